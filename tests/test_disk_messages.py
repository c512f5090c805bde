"""Tests of distlm.disk: which errors become one line, and what it says."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from distlm import disk
from distlm.errors import RunError


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
  path = tmp_path / "metrics.jsonl"
  with (
    pytest.raises(RunError, match=rf"^{path}: No space left on device;"),
    disk.disk_errors_in_one_line(str(tmp_path)),
  ):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_without_a_name_the_directory_of_the_run_is_named(
  tmp_path: Path,
) -> None:
  with (
    pytest.raises(RunError, match=rf"^{tmp_path}: Read-only file system;"),
    disk.disk_errors_in_one_line(str(tmp_path)),
  ):
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_failing_disk_is_one_line_wherever_it_is(tmp_path: Path) -> None:
  with (
    pytest.raises(RunError, match=r"^/cache/tokens\.bin: Input/output error;"),
    disk.disk_errors_in_one_line(str(tmp_path)),
  ):
    raise OSError(errno.EIO, "Input/output error", "/cache/tokens.bin")


@pytest.mark.parametrize(
  "error",
  [
    FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/data.txt"),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
  ],
)
def test_what_an_experiment_got_wrong_keeps_its_traceback(
  tmp_path: Path, error: OSError
) -> None:
  with (
    pytest.raises(type(error)),
    disk.disk_errors_in_one_line(str(tmp_path)),
  ):
    raise error


def test_a_save_that_hardly_fits_is_refused_before_it_begins(
  tmp_path: Path,
) -> None:
  disk.check_room(tmp_path, 1000)
  with pytest.raises(OSError, match="No space left on device: it needs"):
    disk.check_room(tmp_path, 2**60)


def test_the_reason_is_found_in_the_pages_of_tensorstore() -> None:
  pages = "Error writing [source locations=...]" * 50
  message = f"RESOURCE_EXHAUSTED: {pages} os_error_code='28' {pages}"
  assert disk.reason(ValueError(message)) == "No space left on device"
  assert disk.reason(ValueError("a\n b")) == "a b"
