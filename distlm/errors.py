"""The errors that a user sees as one line instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

# What a disk does to a run, and the user can mend.
_DISK_ERRORS = (
  *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
  *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ESTALE),
)


class UsageError(ValueError):
  """A setting or input that cannot work; the command exits with code 2.

  The message names the setting, the value got, the rule and a way out, in one
  line.
  """


class RunError(RuntimeError):
  """A failure of the run with a known cause; the command exits with code 1.

  The message is one line that names what failed and what to look at.
  """


@contextlib.contextmanager
def disk_errors_in_one_line(workdir: str) -> Iterator[None]:
  """Makes a RunError of what a full, failing or vanished disk raises.

  Args:
    workdir: named where the error names no file.
  """
  try:
    yield
  except OSError as error:
    if error.errno not in _DISK_ERRORS:
      raise
    raise RunError(
      f"{error.filename or workdir}: {error.strerror}; what was saved is whole:"
      " make room or mend the disk, then the same command goes on from the"
      " newest checkpoint"
    ) from error
