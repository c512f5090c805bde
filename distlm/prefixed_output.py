"""Shows what the processes of a job print, in whole lines that name them.

Everything is bytes: what a process prints need not be text. Where the standard
output is a terminal, that of process 0 is one too, so that its progress bar is
live; the lines of the others appear above it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import re
import select
import selectors
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

_READ_BYTES = 1 << 16
# Of a process that has ended, more can only be from one that outlived it.
_LAST_READS = 32
# What is longer is cut, for it is kept in memory until it ends.
_LONGEST_LINE_BYTES = 1 << 20
_ERASE = b"\r\x1b[K"
_POLL_SECS = 0.1

_KEPT_LINES = 30
# How the line begins that says what went wrong: distlm's, one of XLA before its
# stack trace, or Python's, which notes may follow.
_NAMES_ERROR = re.compile(
  rb"error: |F\d{4} |[\w.]*(Error|Exception|Interrupt)(: |$)"
)


class Output:
  """Forwards the output of processes, by a thread, until it is closed.

  No line is torn or mixed with another. Whoever reads ours may go away: the
  rest is dropped. If he only stops reading, the processes wait in the end, as
  they would without us.
  """

  def __init__(
    self, num_processes: int, may_leave: Callable[[], bool] = lambda: False
  ) -> None:
    """Makes an output of processes that are yet to be started.

    Args:
      num_processes: with more than one, lines begin with the process's index.
      may_leave: whether `close` may leave what nobody reads.
    """
    self._num_processes = num_processes
    self._may_leave = may_leave
    self._stdout, self._stderr = descriptor(sys.stdout), descriptor(sys.stderr)
    self._bar = b""
    self._last_lines: dict[int, collections.deque[bytes]] = {}
    self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    self._selector = selectors.DefaultSelector()
    self._wake_reader, self._wake_writer = os.pipe()
    self._selector.register(self._wake_reader, selectors.EVENT_READ)
    # A thread that is stuck in a write must not keep the process.
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._is_closing = False
    self._error: BaseException | None = None

  def __enter__(self) -> Output:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self.close()

  @contextlib.contextmanager
  def open(self, index: int) -> Iterator[tuple[int, int]]:
    """Makes the streams of a process.

    Yields:
      The descriptors of its standard output and error, open as long as this.
    """
    prefix = b"[%d] " % index if self._num_processes > 1 else b""
    is_live = index == 0 and self._columns() > len(prefix)
    ends = []
    try:
      for number in (1, 2):
        as_terminal = is_live and number == 1
        ours, theirs = os.openpty() if as_terminal else os.pipe()
        ends.append(theirs)
        os.set_blocking(ours, False)
        stream = _Stream(ours, prefix, number, as_terminal)
        self._selector.register(ours, selectors.EVENT_READ, stream)
        if as_terminal:
          tty.setraw(theirs)  # No carriage returns of its own.
          self._resize(stream)
        if number == 2:
          self._last_lines[index] = stream.last_lines
      yield ends[0], ends[1]
    finally:
      for end in ends:
        os.close(end)

  def start(self) -> None:
    """Begins to forward, once all processes were started.

    Not before, for a process with threads is not safe to fork.
    """
    self._thread.start()

  def say(self, line: str) -> None:
    """Shows a line of our own on the standard error, without waiting."""
    # In place of the ^C that a terminal may show.
    start = _ERASE if os.isatty(self._stderr) else b""
    self._messages.put(start + line.encode(errors="backslashreplace") + b"\n")
    os.write(self._wake_writer, b"!")

  def error_line(self, index: int) -> str:
    """Returns the last line of a process that says what went wrong.

    Args:
      index: of a process that has ended, after `close`.

    Returns:
      One of the last lines of its standard error, or "" if it has none.
    """
    lines = self._last_lines.get(index, collections.deque())
    naming = [line for line in lines if _NAMES_ERROR.match(line)]
    line = naming[-1] if naming else lines[-1] if lines else b""
    text = " ".join(line.decode(errors="backslashreplace").split())
    return text.removeprefix("error: ")

  def close(self) -> None:
    """Shows what processes that have ended left, and ends the thread."""
    self._is_closing = True
    os.write(self._wake_writer, b"!")
    if self._thread.ident is not None:
      while self._thread.is_alive():
        self._thread.join(_POLL_SECS)
        if self._may_leave() and self._thread.is_alive():
          return  # It is stuck, and uses the descriptors.
    self._close_streams()
    self._selector.close()
    os.close(self._wake_reader)
    os.close(self._wake_writer)
    if self._error is not None:
      raise self._error

  def _run(self) -> None:
    try:
      while not self._is_closing:
        for key, _ in self._selector.select():
          if key.data is None:
            os.read(self._wake_reader, _READ_BYTES)
            self._show_messages()
          else:
            self._read(key.data)
      for stream in self._streams():
        self._finish(stream)
      self._show_messages()
    except BaseException as error:  # Raised by `close`.
      self._error = error
    finally:  # Else processes would wait for ever until somebody reads.
      self._close_streams()

  def _streams(self) -> list[_Stream]:
    keys = self._selector.get_map().values()
    return [key.data for key in keys if key.data is not None]

  def _close_streams(self) -> None:
    for stream in self._streams():
      self._selector.unregister(stream.descriptor)
      os.close(stream.descriptor)

  def _finish(self, stream: _Stream) -> None:
    for _ in range(_LAST_READS):
      if not self._read(stream):
        return
    self._end(stream)

  def _read(self, stream: _Stream) -> bool:
    """Forwards what can be read; returns whether there may be more."""
    try:
      data = os.read(stream.descriptor, _READ_BYTES)
    except BlockingIOError:
      return False
    except OSError:  # That is how a terminal says that its other side is gone.
      data = b""
    if not data:
      self._end(stream)
      return False
    if stream.is_live:
      self._resize(stream)
    self._show(stream, stream.feed(data))
    return True

  def _end(self, stream: _Stream) -> None:
    self._selector.unregister(stream.descriptor)
    os.close(stream.descriptor)
    self._show(stream, stream.end())

  def _show(self, stream: _Stream, lines: list[bytes]) -> None:
    bar = stream.bar(self._columns()) if stream.is_live else self._bar
    if lines or bar != self._bar:
      self._write(stream.number, b"".join(lines), bar)

  def _show_messages(self) -> None:
    while not self._messages.empty():
      self._write(2, self._messages.get(), self._bar)

  def _write(self, number: int, text: bytes, bar: bytes) -> None:
    """Writes whole lines to our stream 1 or 2, in place of the bar.

    Args:
      number: of the stream.
      text: the lines.
      bar: what is shown below them, on the standard output.
    """
    erasure = _ERASE if self._bar else b""
    if number == 1:
      write(self._stdout, erasure + text + bar)
    else:
      write(self._stdout, erasure)
      write(self._stderr, text)
      write(self._stdout, bar)
    self._bar = bar

  def _columns(self) -> int:
    """Returns the width of the terminal, and 0 where there is none."""
    try:
      return os.get_terminal_size(self._stdout).columns
    except OSError:
      return 0

  def _resize(self, stream: _Stream) -> None:
    columns = self._columns() - len(stream.prefix)
    if columns > 0 and columns != stream.columns:
      with contextlib.suppress(termios.error):
        termios.tcsetwinsize(stream.descriptor, (24, columns))
      stream.columns = columns


class _Stream:
  """Standard output or error of a process, cut into lines."""

  def __init__(
    self, descriptor: int, prefix: bytes, number: int, is_live: bool
  ) -> None:
    self.descriptor, self.prefix, self.number = descriptor, prefix, number
    self.is_live, self.columns = is_live, 0
    self.last_lines: collections.deque[bytes] = collections.deque(
      maxlen=_KEPT_LINES
    )
    self._pending = bytearray()

  def feed(self, data: bytes) -> list[bytes]:
    """Returns the lines that `data` ends, ready to be shown."""
    lines: list[bytes] = []
    self._pending += data
    if b"\n" in data:
      *lines, rest = bytes(self._pending).split(b"\n")
      self._pending = bytearray(rest)
    if b"\r" in self._pending:
      # A bar on a stream that is no terminal has no end of line for hours.
      settled, _, newest = bytes(self._pending).rpartition(b"\r")
      self._pending = bytearray(_visible(settled) + b"\r" + newest)
    if len(self._pending) > _LONGEST_LINE_BYTES:
      lines.append(bytes(self._pending))
      self._pending.clear()
    return [self._finished(line) for line in lines]

  def end(self) -> list[bytes]:
    """Returns the last line, if it has no end."""
    line = bytes(self._pending)
    self._pending.clear()
    return [self._finished(line)] if _visible(line) else []

  def bar(self, columns: int) -> bytes:
    """Returns what a terminal shows of the line that has not ended."""
    text = _visible(bytes(self._pending)).decode(errors="surrogateescape")
    if not text:
      return b""
    # What wraps could not be erased.
    text = text[: max(0, columns - len(self.prefix))]
    return self.prefix + text.encode(errors="surrogateescape")

  def _finished(self, line: bytes) -> bytes:
    line = _visible(line)
    if line.strip():
      self.last_lines.append(line)
    return self.prefix + line + b"\n"


def _visible(line: bytes) -> bytes:
  """Returns what a terminal shows of a line with carriage returns."""
  if b"\r" not in line:
    return line
  shown = ""
  for part in line.decode(errors="surrogateescape").split("\r"):
    shown = part + shown[len(part) :]
  return shown.rstrip().encode(errors="surrogateescape")


def descriptor(stream: TextIO | None) -> int:
  """Returns where to write, past the buffer, what is meant for a stream."""
  if stream is None:  # The process was started with it closed.
    return -1
  stream.flush()
  return stream.fileno()


def write(descriptor: int, data: bytes) -> None:
  """Writes all bytes, or drops them where they cannot be written."""
  view = memoryview(data)
  while view:
    try:
      view = view[os.write(descriptor, view) :]
    except BlockingIOError:  # Whoever shares it made it so.
      select.select([], [descriptor], [])
    except OSError:
      # Whoever read it, such as `head`, has seen enough, or a disk is full: the
      # job goes on.
      return
