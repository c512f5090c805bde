"""What a checkpoint holds of an experiment, and the structure to restore it to.

An experiment lists what it is made of in JAXline's `CHECKPOINT_ATTRS`, which
have a replica axis, and `NON_BROADCAST_CHECKPOINT_ATTRS`, which have none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxline.experiment import AbstractExperiment

from distlm.errors import UsageError


def take(
  module: AbstractExperiment,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns what Orbax and what JSON stores, copied to the host."""
  arrays, attributes = {}, {}
  for name, value in module.snapshot_state().items():
    if any(isinstance(leaf, str) for leaf in jax.tree.leaves(value)):
      # A copy, since saving goes on while the attribute changes.
      attributes[name] = json.loads(json.dumps(value))
    else:
      arrays[name] = jax.tree.map(_to_host, value)
  return arrays, attributes


def _to_host(leaf: Any) -> Any:
  # A copy of device arrays, because the next update donates them.
  return np.array(leaf) if isinstance(leaf, (jax.Array, np.generic)) else leaf


def find_nonfinite(tree: Any, may_be_infinite: bool = False) -> str:
  """Returns the name of the first array with a NaN or infinity, or "".

  Args:
    tree: of arrays.
    may_be_infinite: whether to look for NaNs alone.
  """
  is_wrong: Any = np.isnan if may_be_infinite else lambda x: ~np.isfinite(x)
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    is_float = jax.dtypes.issubdtype(np.asarray(leaf).dtype, np.inexact)
    if is_float and is_wrong(leaf).any():
      return dotted(path)
  return ""


def dotted(path: Any) -> str:
  """Returns the name of a leaf, such as "train_state.params.embed.w"."""
  return jax.tree_util.keystr(path, simple=True, separator=".")


def make_template(
  saved: Mapping[str, Any], module: AbstractExperiment, what: str
) -> dict[str, Any]:
  """Returns arrays of the structure that a checkpoint is restored to.

  The structure of an attribute is that of its present value. Where there is
  none, as in an evaluator before its first checkpoint, it is that of the
  checkpoint, in which tuples have become lists.
  """
  template = jax.tree.map(
    lambda leaf: _placeholder(leaf.shape, leaf.dtype), dict(saved)
  )
  for attributes, num_replica_axes in (
    (module.CHECKPOINT_ATTRS, 1),
    (module.NON_BROADCAST_CHECKPOINT_ATTRS, 0),
  ):
    for attribute, name in attributes.items():
      value = getattr(module, attribute, None)
      if name in template and value is not None:
        wanted = jax.tree.map(
          functools.partial(_like, num_replica_axes=num_replica_axes),
          value,
        )
        _check_same_arrays(saved[name], wanted, f"{what}: {name}")
        template[name] = wanted
  return template


def _like(leaf: Any, num_replica_axes: int) -> Any:
  if isinstance(leaf, (bool, int, float)):
    return leaf
  # Not jnp.result_type, which would make 64 bits 32.
  dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
  return _placeholder(np.shape(leaf)[num_replica_axes:], dtype)


def with_tuples(
  saved: Mapping[str, Any], module: AbstractExperiment
) -> dict[str, Any]:
  """Makes tuples of JSON's lists where the present values have tuples."""
  values = dict(saved)
  for attribute, name in module.NON_BROADCAST_CHECKPOINT_ATTRS.items():
    present = getattr(module, attribute, None)
    if name in saved and present is not None:
      as_saved: Any = jax.tree.structure(json.loads(json.dumps(present)))
      if as_saved == jax.tree.structure(saved[name]):
        values[name] = jax.tree.unflatten(
          jax.tree.structure(present), jax.tree.leaves(saved[name])
        )
  return values


def _placeholder(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  # All its elements are one in memory.
  return np.broadcast_to(np.zeros([], dtype), shape)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  return {
    dotted(path): np.shape(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_same_arrays(saved: Any, wanted: Any, what: str) -> None:
  shapes = _shapes(saved), _shapes(wanted)
  for name in sorted(shapes[0] | shapes[1]):
    if shapes[0].get(name) != shapes[1].get(name):
      raise UsageError(
        f"{what}.{name} is of shape {shapes[0].get(name, 'none')}, but this"
        f" experiment has {shapes[1].get(name, 'none')}; restore it with the"
        " settings that it was saved with, or use another --workdir"
      )
