"""Tests that a run goes on the same on other devices and processes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_run

LEDGER = ("step", "tokens", "tokens_seen", "tokens_padded", "epoch")
# One epoch has 1,187 sequences: 40 batches of 64 cross its end twice.
FLAGS = (
  "--config.data.global_batch_size=64",
  "--config.model.dropout_rate=0.0",
  # Key biases have a gradient by rounding alone, which Adam would blow up.
  "--config.optimizer.eps=1e-3",
  "--config.optimizer.learning_rate=2e-3",
  "--config.evaluation.interval=20",
)


class Part(NamedTuple):
  """Trains to `last_step` on some processes with some devices each."""

  last_step: int
  num_processes: int
  num_devices: int


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp("inputs")
  tiny_run.write_inputs(directory)
  return directory


def _train(inputs: Path, workdir: Path, part: Part) -> None:
  args = tiny_run.arguments(
    "train",
    inputs / "config.py",
    workdir,
    *FLAGS,
    f"--config.training_steps={part.last_step}",
    f"--devices={part.num_devices}",
  )
  processes = tiny_run.start_job(
    args, part.num_processes, tiny_run.environment(inputs / "compiled")
  )
  for end in [tiny_run.finish(process) for process in processes]:
    assert end[0] == 0, end


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
  """Returns the workdir of a run on one device throughout."""
  _train(inputs, inputs / "whole", Part(40, 1, 1))
  return inputs / "whole"


@pytest.mark.parametrize(
  "parts",
  [
    [Part(20, 1, 8), Part(40, 1, 2)],
    [Part(13, 2, 1), Part(27, 1, 2), Part(40, 2, 2)],
  ],
  ids=["8 devices to 2", "2 processes to 1 and back"],
)
def test_the_same_data_and_the_same_curve(
  inputs: Path, whole: Path, tmp_path: Path, parts: list[Part]
) -> None:
  for part in parts:
    _train(inputs, tmp_path, part)
  found, wanted = (
    tiny_run.rows(workdir, "train") for workdir in (tmp_path, whole)
  )
  assert len(found) == len(wanted) == 40
  for have, want in zip(found, wanted, strict=True):
    # The very same data, and what follows from it but for rounding.
    assert [have[name] for name in LEDGER] == [want[name] for name in LEDGER]
    for name in ("loss", "grad_norm", "param_norm"):
      assert have[name] == pytest.approx(want[name], rel=1e-5), have["step"]
  assert wanted[-1]["tokens_repeated"] > 0
  evaluations = [
    tiny_run.rows(workdir, "eval") for workdir in (tmp_path, whole)
  ]
  steps = [row["step"] for row in evaluations[1]]
  assert steps == [20, 40]
  losses = [{row["step"]: row["loss"] for row in rows} for rows in evaluations]
  for step in steps:
    assert losses[0][step] == pytest.approx(losses[1][step], rel=1e-5)
