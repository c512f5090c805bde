"""Tests that a run whose threads fail or die ends, with that error."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fault_runs
import pytest
import tiny_run

from distlm.data.loader import Loader
from distlm.data.prefetch import Prefetcher

pytestmark = pytest.mark.timeout(120)

MORE = (*fault_runs.MORE, "--config.training_steps=20")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", autouse=True)
def _caching(config: Path) -> Iterator[None]:
  with tiny_run.compiling_once(config.parent / "compiled"):
    yield


@pytest.fixture
def errors_of_run(
  config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[], str]:
  """A function that trains to the failure, and returns what it said.

  It asserts the exit code, and that no thread is left.
  """

  def train() -> str:
    gc.collect()
    before = set(threading.enumerate())
    args = tiny_run.arguments("train", config, tmp_path, *MORE)
    assert tiny_run.run_here(args) == 1
    assert _threads_left(before) == set()
    output, errors = capsys.readouterr()
    assert "finished" not in output
    return errors

  return train


def _threads_left(before: set[threading.Thread]) -> set[threading.Thread]:
  # JAXline's threads end with their executors, which form cycles.
  gc.collect()
  deadline = time.monotonic() + 60
  while (left := set(threading.enumerate()) - before) and (
    time.monotonic() < deadline
  ):
    time.sleep(0.05)
  return left


def _at_batch(
  monkeypatch: pytest.MonkeyPatch,
  step: int,
  act: Callable[[], None],
  method: str = "process_batch",
) -> None:
  """Acts in the prefetch thread, as the batch that follows a step is made."""
  make = getattr(Loader, method)

  def act_and_make(self: Loader, index: int) -> Any:
    if index == step:
      act()
    return make(self, index)

  monkeypatch.setattr(Loader, method, act_and_make)


def _raising(make_error: Callable[[], Exception]) -> Callable[[], None]:
  # Made anew, since an error keeps the frames that it has passed, and those
  # keep JAXline's threads.
  def fail() -> None:
    raise make_error()

  return fail


def test_the_prefetch_thread_raises_what_nobody_foresaw(
  errors_of_run: Callable[[], str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  _at_batch(monkeypatch, 7, _raising(lambda: KeyError("of step 7")))
  assert errors_of_run().endswith("KeyError: 'of step 7'\n")
  # All that was trained before it is on disk.
  assert tiny_run.steps(tmp_path, "train") == list(range(1, 8))
  assert fault_runs.assert_whole(tmp_path) == [5]


@pytest.mark.parametrize(
  "method", ["process_batch", "process_evaluation_batch"]
)
def test_the_prefetch_thread_cannot_read(
  errors_of_run: Callable[[], str],
  monkeypatch: pytest.MonkeyPatch,
  method: str,
) -> None:
  message = os.strerror(errno.EIO)
  fail = _raising(lambda: OSError(errno.EIO, message, "/data/tokens.npy"))
  _at_batch(monkeypatch, 7, fail, method)
  message = tiny_run.check_one_line(errors_of_run())
  assert message.startswith("/data/tokens.npy: Input/output error")


def test_the_prefetch_thread_dies_silently(
  errors_of_run: Callable[[], str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  def produce(self: Prefetcher[Any], iterable: Iterable[Any]) -> None:
    for _, item in zip(range(7), iterable, strict=False):
      self._queue.put((item,))

  monkeypatch.setattr(Prefetcher, "_produce", produce)
  message = tiny_run.check_one_line(errors_of_run())
  assert message.startswith("the prefetch thread died without an error")
  assert tiny_run.steps(tmp_path, "train") == list(range(1, 8))


def test_the_writing_thread_fails(
  errors_of_run: Callable[[], str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  path = tmp_path / "metrics.jsonl"

  def replace_by_directory() -> None:
    path.rename(tmp_path / "elsewhere")
    path.mkdir()

  _at_batch(monkeypatch, 12, replace_by_directory)
  message = tiny_run.check_one_line(errors_of_run())
  assert message.startswith(f"{path}: Is a directory")


@pytest.mark.parametrize("series", ["latest", "best"])
@pytest.mark.parametrize("step", [10, 20])
def test_the_checkpoint_thread_fails(
  errors_of_run: Callable[[], str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  series: str,
  step: int,
) -> None:
  full = _raising(lambda: OSError(errno.ENOSPC, "it is full"))
  _at_rename(monkeypatch, f"{series}/{step}", full)
  message = tiny_run.check_one_line(errors_of_run())
  where = tmp_path / "checkpoints" / series
  assert message.startswith(f"{where}: a checkpoint could not be written")
  assert "it is full" in message
  assert fault_runs.assert_whole(tmp_path)[0] == 5
  assert step not in tiny_run.saved_steps(tmp_path, series)


def test_the_checkpoint_thread_raises_what_nobody_foresaw(
  errors_of_run: Callable[[], str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  fail = _raising(lambda: KeyError("of step 10"))
  _at_rename(monkeypatch, "latest/10", fail)
  assert errors_of_run().endswith("KeyError: 'of step 10'\n")
  assert fault_runs.assert_whole(tmp_path)[0] == 5
  assert 10 not in tiny_run.saved_steps(tmp_path)


def _at_rename(
  monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]
) -> None:
  """Acts in the thread of a save, as what is whole gets its name."""
  real_rename = os.rename

  def rename(source: Any, target: Any, **options: Any) -> None:
    if str(target).endswith(name):
      act()
    real_rename(source, target, **options)

  monkeypatch.setattr(os, "rename", rename)
