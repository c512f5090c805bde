"""Learning-rate schedules and the optimizers of Optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from distlm.settings import OptimizerConfig
from distlm.types import Params

_NOT_DECAYED = ("b", "offset", "scale")


def make_schedule(
  config: OptimizerConfig, training_steps: int
) -> optax.Schedule:
  """Returns the learning rate by step.

  It rises linearly from 0 over `warmup_steps`, then follows the schedule to
  `end_learning_rate` at `training_steps`.
  """
  peak, end = config.learning_rate, config.end_learning_rate
  decay_steps = max(training_steps - config.warmup_steps, 1)
  decay = {
    "cosine": optax.cosine_decay_schedule(peak, decay_steps, end / peak),
    "linear": optax.linear_schedule(peak, end, decay_steps),
    "constant": optax.constant_schedule(peak),
  }[config.schedule]
  if not config.warmup_steps:
    return decay
  warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
  return optax.join_schedules([warmup, decay], [config.warmup_steps])


def decay_mask(params: Params) -> Any:
  """Returns True for the matrices: biases and norms are not decayed.

  By their names in Haiku: parameters of layers are stacked, and a device may
  hold a flat part of them, so that shapes do not tell.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, _: (
      jax.tree_util.keystr(path[-1:], simple=True) not in _NOT_DECAYED
    ),
    params,
  )


def make_optimizer(
  config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Returns the optimizer by name, which works element by element.

  Settings that are None are left to Optax.
  """
  settings = {
    key: value
    for key in ("b1", "b2", "eps", "momentum", "weight_decay")
    if (value := getattr(config, key)) is not None
  }
  if config.name in ("adamw", "lion"):
    settings["mask"] = decay_mask
  make = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "sgd": optax.sgd,
    "lion": optax.lion,
  }[config.name]
  decay = settings.pop("weight_decay", 0.0) if config.name == "sgd" else 0.0
  optimizer = make(schedule, **settings)
  if not decay:
    return optimizer
  return optax.chain(optax.add_decayed_weights(decay, decay_mask), optimizer)
