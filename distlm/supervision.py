"""Runs the processes of a job so that all of them end when one fails."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

_STOP_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)
# Processes that lost one of theirs cannot finish the step, and a checkpoint is
# whole at any time: there is nothing to wait for.
_TERM_SECS = 2.0
# SIGTERM may come by two ways at once: that is one request, not two.
ONE_REQUEST_SECS = 1.0
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 4096


class Ended(NamedTuple):
  """How a process ended; `code` is -n after a death by signal n."""

  process: int
  code: int

  @property
  def exit_code(self) -> int:
    """The exit code as a shell has it."""
    return self.code if self.code >= 0 else 128 - self.code

  def describe(self, num_processes: int) -> str:
    """Returns which process of how many ended first, and how."""
    is_alone = num_processes == 1
    who = "the process" if is_alone else f"process {self.process}"
    if self.code < 0:
      return f"{who} was killed by {_signal_name(-self.code)}"
    first = "" if is_alone else " first,"
    return f"{who} failed{first} with exit code {self.code}"


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:  # A real-time signal.
    return f"signal {number}"


class Signals:
  """Collects SIGINT, SIGTERM and SIGHUP; readable once one came."""

  def __init__(self) -> None:
    self.received: list[int] = []
    self._time = 0.0  # of the last one

  def __enter__(self) -> Signals:
    self._reader, self._writer = socket.socketpair()
    for end in (self._reader, self._writer):
      end.setblocking(False)
    self._previous_wakeup = signal.set_wakeup_fd(
      self._writer.fileno(), warn_on_full_buffer=False
    )
    self._previous = {
      number: signal.signal(number, self._receive)
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._previous_wakeup)
    self._reader.close()
    self._writer.close()

  def fileno(self) -> int:
    """Returns what a selector waits on."""
    return self._reader.fileno()

  def clear(self) -> None:
    """Makes it readable only when a further signal comes."""
    with contextlib.suppress(BlockingIOError):
      self._reader.recv(_MESSAGE_BYTES)

  def wait(self, secs: float) -> bool:
    """Waits for a signal at most so long; returns whether one has come."""
    deadline = time.monotonic() + secs
    with selectors.DefaultSelector() as selector:
      selector.register(self, selectors.EVENT_READ)
      while not self.received and (left := deadline - time.monotonic()) > 0:
        selector.select(left)
        self.clear()
    return bool(self.received)

  def _receive(self, number: int, frame: FrameType | None) -> None:
    del frame
    now = time.monotonic()
    # As `timeout` sends SIGTERM, to its child and to the group of that.
    is_again = self.received[-1:] == [number] == [signal.SIGTERM]
    if not (is_again and now - self._time < ONE_REQUEST_SECS):
      self.received.append(number)
      self._time = now


class Processes:
  """The processes of a job; when it is closed none is left, nor its children.

  Each leads a session and process group of its own, which is killed when the
  process has ended, in whatever way.

  Attributes:
    first: how the first ended that did not end with 0; the kernel keeps the
      order, however late we look.
    was_stopped: whether that was because a signal asked it to.
    was_forced: whether a second signal killed any.
  """

  def __init__(self, signals: Signals, say: Callable[[str], None]) -> None:
    """Makes a job without processes.

    Args:
      signals: the first asks the processes to stop, the second kills them.
      say: shows a line.
    """
    self.first: Ended | None = None
    self.was_stopped = self.was_forced = False
    self._signals, self._say = signals, say
    self._num_heeded = 0
    self._has_failed = False
    self._kill_at: float | None = None
    self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
    # Epoll, which reports what became ready in that very order.
    self._selector = selectors.EpollSelector()
    self._selector.register(signals, selectors.EVENT_READ)

  def __enter__(self) -> Processes:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    for index in list(self._running):
      self._end(index)
    self._selector.close()

  def start(
    self,
    index: int,
    command: Sequence[str],
    env: Mapping[str, str],
    streams: tuple[int, int],
  ) -> None:
    """Starts a process; not in a thread that ends before it.

    Args:
      index: of the process.
      command: what to run.
      env: its environment.
      streams: the descriptors of its standard output and error.

    Raises:
      OSError: if it cannot be started.
    """
    popen = subprocess.Popen(
      command,
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=streams[0],
      stderr=streams[1],
      start_new_session=True,
      preexec_fn=functools.partial(_die_with, os.getpid(), _prctl()),
    )
    try:
      descriptor = os.pidfd_open(popen.pid)
    except OSError:
      popen.kill()
      popen.wait()
      raise
    self._running[index] = descriptor, popen
    self._selector.register(descriptor, selectors.EVENT_READ, index)

  def wait(self) -> None:
    """Waits until all have ended, after a failure by force."""
    while self._running:
      left = None
      if self._kill_at is not None:
        left = max(0.0, self._kill_at - time.monotonic())
      ready = self._selector.select(left)
      self._heed_signals()
      for key, _ in ready:
        if key.data is not None:
          self._note(self._end(key.data))
      if self._kill_at is not None and time.monotonic() >= self._kill_at:
        self._kill(signal.SIGKILL)
        self._kill_at = None

  def _heed_signals(self) -> None:
    self._signals.clear()
    while self._num_heeded < len(self._signals.received):
      self._num_heeded += 1
      if self._num_heeded == 1:
        self._say("stopping; again to kill at once")
        for _, popen in self._running.values():
          # Not their groups: they may need their own processes to stop well.
          os.kill(popen.pid, signal.SIGTERM)
      else:
        self.was_forced = True
        self._kill(signal.SIGKILL)

  def _note(self, ended: Ended) -> None:
    if ended.code == 0:
      return
    # It may have been asked, and not we; then it stopped all the others too.
    has_saved = ended.code == 128 + signal.SIGTERM
    was_asked = bool(self._signals.received) or has_saved
    is_stop = was_asked and ended.code in _STOP_CODES
    if self.first is None:
      self.first, self.was_stopped = ended, is_stop
    if not is_stop and not self._has_failed:
      self._has_failed = True
      self._kill(signal.SIGTERM)
      self._kill_at = time.monotonic() + _TERM_SECS

  def _kill(self, number: int) -> None:
    for _, popen in self._running.values():
      _kill_group(popen, number)

  def _end(self, index: int) -> Ended:
    descriptor, popen = self._running.pop(index)
    # Before it is reaped, for until then nobody else has its number.
    _kill_group(popen, signal.SIGKILL)
    code = popen.wait()
    self._selector.unregister(descriptor)
    os.close(descriptor)
    return Ended(index, code)


def _kill_group(popen: subprocess.Popen[bytes], number: int) -> None:
  with contextlib.suppress(PermissionError):  # Such as after a sudo.
    os.killpg(popen.pid, number)


def _prctl() -> Any:
  return ctypes.CDLL(None, use_errno=True).prctl


def _die_with(launcher: int, prctl: Any) -> None:
  """Has the kernel kill this process when the launcher ends.

  By SIGKILL, for JAX swallows SIGTERM once it has joined a job.
  """
  prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
  if os.getppid() != launcher:  # It ended before.
    os.kill(os.getpid(), signal.SIGKILL)
