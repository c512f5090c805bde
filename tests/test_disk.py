"""Tests of runs on a disk that gets full or read-only, for real."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fault_runs
import pytest
import tiny_run

from distlm import disk as disk_module

# Of a checkpoint of 340 KiB, but enough for the rows of a run.
TOO_LITTLE = 160 * 1024


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> fault_runs.Runs:
  return fault_runs.make(tmp_path_factory.getbasetemp())


class Disk:
  """A file system of 16 MiB that a test fills and frees."""

  def __init__(self, directory: Path) -> None:
    self.directory = directory
    self.workdir = directory / "run"
    self._filler = directory / "filler"

  def fill(self, leaving: int = 0) -> None:
    with open(self._filler, "ab", buffering=0) as file:
      while (free := shutil.disk_usage(self.directory).free - leaving) > 0:
        file.write(bytes(free))

  def make_room(self) -> None:
    self._filler.unlink()


def _mount(*args: str | Path) -> None:
  """Mounts, or skips the test where nobody may."""
  command = shutil.which("mount")
  if command is None:
    pytest.skip("there is no command mount")
  result = subprocess.run([command, *args], capture_output=True, text=True)
  if result.returncode:
    pytest.skip(f"mounting is not permitted here: {result.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
  directory = tmp_path / "disk"
  directory.mkdir()
  _mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", directory)
  try:
    yield Disk(directory)
  finally:
    # Lazily, so that it goes even if a process of a failed test lives on.
    subprocess.run(["umount", "-R", "-l", directory], check=True)


def _fails(runs: fault_runs.Runs, disk: Disk, *more: str) -> tuple[int, str]:
  args = fault_runs.arguments(runs, disk.workdir, *more)
  code, _, errors = tiny_run.finish(tiny_run.start(args, runs.env))
  return code, tiny_run.check_one_line(errors)


def _wait_for_save(
  disk: Disk, step: int, process: subprocess.Popen[str]
) -> None:
  tiny_run.wait_until(
    lambda: step in tiny_run.saved_steps(disk.workdir), process
  )


def _fails_when_filled(
  runs: fault_runs.Runs, disk: Disk, step: int, leaving: int, *more: str
) -> tuple[int, str]:
  """Fills the disk when a step has been saved; returns code and error."""
  args = fault_runs.arguments(runs, disk.workdir, *more)
  with fault_runs.started(args, runs.env) as process:
    _wait_for_save(disk, step, process)
    disk.fill(leaving)
    code, _, errors = tiny_run.finish(process)
  return code, tiny_run.check_one_line(errors)


def test_a_disk_too_small_for_the_first_save(
  runs: fault_runs.Runs, disk: Disk
) -> None:
  disk.fill(leaving=TOO_LITTLE)
  code, message = _fails(runs, disk)
  assert code == 1
  assert f"{disk.workdir}/checkpoints/latest: a checkpoint could not" in message
  assert "ENOSPC" in message or "No space left on device" in message
  assert "the same command goes on from the newest" in message
  assert fault_runs.assert_whole(disk.workdir) == []
  disk.make_room()
  output = fault_runs.end(runs, disk.workdir)
  assert "from 0 to 30" in output


def test_a_disk_full_at_a_later_save(runs: fault_runs.Runs, disk: Disk) -> None:
  code, message = _fails_when_filled(runs, disk, 10, TOO_LITTLE)
  assert code == 1
  assert "a checkpoint could not be written" in message
  saved = fault_runs.assert_whole(disk.workdir)
  assert saved[:2] == [5, 10]
  # Twice, as a user who has not understood it does.
  code, message = _fails(runs, disk)
  assert code == 1
  assert "the same command goes on from the newest" in message
  assert fault_runs.assert_whole(disk.workdir) == saved
  disk.make_room()
  output = fault_runs.end(runs, disk.workdir)
  assert f"from {saved[-1]} to 30 (resumed)" in output


def test_a_disk_full_while_rows_are_written(
  runs: fault_runs.Runs, disk: Disk
) -> None:
  code, message = _fails_when_filled(
    runs, disk, 5, 0, "--config.evaluation.interval=1000"
  )
  assert code == 1
  assert str(disk.workdir) in message
  assert "No space left on device" in message
  saved = fault_runs.assert_whole(disk.workdir)
  assert saved[:1] == [5]
  disk.make_room()
  output = fault_runs.end(runs, disk.workdir)
  assert f"from {saved[-1]} to 30 (resumed)" in output


def test_a_full_disk_before_the_start(
  runs: fault_runs.Runs, disk: Disk
) -> None:
  shutil.copytree(runs.half, disk.workdir)
  disk.fill()
  code, message = _fails(runs, disk)
  assert code == 2
  assert f"--workdir={disk.workdir}: it cannot be written (No space" in message


def test_a_run_that_may_go_on_without_a_save(
  runs: fault_runs.Runs, disk: Disk
) -> None:
  more = ("--config.checkpoint.on_error=continue",)
  args = fault_runs.arguments(runs, disk.workdir, *more)
  with fault_runs.started(args, runs.env) as process:
    _wait_for_save(disk, 5, process)
    disk.fill(TOO_LITTLE)
    assert process.stderr is not None
    warning = process.stderr.readline()
    disk.make_room()
    code, output, errors = tiny_run.finish(process)
  assert (code, "30 of 30" in output) == (0, True), errors
  for line in (warning, *errors.splitlines()):
    assert line.startswith(f"warning: {disk.workdir}/checkpoints/")
    assert "a checkpoint could not be written" in line
    assert "training goes on, and the next save tries again" in line
  saved = fault_runs.assert_whole(disk.workdir)
  assert (saved[0], saved[-1]) == (5, fault_runs.STEPS)
  fault_runs.assert_ended(runs, disk.workdir)


def test_a_run_whose_last_save_fails_too(
  runs: fault_runs.Runs, disk: Disk
) -> None:
  shutil.copytree(runs.half, disk.workdir)
  disk.fill(TOO_LITTLE)
  args = fault_runs.arguments(
    runs, disk.workdir, "--config.checkpoint.on_error=continue"
  )
  code, _, errors = tiny_run.finish(tiny_run.start(args, runs.env))
  [*warnings, last] = errors.splitlines()
  assert code == 1
  assert last.startswith("error: ")
  assert all(line.startswith("warning: ") for line in warnings)
  assert fault_runs.assert_whole(disk.workdir) == [5, 10, 15, 20]
  disk.make_room()
  fault_runs.end(runs, disk.workdir)


def _make_read_only(directory: Path) -> None:
  """Makes what is opened anew below a directory read-only.

  A second mount on it, since the kernel refuses to change one with files open.
  """
  _mount("--bind", directory, directory)
  _mount("-o", "remount,ro,bind", directory)


def test_a_directory_that_is_read_only_from_the_start(
  runs: fault_runs.Runs, disk: Disk
) -> None:
  shutil.copytree(runs.half, disk.workdir)
  _mount("-o", "remount,ro", disk.directory)
  code, message = _fails(runs, disk)
  assert code == 2
  assert f"--workdir={disk.workdir}: it cannot be written" in message
  assert "Read-only file system" in message
  _mount("-o", "remount,rw", disk.directory)
  fault_runs.end(runs, disk.workdir)


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_directory_that_becomes_read_only(
  runs: fault_runs.Runs, disk: Disk, name: str
) -> None:
  args = fault_runs.arguments(runs, disk.workdir)
  with fault_runs.started(args, runs.env) as process:
    _wait_for_save(disk, 5, process)
    _make_read_only(disk.workdir / name)
    code, _, errors = tiny_run.finish(process)
  message = tiny_run.check_one_line(errors)
  assert code == 1
  assert str(disk.workdir / name) in message
  assert "Read-only file system" in message
  subprocess.run(["umount", disk.workdir / name], check=True)
  assert fault_runs.assert_whole(disk.workdir)[:1] == [5]
  fault_runs.end(runs, disk.workdir)


@pytest.mark.parametrize(
  ("message", "is_shown"),
  [
    ("Error writing to OCDBT [os_error_code='28']", False),
    ("a mistake of the experiment", True),
  ],
)
def test_errors_of_the_other_writes_of_a_save_that_failed(
  message: str, is_shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
  disk_module.hide_late_writes()

  async def fail() -> None:
    raise ValueError(message)

  async def main() -> None:
    task = asyncio.create_task(fail())
    future = asyncio.get_running_loop().create_future()
    future.set_exception(ValueError(message))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task, future

  asyncio.run(main())
  gc.collect()
  assert len(caplog.records) == (2 if is_shown else 0)
