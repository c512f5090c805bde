"""What one checkpoint holds, and where two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from distlm import checkpoint
from distlm.errors import RunError
from distlm.snapshot import dotted

_MAX_VALUE_CHARS = 100
_WAY_OUT = "move it away to go on from another one"


class Contents(NamedTuple):
  """A checkpoint in the memory of the host."""

  tree: dict[str, Any]
  arrays: dict[Any, np.ndarray]  # The leaves of `tree`, by their key paths.
  state: dict[str, Any]
  attributes: dict[str, Any]
  config: dict[str, Any]


def read(path: Path) -> Contents:
  """Reads a checkpoint, from now on without accelerators.

  Args:
    path: the directory of a step.

  Raises:
    RunError: if it cannot be read, or is not as `DiskCheckpointer` writes it.
  """
  # Before JAX looks for devices: the run that is looked at may hold them.
  jax.config.update("jax_platforms", "cpu")
  tree, metadata = checkpoint.read(path)
  leaves = {
    name: np.asarray(leaf)
    for name, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
  sections = metadata if isinstance(metadata, dict) else {}
  for section in ("state", "attributes", "config"):
    if not isinstance(sections.get(section), dict):
      raise RunError(
        f"checkpoint {path}: its metadata has no object {section}; {_WAY_OUT}"
      )
  return Contents(
    tree, leaves, metadata["state"], metadata["attributes"], metadata["config"]
  )


def count_params(arrays: dict[Any, np.ndarray]) -> int:
  """Returns the elements of the uppermost subtree "params", 0 without one."""
  subtrees = [
    path[: depth + 1]
    for path in arrays
    for depth in range(len(path))
    if dotted(path[depth : depth + 1]) == "params"
  ]
  if not subtrees:
    return 0
  params = min(subtrees, key=len)
  return sum(
    array.size
    for path, array in arrays.items()
    if path[: len(params)] == params
  )


def diff_arrays(first: Contents, second: Contents) -> Iterator[str]:
  """Yields the arrays of other forms, then the first of other content."""
  ours, theirs = first.arrays, second.arrays
  alike = []
  for path in ours | theirs:
    form, other = _form(ours.get(path)), _form(theirs.get(path))
    if form == other:
      alike.append(path)
    else:
      yield f"{dotted(path)}: {form} in the first, {other} in the second"
  unequal = [path for path in alike if _unequal(ours[path], theirs[path]).any()]
  if unequal:
    path = unequal[0]
    yield f"{dotted(path)}: {_describe(ours[path], theirs[path])}"
    yield f"{len(unequal)} of {len(alike)} arrays have other elements"
  structure: Any = jax.tree.structure(first.tree)
  if len(alike) == len(ours | theirs) and (
    structure != jax.tree.structure(second.tree)
  ):
    yield "containers that hold no arrays differ"


def _form(array: np.ndarray | None) -> str:
  return "none" if array is None else f"{array.dtype}{list(array.shape)}"


def _unequal(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
  """Returns which elements differ in a bit.  # [size]."""
  bits = [
    np.ascontiguousarray(array)
    .view(np.uint8)
    .reshape(array.size, array.itemsize)
    for array in (ours, theirs)
  ]
  return (bits[0] != bits[1]).any(axis=1)


def _describe(ours: np.ndarray, theirs: np.ndarray) -> str:
  """Returns where and how far two arrays of one form differ."""
  unequal = _unequal(ours, theirs)
  where = np.unravel_index(int(unequal.argmax()), ours.shape)
  a, b = ours.reshape(-1)[unequal], theirs.reshape(-1)[unequal]
  if a.dtype.kind in "iu":
    # Modulo 2^64, which is exact where floats would round.
    high, low = (f(a, b).astype(np.uint64) for f in (np.maximum, np.minimum))
    largest = f"{(high - low).max()}"
  else:
    with np.errstate(all="ignore"):
      distances = np.abs(a.astype(np.float64) - b.astype(np.float64))
    largest = f"{distances.max():.6g}"
  return (
    f"{unequal.sum():,} of {unequal.size:,} elements differ, the first at"
    f" {[int(index) for index in where]}, by at most {largest}"
  )


def diff_json(section: str, ours: Any, theirs: Any) -> Iterator[str]:
  """Yields the first key of two JSON objects that differs, if one does."""
  flat, other = _flatten(ours), _flatten(theirs)
  for path in flat | other:
    have, want = flat.get(path), other.get(path)
    if have != want:
      name = ".".join([section, *map(str, path)])
      yield (
        f"{name}: {shorten(have)} in the first, {shorten(want)} in the second"
      )
      return


def _flatten(tree: Any) -> dict[tuple[str | int, ...], str]:
  """Returns the leaves of a JSON value, as texts, by their keys."""
  if not (isinstance(tree, dict | list) and tree):
    # Texts tell 1 from 1.0 and true, and NaN equals NaN.
    return {(): json.dumps(tree)}
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  return {
    (key, *path): text
    for key, value in items
    for path, text in _flatten(value).items()
  }


def shorten(text: str | None) -> str:
  """Returns a text, such as that of a long list, as it fits on a line."""
  if text is None:
    return "none"
  return (
    text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
  )
