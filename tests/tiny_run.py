"""A language-model run of seconds: its files, its process, what it left."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import process_job
import pytest

from distlm import checkpoint as checkpoints
from distlm import cli
from distlm.writers import read_metrics

TIMEOUT_SECS = 180
# For jobs of several processes, which are compared with each other: JAX keeps
# the programs of process 0 alone, the others compile theirs at each start.
COMPILING_FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
CONFIG = """
from pathlib import Path
import distlm

def get_config():
  here = Path(__file__).parent
  config = distlm.get_base_config()
  config.model.update(num_layers=2, model_size=32, num_heads=2)
  config.data.source = (str(here / "text.txt"),)
  config.data.cache_dir = str(here / "cache")
  config.data.sequence_length = 16
  config.data.global_batch_size = 8
  config.optimizer.learning_rate = 1e-2
  config.optimizer.warmup_steps = 5
  config.optimizer.schedule = "constant"
  config.accumulation_steps = 2
  config.evaluation.update(interval=10, batches=3)
  config.checkpoint.interval = 5
  config.log_train_data_interval = 1
  config.training_steps = 40
  return config
"""


def write_inputs(directory: Path) -> Path:
  """Writes an easy text of 20 kB and a configuration; returns its path."""
  choose = random.Random(0).choice
  words = ["the cat", "sat on", "a mat", "and the dog", "ran to", "the barn"]
  text = " ".join(choose(words) for _ in range(4000))[:20_000]
  (directory / "text.txt").write_text(text)
  path = directory / "config.py"
  path.write_text(CONFIG)
  return path


def arguments(
  command: str, config: Path, workdir: Path, *more: str
) -> list[str]:
  return [command, f"--config={config}", f"--workdir={workdir}", *more]


def environment(cache: Path | None, **more: str) -> dict[str, str]:
  """Returns the variables of a child process.

  Args:
    cache: a directory for compiled programs, which leave results bit-identical.
    **more: further variables.
  """
  # What conftest sets for this process would decide the devices of that one.
  env = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
  if cache is not None:
    env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  return {**env, **more}


def start(
  args: Sequence[str],
  env: dict[str, str],
  program: Sequence[str] = ("-m", "distlm"),
) -> subprocess.Popen[str]:
  return subprocess.Popen(
    [sys.executable, *program, *args],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def start_job(
  args: Sequence[str],
  num_processes: int,
  env: dict[str, str],
  program: Sequence[str] = ("-m", "distlm"),
) -> list[subprocess.Popen[str]]:
  """Starts the processes of a job on this machine, one by itself or more."""
  if num_processes == 1:
    return [start(args, env, program)]
  job = [
    f"--coordinator={process_job.free_address()}",
    f"--num-processes={num_processes}",
  ]
  return [
    start([*args, *job, f"--process-id={index}"], env, program)
    for index in range(num_processes)
  ]


@contextlib.contextmanager
def compiling_once(directory: Path, **more: Any) -> Iterator[None]:
  """Lets the runs in this process share their compiled programs.

  Args:
    directory: where they are kept.
    **more: further settings of JAX for as long.
  """
  values = {
    "jax_compilation_cache_dir": str(directory),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    **more,
  }
  before = {name: jax.config.values[name] for name in values}
  for name, value in values.items():
    jax.config.update(name, value)
  try:
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
  """Returns exit code, output and errors of a process that ends by itself."""
  with process:
    try:
      output, errors = process.communicate(timeout=TIMEOUT_SECS)
    finally:
      process.kill()
  return process.returncode, output, errors


def run(args: Sequence[str], env: dict[str, str]) -> str:
  """Runs `distlm` in a process that must succeed; returns its output."""
  code, output, errors = finish(start(args, env))
  assert code == 0, errors
  assert errors == ""
  return output


def run_here(args: Sequence[str]) -> int:
  """Runs `distlm` in this process, on its devices; returns the exit code."""
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  return int(end.value.code or 0)


def interrupt(
  process: subprocess.Popen[str], workdir: Path, step: int, number: int
) -> tuple[int, str, str]:
  """Sends a signal as soon as the training row of a step is there."""
  wait_until(lambda: step in steps(workdir, "train"), process)
  process.send_signal(number)
  return finish(process)


def wait_until(
  is_true: Callable[[], bool], process: subprocess.Popen[str]
) -> None:
  deadline = time.monotonic() + TIMEOUT_SECS
  while not is_true():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.002)


def check_one_line(errors: str) -> str:
  """Returns the message of what must be a single line of error."""
  assert errors.startswith("error: ")
  assert errors.endswith("\n")
  assert errors.count("\n") == 1
  return errors.removeprefix("error: ").removesuffix("\n")


def steps(workdir: Path, split: str) -> list[int]:
  return [row["step"] for row in read_metrics(workdir) if row["split"] == split]


def rows(workdir: Path, split: str | None = None) -> list[dict[str, Any]]:
  """Returns the rows by split and step, without what is a matter of time."""
  return sorted(
    (
      {key: row[key] for key in row if not ("_per_sec" in key or key == "mfu")}
      for row in read_metrics(workdir)
      if split in (None, row["split"])
    ),
    key=lambda row: (row["split"], row["step"]),
  )


def saved_steps(workdir: Path, series: str = "latest") -> list[int]:
  directory = workdir / "checkpoints" / series
  return sorted(
    int(path.name) for path in directory.glob("*") if path.name.isdigit()
  )


def checkpoint(workdir: Path, series: str = "latest") -> dict[str, Any]:
  """Returns all that the newest checkpoint of a series holds, by path."""
  step = saved_steps(workdir, series)[-1]
  directory = workdir.absolute() / "checkpoints" / series / f"{step}"
  arrays, metadata = checkpoints.read(directory)
  leaves = jax.tree_util.tree_leaves_with_path(arrays)
  return {
    **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
    **{name: metadata[name] for name in ("state", "attributes")},
  }


def assert_same_checkpoint(
  ours: Path, theirs: Path, series: str = "latest"
) -> None:
  """Asserts that all arrays are equal bit for bit, and all else too."""
  have, want = checkpoint(ours, series), checkpoint(theirs, series)
  assert have.keys() == want.keys()
  assert len(want) > 50
  for name, value in want.items():
    if isinstance(value, np.ndarray):
      assert have[name].dtype == value.dtype, name
      assert have[name].tobytes() == value.tobytes(), name
    else:
      assert have[name] == value, name
