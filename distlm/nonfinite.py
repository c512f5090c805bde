"""Finds where the NaN or infinity that stopped a run came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distlm import parallel, snapshot
from distlm.errors import RunError
from distlm.model.transformer import find_nonfinite_scope
from distlm.types import Array, Batch, Params


def find_cause(
  forward: Any,
  gradient: Callable[..., Any],
  params: Params,
  batch: Batch,
  keys: Array,
) -> str:
  """Returns the first thing that is not finite in one update, in words.

  All processes must call it, since it computes the update's gradient again.

  Args:
    forward: the model, made by `build_forward_fn`.
    gradient: `GradientUpdater.gradient`.
    params: [R, ...] replicated, those before the update.
    batch: [R, A, B, T].
    keys: [R, 2], of each device.
  """

  def flags(params: Params, batch: Batch, key: Array) -> Any:
    grads, _ = gradient(params, batch, key)
    return jax.tree.map(lambda g: jnp.isfinite(g).all(), grads)

  # First, as a process alone in it would wait for the others for ever.
  is_finite = parallel.fetch(parallel.pmap(flags)(params, batch, keys))
  name = snapshot.find_nonfinite(parallel.fetch(params))
  if name:
    return f"parameter {name}"
  names = [
    snapshot.dotted(path)
    for path, flag in jax.tree_util.tree_leaves_with_path(is_finite)
    if not flag
  ]
  of_gradient = (
    f"the gradient of {names[0]}"
    if names
    else "the loss or the gradient's norm"
  )
  of_activation = _find_activation(forward, params, batch, keys)
  return f"{of_activation}, and {of_gradient}" if of_activation else of_gradient


def error(
  step: int, cause: str, num_in_row: int, is_skipping: bool
) -> RunError:
  """Returns what ends a run.

  Args:
    step: the update.
    cause: what `find_cause` returned.
    num_in_row: how many updates had such a cause, one after the other.
    is_skipping: whether some in a row were allowed.
  """
  many = ""
  if is_skipping:
    many = f", as in {num_in_row} steps in a row, more than nonfinite_limit"
  skip = "" if is_skipping else ", or go on past such steps with nonfinite=skip"
  return RunError(
    f"step {step}: {cause} is not finite{many}; nothing of it is saved: mend"
    f" the data, start in another --workdir with a lower learning rate{skip}"
  )


def _find_activation(
  forward: Any, params: Params, batch: Batch, keys: Array
) -> str:
  """Looks at the rows of each device of this process, part by part."""
  host_params = parallel.fetch(params)
  for device, (row, key) in enumerate(parallel.rows((batch, keys))):
    num_parts = len(row.mask)
    for part, part_key in enumerate(jax.random.split(key, num_parts)):
      scope = find_nonfinite_scope(
        forward, host_params, part_key, row.inputs[part], row.mask[part]
      )
      if scope:
        return (
          f"the output of {scope}, on device {device} of process"
          f" {parallel.process_index()}"
        )
  return ""
