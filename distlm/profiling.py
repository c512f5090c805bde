"""Traces a window of training steps and reads the trace back.

A trace is asked for rarely and looked at hours later, so what was written is
checked at once: an empty one says so while the run can still be repeated.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions, ProfilePlane

# How JAXline marks its steps.
_STEP_EVENT = "train"
# Named after the HLO instruction or after the JAX primitive.
_COLLECTIVE = re.compile(
  r"all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter|collective[-_]|"
  r"psum|pmax|pmin|ppermute"
)
_NUM_TOP_OPS = 5


@dataclasses.dataclass(frozen=True)
class TraceReport:
  """What a written trace holds.

  Attributes:
    path: the .xplane.pb file.
    num_events: events of the host and the devices.
    num_steps: training steps that are marked in it.
    device_secs: time in operations, summed over devices; an operation counts
      without those nested in it.
    collective_secs: the part of it in collectives, waiting included.
    top_ops: names and seconds of the operations that took longest.
  """

  path: Path
  num_events: int
  num_steps: int
  device_secs: float
  collective_secs: float
  top_ops: tuple[tuple[str, float], ...]

  @property
  def is_empty(self) -> bool:
    """Whether the trace shows no training step."""
    return not (self.num_events and self.num_steps)

  def text(self) -> str:
    """Returns a few lines for the console."""
    if self.is_empty:
      return (
        f"WARNING: the trace is empty: {self.num_steps} steps marked in"
        f" {self.num_events:,} events; see {self.path}"
      )
    share = self.collective_secs / (self.device_secs or 1.0)
    top = ", ".join(
      f"{name} {secs * 1e3:.1f} ms" for name, secs in self.top_ops
    )
    return (
      f"trace of {self.num_steps} steps, {self.num_events:,} events:"
      f" {self.path}\n"
      f"  device time {self.device_secs * 1e3:.1f} ms over all devices,"
      f" {share:.0%} of it in collectives\n"
      f"  longest: {top or 'no device operations'}\n"
      "  to look at it: pip install xprof; tensorboard --logdir"
      f" {shlex.quote(str(self.path.parents[3]))}"
    )


class TraceWindow:
  """Traces `num_steps` updates from the one after `start_step` on.

  It stands in for a JAXline `PeriodicAction`: JAXline calls `update_time` once
  before the loop, the window itself after each step, and `wait_to_finish` after
  the loop. As a context manager it also ends a trace that an error interrupts.
  A run resumed within the window traces the rest of it; one resumed beyond it
  traces nothing.

  Attributes:
    report: what the trace holds, once it is written.
  """

  def __init__(
    self,
    directory: Path,
    start_step: int,
    num_steps: int,
    device_memory: bool,
    print_line: Callable[[str], None],
  ) -> None:
    """Plans a window.

    Args:
      directory: where traces go, by convention `WORKDIR/profile`.
      start_step: completed updates at the start of the trace.
      num_steps: updates to trace; 0 for no trace.
      device_memory: whether to write the device memory profile at the end of
        the window.
      print_line: called with reports and warnings.
    """
    self.report: TraceReport | None = None
    self._directory = directory
    self._start_step = start_step
    self._end_step = start_step + num_steps
    self._device_memory = device_memory
    self._print_line = print_line
    self._is_tracing = False
    self._is_done = not (num_steps or device_memory)
    self._outputs: Mapping[str, Any] = {}

  def update_time(self, t: float, step: int) -> None:
    """Begins a run at `step` completed updates."""
    del t
    # A window of no steps, for the memory profile alone, is open at its start.
    if step > self._start_step and step >= self._end_step:
      self._is_done = True
    self._move_to(step)

  def __call__(self, t: float, step: int, outputs: Mapping[str, Any]) -> None:
    """Starts or stops the trace between two steps.

    Args:
      t: ignored.
      step: completed updates.
      outputs: device arrays of the last update. The window waits for them at
        both its ends, so that it holds the device work of its steps alone.
    """
    del t
    self._outputs = outputs
    self._move_to(step)

  def wait_to_finish(self) -> None:
    """Ends the window with the loop."""
    self.close()

  def close(self) -> None:
    """Writes a trace under way, and says if nothing was profiled.

    May be called again.
    """
    if self._is_tracing:
      self._end()
    elif not self._is_done:
      self._is_done = True
      self._print_line(
        "WARNING: nothing was profiled: the run ended before"
        f" profile.start_step={self._start_step}"
      )

  def __enter__(self) -> TraceWindow:
    return self

  def __exit__(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if error is not None:
      # Outputs that wait for a process that died would never be ready.
      self._outputs = {}
    self.close()

  def _move_to(self, step: int) -> None:
    if self._is_done or step < self._start_step:
      return
    if step >= self._end_step:
      self._end()
    elif not self._is_tracing:
      self._start()

  def _start(self) -> None:
    options = ProfileOptions()
    # Python frames are most of the events, and slow the steps down.
    options.python_tracer_level = 0
    jax.block_until_ready(self._outputs)
    jax.profiler.start_trace(self._directory, profiler_options=options)
    self._is_tracing = True

  def _end(self) -> None:
    self._is_done = True
    if self._is_tracing:
      self._is_tracing = False
      try:
        jax.block_until_ready(self._outputs)
      finally:
        jax.profiler.stop_trace()
      self.report = read_trace(self._directory)
      self._print_line(self.report.text())
    if self._device_memory:
      path = self._directory / "device_memory.pprof.gz"
      self._print_line(write_device_memory_profile(path))


def read_trace(directory: Path) -> TraceReport:
  """Reads the newest trace that `jax.profiler` wrote into `directory`."""
  paths = directory.glob("plugins/profile/*/*.xplane.pb")
  path = max(paths, key=lambda path: path.stat().st_mtime, default=None)
  if path is None:
    return TraceReport(directory, 0, 0, 0.0, 0.0, ())
  num_events = 0
  steps = set()
  op_secs: dict[str, float] = collections.defaultdict(float)
  for plane in ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        num_events += 1
        if event.name == _STEP_EVENT:
          steps.add(dict(event.stats).get("step_num"))
    for ops in _ops_by_line(plane):
      for name, own_ns in _own_times(ops):
        op_secs[name] += own_ns * 1e-9
  return TraceReport(
    path=path,
    num_events=num_events,
    num_steps=len(steps - {None}),
    device_secs=sum(op_secs.values()),
    collective_secs=sum(
      secs for name, secs in op_secs.items() if _COLLECTIVE.match(name)
    ),
    top_ops=tuple(
      sorted(op_secs.items(), key=lambda item: -item[1])[:_NUM_TOP_OPS]
    ),
  )


class _Op(NamedTuple):
  name: str
  start_ns: float
  duration_ns: float


def _ops_by_line(plane: ProfilePlane) -> Iterator[list[_Op]]:
  """Yields the device operations of each thread, stream or core."""
  # TPU planes have a line of operations beside lines that sum them up. On CPUs
  # and GPUs an operation is an event with the name of its HLO instruction.
  lines = list(plane.lines)
  op_lines = [line for line in lines if line.name == "XLA Ops"]
  for line in op_lines or lines:
    ops = []
    for event in line.events:
      name = dict(event.stats).get("hlo_op")
      if name is None and op_lines:
        name = event.name.partition(" = ")[0].lstrip("%")
      if name is not None:
        ops.append(_Op(str(name), event.start_ns, event.duration_ns))
    yield ops


def _own_times(ops: Iterable[_Op]) -> Iterator[tuple[str, float]]:
  """Yields names and nanoseconds of operations, less those nested in them.

  A loop is an operation around those of its body, which would count twice.
  """
  enclosing: list[_Op] = []
  for op in sorted(ops, key=lambda op: (op.start_ns, -op.duration_ns)):
    while enclosing and _end_ns(enclosing[-1]) <= op.start_ns:
      enclosing.pop()
    yield op.name, op.duration_ns
    if enclosing:
      yield enclosing[-1].name, -op.duration_ns
    enclosing.append(op)


def _end_ns(op: _Op) -> float:
  return op.start_ns + op.duration_ns


def write_device_memory_profile(path: Path) -> str:
  """Writes which code allocated the device memory in use, for `pprof`.

  Args:
    path: the file to write: a gzipped protocol buffer of pprof.

  Returns:
    Lines for the console: the path and, where the backend counts it, the
    memory of each device; a warning if what was written cannot be read.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  jax.profiler.save_device_memory_profile(str(path))
  try:
    is_empty = not gzip.decompress(path.read_bytes())
  except (OSError, EOFError):
    is_empty = True
  if is_empty:
    return f"WARNING: the device memory profile is empty: {path}"
  lines = [
    f"device memory profile: {path}",
    f"  to read it: pprof -top {shlex.quote(str(path))}",
  ]
  for device in jax.local_devices():
    # None on CPUs, which have no memory of their own.
    if stats := device.memory_stats():
      in_use, most, limit = (
        f"{stats.get(key, 0) / 2**30:.2f} GiB"
        for key in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
      )
      lines.append(f"  {device}: {in_use} in use, {most} at most, of {limit}")
  return "\n".join(lines)
