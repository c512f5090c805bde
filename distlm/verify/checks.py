"""What else must hold: masks of dropout differ, and no data is left out."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxline.experiment import AbstractExperiment

from distlm import parallel
from distlm.config import jaxline_config
from distlm.data import loader as loaders
from distlm.data.token_store import TokenStore, split
from distlm.experiment import LanguageModelExperiment
from distlm.settings import RANDOM_MODES, OptimizerConfig, RunConfig
from distlm.types import Batch
from distlm.verify.runs import keys

_DROPOUT_RATE = 0.5
_NUM_PARTS = 2
_CHUNK_SEQUENCES = 4096
_NUM_EPOCHS = 2  # A batch may span two.


class _OnePlaceLoader(loaders.Loader):
  """Gives one sequence everywhere, and in each step counts it in one place.

  A place is an accumulation step of a device, in the order of the global batch.
  """

  def process_batch(self, step: int) -> Batch:
    layout = self._layout
    ours = (layout.devices_per_process, layout.accumulation_steps)
    places = np.arange(layout.process_count * ours[0] * ours[1]).reshape(
      layout.process_count, *ours
    )  # [processes, R, A]
    batch = super().process_batch(0)  # [R, A, B, T]
    row = self.global_batch(0)
    counts = np.zeros(batch.mask.shape, bool)
    counts[:, :, 0] = (places[layout.process_index] == step % places.size)[
      ..., None
    ]
    return Batch(
      np.broadcast_to(row.inputs[0], batch.inputs.shape),
      np.broadcast_to(row.targets[0], batch.targets.shape),
      counts & row.mask[0],
    )


class _OnePlaceExperiment(LanguageModelExperiment):
  loader_class = _OnePlaceLoader


class _KeyProbe(AbstractExperiment):
  """Notes the keys that JAXline's loop gives to steps."""

  def __init__(self) -> None:
    super().__init__("train")
    self.keys: list[jax.Array] = []

  def step(self, *, rng: jax.Array, **others: Any) -> dict[str, Any]:
    del others
    self.keys.append(rng)
    return {}

  def evaluate(self, **arguments: Any) -> dict[str, Any]:
    del arguments
    return {}


def check_masks(config: RunConfig, store: TokenStore) -> tuple[str, str]:
  """Looks whether dropout differs over devices, processes, parts and steps.

  The same sequence is everywhere, counts in one place at a time, and no update
  changes the parameters: so loss and gradient depend on the place's mask alone.

  Returns:
    What was found, and what is wrong with it, or "".
  """
  if config.random_mode_train != RANDOM_MODES[0]:
    mode = config.random_mode_train
    return f"not compared, since random_mode_train={mode} shares keys", ""
  num_devices = parallel.process_count() * parallel.local_device_count()
  num_places = num_devices * _NUM_PARTS
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, dropout_rate=_DROPOUT_RATE),
    # Its updates are lost in the rounding of the parameters.
    optimizer=OptimizerConfig(
      name="sgd", learning_rate=1e-30, schedule="constant", warmup_steps=0
    ),
    accumulation_steps=_NUM_PARTS,
    training_steps=num_places + 1,
  )
  step_key, init_key = keys(config)
  probe = _KeyProbe()
  state = types.SimpleNamespace(
    global_step=0, train_step_rng=probe.initialize_train_step_rng(step_key)
  )
  loop_config = jaxline_config(
    dataclasses.replace(config, training_steps=2), once=False
  )
  probe.train_loop(loop_config, state, [], None)
  experiment = _OnePlaceExperiment("train", init_key, config, store)
  found: dict[tuple[float, float], str] = {}
  for step in range(num_places + 1):
    is_later = step == num_places  # The first place again, with other keys.
    scalars = experiment.step(
      global_step=parallel.replicate(jnp.int32(step)),
      rng=probe.keys[is_later],
      writer=None,
    )
    device, part = divmod(step % num_places, _NUM_PARTS)
    place = f"device {device} in part {part} of step {1 + is_later}"
    loss, norm = (scalars[name].item() for name in ("loss", "grad_norm"))
    if (loss, norm) in found:
      experiment.close()
      return "", f"{place} has the mask of {found[loss, norm]}"
    found[loss, norm] = place
  experiment.close()
  return f"{len(found)} masks, of all devices, parts and 2 steps, differ", ""


def check_data(config: RunConfig, store: TokenStore) -> tuple[str, str]:
  """Looks whether an epoch, and an evaluation, has every target once.

  Returns:
    What was found, and what is wrong with it, or "".
  """
  loader = loaders.Loader(
    store, config.data, 0, config.random_seed, loaders.Layout()
  )
  train, validation = split(store, config.data.validation_fraction)
  size = config.data.global_batch_size
  num_sequences = -(-(len(train) - 1) // config.data.sequence_length)
  num_steps = -(-_NUM_EPOCHS * num_sequences // size)
  order = np.concatenate([loader.sequences(i) for i in range(num_steps)])
  for epoch in range(_NUM_EPOCHS):
    of_epoch = order[epoch * num_sequences : (epoch + 1) * num_sequences]
    times = np.bincount(of_epoch, minlength=num_sequences)
    # First what is missing: where one is, another may come in its place.
    wrong = [*np.flatnonzero(times == 0), *np.flatnonzero(times > 1)]
    if wrong:
      return "", (
        f"sequence {wrong[0]} comes {times[wrong[0]]} times in epoch"
        f" {epoch + 1}"
      )
  read = _count(
    loader.training_rows(chunk)
    for chunk in np.split(
      np.arange(num_sequences),
      range(_CHUNK_SEQUENCES, num_sequences, _CHUNK_SEQUENCES),
    )
  )
  evaluated = _count(
    loader.evaluation_batch(i) for i in range(loader.num_evaluation_batches)
  )
  for name, found, tokens in (
    ("an epoch", read, train),
    ("an evaluation", evaluated, validation),
  ):
    wanted = (len(tokens) - 1, int(np.sum(tokens[1:], dtype=np.int64)))
    if found != wanted:
      return "", (
        f"{name} has {found[0]} targets that sum to {found[1]}, its text"
        f" {wanted[0]} that sum to {wanted[1]}"
      )
  return (
    f"an epoch has each of {num_sequences:,} sequences and {read[0]:,} targets"
    f" once, an evaluation each of {evaluated[0]:,}"
  ), ""


def _count(batches: Any) -> tuple[int, int]:
  """Returns the number of unmasked targets, and their sum."""
  number = total = 0
  for batch in batches:
    number += int(batch.mask.sum())
    total += int(np.sum(batch.targets, where=batch.mask, dtype=np.int64))
  return number, total
