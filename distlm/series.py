"""The saved steps of a run as directories: which are whole, which damaged."""

from __future__ import annotations

import json
import time
from pathlib import Path

from distlm import checksums
from distlm.console import warn
from distlm.errors import RunError

# Orbax writes it last: without it, a directory is what a crash left, of a save
# or of a deletion.
COMMIT_FILE = "commit_success.txt"
# Counts the best models: the last is the best, whatever its step.
SERIAL = "serial"
_METRICS_FILE = "metrics/metrics"

_Identity = tuple[Path, int, int]


class Series:
  """The checkpoints of "latest" or of "best", a directory for each step.

  What is on disk is looked at anew by each call, since another process may
  train while this one evaluates.
  """

  def __init__(self, directory: Path) -> None:
    """Makes nothing on disk."""
    self.directory = directory
    # What `newest_intact` found.
    self._intact: set[_Identity] = set()
    self._damaged: set[_Identity] = set()

  def path(self, step: int | None) -> Path:
    """Returns the directory of a step, there or not."""
    return self.directory / f"{step}"

  def steps(self) -> list[int]:
    """Returns the steps of whole checkpoints, the newest last.

    Those that `newest_intact` found damaged do not count.
    """
    steps = [
      int(path.name)
      for path in self.directory.glob("*")
      if path.name.isdecimal()
      and path.name == f"{int(path.name)}"  # Not, for example, 007.
      and (path / COMMIT_FILE).exists()
      and _identity(path) not in self._damaged
    ]
    return sorted(steps, key=lambda step: (self.serial(step), step))

  def serial(self, step: int) -> int:
    """Returns the number of a best model, from 0, and -1 of others."""
    try:
      metrics = json.loads((self.path(step) / _METRICS_FILE).read_bytes())
      return int(metrics[SERIAL])
    except (OSError, ValueError, TypeError, LookupError):
      return -1

  def newest(self) -> int | None:
    """Returns the last of `steps`, or None."""
    steps = self.steps()
    return steps[-1] if steps else None

  def newest_intact(
    self, set_aside: bool = False, may_start_anew: bool = False
  ) -> int | None:
    """Returns the newest step whose checksums are right, or None without any.

    Newer ones are named on standard error, and do not count from now on.

    Args:
      set_aside: whether to rename them, which is for the process that trains.
      may_start_anew: whether None is the answer too if all are damaged.

    Raises:
      RunError: if there are checkpoints, but all are damaged.
    """
    if not (may_start_anew or self.steps()):
      self._check_committed()
    intact, damaged = None, {}
    for step in reversed(self.steps()):
      identity = _identity(self.path(step))
      is_known = identity in self._intact
      damage = "" if is_known else checksums.find_damage(self.path(step))
      if not damage:
        self._intact.add(identity)
        intact = step
        break
      damaged[step] = f"checkpoint {self.path(step)}: it is damaged ({damage})"
    if damaged and intact is None and not may_start_anew:
      raise RunError(
        f"{next(iter(damaged.values()))}, and no other is intact; use another"
        " --workdir to start anew"
      )
    for step, message in damaged.items():
      self._damaged.add(_identity(self.path(step)))
      if set_aside:
        path = self.set_aside(step, "damaged")
        warn(f"{message}, and was renamed {path.name}")
      else:
        warn(f"{message}, and is ignored")
    return intact

  def set_aside(self, step: int, why: str) -> Path:
    """Renames what is in the place of a step, if there is; deletes nothing."""
    path = self.path(step)
    aside = path.with_name(f"{step}.{why}-{time.time_ns()}")
    if path.exists() or path.is_symlink():  # It may lead nowhere.
      path.rename(aside)
    return aside

  def _check_committed(self) -> None:
    """Refuses steps of which none has the mark of a whole save.

    A save gets its name when it is whole, and is deleted after a later one, so
    that no crash leaves that.
    """
    steps = [
      int(path.name)
      for path in self.directory.glob("*")
      if path.name.isdecimal() and any(path.glob("*"))
    ]
    if steps:
      raise RunError(
        f"checkpoint {self.path(max(steps))}: {COMMIT_FILE} is missing, and no"
        " other is intact; use another --workdir to start anew"
      )


def _identity(path: Path) -> _Identity:
  """Returns what tells a checkpoint from one that replaced it later."""
  try:
    status = path.stat()
  except OSError:
    return path, 0, 0
  return path, status.st_ino, status.st_ctime_ns
