"""Tests that no damage of a checkpoint's files leads to a wrong restore."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fault_runs
import jax
import numpy as np
import pytest
from attribute_experiment import Toy, open_checkpoints, save_step

from distlm import parallel
from distlm.checkpoint import DiskCheckpointer

# Orbax's notes on the time and state of a save: no checksum covers them.
NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")
NEWEST = 3


def _cut(num_bytes: int) -> Callable[[Path], None]:
  """Truncates to so many bytes, or by so many if the number is negative."""

  def cut(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, num_bytes if num_bytes >= 0 else size + num_bytes)

  return cut


def _flip(share: float) -> Callable[[Path], None]:
  """Flips a bit at a share of the file."""

  def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[round(share * (len(content) - 1))] ^= 1
    path.write_bytes(content)

  return flip


def _zero(path: Path) -> None:
  """Leaves what a crash of the machine does of data not yet on disk."""
  path.write_bytes(bytes(path.stat().st_size))


def _append(path: Path) -> None:
  path.write_bytes(path.read_bytes() + b"\n")


def _replace_by_directory(path: Path) -> None:
  path.unlink()
  path.mkdir()


def _replace_by_loop(path: Path) -> None:
  path.unlink()
  path.symlink_to(path.name)


DAMAGES = {
  "emptied": _cut(0),
  "cut to a byte": _cut(1),
  "cut by a byte": _cut(-1),
  "first byte flipped": _flip(0.0),
  "byte flipped": _flip(0.4),
  "middle byte flipped": _flip(0.5),
  "last byte flipped": _flip(1.0),
  "zeroed": _zero,
  "longer": _append,
  "removed": os.unlink,
  "a directory": _replace_by_directory,
  "a symlink loop": _replace_by_loop,
}


@pytest.fixture(autouse=True)
def _repaired() -> None:
  parallel.repair_jaxline()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a directory with checkpoints of the steps 1, 2 and 3."""
  parallel.repair_jaxline()
  directory = tmp_path_factory.mktemp("saved")
  for step in range(1, NEWEST + 1):
    checkpointer = open_checkpoints(directory, Toy(step))
    save_step(checkpointer, step, "latest")
    checkpointer.close()
  return directory


def _restore(directory: Path) -> tuple[DiskCheckpointer, int]:
  """Restores as a process that goes on; returns the step, after a check.

  Each step was saved with values of its own, all of which must be there.
  """
  toy = Toy(0)
  checkpointer = open_checkpoints(directory, toy, keep=9)
  checkpointer.series("latest").newest_intact(set_aside=True)
  checkpointer.restore("latest")
  step = int(checkpointer.get_experiment_state("latest").global_step)
  want, have = Toy(step).listed(), toy.listed()
  assert jax.tree.structure(have) == jax.tree.structure(want)
  for ours, theirs in zip(
    jax.tree.leaves(have), jax.tree.leaves(want), strict=True
  ):
    assert np.asarray(ours).dtype == np.asarray(theirs).dtype
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
  return checkpointer, step


def _contents(directory: Path) -> list[bytes | str]:
  """Returns what all files hold, and where links lead, wherever they are."""
  return sorted(
    (
      os.readlink(path) if path.is_symlink() else path.read_bytes()
      for path in fault_runs.files(directory)
    ),
    key=repr,
  )


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_file_damaged_is_seen_or_does_not_matter(
  saved: Path,
  tmp_path: Path,
  damage: str,
  capsys: pytest.CaptureFixture[str],
) -> None:
  newest = saved / "latest" / f"{NEWEST}"
  names = [str(path.relative_to(newest)) for path in fault_runs.files(newest)]
  assert {*NOTES, "checksums.json", "metadata/metadata"} < {*names}
  for i, name in enumerate(names):
    copy = Path(shutil.copytree(saved, tmp_path / f"{i}"))
    DAMAGES[damage](copy / "latest" / f"{NEWEST}" / name)
    before = _contents(copy)
    checkpointer, step = _restore(copy)
    checkpointer.close()
    errors = capsys.readouterr().err
    assert _contents(copy) == before, name
    if name in NOTES:
      assert (step, errors) in ((NEWEST, ""), (NEWEST - 1, "")), name
      continue
    if name == "checksums.json" and damage in ("cut by a byte", "longer"):
      assert (step, errors) == (NEWEST, "")  # Only the last line break.
      continue
    assert step == NEWEST - 1, name
    [aside] = copy.glob(f"latest/{NEWEST}.*")
    assert aside.name.startswith(f"{NEWEST}.damaged-")
    assert errors.startswith(f"warning: checkpoint {copy}/latest/{NEWEST}: ")
    # A damaged list of checksums may name what never was.
    assert name in errors or name == "checksums.json", (name, errors)
    assert errors.endswith(f", and was renamed {aside.name}\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("name", NOTES)
def test_every_byte_of_a_note_may_change(
  saved: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
  copy = Path(shutil.copytree(saved, tmp_path / "copy"))
  path = copy / "latest" / f"{NEWEST}" / name
  content = path.read_bytes()
  for i in range(0, len(content), max(1, len(content) // 25)):
    path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
    checkpointer, step = _restore(copy)
    checkpointer.close()
    assert (step, capsys.readouterr().err) == (NEWEST, "")


def _file(path: Path) -> None:
  path.write_text("precious")


def _empty(path: Path) -> None:
  path.mkdir()


def _loop(path: Path) -> None:
  path.symlink_to(path.name)


def _dangling(path: Path) -> None:
  path.symlink_to("nowhere")


def _marked_only(path: Path) -> None:
  path.mkdir()
  (path / "commit_success.txt").touch()


@pytest.mark.parametrize("in_place_of", [NEWEST, NEWEST + 1])
@pytest.mark.parametrize(
  "make", [_file, _empty, _loop, _dangling, _marked_only]
)
def test_what_is_no_checkpoint_is_passed_over_and_kept(
  saved: Path, tmp_path: Path, make: Callable[[Path], None], in_place_of: int
) -> None:
  copy = Path(shutil.copytree(saved, tmp_path / "copy"))
  path = copy / "latest" / f"{in_place_of}"
  if path.exists():
    path.rename(tmp_path / "elsewhere")
  make(path)
  checkpointer, step = _restore(copy)
  assert step == in_place_of - 1
  before = _contents(copy)
  # And it does not keep the run from saving the same step.
  state = checkpointer.get_experiment_state("latest")
  state.experiment_module.__dict__.update(Toy(in_place_of).listed())
  save_step(checkpointer, in_place_of, "latest")
  checkpointer.close()
  checkpointer, step = _restore(copy)
  checkpointer.close()
  assert step == in_place_of
  after = _contents(copy)
  assert all(content in after for content in before)
  assert [*copy.glob(f"latest/{in_place_of}.*")]


@pytest.mark.parametrize(
  ("link", "target"),
  [("loop", "loop"), ("here", "."), ("arrays/up", "../.."), ("up", "..")],
)
def test_links_in_a_checkpoint_lead_nowhere(
  saved: Path, tmp_path: Path, link: str, target: str
) -> None:
  copy = Path(shutil.copytree(saved, tmp_path / "copy"))
  (copy / "latest" / f"{NEWEST}" / link).symlink_to(target)
  checkpointer, step = _restore(copy)
  checkpointer.close()
  assert step == NEWEST
