"""How soon a validation loss is reached: PyTorch's recipe and distlm's own.

  python benchmarks/time_to_loss.py --text=PATH/tinyshakespeare.txt

The target and the first recipe are those that were published for the small
size on a CPU (https://github.com/karpathy/nanoGPT#baselines): 2,000 steps to a
loss of 1.88. PyTorch trains by it, on random crops, and by one of AdamW that
was tuned for this text; distlm trains by its own, with Muon, as its command
does, on its epochs. Sizes, batch and initial parameters are the same for all.
The clock runs while they train: for PyTorch until the first validation, each 50
steps, that reaches the target, for distlm to the end of its steps, which its
recipe is short enough for. Starting, compiling and validating do not count.
Validation is over the last 10 % of the text, for PyTorch but for the rest that
fills no sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sizes
from sizes import SIZES, Shared

TARGET_LOSS = 1.88
MAX_SHARE_OF_TIME = 0.7
SIZE = SIZES["small"]
_CHECK_STEPS = 50
# PyTorch validates only when its training loss is so near the target, in nats.
_NEAR = 0.1
_VALIDATION_ROWS = 128
_SEED = 1337
_POLL_SECS = 0.01


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How the small model is trained with AdamW; matrices alone decay."""

  num_steps: int
  learning_rate: float
  end_learning_rate: float
  schedule: str  # "cosine" or "linear", after a linear warmup
  warmup_steps: int
  b2: float = 0.99
  weight_decay: float = 0.1

  def rate(self, step: int) -> float:
    """Returns the learning rate of a step, from 0."""
    if step < self.warmup_steps:
      return self.learning_rate * step / self.warmup_steps
    decay_steps = self.num_steps - self.warmup_steps
    done = (step - self.warmup_steps) / decay_steps
    left = (1 + math.cos(math.pi * done)) / 2
    if self.schedule == "linear":
      left = 1 - done
    drop = self.learning_rate - self.end_learning_rate
    return self.end_learning_rate + left * drop


PUBLISHED = Recipe(2000, 1e-3, 1e-4, "cosine", 100)
TUNED = Recipe(1200, 6e-3, 0.0, "linear", 80)
OWN_STEPS = 500
OWN = {
  "training_steps": OWN_STEPS,
  "optimizer.name": "muon",
  "optimizer.learning_rate": 0.012,
  "optimizer.schedule": "linear",
  "optimizer.warmup_steps": 20,
}


def measure(
  text: str, num_rounds: int = 1, num_devices: int = 1
) -> dict[str, Any]:
  """Returns all figures, as JSON has them.

  Args:
    text: the path of the text.
    num_rounds: of each contender, in turns.
    num_devices: of distlm.
  """
  with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    settings = SIZE.settings(Path(text).resolve(), directory / "cache")
    _run_child({"task": "prepare", "settings": settings, "directory": name})
    contenders: dict[str, Callable[[], dict[str, Any]]] = {}
    if importlib.util.find_spec("torch"):
      for of, recipe in (("published", PUBLISHED), ("tuned", TUNED)):
        arguments = {
          "task": "torch",
          "text": text,
          "directory": name,
          "recipe": dataclasses.asdict(recipe),
        }
        contenders[f"PyTorch, {of} recipe"] = functools.partial(
          _run_child, arguments
        )
    contenders["distlm, own recipe"] = functools.partial(
      _train, directory, settings, num_devices
    )
    rounds = [
      {name: run() for name, run in contenders.items()}
      for _ in range(num_rounds)
    ]
  return {
    "target_loss": TARGET_LOSS,
    "recipes": {
      "published": dataclasses.asdict(PUBLISHED),
      "tuned": dataclasses.asdict(TUNED),
      "own": OWN,
    },
    "num_devices": num_devices,
    **_summary(rounds),
  }


def _summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
  rows = {
    name: {
      **row,
      "train_secs": statistics.median(r[name]["train_secs"] for r in rounds),
      "rounds": [r[name]["train_secs"] for r in rounds],
    }
    for name, row in rounds[0].items()
  }
  ours = rows["distlm, own recipe"]["train_secs"]
  faster = {name: row["train_secs"] / ours for name, row in rows.items()}
  return {"rows": rows, "times_faster_than": faster}


def _run_child(arguments: dict[str, Any]) -> dict[str, Any]:
  """Runs this file in a process of its own; see `main`."""
  return sizes.run_json(
    [sys.executable, __file__, "--child", json.dumps(arguments)],
    sizes.ENVIRONMENT,
  )


def _train(
  directory: Path, settings: list[tuple[str, str]], num_devices: int
) -> dict[str, Any]:
  """Runs `distlm train`, and times it by the rows of its log."""
  own = {
    **OWN,
    "evaluation.interval": 0,  # Only at the end.
    "evaluation.batches": 0,  # All of the validation split.
  }
  all_settings = {**dict(settings), **own}
  with tempfile.TemporaryDirectory(dir=directory) as name:
    log = Path(name) / "metrics.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "distlm", "train", f"--config={sizes.CONFIG}"),
        *(f"--devices={num_devices}", f"--workdir={name}"),
        *(f"--config.{key}={value}" for key, value in all_settings.items()),
      ],
      stdout=subprocess.DEVNULL,
    )
    times: dict[int, float] = {}
    try:
      while process.poll() is None:
        for row in _rows(log)[len(times) :]:
          times.setdefault(row["step"], time.perf_counter() - start)
        time.sleep(_POLL_SECS)
    finally:  # It must not go on without the benchmark.
      process.kill()
      process.wait()
    if process.returncode:
      raise RuntimeError(f"distlm train ended with code {process.returncode}")
    evaluated = [row for row in _rows(log) if row["split"] == "eval"]
  first = min(times)
  step_secs = (times[OWN_STEPS] - times[first]) / (OWN_STEPS - first)
  return {
    "step": OWN_STEPS,
    "loss": evaluated[-1]["loss"],
    "train_secs": OWN_STEPS * step_secs,
    "startup_secs": times[first] - first * step_secs,
  }


def _rows(log: Path) -> list[dict[str, Any]]:
  text = log.read_text() if log.exists() else ""
  return [json.loads(line) for line in text.splitlines(True) if "\n" in line]


def _train_torch(
  recipe: Recipe, text: str, shared: Shared, start: float
) -> dict[str, Any]:
  """Trains until the target is reached, or the steps are over."""
  import peer_torch
  import torch

  peer_torch.use_all_cores()
  torch.manual_seed(_SEED)
  train, validation = _split(text)
  model = peer_torch.Model(SIZE, shared.vocab_size)
  peer_torch.copy_parameters(model, shared)
  optimizer = peer_torch.make_optimizer(model, recipe.b2, recipe.weight_decay)
  update = peer_torch.make_step(model, optimizer)
  window = torch.arange(SIZE.sequence_length + 1)
  startup_secs = time.perf_counter() - start
  losses: list[float] = []
  found, secs = math.inf, 0.0
  while len(losses) < recipe.num_steps and found > TARGET_LOSS:
    start = time.perf_counter()
    for _ in range(_CHECK_STEPS):
      for group in optimizer.param_groups:
        group["lr"] = recipe.rate(len(losses))
      starts = torch.randint(len(train) - len(window), (SIZE.batch_size, 1))
      crops = train[starts + window]  # [B, T + 1]
      losses.append(update(crops[:, :-1], crops[:, 1:]))
    secs += time.perf_counter() - start
    is_over = len(losses) >= recipe.num_steps
    recent = statistics.fmean(losses[-_CHECK_STEPS:])
    if is_over or recent <= TARGET_LOSS + _NEAR:
      found = min(found, _validate(model, validation))
  return {
    "step": len(losses),
    "loss": found,
    "train_secs": secs,
    "startup_secs": startup_secs,
  }


def _split(text: str) -> Any:
  """Returns the training and the validation tokens, by distlm's ids."""
  import torch

  content = Path(text).read_bytes().decode()
  ids = {character: i for i, character in enumerate(sorted(set(content)))}
  tokens = torch.tensor([ids[character] for character in content])
  return tokens.tensor_split([len(tokens) * 9 // 10])


def _validate(model: Any, tokens: Any) -> float:
  """Returns the mean loss over all whole sequences."""
  import torch

  length = SIZE.sequence_length
  num_rows = (len(tokens) - 1) // length
  inputs = tokens[: num_rows * length].view(num_rows, length)
  targets = tokens[1 : num_rows * length + 1].view(num_rows, length)
  total = 0.0
  with torch.inference_mode():
    for pair in zip(
      inputs.split(_VALIDATION_ROWS),
      targets.split(_VALIDATION_ROWS),
      strict=True,
    ):
      total += model(*pair).item() * len(pair[0])
  return total / num_rows


def table(figures: dict[str, Any]) -> str:
  """Returns the figures of `measure` as Markdown."""
  faster = figures["times_faster_than"]
  lines = [
    f"Target: validation loss {figures['target_loss']}; distlm on"
    f" {figures['num_devices']} device(s).\n",
    "| | steps | validation loss | training, s | start and compile, s |"
    " distlm is faster by |",
    "|---|---|---|---|---|---|",
  ]
  for name, row in figures["rows"].items():
    missed = "" if row["loss"] <= figures["target_loss"] else " (missed)"
    lines.append(
      f"| {name} | {row['step']:,} | {row['loss']:.3f}{missed} |"
      f" {row['train_secs']:.1f} | {row['startup_secs']:.1f} |"
      f" {faster[name]:.2f} |"
    )
  return "\n".join(lines)


def targets(figures: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met)."""
  faster = figures["times_faster_than"].get("PyTorch, published recipe")
  if faster is None:
    return []
  share = 1 / faster
  own = figures["rows"]["distlm, own recipe"]
  reached = own["loss"] <= figures["target_loss"]
  return [
    (
      f"time to a validation loss of {figures['target_loss']} over that of"
      " PyTorch by the published recipe",
      share,
      f"<= {MAX_SHARE_OF_TIME}",
      reached and share <= MAX_SHARE_OF_TIME,
    )
  ]


def _be_child(arguments: dict[str, Any], start: float) -> dict[str, Any]:
  shared = os.path.join(arguments["directory"], "shared")
  if arguments["task"] == "prepare":
    sizes.prepare(arguments["settings"], Path(shared))
    return {}
  recipe = Recipe(**arguments["recipe"])
  return _train_torch(recipe, arguments["text"], Shared(shared), start)


def main() -> None:
  """Prints the table, or does a task of a child process."""
  start = time.perf_counter()
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--text", help="the text to train on")
  parser.add_argument("--rounds", type=int, default=1)
  parser.add_argument("--devices", type=int, default=1, help="of distlm")
  parser.add_argument("--json", help="where to write the figures, too")
  parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    print(json.dumps(_be_child(args.child, start)))
    return
  if not args.text:
    parser.error("--text is needed: the path of the text to train on")
  figures = measure(args.text, args.rounds, args.devices)
  if args.json:
    Path(args.json).write_text(json.dumps(figures, indent=2))
  print(table(figures))


if __name__ == "__main__":
  main()
