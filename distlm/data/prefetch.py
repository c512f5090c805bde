"""Items made ahead of time by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from distlm.errors import RunError

T = TypeVar("T")

# How often a waiting caller makes sure that the thread still lives.
_LIVENESS_CHECK_SECS = 1.0


class Prefetcher(Generic[T]):
  """Iterates over `iterable`, which one background thread runs ahead in.

  An error of the iterable is raised by the `next()` that would have returned
  the item. After it, at the end and after `close`, there are no more items.

  >>> with Prefetcher(range(3), size=2) as items:
  ...   list(items)
  [0, 1, 2]
  """

  def __init__(self, iterable: Iterable[T], size: int) -> None:
    """Starts the thread.

    Args:
      iterable: makes the items, in the thread.
      size: how many items may wait; one more may be in the making.
    """
    if size < 1:  # A queue.Queue of size 0 would have no bound.
      raise ValueError(f"size={size}: it must be positive")
    # The last entry is an error: StopIteration, or what went wrong.
    self._queue: queue.Queue[tuple[T] | BaseException] = queue.Queue(size)
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._produce, args=(iterable,), name="prefetch", daemon=True
    )
    self._thread.start()

  def _produce(self, iterable: Iterable[T]) -> None:
    try:
      iterator = iter(iterable)
      while not self._stop.is_set():
        self._queue.put((next(iterator),))
    except BaseException as error:  # Whatever it is, the caller raises it.
      self._queue.put(error)

  def __iter__(self) -> Iterator[T]:
    return self

  def __next__(self) -> T:
    if self._stop.is_set():
      raise StopIteration
    entry = self._wait()
    if isinstance(entry, tuple):
      return entry[0]
    self.close()
    raise entry

  def _wait(self) -> tuple[T] | BaseException:
    while True:
      # Asked before the queue is, as its last act may be to fill it.
      alive = self._thread.is_alive()
      try:
        return self._queue.get(block=alive, timeout=_LIVENESS_CHECK_SECS)
      except queue.Empty:
        if not alive:
          raise RunError(
            "the prefetch thread died without an error; look for a fork of"
            " this process after it started"
          ) from None

  def close(self) -> None:
    """Stops the thread and waits until it has ended."""
    self._stop.set()
    # After `stop` the thread puts at most one more entry, so that one empty
    # place is enough to let it end.
    try:
      while True:
        self._queue.get_nowait()
    except queue.Empty:
      pass
    self._thread.join()

  def __enter__(self) -> Prefetcher[T]:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self.close()
