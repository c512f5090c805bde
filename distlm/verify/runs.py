"""The same few updates by one device, and by an experiment on any layout."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from distlm import parallel, replicas
from distlm.data import loader as loaders
from distlm.data.token_store import TokenStore
from distlm.experiment import LanguageModelExperiment, make_model, make_updater
from distlm.settings import RunConfig
from distlm.types import Batch, LossSums, Params

MOST_ACCUMULATION_STEPS = 4


class Step(NamedTuple):
  """What an update must give on all layouts."""

  loss: float
  grad_norm: float
  tokens: int
  params: Params  # after it, on the host


class Outcome(NamedTuple):
  """What a layout computed."""

  steps: list[Step]
  evaluation_loss: float
  evaluation_tokens: int
  unequal_at: int = 0  # the first step after which replicas differ

  @property
  def checksum(self) -> str:
    """8 digits that any changed bit of the last parameters changes."""
    prints = np.asarray(jax.jit(replicas.fingerprint)(self.steps[-1].params))
    return hashlib.blake2b(prints.tobytes(), digest_size=4).hexdigest()


class PaddedLoader(loaders.Loader):
  """Masks places so that devices and accumulation steps count unequally."""

  def global_batch(self, step: int) -> Batch:
    return self._padded(super().global_batch(step), step)

  def process_batch(self, step: int) -> Batch:
    return self._padded(super().process_batch(step), step)

  def evaluation_batch(self, index: int) -> Batch:
    return self._padded(super().evaluation_batch(index), index)

  def process_evaluation_batch(self, index: int) -> Batch:
    return self._padded(super().process_evaluation_batch(index), index)

  def _padded(self, batch: Batch, index: int) -> Batch:
    """Masks places of [global B, T], or of this process's [R, A, B, T]."""
    *sizes, length = batch.mask.shape
    count = self._layout.process_count if len(sizes) > 1 else 1
    places = _places(index, count * math.prod(sizes), length)
    ours = np.split(places, count)[self._layout.process_index % count]
    return batch._replace(mask=batch.mask & ours.reshape(batch.mask.shape))

  def _validation_indices(self, index: int) -> NDArray[np.int64]:
    # The last one is the last of the split, which need not be full.
    if index == self.num_evaluation_batches - 1:
      index = -(-self._validation.num_sequences // self._batch_size) - 1
    return super()._validation_indices(index)


def _places(step: int, num_sequences: int, length: int) -> Any:
  """Returns which places of a global batch count, [global B, T] bool.

  In turns: some of each sequence; not those of the last device; not those of
  the first accumulation step of each device, of the layout with most of both;
  all. But for the last, means of means differ from the mean.
  """
  mask = np.ones((num_sequences, length), bool)
  if step % 4 == 0:
    sizes = np.random.default_rng(step).integers(length + 1, size=num_sequences)
    mask = np.arange(length) < sizes[:, None]
    mask[0] = True  # Never none at all.
  elif step % 4 == 1:
    mask[-MOST_ACCUMULATION_STEPS:] = False
  elif step % 4 == 2:
    mask[::MOST_ACCUMULATION_STEPS] = False
  return mask


class _PaddedExperiment(LanguageModelExperiment):
  loader_class = PaddedLoader

  @property
  def state(self) -> Any:
    return self._train_state


def keys(config: RunConfig) -> tuple[jax.Array, jax.Array]:
  """Returns the keys of the steps and of the parameters, as JAXline does."""
  step_key, init_key = jax.random.split(jax.random.PRNGKey(config.random_seed))
  return step_key, init_key


def run_reference(config: RunConfig, store: TokenStore) -> Outcome:
  """Computes all steps on one device, whole batches at once, without pmap."""
  loader = PaddedLoader(
    store,
    config.data,
    config.evaluation.batches,
    config.random_seed,
    loaders.Layout(),
  )
  updater = dataclasses.replace(
    make_updater(config, make_model(config, store.tokenizer.vocab_size)),
    axis_name=None,
  )
  update, evaluate = jax.jit(updater.update), jax.jit(updater.evaluate)
  _, key = keys(config)
  state, steps = jax.jit(updater.init)(key), []
  for step in range(config.training_steps):
    state, scalars = update(state, _one_part(loader.global_batch(step)), key)
    steps.append(_step(scalars, state.params))
  sums = [
    evaluate(state.params, _one_part(loader.evaluation_batch(i)))
    for i in range(loader.num_evaluation_batches)
  ]
  return Outcome(steps, *_mean(sums))


def run_layout(
  config: RunConfig, store: TokenStore, num_devices: int
) -> Outcome:
  """Computes all steps as a run does on so many devices of each process."""
  with (
    contextlib.nullcontext()
    if num_devices == parallel.local_device_count()
    else parallel.first_devices(num_devices)
  ):
    step_key, init_key = keys(config)
    experiment = _PaddedExperiment("train", init_key, config, store)
    rng = parallel.replicate(step_key)
    compare = parallel.pmap(replicas.compare)
    steps, unequal_at = [], 0
    for step in range(config.training_steps):
      global_step = parallel.replicate(jnp.int32(step))
      scalars = experiment.step(global_step=global_step, rng=rng, writer=None)
      experiment.pause()
      params = parallel.fetch(experiment.state.params)
      steps.append(_step(scalars, params))
      is_equal, _ = compare(experiment.state)
      if not unequal_at and not parallel.fetch(is_equal):
        unequal_at = step + 1
    figures = experiment.evaluate(global_step=global_step, rng=rng, writer=None)
    experiment.close()
  return Outcome(steps, figures["loss"], int(figures["tokens"]), unequal_at)


def _one_part(batch: Batch) -> Batch:
  """Makes [A, B, T] of [B, T]."""
  return Batch(*(array[None] for array in batch))


def _step(scalars: dict[str, Any], params: Params) -> Step:
  loss, grad_norm, tokens = (
    np.asarray(scalars[name]).item() for name in ("loss", "grad_norm", "tokens")
  )
  return Step(loss, grad_norm, tokens, jax.tree.map(np.array, params))


def _mean(sums: list[LossSums]) -> tuple[float, int]:
  num_tokens = sum(int(part.num_tokens) for part in sums)
  return sum(float(part.loss) for part in sums) / num_tokens, num_tokens
