"""An experiment with checkpoint attributes of every kind, and its saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxline.experiment import AbstractExperiment

from distlm import parallel
from distlm.checkpoint import DiskCheckpointer

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "uint32", "bool")


class Pair(NamedTuple):
  """A node that is neither a dict nor a plain tuple."""

  first: Any
  second: Any


class Toy(AbstractExperiment):
  """Has attributes of every kind; `scale` 0 is the state of a fresh object."""

  CHECKPOINT_ATTRS: ClassVar = {
    "_params": "params",
    "_opt_state": "opt_state",
    "_stateless": "stateless",
  }
  NON_BROADCAST_CHECKPOINT_ATTRS: ClassVar = {
    "_host": "host",
    "_numbers": "numbers",
    "_position": "position",
    "_pair": "pair",
    "_text": "text",
    "_nothing": "nothing",
    "_empty": "empty",
  }

  def __init__(self, scale: int, width: int = 3) -> None:
    super().__init__("train")
    arrays = {
      dtype: jnp.arange(width).astype(dtype) * jnp.array(scale, dtype)
      for dtype in DTYPES
    }
    params = {"w": jnp.full((2, width), 0.1) * scale, "b": jnp.ones(()) * scale}
    self._params = parallel.replicate(
      Pair({"layer_0": arrays, "layer_1": [params]}, (jnp.ones(1) * scale,))
    )
    self._opt_state = parallel.replicate(optax.adamw(1e-3).init(params))
    # Its state has no array at all, but a structure.
    self._stateless = parallel.replicate(optax.sgd(1e-3).init(params))
    self._host = {
      "int64": np.array([2**40, -1]) * scale,
      "float64": np.array([0.1, 1e300]) * scale,
      "scalar": np.float32(0.25 * scale),
      "long": np.int64(2**40 * scale),
      "array": jnp.arange(3) * scale,
      "key": jax.random.PRNGKey(7 * scale),
    }
    self._numbers = {"w": np.ones(2) * scale, "n": 2**40 * scale, "x": 0.1}
    self._position = {"step": 3 * scale, "seen": [1, 2.5, "a", None, True]}
    self._pair = Pair(5 * scale, (1, Pair("b", None)))
    self._text = "naïve ☃" * scale
    self._nothing = None
    self._empty = {}

  def step(self, **_: Any) -> dict[str, Any]:
    return {}

  def evaluate(self, **_: Any) -> dict[str, Any]:
    return {}

  def listed(self) -> dict[str, Any]:
    """Returns the attributes that a checkpoint holds."""
    names = {**self.CHECKPOINT_ATTRS, **self.NON_BROADCAST_CHECKPOINT_ATTRS}
    return {name: getattr(self, name) for name in names}


def open_checkpoints(
  directory: Path, experiment: Toy, series: str = "latest", keep: int = 3
) -> DiskCheckpointer:
  """Returns a checkpointer as a process that starts has it."""
  checkpointer = DiskCheckpointer(directory, keep, {"random_seed": 1})
  state = checkpointer.get_experiment_state(series)
  state.global_step = 0
  state.experiment_module = experiment
  state.train_step_rng = parallel.replicate(jax.random.PRNGKey(0))
  return checkpointer


def save_step(checkpointer: DiskCheckpointer, step: int, series: str) -> None:
  checkpointer.get_experiment_state(series).global_step = step
  checkpointer.save(series)
  checkpointer.wait_for_checkpointing_to_finish()
