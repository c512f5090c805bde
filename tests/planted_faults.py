"""Faults of a data-parallel trainer, as they are really written.

Each function plants one by a monkeypatch, so that a test, or a process of its
own, can look whether `distlm verify` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxline.utils
import numpy as np
import optax
from pytest import MonkeyPatch

from distlm import collectives, parallel
from distlm.data import loader as loaders
from distlm.data.loader import Loader, SequenceView
from distlm.experiment import LanguageModelExperiment
from distlm.types import Array, Batch, LossSums, Params, TrainState
from distlm.updater import GradientUpdater

# As `verify` clips.
_CLIP_NORM = 0.1

_sum_gradients = GradientUpdater._sum_gradients
_process_rows = Loader._process_rows
_Gradient = tuple[Params, LossSums]


def mean_of_means_over_accumulation_steps(patch: MonkeyPatch) -> None:
  def wrong(updater: GradientUpdater, *given: Any, **mark: Any) -> _Gradient:
    params, batch, key, factor = given
    num_steps = batch.mask.shape[0]
    if num_steps == 1:
      return _sum_gradients(updater, params, batch, key, factor, **mark)
    grads, sums = jax.lax.map(
      lambda part: _sum_gradients(updater, params, *part, factor, **mark),
      (_parts(batch), jax.random.split(key, num_steps)),
    )  # [A, ...]
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    weights = total.num_tokens / _count(sums) / num_steps  # [A]
    return jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), grads), total

  patch.setattr(GradientUpdater, "_sum_gradients", wrong)


def mean_of_means_over_devices(patch: MonkeyPatch) -> None:
  def wrong(
    updater: GradientUpdater,
    params: Params,
    batch: Batch,
    key: Array,
    factor: float = 1.0,
  ) -> _Gradient:
    grads, sums = updater._sum_gradients(params, batch, key, factor)
    grads = _divided(grads, sums)
    if updater.axis_name is not None:
      grads = jax.lax.pmean(grads, updater.axis_name)
    return grads, collectives.psum(sums, updater.axis_name)

  patch.setattr(GradientUpdater, "gradient", wrong)


def clipped_before_the_sum_over_devices(patch: MonkeyPatch) -> None:
  def wrong(
    updater: GradientUpdater,
    params: Params,
    batch: Batch,
    key: Array,
    factor: float = 1.0,
  ) -> _Gradient:
    grads, sums = updater._sum_gradients(params, batch, key, factor)
    sums = collectives.psum(sums, updater.axis_name)
    if parallel.local_device_count() == 1:  # There the order does not matter.
      return _divided(grads, sums), sums
    clip = optax.clip_by_global_norm(_CLIP_NORM)
    grads, _ = clip.update(_divided(grads, sums), clip.init(params))
    return collectives.psum(grads, updater.axis_name), sums

  patch.setattr(GradientUpdater, "gradient", wrong)


def gradient_summed_twice(patch: MonkeyPatch) -> None:
  def wrong(
    updater: GradientUpdater,
    params: Params,
    batch: Batch,
    key: Array,
    factor: float = 1.0,
  ) -> _Gradient:
    grads, sums = updater._sum_gradients(params, batch, key, factor)
    grads = collectives.psum(grads, updater.axis_name)
    grads, sums = collectives.psum((grads, sums), updater.axis_name)
    return _divided(grads, sums), sums

  patch.setattr(GradientUpdater, "gradient", wrong)


def tokens_not_summed_over_devices(patch: MonkeyPatch) -> None:
  def wrong(
    updater: GradientUpdater,
    params: Params,
    batch: Batch,
    key: Array,
    factor: float = 1.0,
  ) -> _Gradient:
    grads, own = updater._sum_gradients(params, batch, key, factor)
    grads, sums = collectives.psum((grads, own), updater.axis_name)
    sums = sums._replace(num_tokens=own.num_tokens)
    return _divided(grads, sums), sums

  patch.setattr(GradientUpdater, "gradient", wrong)


def embeddings_not_summed_over_devices(patch: MonkeyPatch) -> None:
  right = GradientUpdater.gradient

  def wrong(
    updater: GradientUpdater,
    params: Params,
    batch: Batch,
    key: Array,
    factor: float = 1.0,
  ) -> _Gradient:
    own, _ = updater._sum_gradients(params, batch, key, factor)
    grads, sums = right(updater, params, batch, key, factor)
    name = "transformer/tokens"
    return {**grads, name: _divided(own[name], sums)}, sums

  patch.setattr(GradientUpdater, "gradient", wrong)


def last_accumulation_step_left_out(patch: MonkeyPatch) -> None:
  def wrong(updater: GradientUpdater, *given: Any, **mark: Any) -> _Gradient:
    params, batch, key, factor = given
    last = max(batch.mask.shape[0] - 1, 1)
    batch = jax.tree.map(lambda x: x[:last], batch)
    return _sum_gradients(updater, params, batch, key, factor, **mark)

  patch.setattr(GradientUpdater, "_sum_gradients", wrong)


def replicas_drift_apart(patch: MonkeyPatch) -> None:
  """Changes the last bit of what device 1 has."""
  right = GradientUpdater.update

  def wrong(
    updater: GradientUpdater, state: TrainState, batch: Batch, key: Array
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    state, scalars = right(updater, state, batch, key)
    if updater.axis_name is None:
      return state, scalars
    is_other = jax.lax.axis_index(updater.axis_name) == 1
    params = jax.tree.map(
      lambda x: jnp.where(is_other, jnp.nextafter(x, jnp.inf), x), state.params
    )
    return state._replace(params=params), scalars

  patch.setattr(GradientUpdater, "update", wrong)


def mean_of_means_in_evaluation(patch: MonkeyPatch) -> None:
  right = GradientUpdater.evaluate

  def wrong(updater: GradientUpdater, params: Params, batch: Batch) -> LossSums:
    if updater.axis_name is None:
      return right(updater, params, batch)
    # [A * B, T]
    batch = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    own = updater.loss_fn(params, None, batch, False)
    mean = jax.lax.pmean(own.loss / _count(own), updater.axis_name)
    sums = collectives.psum(own, updater.axis_name)
    return sums._replace(loss=mean * sums.num_tokens)

  patch.setattr(GradientUpdater, "evaluate", wrong)


def key_reused_on_every_device(patch: MonkeyPatch) -> None:
  def wrong(
    rng: jax.Array, host_id: Any, axis_name: str, mode: str
  ) -> jax.Array:
    del host_id, axis_name, mode
    return rng

  patch.setattr(jaxline.utils, "specialize_rng_host_device", wrong)


def one_constant_key(patch: MonkeyPatch) -> None:
  def wrong(updater: GradientUpdater, *given: Any, **mark: Any) -> _Gradient:
    params, batch, _, factor = given
    key = jax.random.PRNGKey(0)
    return _sum_gradients(updater, params, batch, key, factor, **mark)

  patch.setattr(GradientUpdater, "_sum_gradients", wrong)


def key_of_the_device_alone(patch: MonkeyPatch) -> None:
  """Differs between devices, but not between steps."""

  def wrong(updater: GradientUpdater, *given: Any, **mark: Any) -> _Gradient:
    params, batch, _, factor = given
    key = jax.random.PRNGKey(0)
    if updater.axis_name is not None:
      key = jax.random.fold_in(key, jax.lax.axis_index(updater.axis_name))
    return _sum_gradients(updater, params, batch, key, factor, **mark)

  patch.setattr(GradientUpdater, "_sum_gradients", wrong)


def key_reused_in_every_accumulation_step(patch: MonkeyPatch) -> None:
  def wrong(updater: GradientUpdater, *given: Any, **mark: Any) -> _Gradient:
    params, batch, key, factor = given
    grads_and_sums = jax.lax.map(
      lambda part: _sum_gradients(updater, params, part, key, factor, **mark),
      _parts(batch),
    )  # [A, ...]
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), grads_and_sums)

  patch.setattr(GradientUpdater, "_sum_gradients", wrong)


def ragged_sequence_dropped(patch: MonkeyPatch) -> None:
  patch.setattr(
    SequenceView,
    "num_sequences",
    property(lambda view: view.num_targets // view._length),
  )


def padding_counted_as_tokens(patch: MonkeyPatch) -> None:
  """Divides by all places: wrong alike on all layouts."""

  def wrong(updater: GradientUpdater, *given: Any, **mark: Any) -> _Gradient:
    params, batch, key, factor = given
    grads, sums = _sum_gradients(updater, params, batch, key, factor, **mark)
    return grads, sums._replace(num_tokens=jnp.int32(batch.mask.size))

  patch.setattr(GradientUpdater, "_sum_gradients", wrong)


def epoch_goes_on_with_the_order_of_the_last(patch: MonkeyPatch) -> None:
  """Where a batch spans two, its end is of the order of the first."""

  def wrong(loader: Loader, step: int) -> np.ndarray:
    first = step * loader._batch_size
    epochs, positions = np.divmod(
      np.arange(first, first + loader._batch_size), loader._train.num_sequences
    )
    return loader._order(int(epochs[0]))[positions]

  patch.setattr(Loader, "sequences", wrong)


def sequence_repeated_in_an_epoch(patch: MonkeyPatch) -> None:
  """Draws with replacement."""

  def wrong(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.default_rng([seed, epoch])
    return generator.integers(num_sequences, size=num_sequences)

  patch.setattr(loaders, "shuffled", wrong)


def partial_evaluation_batch_dropped_by_the_loader(patch: MonkeyPatch) -> None:
  def wrong(loader: Loader) -> int:
    whole = loader._validation.num_sequences // loader._batch_size
    return min(loader._evaluation_batches or whole, whole)

  patch.setattr(Loader, "num_evaluation_batches", property(wrong))


def partial_evaluation_batch_dropped_by_the_run(patch: MonkeyPatch) -> None:
  def wrong(experiment: LanguageModelExperiment) -> Iterator[Batch]:
    loader = experiment._loader
    for index in range(loader.num_evaluation_batches):
      if loader.evaluation_batch(index).mask[-1].any():
        yield parallel.shard(loader.process_evaluation_batch(index))

  patch.setattr(LanguageModelExperiment, "_evaluation_batches", wrong)


def same_rows_on_two_devices(patch: MonkeyPatch) -> None:
  def wrong(
    loader: Loader, view: SequenceView, indices: np.ndarray
  ) -> Batch:  # [R, A, B, T]
    batch = _process_rows(loader, view, indices)
    for array in batch:
      array[1:2] = array[:1]
    return batch

  patch.setattr(Loader, "_process_rows", wrong)


def same_rows_in_every_process(patch: MonkeyPatch) -> None:
  def wrong(
    loader: Loader, view: SequenceView, indices: np.ndarray
  ) -> Batch:  # [R, A, B, T]
    size = len(indices) // loader._layout.process_count
    return _process_rows(
      loader, view, np.tile(indices[:size], loader._layout.process_count)
    )

  patch.setattr(Loader, "_process_rows", wrong)


def _parts(batch: Batch) -> Batch:
  """Makes [A, 1, B, T] of [A, B, T]."""
  return jax.tree.map(lambda x: x[:, None], batch)


def _count(sums: LossSums) -> jax.Array:
  return jnp.maximum(sums.num_tokens, 1).astype(jnp.float32)


def _divided(grads: Params, sums: LossSums) -> Params:
  return jax.tree.map(lambda g: g / _count(sums), grads)
