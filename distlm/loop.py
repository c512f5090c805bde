"""What distlm adds to JAXline's loop: between two steps, and around it.

Each piece works with any JAXline experiment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxline.train
import jaxline.utils
import numpy as np
from jaxline.experiment import AbstractExperiment
from ml_collections import config_dict

from distlm import parallel
from distlm.checkpoint import DiskCheckpointer
from distlm.console import Console
from distlm.errors import RunError
from distlm.saving import PeriodicSaving, Saver
from distlm.settings import ProfileConfig, ReplicaCheckConfig
from distlm.stop import StopRequest
from distlm.writers import RunWriter

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
  """

  experiment_class: ExperimentFactory
  config: config_dict.ConfigDict
  workdir: Path
  settings: Mapping[str, Any]
  evaluation_interval: int = 0
  profile: ProfileConfig = _NO_PROFILE
  replica_check: ReplicaCheckConfig = _NO_REPLICA_CHECK
  on_save_error: str = "abort"


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
        saver.settle(state.global_step)  # JAXline saves next.
      finally:  # The rows before an error are those that explain it.
        saving.wait_for_writes()

    # Assigned to the object: its class may be used elsewhere.
    experiment.should_run_step = should_run_step_unless_stopped
    experiment.train_loop = train_loop_with_saves
    return experiment

  return make


class _Action:
  """What JAXline's loop calls beside its own `PeriodicAction`s."""

  def update_time(self, t: float, step: int) -> None:
    """Is called before the first step, with the steps completed."""

  def __call__(self, t: float, step: int, scalars: Mapping[str, Any]) -> None:
    """Is called after each step."""

  def wait_to_finish(self) -> None:
    """Is called after the loop."""


class StartSummary(_Action):
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
        *rows,
        (
          "steps",
          f"from {step:,} to {self._job.config.training_steps:,}"
          + (" (resumed)" if step else ""),
        ),
      ],
    )
    self._console.start_progress(step, self._job.config.training_steps)


class Evaluation(_Action):
  """Evaluates between two training steps, and keeps the best model.

  An experiment of the mode "eval" does it, as in JAXline, on the arrays of the
  one that trains: there is no second copy of them.
  """

  def __init__(
    self,
    job: Job,
    checkpointer: DiskCheckpointer,
    saver: Saver,
    writers: RunWriter | None,
  ) -> None:
    self._job = job
    self._checkpointer = checkpointer
    self._saver = saver
    self._writer = None if writers is None else writers.for_split("eval")
    self._state = checkpointer.get_experiment_state("latest")
    self._experiment: AbstractExperiment | None = None
    self._rng: jax.Array | None = None
    self._best = read_best(checkpointer)

  def update_time(self, t: float, step: int) -> None:
    del t
    # Made before the first step, so that its errors come early.
    config = self._job.config
    rng = jax.random.PRNGKey(config.random_seed)
    self._rng = _specialize_keys(rng, config.random_mode_eval)
    self._experiment = jaxline.train._initialize_experiment(
      self._job.experiment_class, "eval", rng, config.experiment_kwargs
    )
    # A run that was trained without evaluation and is evaluated now.
    is_over = step >= config.training_steps
    if is_over and config.best_model_eval_metric and not self._best:
      self._evaluate(step)

  def __call__(self, t: float, step: int, scalars: Mapping[str, Any]) -> None:
    del t, scalars
    interval = self._job.evaluation_interval
    is_due = interval and step % interval == 0
    if is_due or step == self._job.config.training_steps:
      self._saver.settle(step)
      self._evaluate(step)

  def _evaluate(self, step: int) -> None:
    assert self._experiment is not None
    _lend_state(self._state.experiment_module, self._experiment)
    evaluate = jaxline.utils.evaluate_should_return_dict(
      self._experiment.evaluate
    )
    scalars = evaluate(
      global_step=parallel.replicate(np.int32(step)),
      rng=self._rng,
      writer=self._writer,
    )
    if self._writer is not None:
      self._writer.write_scalars(step, scalars)
    self._keep_if_best(step, scalars)

  def _keep_if_best(self, step: int, scalars: Mapping[str, Any]) -> None:
    config = self._job.config
    metric = config.best_model_eval_metric
    if not metric:
      return
    if metric not in scalars:
      raise RunError(
        f"best_model_eval_metric={metric}: evaluate() returned only"
        f" {', '.join(sorted(scalars))}; name one of these"
      )
    value = np.asarray(scalars[metric]).item()
    best = self._best.get("best_eval_metric_value")
    higher_is_better = config.best_model_eval_metric_higher_is_better
    if math.isnan(value):
      return
    if best is None or (value > best if higher_is_better else value < best):
      best_state = self._checkpointer.get_experiment_state("best")
      best_state.global_step = step
      best_state.experiment_module = self._state.experiment_module
      best_state.best_eval_metric_value = value
      best_state.best_model_eval_metric = metric
      self._state.experiment_module.on_new_best_model(best_state)
      if self._saver.save("best", step):
        self._best = {"global_step": step, "best_eval_metric_value": value}


def read_best(checkpointer: DiskCheckpointer) -> dict[str, Any]:
  """Returns the scalars stored with the best model, if there is one."""
  if not checkpointer.can_be_restored("best"):
    return {}
  return checkpointer.read_scalars("best")


def _specialize_keys(rng: jax.Array, mode: str) -> jax.Array:
  """Returns [R, 2] keys, as JAXline's `evaluate` makes them."""
  specialize = functools.partial(
    jaxline.utils.specialize_rng_host_device,
    axis_name=parallel.AXIS,
    mode=mode,
  )
  return parallel.pmap(specialize)(
    parallel.replicate(rng), jaxline.utils.host_id_devices_for_rng(mode)
  )


def _lend_state(source: AbstractExperiment, target: AbstractExperiment) -> None:
  """Lets `target` see the state of `source` until its next step."""
  own_snapshot = type(source).snapshot_state is not (
    AbstractExperiment.snapshot_state
  )
  if own_snapshot:  # Its attributes are not all of the state.
    target.restore_from_snapshot(source.snapshot_state())
    return
  for attribute in (
    *source.CHECKPOINT_ATTRS,
    *source.NON_BROADCAST_CHECKPOINT_ATTRS,
  ):
    setattr(target, attribute, getattr(source, attribute))


def call_if_defined(state: Any, method: str) -> Any:
  """Calls a method that experiments may have, or returns None."""
  experiment = getattr(state, "experiment_module", None)
  function = getattr(experiment, method, None)
  return function() if function is not None else None
