"""Learning-rate schedules and the Optax chain."""

from __future__ import annotations

from typing import Any

import jax
import optax

from distlm.settings import OptimizerConfig
from distlm.types import Params


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
  """Returns True for the matrices: biases and norms are not decayed."""
  return jax.tree.map(lambda x: x.ndim >= 2, params)


def make_optimizer(
  config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Returns clipping by the global norm, then the optimizer by name.

  Settings that are None are left to Optax.
  """
  settings = {
    key: value
    for key in ("b1", "b2", "eps", "momentum", "weight_decay")
    if (value := getattr(config, key)) is not None
  }
  if config.name in ("adamw", "lion"):
    settings["mask"] = decay_mask
  chain = []
  if config.clip_norm:
    chain.append(optax.clip_by_global_norm(config.clip_norm))
  if config.name == "sgd" and (decay := settings.pop("weight_decay", 0.0)):
    chain.append(optax.add_decayed_weights(decay, decay_mask))
  make = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "sgd": optax.sgd,
    "lion": optax.lion,
  }[config.name]
  return optax.chain(*chain, make(schedule, **settings))
