"""Tokens/s of distlm and of its peers, on the same model and batches.

  python benchmarks/throughput.py [--sizes=small,medium] [--rounds=3]
    [--devices=1,2] [--text=PATH]

Each contender runs in a process of its own, one after the other, round after
round: `distlm train`, the whole loop; distlm's compiled update alone; PyTorch,
eager and compiled; and the same model as a textbook writes it in Haiku. All
have the memory settings that distlm's command gives itself; Haiku runs once
more without them, as a textbook leaves it. A round's figure is the median of
its steps, without the first quarter; the table shows the median over rounds,
the least and the largest. All start from the same parameters; if their losses
differ, there are no figures. The peak is that of float32 matrix products, in
the same run. Without PyTorch its rows are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sizes
from sizes import SIZES, Shared, Size
from throughput_table import (
  HAIKU,
  HAIKU_AS_IT_IS,
  NUM_COMPARED_LOSSES,
  PEERS,
  TORCH,
  TORCH_COMPILED,
  table,
  targets,
)

__all__ = ["measure", "table", "targets"]

_MAX_LOSS_DIFFERENCE = 1e-4


@dataclasses.dataclass(frozen=True)
class _Inputs:
  """What all contenders of one size share."""

  size: Size
  settings: list[tuple[str, str]]
  directory: Path

  @property
  def shared(self) -> Path:
    return self.directory / self.size.name


# Gives {"step_secs": [...]}, and "losses" and "version" where known.
Contender = Callable[[], dict[str, Any]]


def measure(
  names: Iterable[str] = tuple(SIZES),
  num_rounds: int = 3,
  device_counts: Sequence[int] = (),
  text: str | None = None,
  num_steps: int = 0,
) -> dict[str, Any]:
  """Returns all figures, as JSON has them.

  Args:
    names: of the sizes.
    num_rounds: of each contender.
    device_counts: of distlm; none: those of the size.
    text: the path of the text; None: the standard library's source.
    num_steps: of a measurement, below 100; 0: that of the size.
  """
  with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    path = Path(text) if text else sizes.write_text(directory / "text")
    figures = {}
    for name in names:
      size = SIZES[name]
      size = dataclasses.replace(size, num_steps=num_steps or size.num_steps)
      settings = size.settings(path.resolve(), directory / "cache")
      inputs, counts = _Inputs(size, settings, directory), device_counts
      figures[name] = _measure_size(
        inputs, num_rounds, counts or size.device_counts
      )
    return figures


def _measure_size(
  inputs: _Inputs, num_rounds: int, device_counts: Sequence[int]
) -> dict[str, Any]:
  size = inputs.size
  _run_child("prepare", inputs)
  contenders = _contenders(inputs, device_counts)
  runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
  peaks: dict[str, float] = {}
  for _ in range(num_rounds):
    for name, run in contenders.items():
      runs[name].append(run())
    difference = _compare_losses(runs)
    for shape, flops in _run_child("peak", inputs).items():
      peaks[shape] = max(flops, peaks.get(shape, 0.0))
  step_flops = size.step_flops(Shared(str(inputs.shared)).vocab_size)
  rows = {name: _summary(size, results) for name, results in runs.items()}
  for row in rows.values():
    flops_per_sec = row["tokens_per_sec"] * step_flops / size.tokens_per_step
    row["share_of_peak"] = flops_per_sec / max(peaks.values())
    row["ratios"] = {
      peer: row["tokens_per_sec"] / rows[peer]["tokens_per_sec"]
      for peer in PEERS
      if peer in rows
    }
  return {
    "tokens_per_step": size.tokens_per_step,
    "flops_per_step": step_flops,
    "peak_flops_per_sec": peaks,
    "rows": rows,
    "largest_loss_difference": difference,
  }


def _contenders(
  inputs: _Inputs, device_counts: Sequence[int]
) -> dict[str, Contender]:
  contenders: dict[str, Contender] = {}
  for count in device_counts:
    of = f"distlm, {count} device{'s' if count > 1 else ''}"
    contenders[f"{of}, whole loop"] = functools.partial(_train, inputs, count)
    contenders[f"{of}, bare step"] = functools.partial(
      _run_child, "step", inputs, count
    )
  if importlib.util.find_spec("torch"):
    run_torch = functools.partial(_run_peer, "peer_torch.py", inputs)
    contenders[TORCH] = run_torch
    contenders[TORCH_COMPILED] = functools.partial(run_torch, "--compile")
  run_haiku = functools.partial(_run_peer, "peer_haiku.py", inputs)
  contenders[HAIKU] = run_haiku
  contenders[HAIKU_AS_IT_IS] = functools.partial(run_haiku, env={})
  return contenders


def _summary(size: Size, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
  medians = [
    statistics.median(secs[len(secs) // 4 :])
    for secs in (run["step_secs"] for run in runs)
  ]
  rates = [size.tokens_per_step / secs for secs in medians]
  return {
    "tokens_per_sec": statistics.median(rates),
    "least": min(rates),
    "largest": max(rates),
    "rounds": rates,
  }


def _compare_losses(runs: dict[str, list[dict[str, Any]]]) -> float:
  """Returns by how much, relative, the first losses differ from distlm's.

  Raises:
    RuntimeError: if it is more than rounding: then no figure means anything.
  """
  losses = {
    name: results[0]["losses"][:NUM_COMPARED_LOSSES]
    for name, results in runs.items()
    if "losses" in results[0]  # The whole loop reads other batches.
  }
  ours = next(iter(losses.values()))  # Of a bare step.
  pairs = [p for x in losses.values() for p in zip(ours, x, strict=True)]
  # One by one: max() may pass over a NaN.
  if not all(math.isclose(*p, rel_tol=_MAX_LOSS_DIFFERENCE) for p in pairs):
    raise RuntimeError(f"the first losses differ, relative: {losses}")
  return max(abs(b / a - 1) for a, b in pairs)


def _run_child(
  task: str, inputs: _Inputs, num_devices: int = 1
) -> dict[str, Any]:
  """Runs this file in a process of its own; see `_be_child`."""
  arguments = {
    "task": task,
    "size": inputs.size.name,
    "settings": inputs.settings,
    "num_steps": inputs.size.num_steps,
    "shared": str(inputs.shared),
    "num_devices": num_devices,
  }
  return sizes.run_json(
    [sys.executable, __file__, "--child", json.dumps(arguments)],
    sizes.ENVIRONMENT,
  )


def _run_peer(
  script: str,
  inputs: _Inputs,
  *flags: str,
  env: Mapping[str, str] = sizes.ENVIRONMENT,
) -> dict[str, Any]:
  size = inputs.size
  command = [
    *(sys.executable, str(Path(__file__).parent / script), str(inputs.shared)),
    *(f"--size={size.name}", f"--steps={size.num_steps}", *flags),
  ]
  return sizes.run_json(command, env)


def _train(inputs: _Inputs, num_devices: int) -> dict[str, Any]:
  """Runs the `distlm train` of a user."""
  with tempfile.TemporaryDirectory(dir=inputs.directory) as workdir:
    sizes.run(
      [
        *(sys.executable, "-m", "distlm", "train", f"--config={sizes.CONFIG}"),
        *("--jaxline_mode=train", f"--devices={num_devices}"),
        f"--workdir={workdir}",
        f"--config.training_steps={inputs.size.num_steps}",
        "--config.log_train_data_interval=1",
        *(f"--config.{key}={value}" for key, value in inputs.settings),
      ]
    )
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
  return {"step_secs": step_secs([json.loads(line) for line in lines])}


def step_secs(rows: Iterable[dict[str, Any]]) -> list[float]:
  """Returns how long each step took, from the rates of a run's log.

  `tokens_per_sec` is over the last steps, up to a number; a row for each step
  tells them apart again. There must be no pause, for a comparison of replicas,
  an evaluation or a save.

  Args:
    rows: the training rows of metrics.jsonl, one for each step.
  """
  from distlm.metrics import _RATE_WINDOW_STEPS

  secs: list[float] = []
  for row in rows:
    if "tokens_per_sec" not in row:
      continue
    num_others = min(len(secs), _RATE_WINDOW_STEPS - 1)
    total = (num_others + 1) * row["tokens"] / row["tokens_per_sec"]
    secs.append(total - sum(secs[len(secs) - num_others :]))
  return secs


def _be_child(arguments: dict[str, Any]) -> dict[str, Any]:
  """Does one task in this process, and returns what it found."""
  size, settings = SIZES[arguments["size"]], arguments["settings"]
  if arguments["task"] == "prepare":
    sizes.prepare(settings, Path(arguments["shared"]))
    return {}
  if arguments["task"] == "peak":
    return sizes.measure_peak(size)
  return _time_bare_step(arguments)


def _time_bare_step(arguments: dict[str, Any]) -> dict[str, Any]:
  from distlm import parallel

  num_devices = arguments["num_devices"]
  parallel.start(num_devices)
  import jax
  import numpy as np

  from distlm import language_model
  from distlm.types import Batch

  config = sizes.parse(arguments["settings"])
  shared = Shared(arguments["shared"])
  model = language_model.make_model(config, shared.vocab_size)
  updater = language_model.make_updater(config, model)
  update = parallel.pmap(updater.update, donate_argnums=0)
  keys = parallel.replicate(jax.random.PRNGKey(config.random_seed))
  state = parallel.pmap(updater.init)(keys)
  by_device = (num_devices, 1, -1, config.data.sequence_length)
  batches = [
    parallel.shard(
      Batch(
        inputs.reshape(by_device),
        targets.reshape(by_device),
        np.ones_like(targets, bool).reshape(by_device),
      )
    )
    for inputs, targets in shared.batches(arguments["num_steps"])
  ]
  times, losses = [], []
  for batch in batches:
    start = time.perf_counter()
    state, scalars = update(state, batch, keys)
    jax.block_until_ready((state, scalars))
    times.append(time.perf_counter() - start)
    losses.append(float(parallel.fetch(scalars["loss"])))
  return {"step_secs": times, "losses": losses, "version": jax.__version__}


def main() -> None:
  """Prints the tables, or does a task of a child process."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--sizes", default=",".join(SIZES))
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=0)
  parser.add_argument("--devices", default="", help="of distlm, such as 1,2")
  parser.add_argument("--text", help="the path of a text of 65 characters")
  parser.add_argument("--json", help="where to write the figures, too")
  parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    print(json.dumps(_be_child(args.child)))
    return
  figures = measure(
    args.sizes.split(","),
    args.rounds,
    [int(count) for count in args.devices.split(",") if count],
    args.text,
    args.steps,
  )
  if args.json:
    Path(args.json).write_text(json.dumps(figures, indent=2))
  print(table(figures))


if __name__ == "__main__":
  main()
