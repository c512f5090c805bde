"""What distlm adds to JAXline's loop: between two steps, and around it.

Each piece works with any JAXline experiment.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxline.experiment import AbstractExperiment
from ml_collections import config_dict

from distlm import parallel, switches
from distlm.console import Console
from distlm.saving import PeriodicSaving, Saver
from distlm.settings import (
  RUNNER_SETTINGS,
  ProfileConfig,
  ReplicaCheckConfig,
)
from distlm.stop import StopRequest
from distlm.watchdog import Watchdog

_NO_PROFILE = ProfileConfig()
_NO_REPLICA_CHECK = ReplicaCheckConfig(interval=0)

ExperimentFactory = Callable[..., AbstractExperiment]


@dataclasses.dataclass(frozen=True)
class Job:
  """What is run and where.

  Attributes:
    experiment_class: any JAXline experiment, or a function that makes one.
    config: JAXline's configuration of it.
    workdir: a directory that this process has claimed.
    settings: what the run's config.json, checkpoints and TensorBoard show, of
      JSON types.
    evaluation_interval: steps between evaluations in the mode "train_eval",
      besides the one at the end; 0 for that one alone.
    profile: what to trace.
    replica_check: of the experiment's `CHECKPOINT_ATTRS`.
    on_save_error: "abort", or "continue" until the next save.
    watchdog_secs: how long a step may take; see `Watchdog`.
  """

  experiment_class: ExperimentFactory
  config: config_dict.ConfigDict
  workdir: Path
  settings: Mapping[str, Any]
  evaluation_interval: int = 0
  profile: ProfileConfig = _NO_PROFILE
  replica_check: ReplicaCheckConfig = _NO_REPLICA_CHECK
  on_save_error: str = "abort"
  watchdog_secs: float = RUNNER_SETTINGS["watchdog_seconds"]


def adapted(
  experiment_class: ExperimentFactory,
  stop: StopRequest,
  saver: Saver,
  save_interval: float,
  last_actions: Sequence[Any],
) -> ExperimentFactory:
  """Makes experiments that stop when asked to, and save after they wrote.

  Args:
    experiment_class: what to adapt.
    stop: whether it was asked to.
    saver: saves "latest", after all else of a step.
    save_interval: between two saves; 0: only at the end.
    last_actions: come after JAXline's own, which write the step's row: it
      explains what they may raise.
  """

  # JAXline looks at the signature, which `wraps` keeps.
  @functools.wraps(experiment_class, updated=())
  def make(*args: Any, **kwargs: Any) -> AbstractExperiment:
    experiment = experiment_class(*args, **kwargs)
    should_run_step, train_loop = (
      experiment.should_run_step,
      experiment.train_loop,
    )

    def should_run_step_unless_stopped(global_step: int, config: Any) -> bool:
      return should_run_step(global_step, config) and not parallel.should_stop(
        global_step, stop.is_requested
      )

    def train_loop_with_saves(
      config: Any, state: Any, actions: Sequence[Any], writer: Any = None
    ) -> None:
      saving = PeriodicSaving(config, actions, saver, save_interval)
      late_actions = (*last_actions, saving)
      for action in late_actions:
        action.update_time(time.time(), state.global_step)
      try:
        train_loop(config, state, (*actions, *late_actions), writer)
        saver.end_steps(state.global_step)  # JAXline saves next.
      finally:  # The rows before an error are those that explain it.
        saving.wait_for_writes()

    # Assigned to the object: its class may be used elsewhere.
    experiment.should_run_step = should_run_step_unless_stopped
    experiment.train_loop = train_loop_with_saves
    return experiment

  return make


class Action:
  """What JAXline's loop calls beside its own `PeriodicAction`s."""

  def update_time(self, t: float, step: int) -> None:
    """Is called before the first step, with the steps completed."""

  def __call__(self, t: float, step: int, scalars: Mapping[str, Any]) -> None:
    """Is called after each step."""

  def wait_to_finish(self) -> None:
    """Is called after the loop."""


class StartSummary(Action):
  """Shows what is about to run, once the experiment is there."""

  def __init__(self, job: Job, state: Any, console: Console) -> None:
    self._job = job
    self._state = state
    self._console = console

  def update_time(self, t: float, step: int) -> None:
    del t
    if parallel.process_index() != 0:
      return
    rows = call_if_defined(self._state, "summary_rows") or []
    self._console.print_summary(
      "training",
      [
        ("workdir", str(self._job.workdir)),
        (
          "devices",
          f"{parallel.process_count()} process(es) x"
          f" {parallel.local_device_count()} {parallel.device_kind()}",
        ),
        ("switches", switches.in_effect(os.environ)),
        *rows,
        (
          "steps",
          f"from {step:,} to {self._job.config.training_steps:,}"
          + (" (resumed)" if step else ""),
        ),
      ],
    )
    self._console.start_progress(step, self._job.config.training_steps)


class Progress(Action):
  """Tells the watchdog that the steps get on."""

  def __init__(self, watchdog: Watchdog) -> None:
    self._watchdog = watchdog

  def update_time(self, t: float, step: int) -> None:
    self(t, step, {})

  def __call__(self, t: float, step: int, scalars: Mapping[str, Any]) -> None:
    del t, scalars
    self._watchdog.begin("step", step)


def call_if_defined(state: Any, method: str) -> Any:
  """Calls a method that experiments may have, or returns None."""
  experiment = getattr(state, "experiment_module", None)
  function = getattr(experiment, method, None)
  return function() if function is not None else None


def is_over(job: Job, state: Any) -> bool:
  """Returns whether a run has made all its steps."""
  return bool(state.global_step >= job.config.training_steps)


def closing_rows(
  job: Job, state: Any, best: Mapping[str, Any], start_time: float
) -> list[tuple[str, str]]:
  """Returns (name, value) rows for the end of a run.

  Args:
    job: what ran.
    state: of its experiment.
    best: the scalars of the best model, as `read_best` gives them.
    start_time: of the command, by `time.monotonic`.
  """
  done = f"{state.global_step:,} of {job.config.training_steps:,}"
  if not is_over(job, state):
    done += "; saved, the same command goes on from here"
  rows = [("steps", done), *(call_if_defined(state, "closing_rows") or [])]
  if best:
    rows.append(
      (
        f"best {job.config.best_model_eval_metric}",
        f"{best['best_eval_metric_value']:.4f} at step"
        f" {best['global_step']:,}: {job.workdir / 'checkpoints' / 'best'}",
      )
    )
  return [
    *rows,
    (
      "curves",
      f"tensorboard --logdir {shlex.quote(str(job.workdir / 'tensorboard'))}",
    ),
    ("wall time", f"{time.monotonic() - start_time:.1f} s"),
  ]
