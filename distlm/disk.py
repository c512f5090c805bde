"""What goes wrong on a disk, in words that help."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlm.errors import RunError

# What a disk does to a run, and the user can mend.
_DISK_ERRORS = (
  *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
  *(errno.EIO, errno.ESTALE),
)
# The same of a file of the run; of others, a mistake of an experiment.
_FILE_ERRORS = (
  *(errno.EACCES, errno.EPERM, errno.ENOENT),
  *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP),
)
_MAX_REASON_LENGTH = 300


@contextlib.contextmanager
def disk_errors_in_one_line(workdir: str) -> Iterator[None]:
  """Makes a RunError of what a full, failing or vanished disk raises.

  Args:
    workdir: named where the error names no file.
  """
  try:
    yield
  except OSError as error:
    is_of_run = error.filename is None or Path(
      os.path.abspath(os.fsdecode(error.filename))
    ).is_relative_to(os.path.abspath(workdir))
    if error.errno not in _DISK_ERRORS and not (
      error.errno in _FILE_ERRORS and is_of_run
    ):
      raise
    raise RunError(
      f"{error.filename or workdir}: {error.strerror}; what was saved is whole:"
      " make room or mend the disk, then the same command goes on from the"
      " newest checkpoint"
    ) from error


def check_room(directory: Path, num_bytes: int) -> None:
  """Raises what a full disk would, before a save takes what is left of it.

  Rows that could not be written meanwhile would end a run that may go on.

  Raises:
    OSError: if there is hardly room for so many bytes.
  """
  usage = shutil.disk_usage(directory)
  needed = num_bytes + num_bytes // 8 + 2**18
  if usage.total and usage.free < needed:  # Some file systems do not tell.
    raise OSError(
      errno.ENOSPC,
      f"{os.strerror(errno.ENOSPC)}: it needs {needed:,} bytes of"
      f" {usage.free:,}",
    )


def reason(error: Exception) -> str:
  """Returns what went wrong, without the pages that TensorStore adds."""
  message = " ".join(str(error).split())
  code = re.search(r"os_error_code='(\d+)'", message)
  return os.strerror(int(code[1])) if code else message[:_MAX_REASON_LENGTH]


@functools.cache
def hide_late_writes() -> None:
  """Keeps what TensorStore's threads print after a save that failed away.

  Orbax raises the error of the first write and closes its event loop, where
  each of the others then wants to tell its own; of those that did, asyncio logs
  that nobody has asked.
  """
  show = sys.unraisablehook

  def show_others(unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and "loop is closed" in str(error)):
      show(unraisable)

  sys.unraisablehook = show_others

  def is_of_others(record: logging.LogRecord) -> bool:
    error = record.exc_info and record.exc_info[1]
    return not (
      "exception was never retrieved" in record.getMessage()
      and isinstance(error, ValueError)
      and "os_error_code" in str(error)  # Only TensorStore writes so.
    )

  logging.getLogger("asyncio").addFilter(is_of_others)
