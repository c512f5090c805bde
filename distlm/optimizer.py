"""Learning-rate schedules and the optimizers of Optax."""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib

from distlm.settings import OptimizerConfig
from distlm.types import Params

_NOT_DECAYED = ("b", "offset", "scale")
# What Adam's updates of matrices usually are, root mean square (Liu et al.,
# 2025, arXiv:2502.16982, section 2.2): one learning rate then suits both.
_MUON_RMS = 0.2


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
  """Returns the optimizer by name; all but muon work element by element.

  Settings that are None are left to Optax.
  """
  settings = {
    key: value
    for key in ("b1", "b2", "eps", "momentum", "weight_decay")
    if (value := getattr(config, key)) is not None
  }
  if config.name == "muon":
    return _make_muon(schedule, **settings)
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


def _make_muon(
  schedule: optax.Schedule,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  momentum: float = 0.95,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Returns Muon for the matrices of layers, and Adam for all else.

  Muon makes the singular values of an update nearly equal (Jordan et al., 2024,
  https://kellerjordan.github.io/posts/muon). Both have Nesterov's momentum;
  what Adam updates does not decay.
  """
  return optax.contrib.muon(
    schedule,
    beta=momentum,
    eps=eps,
    weight_decay=weight_decay,
    adam_b1=b1,
    adam_b2=b2,
    muon_weight_dimension_numbers=_matrices_of_layers,
    consistent_rms=_MUON_RMS,
  )


def _matrices_of_layers(params: Params) -> Any:
  """Returns which axes of a stack of matrices, [L, M, N], are a matrix's."""

  def axes(path: Any, x: jax.Array) -> Any:
    is_matrix = jax.tree_util.keystr(path[-1:], simple=True) == "w"
    axes = optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
    return axes if is_matrix else None

  return jax.tree_util.tree_map_with_path(axes, params)
