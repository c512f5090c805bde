"""Tests of distlm.profiling."""

from __future__ import annotations

import functools
import gzip
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from distlm import profiling


@functools.partial(jax.pmap, axis_name="replicas")
def _toy_step(weights: jax.Array, inputs: jax.Array) -> tuple[Any, Any]:
  """A step with a loop and a collective."""
  hidden, _ = jax.lax.scan(
    lambda carry, _: (jnp.tanh(carry @ weights), None), inputs, length=3
  )
  gradient = jax.lax.psum(hidden.T @ hidden, "replicas")
  return weights - 1e-3 * gradient, {"loss": hidden.sum()}


class _Loop:
  """JAXline's training loop, as far as a window sees it."""

  def __init__(self, width: int = 32) -> None:
    num_devices = jax.local_device_count()
    self.weights = jnp.ones((num_devices, width, width))  # [R, D, D]
    self.inputs = jnp.ones((num_devices, width, width))  # [R, B, D]
    self.lines: list[str] = []

  def window(
    self, path: Path, start_step: int, num_steps: int, device_memory: bool
  ) -> profiling.TraceWindow:
    return profiling.TraceWindow(
      path, start_step, num_steps, device_memory, self.lines.append
    )

  def run(
    self, window: profiling.TraceWindow, steps: range, marked: bool = True
  ) -> None:
    window.update_time(time.time(), steps.start)
    for step in steps:
      name = "train" if marked else "other"
      with jax.profiler.StepTraceAnnotation(name, step_num=step):
        self.weights, outputs = _toy_step(self.weights, self.inputs)
      window(time.time(), step + 1, outputs)
    window.wait_to_finish()


@pytest.fixture
def loop() -> _Loop:
  return _Loop()


def test_trace_holds_the_steps_of_its_window(
  tmp_path: Path, loop: _Loop
) -> None:
  window = loop.window(tmp_path, 2, 3, False)
  loop.run(window, range(8))
  report = window.report
  assert report is not None and not report.is_empty
  # Where TensorBoard's profile plugin looks, and nowhere else.
  [path] = tmp_path.glob("plugins/profile/*/*.xplane.pb")
  assert report.path == path
  assert report.num_steps == 3
  data = jax.profiler.ProfileData.from_file(str(path))
  steps = [
    dict(event.stats)["step_num"]
    for plane in data.planes
    for line in plane.lines
    for event in line.events
    if event.name == "train"
  ]
  assert steps == [2, 3, 4]
  [text] = loop.lines
  assert text.startswith("trace of 3 steps,") and str(path) in text


def test_trace_holds_all_device_work_of_its_steps_alone(
  tmp_path: Path,
) -> None:
  # Wide enough that the devices lag behind the host at both ends.
  loop = _Loop(width=384)
  window = loop.window(tmp_path, 5, 3, False)
  loop.run(window, range(10))
  assert window.report is not None
  data = jax.profiler.ProfileData.from_file(str(window.report.path))
  executed = [
    (stats["run_id"], stats["device_ordinal"])
    for plane in data.planes
    for line in plane.lines
    for event in line.events
    if (stats := dict(event.stats)).get("hlo_op", "").startswith("while")
  ]
  # One loop per step and device: none is missing and none is of a neighbour.
  assert len(executed) == 3 * jax.local_device_count()
  assert window.report.device_secs > window.report.collective_secs > 0
  assert len(window.report.top_ops) == 5
  secs = [secs for _, secs in window.report.top_ops]
  assert secs == sorted(secs, reverse=True)


def test_own_times_count_nested_operations_once() -> None:
  ops = [
    profiling._Op("while", 0, 100),
    profiling._Op("while.inner", 10, 50),
    profiling._Op("add", 10, 20),
    profiling._Op("add", 30, 20),
    profiling._Op("tanh", 70, 10),
    profiling._Op("copy", 100, 5),
  ]
  times: dict[str, float] = {}
  for name, own_ns in profiling._own_times(reversed(ops)):
    times[name] = times.get(name, 0) + own_ns
  assert times == {
    "while": 40,
    "while.inner": 10,
    "add": 40,
    "tanh": 10,
    "copy": 5,
  }


def test_operations_of_a_tpu_plane_are_not_counted_twice() -> None:
  def line(name: str, event_name: str) -> SimpleNamespace:
    event = SimpleNamespace(
      name=event_name, stats=[], start_ns=0, duration_ns=9
    )
    return SimpleNamespace(name=name, events=[event])

  plane: Any = SimpleNamespace(
    lines=[
      line("XLA Modules", "jit_update"),
      line("XLA Ops", "%all-reduce.1 = f32[8] all-reduce(%p)"),
    ]
  )
  assert list(profiling._ops_by_line(plane)) == [
    [profiling._Op("all-reduce.1", 0, 9)]
  ]


@pytest.mark.parametrize(
  ("start", "num_traced"),
  [(3, 2), (2, 3), (4, 1), (5, 0), (9, 0)],
)
def test_resumed_run_traces_the_rest_of_the_window(
  tmp_path: Path, loop: _Loop, start: int, num_traced: int
) -> None:
  window = loop.window(tmp_path, 2, 3, False)
  loop.run(window, range(start, start + 4))
  assert (window.report.num_steps if window.report else 0) == num_traced
  # A run beyond the window says nothing.
  assert len(loop.lines) == bool(num_traced)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_resumed_beyond_the_window_profiles_nothing(
  tmp_path: Path, loop: _Loop, num_steps: int
) -> None:
  loop.run(loop.window(tmp_path, 2, num_steps, True), range(5, 8))
  assert not loop.lines and not list(tmp_path.iterdir())


def test_start_step_0_traces_the_first_step(
  tmp_path: Path, loop: _Loop
) -> None:
  window = loop.window(tmp_path, 0, 1, False)
  loop.run(window, range(3))
  assert window.report is not None and window.report.num_steps == 1


def test_error_in_the_window_still_writes_the_trace(
  tmp_path: Path, loop: _Loop
) -> None:
  with (
    pytest.raises(KeyError, match="the run"),
    loop.window(tmp_path, 0, 100, False) as window,
  ):
    window.update_time(0.0, 0)
    with jax.profiler.StepTraceAnnotation("train", step_num=0):
      loop.weights, outputs = _toy_step(loop.weights, loop.inputs)
    window(0.0, 1, outputs)
    raise KeyError("the run")
  assert window.report is not None and window.report.num_steps == 1
  # The profiler is free for the next trace.
  jax.profiler.start_trace(tmp_path / "next")
  jax.profiler.stop_trace()


def test_run_that_ends_within_the_window_is_traced(
  tmp_path: Path, loop: _Loop
) -> None:
  window = loop.window(tmp_path, 1, 100, False)
  loop.run(window, range(3))
  window.close()
  assert window.report is not None and window.report.num_steps == 2
  assert len(loop.lines) == 1


def test_trace_without_marked_steps_is_reported_empty(
  tmp_path: Path, loop: _Loop
) -> None:
  window = loop.window(tmp_path, 0, 2, False)
  loop.run(window, range(2), marked=False)
  assert window.report is not None and window.report.is_empty
  [line] = loop.lines
  assert line.startswith("WARNING: the trace is empty: 0 steps")
  assert "\n" not in line


def test_missing_trace_is_reported_empty(tmp_path: Path) -> None:
  report = profiling.read_trace(tmp_path)
  assert report.is_empty and "WARNING" in report.text()


def test_run_that_ends_before_the_window_says_so(
  tmp_path: Path, loop: _Loop
) -> None:
  loop.run(loop.window(tmp_path, 5, 2, True), range(3))
  [line] = loop.lines
  assert line.startswith("WARNING: nothing was profiled")
  assert "profile.start_step=5" in line


@pytest.mark.parametrize("num_steps", [0, 1])
def test_memory_profile_is_gzipped_pprof(
  tmp_path: Path, loop: _Loop, num_steps: int
) -> None:
  window = loop.window(tmp_path, 2, num_steps, True)
  loop.run(window, range(5))
  path = tmp_path / "device_memory.pprof.gz"
  # The strings of the profile name the devices that hold the arrays.
  assert b"device" in gzip.decompress(path.read_bytes())
  assert str(path) in loop.lines[-1]
  assert len(loop.lines) == 1 + num_steps


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"")])
def test_unreadable_memory_profile_is_a_warning(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
  monkeypatch.setattr(
    jax.profiler,
    "save_device_memory_profile",
    lambda path: Path(path).write_bytes(content),
  )
  text = profiling.write_device_memory_profile(tmp_path / "memory.gz")
  assert text.startswith("WARNING: the device memory profile is empty")


def test_window_that_is_not_asked_for_does_nothing(
  tmp_path: Path, loop: _Loop
) -> None:
  loop.run(loop.window(tmp_path, 0, 0, False), range(2))
  assert not loop.lines and not list(tmp_path.iterdir())
