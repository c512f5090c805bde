"""Evaluation between two steps of the training."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jaxline.train
import jaxline.utils
import numpy as np
from jaxline.experiment import AbstractExperiment

from distlm import parallel
from distlm.checkpoint import DiskCheckpointer
from distlm.errors import RunError
from distlm.loop import Action, Job
from distlm.saving import Saver
from distlm.watchdog import Watchdog
from distlm.writers import RunWriter


class Evaluation(Action):
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
    watchdog: Watchdog,
  ) -> None:
    self._job = job
    self._watchdog = watchdog
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
    with self._watchdog.doing("evaluation", step):
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
