"""A JAXline experiment of another's hand: it knows only distlm.runner.

It fits y = x w by SGD, on data that each device draws by its own key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxline import experiment, utils

from distlm import runner

TRUE_WEIGHTS = (1.0, -2.0, 3.0)
_ROWS = 8
_LEARNING_RATE = 0.1


def _loss(weights: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.mean((x @ weights - x @ jnp.array(TRUE_WEIGHTS)) ** 2)


def _update(
  weights: jax.Array, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  x = jax.random.normal(key, (_ROWS, len(TRUE_WEIGHTS)))
  loss, grads = jax.value_and_grad(_loss)(weights, x)
  num_devices = jax.lax.psum(1, "i")
  loss, grads = jax.lax.psum((loss, grads), "i")
  weights -= _LEARNING_RATE * grads / num_devices
  return weights, {"mse": loss / num_devices}


class ToyExperiment(experiment.AbstractExperiment):
  """Linear regression; `scores` are what evaluations return, one by one."""

  CHECKPOINT_ATTRS: ClassVar = {"_weights": "weights"}

  def __init__(
    self,
    mode: str,
    init_rng: jax.Array | None = None,
    fail_at_step: int = -1,
    fail_in_evaluation: bool = False,
    scores: Sequence[float] = (),
  ) -> None:
    super().__init__(mode, init_rng)
    self._fail_at_step = fail_at_step
    self._fail_in_evaluation = fail_in_evaluation
    self._scores = scores
    self._weights = utils.bcast_local_devices(np.zeros(3, np.float32))
    self._update = jax.pmap(_update, axis_name="i", donate_argnums=0)

  def step(
    self, *, global_step: jax.Array, rng: jax.Array, writer: Any
  ) -> dict[str, Any]:
    if int(utils.get_first(global_step)) == self._fail_at_step:
      raise ArithmeticError("the toy step fails")
    self._weights, scalars = self._update(self._weights, rng)
    return utils.get_first(scalars)

  def evaluate(
    self, *, global_step: jax.Array, rng: jax.Array, writer: Any
  ) -> dict[str, Any]:
    if self._fail_in_evaluation:
      raise ArithmeticError("the toy evaluation fails")
    step = int(utils.get_first(global_step))
    weights = utils.get_first(self._weights)
    scalars = {"mse": np.mean((weights - np.array(TRUE_WEIGHTS)) ** 2)}
    if self._scores:
      scalars["score"] = np.float32(self._scores[step // 10 - 1])
    return scalars


class OldStyleExperiment(ToyExperiment):
  """As experiments were before JAXline passed a key to them."""

  def __init__(self, mode: str, **kwargs: Any) -> None:
    # The signature is what JAXline looks at.
    super().__init__(mode, **kwargs)


class OwnSnapshotExperiment(ToyExperiment):
  """Lists no attributes: it makes and restores snapshots itself."""

  CHECKPOINT_ATTRS: ClassVar = {}

  def snapshot_state(self) -> Mapping[str, Any]:
    return {"halves": utils.get_first(self._weights) / 2, "note": "of halves"}

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    assert snapshot_state["note"] == "of halves"
    halves = np.asarray(snapshot_state["halves"])
    self._weights = utils.bcast_local_devices(2 * halves)


if __name__ == "__main__":
  runner.main(ToyExperiment)
