"""Processes, settings and experiments that the benchmarks share.

What is measured runs in a process of its own: peak memory, caches of compiled
programs and the devices of JAX belong to a process. The process that measures
imports no JAX, since on Linux the peak memory of a child starts with its
parent's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sizes

Settings = dict[str, Any]  # by dotted keys

ROOT = Path(__file__).parent.parent
POLL_SECS = 0.005


def call(
  function: Callable[..., Any],
  env: Mapping[str, str] | None = None,
  **kwargs: Any,
) -> Any:
  """Returns what a function of a benchmark returns in a new process.

  Args:
    function: of the top level of a file of this directory.
    env: variables to set in the process.
    **kwargs: of the function, of JSON types, as is its result.
  """
  module = Path(inspect.getfile(function)).stem
  output = subprocess.run(
    [
      *(sys.executable, __file__, module, function.__name__),
      json.dumps(kwargs),
    ],
    cwd=ROOT,
    env={**os.environ, **(env or {})},
    stdout=subprocess.PIPE,
    check=True,
    text=True,
  ).stdout
  return json.loads(output.splitlines()[-1])


def call_in_turns(
  num_rounds: int, calls: Sequence[Callable[[], Any]]
) -> list[list[Any]]:
  """Returns the results of each call, made in `num_rounds` rounds of all.

  What slows the machine down for a while then slows all of them.
  """
  rounds = [[call() for call in calls] for _ in range(num_rounds)]
  return [list(results) for results in zip(*rounds, strict=True)]


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the median of each figure."""
  return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


@contextlib.contextmanager
def corpus() -> Iterator[Settings]:
  """Gives the settings of the text of all benchmarks, tokenized already."""
  with tempfile.TemporaryDirectory() as name:
    settings = {
      "data.source": str(sizes.write_text(Path(name) / "text.txt")),
      "data.cache_dir": name,
      "data.tokenizer": "char",
    }
    call(prepare_text, settings=settings)
    yield settings


def of_size(name: str, text: Settings) -> Settings:
  """Returns the settings of a size of all benchmarks, on a `corpus`."""
  path, cache_dir = Path(text["data.source"]), Path(text["data.cache_dir"])
  return dict(sizes.SIZES[name].settings(path, cache_dir))


def prepare_text(settings: Settings) -> int:
  """Tokenizes a text where it is not; returns the number of its tokens."""
  from distlm.data import token_store

  return len(token_store.open_token_store(make_config(settings).data).tokens)


def make_config(settings: Settings) -> Any:
  """Returns the checked settings of `sizes.CONFIG`, changed by some."""
  return sizes.parse([(key, str(value)) for key, value in settings.items()])


def make_experiment(settings: Settings) -> tuple[Any, Any, Any]:
  """Returns the experiment, and its first batch and keys, on the devices."""
  import jax

  from distlm import parallel
  from distlm.experiment import LanguageModelExperiment

  key = jax.random.PRNGKey(0)
  experiment = LanguageModelExperiment("train", key, make_config(settings))
  batch = parallel.shard(experiment._loader.process_batch(0))
  return experiment, batch, parallel.replicate(key)


def train_arguments(
  workdir: Path, settings: Settings, num_devices: int
) -> list[str]:
  """Returns the arguments of `distlm` to train `sizes.CONFIG`, changed."""
  return [
    *("train", f"--config={sizes.CONFIG}", f"--workdir={workdir}"),
    *("--jaxline_mode=train", f"--devices={num_devices}"),
    *(f"--config.{key}={value}" for key, value in settings.items()),
  ]


def wait_for_rows(process: Any, metrics: Path) -> float:
  """Waits for the first row of a run; returns the time of `perf_counter`."""
  while not (metrics.exists() and metrics.stat().st_size):
    if process.poll() is not None:
      raise RuntimeError(f"the run ended early, with {process.returncode}")
    time.sleep(POLL_SECS)
  return time.perf_counter()


def secs(function: Callable[[], Any]) -> float:
  """Returns how long a function takes."""
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """Returns a table."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def print_results(module: Any) -> None:
  """Runs a benchmark that has no option but --quick, and prints its table.

  Args:
    module: has `measure(quick)`, `table(result)` and `targets(result)`.
  """
  parser = argparse.ArgumentParser(description=module.__doc__)
  parser.add_argument("--quick", action="store_true")
  result = module.measure(parser.parse_args().quick)
  print(module.table(result))
  print(*module.targets(result), sep="\n")


def main() -> None:
  """Calls a function for `call`, and prints its result as the last line."""
  module, function, kwargs = sys.argv[1:]
  result = getattr(importlib.import_module(module), function)(
    **json.loads(kwargs)
  )
  print(json.dumps(result), flush=True)


if __name__ == "__main__":
  main()
