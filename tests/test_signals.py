"""Tests of signals at the moments of a run that are not plain steps."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import fault_runs
import pytest
import tiny_run

from distlm.stop import StopRequest

STEPS = 12
# Evaluations of seconds, after the steps 6 and 12; saves after 5, 10 and 12.
SHORT = (f"--config.training_steps={STEPS}", "--config.evaluation.interval=6")
STOPPING = "stopping after this step; again to leave at once"

Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> fault_runs.Runs:
  directory = tmp_path_factory.mktemp("signals")
  config = tiny_run.write_inputs(directory)
  text = directory / "text.txt"
  text.write_text(text.read_text() * 5)
  runs = fault_runs.make(tmp_path_factory.getbasetemp())
  runs = runs._replace(config=config, whole=directory / "whole")
  tiny_run.run(_arguments(runs, runs.whole), runs.env)
  return runs


def _arguments(runs: fault_runs.Runs, workdir: Path, *more: str) -> list[str]:
  return fault_runs.arguments(runs, workdir, *SHORT, *more)


def _cpu_secs(process: Process) -> float:
  fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()
  return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _wait_for_work(process: Process, cpu_secs: float) -> None:
  """Waits until a process has computed for so long."""
  end = _cpu_secs(process) + cpu_secs
  tiny_run.wait_until(lambda: _cpu_secs(process) > end, process)


def _wait_for_summary(process: Process, workdir: Path) -> None:
  assert process.stdout is not None
  while "from 0 to 12" not in process.stdout.readline():
    assert process.poll() is None
  assert tiny_run.steps(workdir, "train") == []


def _wait_for_compilation(process: Process, workdir: Path) -> None:
  _wait_for_summary(process, workdir)
  # Nothing else takes long from here to the first row.
  _wait_for_work(process, 1.0)
  assert tiny_run.steps(workdir, "train") == []


def _wait_for_evaluation(process: Process, workdir: Path) -> None:
  # The row of step 6 comes after its evaluation.
  tiny_run.wait_until(lambda: 5 in tiny_run.steps(workdir, "train"), process)
  # Longer than step 6 and the save before it, and shorter than an evaluation.
  _wait_for_work(process, 0.5)
  assert tiny_run.steps(workdir, "eval") == []


def _wait_for_save(process: Process, workdir: Path) -> None:
  temporary = f"checkpoints/latest/{fault_runs.TEMPORARY}"
  tiny_run.wait_until(lambda: any(workdir.glob(temporary)), process)


Moment = Callable[[Process, Path], None]
# Each with the steps that may have been finished before the run stops.
MOMENTS: dict[str, tuple[Moment, range]] = {
  "summary": (_wait_for_summary, range(2)),
  "compilation": (_wait_for_compilation, range(2)),
  "evaluation": (_wait_for_evaluation, range(6, 7)),
  "save": (_wait_for_save, range(5, 8)),
}
CASES = [
  ("compilation", signal.SIGINT, ("--signal-exit-code",)),
  ("evaluation", signal.SIGTERM, ("--signal-exit-code",)),
  ("save", signal.SIGINT, ()),
]
SLOW_CASES = [
  ("summary", signal.SIGTERM, ()),
  ("summary", signal.SIGINT, ("--signal-exit-code",)),
  ("compilation", signal.SIGTERM, ()),
  ("evaluation", signal.SIGINT, ()),
  ("save", signal.SIGTERM, ("--signal-exit-code",)),
]


@pytest.mark.parametrize(
  ("moment", "number", "flag"),
  [
    *CASES,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
  ],
)
def test_asked_to_stop_it_saves_the_step_it_finished(
  runs: fault_runs.Runs,
  tmp_path: Path,
  moment: str,
  number: signal.Signals,
  flag: tuple[str, ...],
) -> None:
  env = runs.env
  if moment == "compilation":
    env = tiny_run.environment(None, JAX_ENABLE_COMPILATION_CACHE="false")
  wait, may_have_done = MOMENTS[moment]
  with fault_runs.started(_arguments(runs, tmp_path, *flag), env) as process:
    wait(process, tmp_path)
    process.send_signal(number)
    code, output, errors = tiny_run.finish(process)
  assert errors.strip() == STOPPING
  assert code == (128 + number if flag else 0)
  stopped = tiny_run.saved_steps(tmp_path)[-1]
  assert stopped in may_have_done
  assert f"stopped\n  steps      {stopped} of {STEPS}; saved" in output
  # No row is missing, and none is of a step that is not in the checkpoint.
  assert tiny_run.steps(tmp_path, "train") == list(range(1, stopped + 1))
  evaluated = [6] if stopped >= 6 else []
  assert tiny_run.steps(tmp_path, "eval") == evaluated
  assert fault_runs.assert_whole(tmp_path)[-1] == stopped
  # A run that ends by itself ends with 0, whatever the flag.
  output = fault_runs.end(runs, tmp_path, *SHORT, "--signal-exit-code")
  assert f"from {stopped} to {STEPS}" in output


@pytest.mark.parametrize(
  ("first", "second"),
  [
    (signal.SIGINT, signal.SIGINT),
    pytest.param(signal.SIGTERM, signal.SIGINT, marks=pytest.mark.slow),
  ],
)
def test_a_second_interrupt_leaves_at_once(
  runs: fault_runs.Runs,
  tmp_path: Path,
  first: signal.Signals,
  second: signal.Signals,
) -> None:
  with fault_runs.started(_arguments(runs, tmp_path), runs.env) as process:
    _wait_for_evaluation(process, tmp_path)
    process.send_signal(first)
    assert process.stderr is not None
    shown = [process.stderr.readline() for _ in range(2)]
    process.send_signal(second)
    code, output, errors = tiny_run.finish(process)
  assert shown == ["\n", f"{STOPPING}\n"]
  assert (code, errors) == (128 + second, "")
  # It did not end the evaluation, which takes seconds.
  assert tiny_run.steps(tmp_path, "eval") == []
  assert "saved" not in output
  assert set(fault_runs.assert_whole(tmp_path)) <= {5}
  fault_runs.end(runs, tmp_path, *SHORT)


def test_sigterm_by_two_ways_at_once_is_one_request() -> None:
  with StopRequest() as stop:
    for _ in range(3):
      os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
