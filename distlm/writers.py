"""Writes the scalars of a run: TensorBoard, metrics.jsonl and the console.

`WORKDIR/metrics.jsonl` has one JSON object a line: `step` (completed updates),
`split` ("train" or "eval"), then the scalars. JSON has no NaN or infinity, so
these are the strings "NaN", "Infinity" and "-Infinity", which Python's
`float()` reads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from tensorboardX import summary as summaries
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from distlm.settings import flatten

METRICS_FILE = "metrics.jsonl"
SPLITS = ("train", "eval")

# Shows the scalars of (split, step); `Console.log_scalars` is one.
ShowScalars = Callable[[str, int, Mapping[str, Any]], None]


class RunWriter:
  """Owns what a run writes about itself; one process of the run makes one.

  Every row has reached the operating system when `write_scalars` returns, so
  a killed process loses none. Safe for several threads.

  A run that restarts goes back to the step of its checkpoint, and so do its
  curves: rows after that step are dropped, since they are written again.

  >>> import tempfile
  >>> from distlm.console import Console
  >>> workdir = tempfile.mkdtemp()
  >>> console = Console()
  >>> with RunWriter(Path(workdir), None, console.log_scalars) as writer:
  ...   writer.for_split("eval").write_scalars(20, {"loss": np.float32(2.5)})
  eval step 20  loss 2.5
  >>> read_metrics(Path(workdir))
  [{'step': 20, 'split': 'eval', 'loss': 2.5}]
  """

  def __init__(
    self,
    workdir: Path,
    resume_step: int | None,
    show: ShowScalars,
    splits: Sequence[str] = SPLITS,
  ) -> None:
    """Opens the files of a run.

    Args:
      workdir: the directory of the run.
      resume_step: step of the checkpoint that the run is restored from; None
        for a run from the start, which drops all rows of earlier attempts.
      show: called with each row, usually `Console.log_scalars`.
      splits: what this process writes. Without "train" it is an evaluator
        beside the run: it drops nothing, and appends what is not there yet.
    """
    self._show = show
    self._is_resumed = resume_step is not None
    self._lock = threading.Lock()
    self._error: Exception | None = None
    self._is_evaluator = "train" not in splits
    self._metrics_path = workdir / METRICS_FILE
    self._event_files = {
      split: _EventFile(workdir / "tensorboard" / split) for split in splits
    }
    if not self._is_evaluator:
      last_step = -1 if resume_step is None else resume_step
      _drop_rows_after(self._metrics_path, last_step)
      for event_file in self._event_files.values():
        event_file.drop_events_after(last_step)

  def for_split(self, split: str) -> SplitWriter:
    """Returns the JAXline `Writer` of "train" or "eval"."""
    return SplitWriter(self, split)

  def write_scalars(
    self, split: str, step: int, scalars: Mapping[str, Any]
  ) -> None:
    """Writes one row.

    Args:
      split: "train" or "eval".
      step: completed updates.
      scalars: numbers, or arrays of one element.

    Raises:
      OSError: if it cannot be written, now or at an earlier call.
    """
    row = {name: np.asarray(value).item() for name, value in scalars.items()}
    with self._failing():
      self._show(split, step, row)
      if not (self._is_evaluator and self._has_row(split, step)):
        self._event_files[split].add(step, _scalar_summary(row))
        _append_row(self._metrics_path, {"step": step, "split": split, **row})

  def write_config(self, config: Mapping[str, Any]) -> None:
    """Shows the settings on TensorBoard's text and hparams pages.

    They are written once, by the start of the run: a resumed run may change
    only settings that do not touch what is computed.

    Args:
      config: nested settings of JSON types.
    """
    if self._is_resumed:
      return
    page = f"```json\n{json.dumps(config, indent=2)}\n```"
    text = summaries.text("config", page)
    text.value[0].tag = "config"  # tensorboardX appends "/text_summary".
    # Not `add_hparams`: it makes a run of its own in a subdirectory. The end
    # of the session is left open, since the run can still fail.
    experiment, session_start, _ = summaries.hparams(
      {key: _hyperparameter(value) for key, value in flatten(config)},
      {"loss": 0.0},
    )
    with self._failing():
      for summary in (text, experiment, session_start):
        self._event_files["train"].add(0, summary)

  def raise_if_failed(self) -> None:
    """Raises the first error of a write.

    JAXline writes in a background thread and raises its error at the next
    write only, which never comes when the last one fails.
    """
    if self._error is not None:
      raise self._error

  def close(self) -> None:
    """Closes the files, and raises the first error of a write.

    May be called again.
    """
    with self._lock:
      while self._event_files:
        self._event_files.popitem()[1].close()
    self.raise_if_failed()

  def __enter__(self) -> RunWriter:
    return self

  def __exit__(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    # An error of the run itself is the one to see.
    hidden = (Exception,) if error is not None else ()
    with contextlib.suppress(*hidden):
      self.close()

  def _has_row(self, split: str, step: int) -> bool:
    return any(
      (row.get("split"), row["step"]) == (split, step)
      for row in read_metrics(self._metrics_path.parent)
    )

  @contextlib.contextmanager
  def _failing(self) -> Iterator[None]:
    """Holds the lock, and remembers the first error."""
    with self._lock:
      self.raise_if_failed()
      if not self._event_files:
        raise ValueError("the RunWriter is closed")
      try:
        yield
      except Exception as error:
        self._error = error
        raise


class SplitWriter(NamedTuple):
  """JAXline's `Writer` protocol for one split of a run."""

  run_writer: RunWriter
  split: str

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Writes one row; see `RunWriter.write_scalars`."""
    self.run_writer.write_scalars(self.split, int(global_step), scalars)


class _EventFile:
  """A new TensorBoard event file, written at once.

  tensorboardX's SummaryWriter writes from a thread of its own: a killed
  process loses what is queued, and a full disk ends that thread unnoticed, so
  that the tenth row after it blocks for ever.
  """

  def __init__(self, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # tensorboardX names files by the second and truncates one that exists.
    # TensorBoard reads files in the order of their names.
    self._file = EventsWriter(
      str(directory / "events"), filename_suffix=f".{time.time_ns()}"
    )

  def drop_events_after(self, step: int) -> None:
    """Tells TensorBoard to forget later steps of the earlier files.

    Its fast data server does not listen: there, a later point of a curve goes
    when the resumed run writes a point at or before its step.
    """
    started = SessionLog(status=SessionLog.START)
    self._write(Event(step=step + 1, session_log=started))

  def add(self, step: int, summary: Summary) -> None:
    self._write(Event(step=step, summary=summary))

  def close(self) -> None:
    self._file.close()

  def _write(self, event: Event) -> None:
    event.wall_time = time.time()
    self._file.write_event(event)
    self._file.flush()


def _scalar_summary(row: Mapping[str, float]) -> Summary:
  return Summary(
    value=[
      Summary.Value(tag=name, simple_value=value) for name, value in row.items()
    ]
  )


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
  """Returns the rows of a run's metrics.jsonl, in order.

  A line that a crash left incomplete is not a row. No file is no rows.
  """
  rows = []
  with contextlib.suppress(FileNotFoundError):
    for line in (workdir / METRICS_FILE).read_bytes().splitlines():
      # A torn line is no JSON; torn by a full disk it may even be no UTF-8.
      with contextlib.suppress(ValueError):
        rows.append(json.loads(line))
  return [
    row
    for row in rows
    if isinstance(row, dict) and isinstance(row.get("step"), int)
  ]


def _drop_rows_after(path: Path, last_step: int) -> None:
  """Drops later rows and torn lines, all or nothing."""
  kept = b"".join(
    _encode(row)
    for row in read_metrics(path.parent)
    if row["step"] <= last_step
  )
  # An evaluator may be appending: a file with nothing to drop stays as it is.
  if not path.exists() or path.read_bytes() == kept:
    return
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_bytes(kept)
  os.replace(temporary, path)


def _append_row(path: Path, row: Mapping[str, Any]) -> None:
  """Appends one line by one write, which another process cannot tear.

  The file is opened anew, because `_drop_rows_after` may have replaced it, and
  so that a vanished directory is an error.
  """
  line = _encode(row)
  with path.open("ab", buffering=0) as file:
    if file.write(line) != len(line):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _encode(row: Mapping[str, Any]) -> bytes:
  strict = {name: _json_value(value) for name, value in row.items()}
  return (json.dumps(strict, allow_nan=False) + "\n").encode()


def _json_value(value: Any) -> Any:
  if not isinstance(value, float) or math.isfinite(value):
    return value
  if math.isnan(value):
    return "NaN"
  return "Infinity" if value > 0 else "-Infinity"


def _hyperparameter(value: Any) -> bool | float | str:
  """Returns a setting as a type that hparams knows."""
  return value if isinstance(value, (bool, int, float, str)) else str(value)
