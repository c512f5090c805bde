"""Watches that all replicas of a run stay equal, to the last bit.

Equal replicas that apply equal updates stay equal, unless memory fails, a
device computes wrongly, or a program updates them by what differs between
devices. Nothing in the losses shows it; so the run looks now and then.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distlm import bits, collectives, parallel, snapshot
from distlm.console import warn
from distlm.errors import RunError


def fingerprint(tree: Any) -> jax.Array:
  """Returns two numbers for each leaf; any change of one word changes both.

  They are the sum of a leaf's words, and the sum of the words mixed with their
  places, modulo 2**32. The mixing is the last step of MurmurHash3 (Appleby,
  2011), which maps each word to another one, so that a changed word always
  changes the sum; changes of several words cancel by chance alone.

  Args:
    tree: arrays of any shape and type.

  Returns:
    [leaves, 2] uint32, the leaves in the order of `jax.tree.leaves`.
  """

  def of_leaf(leaf: jax.Array) -> jax.Array:
    words = bits.as_words(leaf).ravel()
    places = jnp.arange(words.size, dtype=jnp.uint32)
    mixed = _mix(words + places * jnp.uint32(0x9E3779B9))
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in (words, mixed)])

  return jnp.stack([of_leaf(leaf) for leaf in jax.tree.leaves(tree)])


def _mix(words: jax.Array) -> jax.Array:
  words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
  words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
  return words ^ (words >> 16)


class _Comparison(NamedTuple):
  """One comparison of all replicas, perhaps not computed yet."""

  step: int
  is_equal: jax.Array  # [R] bool
  fingerprints: jax.Array  # [R, N, leaves, 2], of all N devices
  names: list[str]  # of the leaves


class ReplicaCheck:
  """Compares the replicated attributes of an experiment over all devices.

  Devices compare what they hold; the host only looks at the verdict, one step
  late, so that it never waits. All processes see the same verdict and act
  alike.
  """

  def __init__(
    self,
    state: Any,
    interval: int,
    policy: str,
  ) -> None:
    """Compares nothing yet.

    Args:
      state: JAXline's, with the experiment in `experiment_module`.
      interval: steps between comparisons; 0 for none.
      policy: of a difference: "abort", or "repair", which gives all devices
        the replica that most of them have.
    """
    self._state = state
    self._interval = interval
    self._policy = policy
    self._compare = parallel.pmap(compare)
    self._pending: _Comparison | None = None
    self._equal_at: int | None = None  # the last step found equal

  def update_time(self, t: float, step: int) -> None:
    """Is called by JAXline before the first step."""

  def __call__(self, t: float, step: int, scalars: Mapping[str, Any]) -> None:
    """Is called by JAXline after each step."""
    del t, scalars
    self.settle()
    if self._interval and step % self._interval == 0:
      self._start(step)

  def check_now(self, step: int) -> None:
    """Compares at once, before what must not hold a wrong replica.

    Raises:
      RunError: as `settle` does.
    """
    if self._interval and self._equal_at != step:
      if self._pending is None:
        self._start(step)
      self.settle()

  def settle(self) -> None:
    """Acts on the verdict of the last comparison, waiting for it.

    Raises:
      RunError: if replicas differ and are not to be, or cannot be, repaired.
    """
    pending, self._pending = self._pending, None
    if pending is None:
      return
    if parallel.fetch(pending.is_equal):
      self._equal_at = pending.step
      return
    difference = _describe(pending)
    if self._policy == "abort":
      raise _error(difference)
    if difference.majority is None:
      raise RunError(
        f"{difference.text}; no majority of the devices shows which replica is"
        " right, so there is nothing to repair from"
      )
    experiment = self._state.experiment_module
    for attribute in experiment.CHECKPOINT_ATTRS:
      repaired = parallel.broadcast(
        _replicated(experiment, attribute), difference.majority
      )
      value = jax.tree.map(
        lambda new, old: old if new is None else new,
        repaired,
        getattr(experiment, attribute),
        is_leaf=lambda x: x is None,
      )
      setattr(experiment, attribute, value)
    if hasattr(experiment, "on_repair"):
      experiment.on_repair()
    if parallel.process_index() == 0:
      warn(f"{difference.text}; repaired from the others")

  def _start(self, step: int) -> None:
    experiment = self._state.experiment_module
    tree = {
      name: _replicated(experiment, attribute)
      for attribute, name in experiment.CHECKPOINT_ATTRS.items()
    }
    if jax.tree.leaves(tree):
      self._pending = _comparison(step, tree, self._compare)


def _replicated(experiment: Any, attribute: str) -> Any:
  """Returns an attribute, less what an experiment has parts of on purpose."""
  value = getattr(experiment, attribute)
  without_parts = getattr(experiment, "without_parts", None)
  return value if without_parts is None else without_parts(value)


def check(step: int, tree: Any) -> None:
  """Compares all replicas of a tree [R, ...] at once, on all processes.

  Raises:
    RunError: if they differ.
  """
  comparison = _comparison(step, tree, parallel.pmap(compare))
  if not parallel.fetch(comparison.is_equal):
    raise _error(_describe(comparison))


def _comparison(
  step: int, tree: Any, compare: Callable[..., Any]
) -> _Comparison:
  is_equal, fingerprints = compare(tree)
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  names = [snapshot.dotted(path) for path, _ in leaves]
  return _Comparison(step, is_equal, fingerprints, names)


def compare(tree: Any) -> tuple[jax.Array, jax.Array]:
  """Compares a replicated tree over all devices; to be pmapped.

  Returns:
    [] bool, whether all replicas are equal, and [N, leaves, 2] the fingerprints
    of all N devices.
  """
  fingerprints = collectives.all_gather(fingerprint(tree))  # [N, leaves, 2]
  return jnp.all(fingerprints == fingerprints[0]), fingerprints


def _error(difference: _Difference) -> RunError:
  return RunError(
    f"{difference.text}; look at that device, then the same command goes on"
    " from the newest checkpoint, saved when all were equal"
  )


class _Difference(NamedTuple):
  text: str
  majority: int | None  # the number of a device that has it, of all processes


def _describe(comparison: _Comparison) -> _Difference:
  """Names devices and first leaf that differ from what most devices have."""
  rows = parallel.fetch(comparison.fingerprints)  # [N, leaves, 2]
  replicas = [row.tobytes() for row in rows]
  most_common, count = collections.Counter(replicas).most_common(1)[0]
  right = replicas.index(most_common)
  wrong = [i for i, replica in enumerate(replicas) if replica != most_common]
  leaf = int(np.flatnonzero((rows[wrong] != rows[right]).any(axis=(0, 2)))[0])
  devices = ", ".join(parallel.name_of_device(i) for i in wrong)
  text = (
    f"replicas differ after step {comparison.step}: {devices} from the other"
    f" {count} of {len(rows)}, first in {comparison.names[leaf]}"
  )
  return _Difference(text, right if count > len(rows) / 2 else None)
