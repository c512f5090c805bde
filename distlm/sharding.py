"""How the devices share an update: each makes all of it, or a part of it.

Both ways have the same methods, and sum to the same update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from distlm import collectives
from distlm.types import Array, OptState, Params


@dataclasses.dataclass(frozen=True)
class Whole:
  """Each device makes the whole update, from the whole optimizer state.

  Attributes:
    axis_name: the axis of the devices; None: there is one device, and no axis.
    reduce_dtype: of gradients while they are summed. bfloat16 halves what
      travels, and rounds each summand and each sum to 8 bits.
  """

  axis_name: str | None
  reduce_dtype: Any = jnp.float32

  def sum_gradients(self, grads: Params) -> Params:
    """Returns what this device owns of the float32 sum over all devices."""
    sums = self._sum(_cast(grads, self.reduce_dtype))
    return _cast(sums, jnp.float32)

  def _sum(self, grads: Params) -> Params:
    return collectives.psum(grads, self.axis_name)

  def sum_in_backward(self) -> Callable[[Array], Array] | None:
    """Returns an identity whose gradient is summed, or None if there is none.

    Where it is applied to parameters within a loop over layers, the backward
    loop sums a layer's gradient while it computes the next one's. After the
    loop there is nothing left that could hide a sum.
    """
    mark = jax.custom_vjp(lambda param: param)
    mark.defvjp(
      lambda param: (param, None), lambda _, grad: (self.sum_gradients(grad),)
    )
    return mark

  def own(self, tree: Params) -> Params:
    """Returns what this device owns of a tree that is equal on all."""
    return tree

  def total(self, value: jax.Array) -> jax.Array:
    """Returns a sum over the whole of what is summed over own parts."""
    return value

  def gather(self, parts: Params, like: Params) -> Params:
    """Undoes `own`, bit for bit.

    Args:
      parts: what each device owns.
      like: a tree of the shapes to return; the values do not matter.
    """
    del like
    return parts


@dataclasses.dataclass(frozen=True)
class Split(Whole):
  """Each device makes its part of the update, from its part of the state.

  It is the first stage of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
  Device i of N owns the i-th of N equal parts of each array, flattened and
  padded with zeros: [ceil(size / N)]. Scattering the sum of the gradients and
  gathering the updates moves as many bytes as summing everywhere; but libtpu
  0.0.42 compiles the scatter to a whole sum, half as many bytes again.

  Trees of parts have the structure of the parameters, so that Optax's
  optimizers work on them as long as they treat elements alike: masks must go by
  the names of parameters, not by their shapes.
  """

  axis_name: str  # There must be one.

  def _sum(self, grads: Params) -> Params:
    scatter = functools.partial(
      collectives.reduce_scatter, axis_name=self.axis_name
    )
    return jax.tree.map(lambda x: scatter(self._parts(x).ravel()), grads)

  def sum_in_backward(self) -> None:
    # A gradient has the shape of what it is for; a part of it has not.
    return None

  def own(self, tree: Params) -> Params:
    index = collectives.axis_index(self.axis_name)
    return jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(
        self._parts(x), index, keepdims=False
      ),
      tree,
    )

  def total(self, value: jax.Array) -> jax.Array:
    return collectives.psum(value, self.axis_name)

  def gather(self, parts: Params, like: Params) -> Params:
    def join(part: jax.Array, x: jax.Array) -> jax.Array:
      whole = collectives.gather_tiled(part, self.axis_name)
      return whole[: x.size].reshape(x.shape)

    return jax.tree.map(join, parts, like)

  def _parts(self, x: jax.Array) -> jax.Array:
    """Returns [N, ceil(size / N)], one row for each device."""
    # Not the devices that there are: a pmap may be over fewer.
    num_devices = collectives.axis_size(self.axis_name)
    part_size = -(-x.size // num_devices)
    padding = num_devices * part_size - x.size
    return jnp.pad(x.ravel(), (0, padding)).reshape(num_devices, part_size)


def _cast(tree: Params, dtype: Any) -> Params:
  return jax.tree.map(lambda x: x.astype(dtype), tree)


def make_sharding(
  axis_name: str | None, shard_state: bool, reduce_dtype: Any = jnp.float32
) -> Whole:
  """Returns `Split` if the state is to be sharded, and there are devices."""
  if axis_name is not None and shard_state:
    return Split(axis_name, reduce_dtype)
  return Whole(axis_name, reduce_dtype)


def gather_state(
  sharding: Whole,
  optimizer: optax.GradientTransformation,
  opt_state: OptState,
  params: Params,
) -> OptState:
  """Returns the state as it is without sharding, the same on all devices.

  This is the form of checkpoints, which any number of devices can restore.

  Args:
    sharding: how the state is shared now.
    optimizer: whose state it is.
    opt_state: what this device owns of it.
    params: of the shapes that it is for.
  """
  # Not by shapes: an array of one element has the shape of its parts.
  return optax.tree.map_params(optimizer, sharding.gather, opt_state, params)


def split_state(
  sharding: Whole, optimizer: optax.GradientTransformation, opt_state: OptState
) -> OptState:
  """Undoes `gather_state`, on as many devices as there are now."""
  return optax.tree.map_params(optimizer, sharding.own, opt_state)


def replicated_state(
  sharding: Whole, optimizer: optax.GradientTransformation, opt_state: OptState
) -> OptState:
  """Returns what is equal on all devices, with None in place of parts."""
  if not isinstance(sharding, Split):
    return opt_state
  return optax.tree.map_params(optimizer, lambda _: None, opt_state)
