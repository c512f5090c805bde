"""Tests of the prefetch thread: order, bounds, errors, its end."""

from __future__ import annotations

import gc
import itertools
import statistics
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distlm.data.prefetch import Prefetcher
from distlm.errors import RunError


def _wait_for(condition: Callable[[], bool]) -> None:
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline, "waited for 60 s"
    time.sleep(0.001)


def _threads() -> list[threading.Thread]:
  return [t for t in threading.enumerate() if t.name == "prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
  yield
  assert not _threads()


@pytest.mark.parametrize("size", [1, 2, 200])
def test_items_keep_their_order(size: int) -> None:
  with Prefetcher(range(100), size) as items:
    assert list(items) == list(range(100))
    assert list(items) == []


def test_runs_in_another_thread_ahead_but_bounded() -> None:
  made: list[int] = []

  def make() -> Iterator[int]:
    for index in itertools.count():
      made.append(threading.get_ident())
      yield index

  with Prefetcher(make(), size=3) as items:
    _wait_for(lambda: len(made) == 4)  # 3 wait, one more is made.
    time.sleep(0.05)
    assert len(made) == 4
    assert next(items) == 0
    _wait_for(lambda: len(made) == 5)
    assert threading.get_ident() not in made
    assert len(set(made)) == 1


def test_an_error_is_raised_where_its_item_would_be() -> None:
  def make() -> Iterator[int]:
    yield 1
    raise KeyError("lost")

  with Prefetcher(make(), size=2) as items:
    assert next(items) == 1
    with pytest.raises(KeyError, match="lost") as caught:
      next(items)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "make"
    assert next(items, None) is None


def test_an_error_of_iter_and_a_base_exception_are_raised() -> None:
  def leave() -> Iterator[int]:
    raise SystemExit(3)
    yield

  not_iterable: Any = 3
  with (
    pytest.raises(TypeError, match="not iterable"),
    Prefetcher[int](not_iterable, size=1) as items,
  ):
    next(items)
  with pytest.raises(SystemExit), Prefetcher(leave(), size=1) as items:
    next(items)


@pytest.mark.parametrize("size", [1, 2])
def test_close_ends_a_thread_that_waits_for_room(size: int) -> None:
  secs = []
  for _ in range(50):  # The places where the thread may be are a race.
    items = Prefetcher(itertools.count(), size)
    next(items)
    started = time.monotonic()
    items.close()
    secs.append(time.monotonic() - started)
    assert not _threads()
    items.close()
    assert next(items, None) is None
  # Not each: a busy machine may stop a process for as long.
  assert statistics.median(secs) < 1


def test_leaving_with_an_error_ends_the_thread() -> None:
  with (
    pytest.raises(ZeroDivisionError),
    Prefetcher(itertools.count(), size=1) as items,
  ):
    next(items)
    raise ZeroDivisionError
  assert not _threads()


def test_few_items_are_alive_at_once() -> None:
  class Item:
    pass

  alive: weakref.WeakSet[Item] = weakref.WeakSet()

  def make() -> Iterator[Item]:
    for _ in range(200):
      item = Item()
      alive.add(item)
      yield item
      del item

  with Prefetcher(make(), size=2) as items:
    most = 0
    for _ in items:
      most = max(most, len(alive))
    # 2 wait, 1 in the making, 1 here, 1 on its way.
    assert most <= 5
  gc.collect()
  assert len(alive) <= 1  # What the loop variable holds.


def test_a_silent_death_of_the_thread_is_an_error(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(Prefetcher, "_produce", lambda self, iterable: None)
  with (
    pytest.raises(RunError, match="died without an error"),
    Prefetcher(range(3), size=1) as items,
  ):
    next(items)


def test_size_must_be_positive() -> None:
  with pytest.raises(ValueError, match="size=0"):
    Prefetcher(range(3), size=0)
