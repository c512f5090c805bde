"""Jobs of several processes that die, stop, fail and are asked to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_run

from distlm.writers import read_metrics

NUM_DEVICES = 4
NUM_STEPS = 60
SECS_TO_END = 60  # On a busy machine; the notes say how long it really took.
PROGRAM = str(Path(__file__).with_name("faulty_train.py"))
MORE = (
  f"--config.training_steps={NUM_STEPS}",
  "--config.model.num_layers=1",
  "--config.model.dropout_rate=0.1",
  "--config.accumulation_steps=1",
  "--config.evaluation.interval=0",
)

Job = Callable[..., list[str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", params=[2, 4])
def num_processes(request: pytest.FixtureRequest) -> int:
  number: int = request.param
  return number


@pytest.fixture(scope="module")
def whole(
  config: Path,
  num_processes: int,
  tmp_path_factory: pytest.TempPathFactory,
) -> Path:
  """Returns the workdir of a job that nothing happened to."""
  workdir = tmp_path_factory.mktemp("whole")
  args = _launch(config, workdir, num_processes)
  code, _, errors = tiny_run.finish(tiny_run.start(args, _environment()))
  assert code == 0, errors
  return workdir


def _launch(config: Path, workdir: Path, num_processes: int) -> list[str]:
  """Returns the arguments of `distlm` for a supervised job."""
  return [
    "launch",
    f"--processes={num_processes}",
    f"--devices-per-process={NUM_DEVICES // num_processes}",
    "--max-restarts=3",
    *("--", sys.executable, PROGRAM),
    *tiny_run.arguments("train", config, workdir, *MORE),
    "--config.watchdog.seconds=8",
  ]


def _environment(**more: str) -> dict[str, str]:
  fault = {"FAULT": "none:0", "FAULT_FILE": os.devnull, **more}
  return tiny_run.environment(None, **tiny_run.COMPILING_FAST, **fault)


def _wait_for_step(
  workdir: Path, step: int, job: subprocess.Popen[str]
) -> None:
  tiny_run.wait_until(
    lambda: max(tiny_run.steps(workdir, "train"), default=0) >= step, job
  )


def _pid(workdir: Path, process_id: int) -> int:
  note = workdir / "processes" / f"{process_id}.json"
  pid: int = json.loads(note.read_bytes())["pid"]
  return pid


@pytest.mark.parametrize("target", [0, 1], ids=["coordinator", "worker"])
def test_a_supervised_job_survives_all_faults(
  config: Path, whole: Path, num_processes: int, target: int, tmp_path: Path
) -> None:
  workdir = tmp_path / "run"
  args = _launch(config, workdir, num_processes)
  fault = {"FAULT": f"{target}:40", "FAULT_FILE": str(tmp_path / "fault")}
  pids = set()
  job = tiny_run.start(args, _environment(**fault))
  try:
    for step, number in ((8, signal.SIGKILL), (24, signal.SIGSTOP)):
      _wait_for_step(workdir, step, job)
      killed = _pid(workdir, target)
      pids |= {_pid(workdir, i) for i in range(num_processes)}
      os.kill(killed, number)
      tiny_run.wait_until(lambda pid=killed: not _is_alive(pid), job)
    _wait_for_step(workdir, 45, job)  # And after the exception at 40.
    pids |= {_pid(workdir, i) for i in range(num_processes)}
    os.kill(_pid(workdir, target), signal.SIGTERM)
    code, output, errors = tiny_run.finish(job)
  finally:
    job.kill()
  assert code == 0, errors
  assert "stopped" in output
  assert len(pids) >= 3 * num_processes
  assert not [pid for pid in pids if _is_alive(pid)]
  of_restarts = re.findall(r"^(.*); restart (\d) of 3 in", errors, re.M)
  assert [number for _, number in of_restarts] == ["1", "2", "3"]
  assert of_restarts[0][0] == f"process {target} was killed by SIGKILL"
  assert "did not get on for" in errors
  assert f"process {target} (pid " in errors
  assert of_restarts[2][0] == (
    f"process {target} failed first, with exit code 1"
  )
  assert "LookupError: a fault of the experiment" in errors
  stopped_at = tiny_run.saved_steps(workdir)[-1]
  assert 45 <= stopped_at < NUM_STEPS

  code, _, errors = tiny_run.finish(tiny_run.start(args, _environment()))
  assert code == 0, errors
  tiny_run.assert_same_checkpoint(workdir, whole)
  rows = [row["step"] for row in read_metrics(workdir) if "loss" in row]
  assert sorted(set(rows)) == list(range(1, NUM_STEPS + 1))


def _is_alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True
