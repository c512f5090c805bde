"""Tests that a run killed at any moment, again and again, ends the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fault_runs
import pytest
import tiny_run

KILLS = int(os.environ.get("DISTLM_KILLS", "8"))
SEED = int(os.environ.get("DISTLM_KILLS_SEED", "0"))
EVALUATION_INTERVAL = 10
# No kill lets a run get further than to the next evaluation.
STEPS = EVALUATION_INTERVAL * (KILLS + 2)
MAX_STARTUP_SECS = 2.5
KINDS = ("start-up", "step", "evaluation", "save")

Process = subprocess.Popen[str]


class Kill(NamedTuple):
  """When to kill: so many steps, and so long, after the kind's own event."""

  kind: str
  steps: int
  secs: float


def _plan(seed: int) -> list[Kill]:
  """Returns as many kills of each kind, in random order."""
  rng = random.Random(seed)
  longest = {"start-up": MAX_STARTUP_SECS, "evaluation": 0.15, "save": 0.05}
  plan = [
    Kill(kind, rng.randint(1, 6), rng.uniform(0, longest.get(kind, 0)))
    for kind in (KINDS[i % len(KINDS)] for i in range(KILLS))
  ]
  rng.shuffle(plan)
  return plan


class Attempt(NamedTuple):
  """What one process has done in a workdir that others were killed in."""

  workdir: Path
  start: float

  def is_training(self) -> bool:
    """Returns whether rows are its own: it has begun a file of events."""
    events = self.workdir.glob("tensorboard/train/*")
    return any(path.stat().st_mtime > self.start for path in events)

  def is_saving(self) -> bool:
    """Returns whether one of its saves has begun, and not ended."""
    return any(map(self._has_made, _half_saved(self.workdir)))

  def _has_made(self, path: Path) -> bool:
    try:
      return path.stat().st_ctime > self.start
    except FileNotFoundError:  # Just now it has ended.
      return False

  def doing(self) -> str:
    """Returns what it was doing when it was killed."""
    if not self.is_training():
      return "starting"
    if self.is_saving():
      return "saving"
    trained = max(tiny_run.steps(self.workdir, "train"), default=0)
    is_due = (trained + 1) % EVALUATION_INTERVAL == 0
    return "evaluating" if is_due else "training"


def _half_saved(workdir: Path) -> list[Path]:
  return [*workdir.glob(f"checkpoints/*/{fault_runs.TEMPORARY}")]


def _event(kill: Kill, attempt: Attempt) -> Callable[[], bool]:
  """Returns what is true from the event on that a kill waits for."""
  if kill.kind == "start-up":
    return lambda: True
  if kill.kind == "save":
    return attempt.is_saving
  done = max(tiny_run.saved_steps(attempt.workdir), default=0)
  if kill.kind == "step":
    done += kill.steps
  else:  # The row of the step itself comes when it has been evaluated.
    done += EVALUATION_INTERVAL - done % EVALUATION_INTERVAL - 1
  # It drops the rows that a killed one wrote after its last checkpoint.
  return lambda: (
    attempt.is_training() and done in tiny_run.steps(attempt.workdir, "train")
  )


def _kill(process: Process, kill: Kill, attempt: Attempt) -> str:
  """Kills a run at the moment planned; returns what it was doing."""
  tiny_run.wait_until(_event(kill, attempt), process)
  # Nothing to wait for: any moment must do.
  time.sleep(kill.secs)
  process.send_signal(signal.SIGKILL)
  code, _, errors = tiny_run.finish(process)
  assert (code, errors) == (-signal.SIGKILL, ""), kill
  return attempt.doing()


def _check(runs: fault_runs.Runs, workdir: Path, whole: Path) -> None:
  args = _arguments(runs, workdir)
  code, output, errors = tiny_run.finish(tiny_run.start(args, runs.env))
  assert (code, errors) == (0, "")
  assert f"{STEPS} of {STEPS}" in output
  for series in ("latest", "best"):
    tiny_run.assert_same_checkpoint(workdir, whole, series)
  assert tiny_run.rows(workdir) == tiny_run.rows(whole)
  assert not _half_saved(workdir)
  assert not [*workdir.glob("checkpoints/*/*.damaged-*")]
  assert tiny_run.saved_steps(workdir) == [*range(5, STEPS + 1, 5)]
  fault_runs.assert_whole(workdir)


def _arguments(runs: fault_runs.Runs, workdir: Path) -> list[str]:
  steps = f"--config.training_steps={STEPS}"
  return fault_runs.arguments(runs, workdir, steps)


@pytest.mark.timeout(120 + 30 * KILLS)
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(
  tmp_path: Path,
  tmp_path_factory: pytest.TempPathFactory,
  record_property: Callable[[str, object], None],
) -> None:
  runs = fault_runs.make(tmp_path_factory.getbasetemp())
  whole, workdir = tmp_path / "whole", tmp_path / "killed"
  tiny_run.run(_arguments(runs, whole), runs.env)
  hits: Counter[tuple[str, str]] = Counter()
  plan = _plan(SEED)
  try:
    for kill in plan:
      attempt = Attempt(workdir, time.time())
      with fault_runs.started(_arguments(runs, workdir), runs.env) as process:
        hits[kill.kind, _kill(process, kill, attempt)] += 1
    _check(runs, workdir, whole)
  except AssertionError as error:
    raise AssertionError(
      f"DISTLM_KILLS={KILLS} DISTLM_KILLS_SEED={SEED}, after"
      f" {hits.total()} kills of {plan}: {error}"
    ) from error
  figures = "; ".join(
    f"{kind}: {count} {doing}" for (kind, doing), count in sorted(hits.items())
  )
  print(f"kills of seed {SEED}: {figures}")
  record_property("kills", figures)
  assert {kind for kind, _ in hits} == set(KINDS[:KILLS])
