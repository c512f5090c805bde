"""Runs that faults are put into, and the whole run whose bits they must end in.

A run has 30 steps on 4 devices with dropout. It saves each 5 steps, keeps all
it saves, and evaluates each 10 steps for about as long as those take.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tiny_run

from distlm import checksums

STEPS = 30
# In this process, which has 8 devices, a run goes on too.
MORE = (
  "--config.model.num_layers=1",
  "--config.model.dropout_rate=0.1",
  "--config.data.global_batch_size=16",
  "--config.data.validation_fraction=0.5",
  "--config.evaluation.batches=0",
  "--config.checkpoint.keep=99",
  f"--config.training_steps={STEPS}",
)
TEMPORARY = "*.orbax-checkpoint-tmp*"


class Runs(NamedTuple):
  """A run that nothing stopped, and one that has done 20 of its 30 steps."""

  config: Path
  whole: Path
  half: Path
  env: dict[str, str]


@functools.cache
def make(directory: Path) -> Runs:
  """Trains both, once for all tests that give the same directory."""
  directory = directory / "fault_runs"
  directory.mkdir()
  config = tiny_run.write_inputs(directory)
  env = tiny_run.environment(directory / "compiled")
  runs = Runs(config, directory / "whole", directory / "half", env)
  tiny_run.run(arguments(runs, runs.whole), env)
  tiny_run.run(
    arguments(runs, runs.half, "--config.training_steps=20"), runs.env
  )
  assert tiny_run.saved_steps(runs.half) == [5, 10, 15, 20]
  return runs


def arguments(runs: Runs, workdir: Path, *more: str) -> list[str]:
  """Returns what follows `distlm` to train in a process of 4 devices."""
  return tiny_run.arguments(
    "train", runs.config, workdir, "--devices=4", *MORE, *more
  )


def copy_of_half(runs: Runs, directory: Path) -> Path:
  """Returns a workdir at step 20 that a test may spoil."""
  return Path(shutil.copytree(runs.half, directory / "run"))


@contextlib.contextmanager
def started(
  args: list[str], env: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
  """Starts `distlm`, which does not outlive the block, however that ends."""
  process = tiny_run.start(args, env)
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


def end(runs: Runs, workdir: Path, *more: str) -> str:
  """Goes on without faults, to the bits of the whole run; returns the output.

  The run may not warn either: what a fault left is whole or was set aside.
  """
  output = tiny_run.run(arguments(runs, workdir, *more), runs.env)
  assert_ended(runs, workdir)
  return output


def assert_ended(runs: Runs, workdir: Path) -> None:
  """Asserts that a run has ended with the bits of the whole one."""
  for series in ("latest", "best"):
    tiny_run.assert_same_checkpoint(workdir, runs.whole, series)
  assert tiny_run.rows(workdir) == tiny_run.rows(runs.whole)
  assert not [*workdir.glob(f"checkpoints/*/{TEMPORARY}")]


def assert_whole(workdir: Path) -> list[int]:
  """Asserts that every checkpoint is intact; returns those of "latest"."""
  for path in workdir.glob("checkpoints/*/*"):
    if path.name.isdigit() and (path / "commit_success.txt").exists():
      assert checksums.find_damage(path) == "", path
  return tiny_run.saved_steps(workdir)


def files(directory: Path) -> list[Path]:
  """Returns all files and links in a directory and below it."""
  return sorted(
    path
    for path in directory.rglob("*")
    if path.is_symlink() or not path.is_dir()
  )
