"""What devices do together inside `parallel.pmap`, over its one axis.

N is the number of devices of all processes.
"""

from __future__ import annotations

from typing import TypeVar

import jax

T = TypeVar("T")

# JAXline names the axis of its own pmaps "i" too.
AXIS = "i"


def psum(tree: T, axis_name: str | None = AXIS) -> T:
  """Sums over all devices, of which there is one without an axis."""
  return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def all_gather(tree: T) -> T:
  """Gathers the values of all devices: [...] to [N, ...]."""
  return jax.lax.all_gather(tree, AXIS)


def reduce_scatter(x: jax.Array, axis_name: str = AXIS) -> jax.Array:
  """Sums over all devices and gives each its part: [N * n] to [n]."""
  return jax.lax.psum_scatter(x, axis_name, tiled=True)


def gather_tiled(x: jax.Array, axis_name: str = AXIS) -> jax.Array:
  """Joins the parts of all devices: [n] to [N * n]."""
  return jax.lax.all_gather(x, axis_name, tiled=True)


def axis_index(axis_name: str = AXIS) -> jax.Array:
  """Returns the number of this device among all, [] int32."""
  return jax.lax.axis_index(axis_name)


def axis_size(axis_name: str = AXIS) -> int:
  """Returns N."""
  return jax.lax.axis_size(axis_name)
