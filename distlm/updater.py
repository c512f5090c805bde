"""One update of the parameters, exact over devices and accumulation steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax

from distlm import collectives
from distlm.sharding import (
  Whole,
  gather_state,
  make_sharding,
  replicated_state,
  split_state,
)
from distlm.types import (
  Array,
  Batch,
  LossScale,
  LossSums,
  OptState,
  Params,
  TrainState,
)

_FIRST_LOSS_SCALE = 2.0**15
_LEAST_LOSS_SCALE = 1.0

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
    optimizer: of Optax, working element by element.
    schedule: the learning rate by step, to report it.
    clip_norm: the global norm that larger gradients are scaled to; 0: none.
    max_skips_in_row: so many updates that are not finite may follow each
      other; after one more no update is applied, and the run should end.
    axis_name: the axis of the devices, or None.
    shard_state: whether each device keeps a part of the optimizer state.
    reduce_dtype: of gradients while they are summed over devices.
    is_marked: whether `loss_fn` applies its `mark` to the parameters of a
      module, given by name, where it uses them; None: it takes no `mark`.
    scales_loss: whether gradients are float16 on their way, and are scaled
      (Micikevicius et al., 2018, arXiv:1710.03740, section 3.2).
  """

  init_fn: InitFn
  loss_fn: LossFn
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
  clip_norm: float = 0.0
  max_skips_in_row: int = 0
  axis_name: str | None = collectives.AXIS
  shard_state: bool = False
  reduce_dtype: Any = jnp.float32
  is_marked: Callable[[str], bool] | None = None
  scales_loss: bool = False

  @property
  def sharding(self) -> Whole:
    """How the devices share an update."""
    return make_sharding(self.axis_name, self.shard_state, self.reduce_dtype)

  def init(self, key: Array) -> TrainState:
    """Returns the state before the first update.

    Args:
      key: the same on all devices, so that their states are equal.
    """
    return self.start(self.init_fn(key))

  def start(self, params: Params) -> TrainState:
    """Returns the state before the first update of given parameters."""
    scale = LossScale(jnp.float32(_FIRST_LOSS_SCALE), jnp.int32(0))
    return TrainState(
      step=jnp.zeros([], jnp.int32),
      params=params,
      opt_state=self.optimizer.init(self.sharding.own(params)),
      num_skipped=jnp.zeros([], jnp.int32),
      num_skipped_in_row=jnp.zeros([], jnp.int32),
      loss_scale=scale if self.scales_loss else None,
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
    devices; so any NaN or infinity anywhere counts. One that a smaller loss
    scale may mend does not count as skipped in a row.

    Args:
      state: equal on all devices, but for parts of the optimizer state.
      batch: [A, B, T], this device's part of the global batch.
      key: this device's PRNG key of this step.

    Returns:
      The next state, and scalars of this update. `loss`, `accuracy` and
      `grad_norm` (before clipping) are of the global batch and of the
      parameters before the update, `param_norm` of those after it;
      `skipped_steps` is the number of updates left out so far, and
      `skipped_in_row` that of the last ones, 0 if this one was applied.
    """
    scale = state.loss_scale
    factor = 1.0 if scale is None else scale.value / batch.mask[0].size
    grads, sums = self.gradient(state.params, batch, key, factor)
    loss, grad_norm = sums.loss / _divisor(sums), self._norm(grads)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    # Else what went wrong could not be looked at any more: the next update is
    # on its way when the host hears of it.
    is_applied = is_finite & (state.num_skipped_in_row <= self.max_skips_in_row)
    params, opt_state, update_norm = self._apply(
      state, grads, grad_norm, is_applied
    )
    can_shrink = False if scale is None else scale.value > _LEAST_LOSS_SCALE
    in_row = state.num_skipped_in_row + ~(is_applied | can_shrink)
    in_row = jnp.where(is_applied, 0, in_row)
    num_skipped = state.num_skipped + ~is_applied
    scalars = {
      "loss": loss,
      "accuracy": sums.num_correct / _divisor(sums),
      "grad_norm": grad_norm,
      "update_norm": update_norm,
      "param_norm": optax.tree.norm(params),
      # The optimizer counts the updates that were applied.
      "learning_rate": jnp.asarray(
        self.schedule(state.step - state.num_skipped), jnp.float32
      ),
      "tokens": sums.num_tokens,
      "skipped_steps": num_skipped,
      "skipped_in_row": in_row,
    }
    if scale is not None:
      scalars["loss_scale"] = scale.value
      scale = _adjust(scale, is_finite)
    return TrainState(
      state.step + 1, params, opt_state, num_skipped, in_row, scale
    ), scalars

  def _apply(
    self,
    state: TrainState,
    grads: Params,
    grad_norm: jax.Array,
    is_applied: jax.Array,
  ) -> tuple[Params, OptState, jax.Array]:
    """Returns parameters, optimizer state and the norm of what was added."""
    if self.clip_norm:
      # Exactly 1 below the limit; a norm of 0 has nothing to divide.
      factor = self.clip_norm / jnp.maximum(grad_norm, self.clip_norm)
      grads = jax.tree.map(lambda g: g * factor, grads)
    own = self.sharding.own(state.params)
    updates, opt_state = self.optimizer.update(grads, state.opt_state, own)
    update_norm = jnp.where(is_applied, self._norm(updates), 0.0)
    # Not the new parameters: a wrong replica would hand its part to all, and
    # be given theirs, so that no comparison could ever find it.
    updates = self.sharding.gather(updates, state.params)
    # A select, not a branch: it is fused into the update, at hardly any cost.
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(is_applied, new, old),
      (optax.apply_updates(state.params, updates), opt_state),
      (state.params, state.opt_state),
    )
    return params, opt_state, update_norm

  def gather_state(self, opt_state: OptState, params: Params) -> OptState:
    """Returns the whole optimizer state, as checkpoints hold it."""
    return gather_state(self.sharding, self.optimizer, opt_state, params)

  def split_state(self, opt_state: OptState) -> OptState:
    """Returns what this device owns of a whole optimizer state."""
    return split_state(self.sharding, self.optimizer, opt_state)

  def replicated_state(self, opt_state: OptState) -> OptState:
    """Returns what is equal on all devices, None in place of all else."""
    return replicated_state(self.sharding, self.optimizer, opt_state)

  def gradient(
    self,
    params: Params,
    batch: Batch,
    key: Array,
    loss_factor: Array | float = 1.0,
  ) -> tuple[Params, LossSums]:
    """Returns the gradient of the mean loss, and the sums, of all devices.

    Args:
      params: equal on all devices.
      batch: [A, B, T], this device's part of the global batch.
      key: this device's PRNG key of this step.
      loss_factor: what the sum of losses is multiplied by on the way; the
        result is without it.

    Returns:
      What this device owns of the gradient, and the sums.
    """
    # Over steps there is one sum over devices, after the last one.
    mark = self.sharding.sum_in_backward() if len(batch.mask) == 1 else None
    if mark is None or self.is_marked is None:
      grads, sums = self._sum_gradients(params, batch, key, loss_factor)
      grads = self.sharding.sum_gradients(grads)
    else:
      grads, sums = self._sum_gradients(
        params, batch, key, loss_factor, mark=mark
      )
      rest = {k: grads[k] for k in grads if not self.is_marked(k)}
      grads = grads | self.sharding.sum_gradients(rest)
    sums = collectives.psum(sums, self.axis_name)
    divisor = _divisor(sums) * loss_factor
    return jax.tree.map(lambda g: g / divisor, grads), sums

  def evaluate(self, params: Params, batch: Batch) -> LossSums:
    """Returns the sums over the global batch, without dropout.

    Args:
      params: equal on all devices.
      batch: [A, B, T], this device's part of the global batch.
    """

    def add(sums: LossSums, part: Batch) -> tuple[LossSums, None]:
      return _add(sums, self.loss_fn(params, None, part, False)), None

    sums, _ = jax.lax.scan(add, _zero_sums(), batch)
    return collectives.psum(sums, self.axis_name)

  def _sum_gradients(
    self,
    params: Params,
    batch: Batch,
    key: Array,
    loss_factor: Array | float,
    **options: Any,
  ) -> tuple[Params, LossSums]:
    """Returns gradient and sums over the accumulation steps of one device."""

    def loss(
      params: Params, key: Array, part: Batch
    ) -> tuple[jax.Array, LossSums]:
      sums = self.loss_fn(params, key, part, True, **options)
      return sums.loss * loss_factor, sums

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

  def _norm(self, tree: Params) -> jax.Array:
    """Returns the norm of the whole of which each device owns a part."""
    return jnp.sqrt(self.sharding.total(optax.tree.norm(tree, squared=True)))


def _adjust(scale: LossScale, is_finite: jax.Array) -> LossScale:
  """Halves the scale after an overflow, doubles it after many good updates."""
  adjusted = jmp.DynamicLossScale(
    scale.value, scale.num_good, min_loss_scale=jnp.float32(_LEAST_LOSS_SCALE)
  ).adjust(is_finite)
  return LossScale(adjusted.loss_scale, adjusted.counter)


def _divisor(sums: LossSums) -> jax.Array:
  """Returns what makes means of sums; 1 where there is no token."""
  return jnp.maximum(sums.num_tokens, 1).astype(jnp.float32)


def _zero_sums() -> LossSums:
  zero = functools.partial(jnp.zeros, [])
  return LossSums(zero(jnp.float32), zero(jnp.int32), zero(jnp.int32))


_add = functools.partial(jax.tree.map, jnp.add)
