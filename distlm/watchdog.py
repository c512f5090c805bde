"""Ends a run that no longer gets on, and says which process holds it up.

A process that is stopped, cut off or waits for a dead disk keeps the others
waiting in a collective, for ever: its heartbeats may well go on. Each process
watches itself, so one of them always finds out.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distlm.atomic import write_atomically

_DIRECTORY = "processes"
_NUM_FIRST = 3
_FIRST_TIMES_FACTOR = 10
_USUAL_TIME_FACTOR = 20
_NUM_USUAL = 20
_TICKS_OF_NOTE = 4  # Between two notes for the others.
_NOTES_MISSED = 4  # So many mean that a process is not there any more.
_SECS_TO_FIND_CAUSE = 10.0  # Reading the notes may hang as well.
_FAILURE_CODE = 1


class Watchdog:
  """A thread that ends the process when its main thread is stuck.

  The work is a sequence of activities, such as "step". Each may take `seconds`,
  and more if it usually takes long: 20 times the median of the last ones. The
  first three of a kind may take 10 times `seconds`: they compile, or wait for
  another process that does.

  Time is counted in ticks of the thread itself: a process that was stopped and
  goes on, or slept with its laptop, is not blamed for it.
  """

  def __init__(
    self, seconds: float, workdir: Path, process_id: int, num_processes: int
  ) -> None:
    """Watches nothing yet.

    Args:
      seconds: see above; 0: it never ends anything.
      workdir: where the processes leave word for each other, in `processes/`.
      process_id: this one's.
      num_processes: of the job.
    """
    self._seconds = seconds
    self._directory = workdir / _DIRECTORY
    self._process_id = process_id
    self._num_processes = num_processes
    self._tick_secs = min(1.0, seconds / 20)
    self._activity, self._step, self._num_ticks = "start", 0, 0
    self._secs_of: dict[str, collections.deque[float]] = (
      collections.defaultdict(lambda: collections.deque(maxlen=_NUM_USUAL))
    )
    self._lock = threading.Lock()  # Of what a tick and `begin` change.
    self._is_over = threading.Event()
    # Notes by a thread of their own: a dead disk must not hold up the watch.
    self._threads = [_daemon(self._watch)]
    if num_processes > 1:
      self._threads.append(_daemon(self._leave_notes))

  def __enter__(self) -> Watchdog:
    if self._seconds:
      for thread in self._threads:
        thread.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._is_over.set()

  def begin(self, activity: str, step: int) -> None:
    """Ends the activity under way and begins another, or the same anew.

    Args:
      activity: what is done.
      step: completed updates.
    """
    with self._lock:
      self._secs_of[self._activity].append(self._secs())
      self._activity, self._step, self._num_ticks = activity, step, 0

  @contextlib.contextmanager
  def doing(self, activity: str, step: int) -> Iterator[None]:
    """Takes its body for an activity, between parts of the one under way."""
    outer = self._activity
    self.begin(activity, step)
    try:
      yield
    finally:
      self.begin(outer, step)

  def _secs(self) -> float:
    return self._num_ticks * self._tick_secs

  def _limit(self) -> float:
    before = self._secs_of[self._activity]
    if len(before) < _NUM_FIRST:
      return _FIRST_TIMES_FACTOR * self._seconds
    return max(self._seconds, _USUAL_TIME_FACTOR * statistics.median(before))

  def _watch(self) -> None:
    while not self._is_over.wait(self._tick_secs):
      with self._lock:
        self._num_ticks += 1
        is_late = self._secs() > self._limit()
      if is_late:
        self._end()

  def _end(self) -> None:
    """Shows where all threads are and which process is behind, and exits."""
    causes = ["what the others do is not known: their notes cannot be read"]
    if self._num_processes == 1:
      causes = ["the stacks of its threads are above"]
    else:

      def look() -> None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
          causes.insert(0, self._find_cause())

      thread = _daemon(look)
      thread.start()
      thread.join(_SECS_TO_FIND_CAUSE)
    if sys.__stderr__ is not None:
      faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
      print(
        f"error: process {self._process_id} did not get on for"
        f" {self._secs():.0f} s in {self._activity} after step {self._step};"
        f" {causes[0]} (if this is no fault, set watchdog.seconds higher than"
        f" {self._seconds:g})",
        file=sys.__stderr__,
        flush=True,
      )
    os._exit(_FAILURE_CODE)

  def _leave_notes(self) -> None:
    """Tells the others, every few ticks, how far this process is."""
    with contextlib.suppress(OSError):
      self._directory.mkdir(parents=True, exist_ok=True)
    is_over = False
    while not is_over:
      note = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "step": self._step,
        "activity": self._activity,
      }
      # What cannot be written, on a full disk say, is shown by what matters.
      with contextlib.suppress(OSError):
        write_atomically(
          self._note(self._process_id), [json.dumps(note).encode()]
        )
      is_over = self._is_over.wait(_TICKS_OF_NOTE * self._tick_secs)

  def _note(self, process_id: int) -> Path:
    return self._directory / f"{process_id}.json"

  def _find_cause(self) -> str:
    now = self._note(self._process_id).stat().st_mtime
    notes = [self._read_note(i) for i in range(self._num_processes)]
    newest = max(note["step"] for note in notes)
    longest = _NOTES_MISSED * _TICKS_OF_NOTE * self._tick_secs
    causes = []
    for process_id, note in enumerate(notes):
      name = f"process {process_id} (pid {note['pid']} on {note['host']})"
      silence = now - note["mtime"]
      if silence > longest:
        causes.append(f"{name} was last heard of {silence:.0f} s ago")
      elif note["step"] < newest or note["activity"] != self._activity:
        causes.append(
          f"{name} is behind, in {note['activity']} after step {note['step']}"
        )
    return "; ".join(causes) or (
      "so do all processes, in the same place: see the stacks above and, if"
      " they wait in a collective, look at the network"
    )

  def _read_note(self, process_id: int) -> dict[str, Any]:
    path = self._note(process_id)
    note: dict[str, Any] = json.loads(path.read_bytes())
    return {**note, "mtime": path.stat().st_mtime}


def _daemon(function: Callable[[], None]) -> threading.Thread:
  # As a daemon it does not keep a process that ends by itself.
  return threading.Thread(
    target=function, name=f"watchdog{function.__name__}", daemon=True
  )
