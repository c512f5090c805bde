"""One update of the parameters, exact over devices and accumulation steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from distlm import parallel
from distlm.types import Array, Batch, LossSums, Params, TrainState

# init(key) -> params
InitFn = Callable[[Array], Params]
# loss(params, key, batch, is_training) -> sums
LossFn = Callable[..., LossSums]


@dataclasses.dataclass(frozen=True)
class GradientUpdater:
  """Pure functions that make, update and evaluate a `TrainState`.

  With an `axis_name` they run inside `parallel.pmap`, each device on its rows
  of the global batch, and all devices end with equal states. Without one, they
  compute the same on a single device.

  Attributes:
    init_fn: makes the parameters from a key.
    loss_fn: the sums of a batch [B, T].
    optimizer: the Optax chain, clipping included.
    schedule: the learning rate by step, to report it.
    max_skips_in_row: so many updates that are not finite may follow each
      other; after one more no update is applied, and the run should end.
    axis_name: the axis of the devices, or None.
  """

  init_fn: InitFn
  loss_fn: LossFn
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
  max_skips_in_row: int = 0
  axis_name: str | None = parallel.AXIS

  def init(self, key: Array) -> TrainState:
    """Returns the state before the first update.

    Args:
      key: the same on all devices, so that their states are equal.
    """
    return self.start(self.init_fn(key))

  def start(self, params: Params) -> TrainState:
    """Returns the state before the first update of given parameters."""
    return TrainState(
      step=jnp.zeros([], jnp.int32),
      params=params,
      opt_state=self.optimizer.init(params),
      num_skipped=jnp.zeros([], jnp.int32),
      num_skipped_in_row=jnp.zeros([], jnp.int32),
    )

  def update(
    self, state: TrainState, batch: Batch, key: Array
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """Applies the gradient of the mean loss over the global batch.

    The gradient is the sum over all unmasked targets of all devices and
    accumulation steps, divided once by their number; then it is clipped by its
    global norm, then handed to the optimizer. A batch without any target gives
    a zero gradient.

    Where the loss or the gradient is not finite, parameters and optimizer state
    stay as they are. All devices decide alike, because both are sums over all
    devices; so any NaN or infinity anywhere counts.

    Args:
      state: equal on all devices.
      batch: [A, B, T], this device's part of the global batch.
      key: this device's PRNG key of this step.

    Returns:
      The next state, and scalars of this update. `loss`, `accuracy` and
      `grad_norm` (before clipping) are of the global batch and of the
      parameters before the update, `param_norm` of those after it;
      `skipped_steps` is the number of updates left out so far, and
      `skipped_in_row` that of the last ones, 0 if this one was applied.
    """
    grads, sums = self.gradient(state.params, batch, key)
    num_tokens = _divisor(sums)
    loss, grad_norm = sums.loss / num_tokens, optax.tree.norm(grads)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    # Else what went wrong could not be looked at any more: the next update is
    # on its way when the host hears of it.
    is_applied = is_finite & (state.num_skipped_in_row <= self.max_skips_in_row)
    updates, opt_state = self.optimizer.update(
      grads, state.opt_state, state.params
    )
    # A select, not a branch: it is fused into the update, at hardly any cost.
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(is_applied, new, old),
      (optax.apply_updates(state.params, updates), opt_state),
      (state.params, state.opt_state),
    )
    num_skipped = state.num_skipped + ~is_applied
    in_row = jnp.where(is_applied, 0, state.num_skipped_in_row + 1)
    # The optimizer counts the updates that were applied.
    learning_rate = self.schedule(state.step - state.num_skipped)
    scalars = {
      "loss": loss,
      "accuracy": sums.num_correct / num_tokens,
      "grad_norm": grad_norm,
      "update_norm": jnp.where(is_applied, optax.tree.norm(updates), 0.0),
      "param_norm": optax.tree.norm(params),
      "learning_rate": jnp.asarray(learning_rate, jnp.float32),
      "tokens": sums.num_tokens,
      "skipped_steps": num_skipped,
      "skipped_in_row": in_row,
    }
    return TrainState(
      state.step + 1, params, opt_state, num_skipped, in_row
    ), scalars

  def gradient(
    self, params: Params, batch: Batch, key: Array
  ) -> tuple[Params, LossSums]:
    """Returns the gradient of the mean loss, and the sums, of all devices.

    Args:
      params: equal on all devices.
      batch: [A, B, T], this device's part of the global batch.
      key: this device's PRNG key of this step.
    """
    grads, sums = self._sum_gradients(params, batch, key)
    grads, sums = parallel.psum((grads, sums), self.axis_name)
    return jax.tree.map(lambda g: g / _divisor(sums), grads), sums

  def evaluate(self, params: Params, batch: Batch) -> LossSums:
    """Returns the sums over the global batch, without dropout.

    Args:
      params: equal on all devices.
      batch: [A, B, T], this device's part of the global batch.
    """

    def add(sums: LossSums, part: Batch) -> tuple[LossSums, None]:
      return _add(sums, self.loss_fn(params, None, part, False)), None

    sums, _ = jax.lax.scan(add, _zero_sums(), batch)
    return parallel.psum(sums, self.axis_name)

  def _sum_gradients(
    self, params: Params, batch: Batch, key: Array
  ) -> tuple[Params, LossSums]:
    """Returns gradient and sums over the accumulation steps of one device."""

    def loss(
      params: Params, key: Array, part: Batch
    ) -> tuple[jax.Array, LossSums]:
      sums = self.loss_fn(params, key, part, True)
      return sums.loss, sums

    gradient = jax.grad(loss, has_aux=True)
    num_steps = batch.mask.shape[0]
    keys = jax.random.split(key, num_steps)
    if num_steps == 1:  # Spares a copy of the gradient.
      return gradient(params, keys[0], jax.tree.map(lambda x: x[0], batch))

    def add(
      total: tuple[Params, LossSums], part: tuple[Array, Batch]
    ) -> tuple[tuple[Params, LossSums], None]:
      return _add(total, gradient(params, *part)), None

    zeros = jax.tree.map(jnp.zeros_like, params), _zero_sums()
    total, _ = jax.lax.scan(add, zeros, (keys, batch))
    return total


def _divisor(sums: LossSums) -> jax.Array:
  """Returns what makes means of sums; 1 where there is no token."""
  return jnp.maximum(sums.num_tokens, 1).astype(jnp.float32)


def _zero_sums() -> LossSums:
  zero = functools.partial(jnp.zeros, [])
  return LossSums(zero(jnp.float32), zero(jnp.int32), zero(jnp.int32))


_add = functools.partial(jax.tree.map, jnp.add)
