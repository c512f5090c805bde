"""Tests of launch/slurm.sbatch on a real SLURM, and of a real mpirun."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import slurm_cluster
import tiny_run
from slurm_cluster import Cluster, wait_until

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).parents[1] / "launch" / "slurm.sbatch"
STEPS = 30
# Not too fast for a signal to find the run in the middle.
MORE = (
  f"--config.training_steps={STEPS}",
  "--config.data.sequence_length=64",
  "--config.data.global_batch_size=32",
  "--config.model.dropout_rate=0.1",
)
# A distlm for the decisions of the script: it ends as told, or when asked to.
STAND_IN = """#!/bin/bash
[[ $SLURM_PROCID == 1 && -n $END_WITH ]] && exit "$END_WITH"
trap 'echo saved; exit 143' TERM
echo "$@"
for ((i = 0; i < 1200; i++)); do sleep 0.1; done
"""


class Runs(NamedTuple):
  """The config of the runs here, and a run of it that nothing stopped."""

  config: Path
  whole: Path
  env: dict[str, str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
  if reason := slurm_cluster.reason_to_skip():
    pytest.skip(f"SLURM cannot be started: {reason}")
  directory = tmp_path_factory.mktemp("slurm")
  with slurm_cluster.running(directory) as cluster:
    yield cluster
  assert slurm_cluster.leftovers(directory / "slurm.conf") == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
  """Trains in 2 processes of 2 devices, which were told by flags."""
  directory = tmp_path_factory.mktemp("runs")
  config = tiny_run.write_inputs(directory)
  runs = Runs(
    config, directory / "whole", tiny_run.environment(directory / "compiled")
  )
  args = tiny_run.arguments("train", config, runs.whole, "--devices=2", *MORE)
  ends = [tiny_run.finish(job) for job in tiny_run.start_job(args, 2, runs.env)]
  assert [code for code, *_ in ends] == [0, 0], ends
  return runs


def submit(
  cluster: Cluster,
  directory: Path,
  env: dict[str, str],
  path: Path,
  *more: str,
  options: Sequence[str] = (),
) -> str:
  """Submits the script, whose distlm is that of a directory `path`.

  Returns:
    The number of the job.
  """
  activate = directory / "activate"
  activate.write_text(f'PATH="{path}:$PATH"\n')
  env = {**env, **cluster.env, "ACTIVATE": str(activate)}
  command = ("sbatch", "--parsable", f"--chdir={directory}", *options)
  submitting = dataclasses.replace(cluster, env=env)
  return submitting.run(*command, str(SCRIPT), *more).strip()


def has_ended(cluster: Cluster, job: str) -> bool:
  states = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
  return cluster.state(job) not in states


def check_end(
  cluster: Cluster, job: str, directory: Path, state: str, code: str
) -> str:
  """Waits for the end of a job; returns what its script said."""
  assert wait_until(lambda: has_ended(cluster, job), tiny_run.TIMEOUT_SECS)
  output = (directory / f"distlm-{job}.out").read_text()
  logs = [path.read_text() for path in directory.glob("logs/*")]
  fields = cluster.fields(job)
  assert (fields["JobState"], fields["ExitCode"]) == (state, code), logs
  return output


def test_a_stopped_job_ends_as_one_that_was_not(
  cluster: Cluster, runs: Runs, tmp_path: Path
) -> None:
  workdir = tmp_path / "run"
  # What the script has variables for, and what goes to distlm as it is.
  env = {**runs.env, "CONFIG": str(runs.config), "WORKDIR": str(workdir)}
  args = (env | {"DEVICES": "2"}, Path(sys.executable).parent, *MORE)
  job = submit(cluster, tmp_path, *args)
  started = wait_until(
    lambda: workdir.exists() and 3 in tiny_run.steps(workdir, "train"),
    tiny_run.TIMEOUT_SECS,
  )
  logs = [tmp_path / "logs" / f"{job}-{task}.log" for task in range(2)]
  assert started, [log.read_text() for log in logs]
  cluster.run("scancel", "--signal=TERM", job)
  # 143, of SIGTERM: not finished, so that what depends on it does not start.
  output = check_end(cluster, job, tmp_path, "FAILED", "143:0")
  assert "+ srun --kill-on-bad-exit=1 --cpus-per-task=2 --output=" in output
  assert f"distlm train --config={runs.config} --workdir={workdir}" in output
  # A person asked for it.
  assert (
    "scontrol requeue" not in output and "ended with exit code 143" in output
  )
  stopped = tiny_run.saved_steps(workdir)[-1]
  assert 3 <= stopped < STEPS
  assert "2 process(es) x 2 cpu" in logs[0].read_text()
  assert f"{stopped} of {STEPS}; saved" in logs[0].read_text()

  job = submit(cluster, tmp_path, *args)
  check_end(cluster, job, tmp_path, "COMPLETED", "0:0")
  output = (tmp_path / "logs" / f"{job}-0.log").read_text()
  assert f"from {stopped} to {STEPS}" in output
  assert tiny_run.steps(workdir, "train") == list(range(1, STEPS + 1))
  tiny_run.assert_same_checkpoint(workdir, runs.whole)


def test_mpirun_starts_a_job(runs: Runs, tmp_path: Path) -> None:
  if shutil.which("mpirun") is None:
    pytest.skip("mpirun is missing; apt-get install openmpi-bin")
  args = tiny_run.arguments("train", runs.config, tmp_path, "--devices=2")
  distlm = str(Path(sys.executable).with_name("distlm"))
  mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
  end = subprocess.run(
    [*mpirun, distlm, *args, *MORE],
    env=runs.env,
    capture_output=True,
    text=True,
    timeout=tiny_run.TIMEOUT_SECS,
  )
  assert end.returncode == 0, end.stderr
  assert "2 process(es) x 2 cpu" in end.stdout
  tiny_run.assert_same_checkpoint(tmp_path, runs.whole)


class Jobs:
  """Jobs of the script with a distlm that does nothing but wait."""

  def __init__(self, cluster: Cluster, directory: Path) -> None:
    self.cluster, self.directory = cluster, directory
    path = directory / "distlm"
    path.write_text(STAND_IN)
    path.chmod(0o755)

  def start(self, *options: str, end_with: str = "") -> str:
    """Returns the number of a job that runs."""
    env = {**os.environ, "END_WITH": end_with}
    job = submit(
      self.cluster, self.directory, env, self.directory, options=options
    )
    log = self.directory / "logs" / f"{job}-0.log"
    is_running = wait_until(lambda: log.exists() and log.read_text() != "", 60)
    assert is_running, self.cluster.fields(job)
    return job

  def check_requeued(self, job: str) -> None:
    """Checks that a job stops, saved, and goes on."""
    log = self.directory / "logs" / f"{job}-1.log"
    assert wait_until(lambda: "saved" in log.read_text(), 120)
    cluster = self.cluster
    assert wait_until(lambda: cluster.state(job) == "PENDING", 60)
    assert cluster.fields(job)["Restarts"] == "1"
    assert wait_until(lambda: self.has_restarted(job), 180), cluster.fields(job)
    output = (self.directory / f"distlm-{job}.out").read_text()
    assert f"+ scontrol requeue {job}" in output
    assert "requeued 1 times" in output
    cluster.run("scancel", job)

  def has_restarted(self, job: str) -> bool:
    """Returns whether a job runs for the second time; asks SLURM not to wait.

    By itself SLURM waits two minutes. It refuses to do otherwise while the job
    still ends, and takes two minutes again if it was asked a moment before.
    """
    if self.cluster.fields(job)["Reason"] == "BeginTime":
      self.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    log = self.directory / "logs" / f"{job}-1.log"
    return log.read_text().count("train --config") == 2


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Jobs:
  return Jobs(cluster, tmp_path)


def test_a_preempted_job_goes_on_by_itself(jobs: Jobs) -> None:
  job = jobs.start()
  urgent = f"--partition={slurm_cluster.URGENT_PARTITION}"
  command = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
  jobs.cluster.run("sbatch", urgent, *command)
  jobs.check_requeued(job)


@pytest.mark.slow  # SLURM looks at limits twice a minute.
def test_a_job_at_its_time_limit_goes_on_by_itself(jobs: Jobs) -> None:
  jobs.check_requeued(jobs.start("--time=3"))


def test_a_cancelled_job_stays_cancelled(jobs: Jobs) -> None:
  job = jobs.start()
  jobs.cluster.run("scancel", job)
  output = check_end(jobs.cluster, job, jobs.directory, "CANCELLED", "0:15")
  assert "scontrol requeue" not in output
  assert "saved" in (jobs.directory / "logs" / f"{job}-1.log").read_text()
  assert jobs.cluster.fields(job)["Restarts"] == "0"


def test_a_process_that_fails_ends_the_job(jobs: Jobs) -> None:
  job = jobs.start(end_with="3")
  # Within the 32 s that srun waits by itself, or for ever.
  assert wait_until(lambda: has_ended(jobs.cluster, job), 20)
  output = (jobs.directory / f"distlm-{job}.out").read_text()
  assert jobs.cluster.state(job) == "FAILED"
  assert "task 1: Exited with exit code 3" in output
  assert "scontrol requeue" not in output
