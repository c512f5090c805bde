"""The same few updates by one device, and by an experiment on any layout."""

from __future__ import annotations

import contextlib
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
from distlm.experiment import LanguageModelExperiment
from distlm.language_model import make_model, make_updater
from distlm.settings import RunConfig
from distlm.types import Batch, Params

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
  """Computes all steps on one device, whole batches at once, without pmap.

  By formulas of its own: what `losses`, `updater` and `optimizer` got wrong on
  all layouts alike would show as well.
  """
  loader = PaddedLoader(
    store,
    config.data,
    config.evaluation.batches,
    config.random_seed,
    loaders.Layout(),
  )
  model = make_model(config, store.tokenizer.vocab_size)
  learning_rate, clip_norm = (
    config.optimizer.learning_rate,
    config.optimizer.clip_norm,
  )

  def mean_loss(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    logits = model.apply(params, None, batch.inputs, batch.mask, False)
    one_hot = jax.nn.one_hot(batch.targets, logits.shape[-1])
    losses = -jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1)  # [B, T]
    num_tokens = jnp.sum(batch.mask)
    return jnp.sum(losses * batch.mask) / num_tokens, num_tokens

  @jax.jit
  def update(params: Params, batch: Batch) -> tuple[Params, dict[str, Any]]:
    (loss, num_tokens), grads = jax.value_and_grad(mean_loss, has_aux=True)(
      params, batch
    )
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(clip_norm / norm, 1.0) if clip_norm else 1.0
    params = jax.tree.map(
      lambda p, g: p - learning_rate * scale * g, params, grads
    )
    return params, {"loss": loss, "grad_norm": norm, "tokens": num_tokens}

  _, key = keys(config)
  params, steps = jax.jit(make_updater(config, model).init_fn)(key), []
  for step in range(config.training_steps):
    params, scalars = update(params, loader.global_batch(step))
    steps.append(_step(scalars, params))
  evaluate = jax.jit(mean_loss)
  means = [
    [x.item() for x in evaluate(params, loader.evaluation_batch(i))]
    for i in range(loader.num_evaluation_batches)
  ]
  num_tokens = sum(count for _, count in means)
  loss = sum(mean * count for mean, count in means) / num_tokens
  return Outcome(steps, loss, num_tokens)


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
      is_equal, _ = compare(experiment.without_parts(experiment.state))
      if not unequal_at and not parallel.fetch(is_equal):
        unequal_at = step + 1
    figures = experiment.evaluate(global_step=global_step, rng=rng, writer=None)
    experiment.close()
  return Outcome(steps, figures["loss"], int(figures["tokens"]), unequal_at)


def _step(scalars: dict[str, Any], params: Params) -> Step:
  loss, grad_norm, tokens = (
    np.asarray(scalars[name]).item() for name in ("loss", "grad_norm", "tokens")
  )
  return Step(loss, grad_norm, tokens, jax.tree.map(np.array, params))
