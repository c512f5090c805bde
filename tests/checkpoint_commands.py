"""Calls the commands on checkpoints; makes checkpoints, and breaks them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attribute_experiment import Toy, open_checkpoints, save_step

from distlm import arguments, inspection


def call(*argv: str | Path) -> None:
  """Runs `distlm checkpoint` in this process."""
  parser = arguments.Parser(prog="distlm checkpoint")
  inspection.add_arguments(parser)
  inspection.run(parser.parse_args([str(arg) for arg in argv]))


def show(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
  """Returns the output of a command that has nothing to warn of."""
  capsys.readouterr()
  call(*argv)
  output, errors = capsys.readouterr()
  assert errors == ""
  return output


def fails(error: type[Exception], *argv: str | Path) -> str:
  """Returns the message of a command that must fail, one line."""
  with pytest.raises(error) as raised:
    call(*argv)
  assert str(raised.value).isprintable()
  return str(raised.value)


def save(workdir: Path, step: int, toy: Toy, series: str = "latest") -> Path:
  """Saves as a process that starts does; returns where."""
  checkpointer = open_checkpoints(workdir / "checkpoints", toy, series)
  save_step(checkpointer, step, series)
  checkpointer.close()
  return workdir / "checkpoints" / series / f"{step}"


def largest(checkpoint: Path) -> Path:
  files = (path for path in checkpoint.glob("arrays/**/*") if path.is_file())
  return max(files, key=lambda path: (path.stat().st_size, path))


def truncate(checkpoint: Path) -> None:
  os.truncate(largest(checkpoint), 10)


def flip(checkpoint: Path) -> None:
  content = bytearray(largest(checkpoint).read_bytes())
  content[len(content) // 2] ^= 1
  largest(checkpoint).write_bytes(content)


def delete(checkpoint: Path) -> None:
  largest(checkpoint).unlink()


def forget(checkpoint: Path) -> None:
  (checkpoint / "checksums.json").unlink()


def scribble(checkpoint: Path) -> None:
  (checkpoint / "checksums.json").write_text("{")


def uncommit(checkpoint: Path) -> None:
  (checkpoint / "commit_success.txt").unlink()
