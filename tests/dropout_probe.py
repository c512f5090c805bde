"""Shows the dropout masks of a run, through the losses of one row at a time.

Every row of a batch is the same sequence, and all rows are masked but those of
one device and accumulation step: so the loss of the batch is a function of the
key of its dropout alone. The keys are those that JAXline's own loop makes.

Started as a script, it is one process of a job; see `process_job`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import exactness_run
import jax
import numpy as np
import process_job
from exactness_run import T, V
from jaxline.experiment import AbstractExperiment

import distlm
from distlm import parallel
from distlm.settings import ModelConfig
from distlm.types import Batch, TrainState
from distlm.updater import GradientUpdater

NUM_STEPS, NUM_PARTS = 3, 2
SEQUENCE = np.arange(T + 1) % V


@functools.cache
def update_fn(updater: GradientUpdater) -> Callable[..., Any]:
  # Donates nothing: the state is used again.
  return parallel.pmap(updater.update)


class DropoutProbe(AbstractExperiment):
  """Updates the same state over and over, by one device's one part."""

  def __init__(
    self,
    updater: GradientUpdater,
    state: TrainState,
    sequence: np.ndarray = SEQUENCE,
  ) -> None:
    """Sets the probe up.

    Args:
      updater: with dropout.
      state: of one device, on the host.
      sequence: [T + 1] tokens.
    """
    super().__init__("train", exactness_run.KEY)
    self._updater = updater
    self._state = parallel.replicate(state)
    self._sequence = sequence.astype(np.int32)
    self._losses: list[Any] = []

  @property
  def losses(self) -> np.ndarray:
    """The losses by step, device (of all processes) and part."""
    return np.array(self._losses)

  def step(
    self, *, global_step: jax.Array, rng: jax.Array, writer: Any
  ) -> dict[str, Any]:
    del global_step, writer
    self._losses.append(
      [
        [self._loss(rng, device, part) for part in range(NUM_PARTS)]
        for device in range(jax.device_count())
      ]
    )
    return {}

  def _loss(self, rng: jax.Array, device: int, part: int) -> float:
    num_local = jax.local_device_count()
    length = len(self._sequence) - 1
    mask = np.zeros((num_local, NUM_PARTS, 1, length), bool)
    local = device - jax.process_index() * num_local
    if 0 <= local < num_local:
      mask[local, part] = True
    inputs = np.broadcast_to(self._sequence[:-1], mask.shape)
    targets = np.broadcast_to(self._sequence[1:], mask.shape)
    batch = parallel.shard(Batch(inputs, targets, mask))
    _, scalars = update_fn(self._updater)(self._state, batch, rng)
    return float(parallel.fetch(scalars["loss"]))

  def evaluate(self, **arguments: Any) -> dict[str, Any]:
    raise NotImplementedError


def run_loop(
  experiment: AbstractExperiment,
  train_step_key: Any,
  actions: Sequence[Callable[..., None]] = (),
  mode: str | None = None,
) -> None:
  """Runs JAXline's loop.

  Args:
    experiment: what is trained.
    train_step_key: from which those of all steps follow.
    actions: what JAXline calls after each step.
    mode: a value of `random_mode_train`; None: distlm's default.
  """
  config = distlm.get_base_config()
  config.training_steps = NUM_STEPS
  if mode is not None:
    config.random_mode_train = mode
  state = types.SimpleNamespace(
    global_step=0,
    train_step_rng=parallel.replicate(train_step_key),
  )
  experiment.train_loop(config, state, actions)


def make_model(dropout_rate: float) -> ModelConfig:
  return ModelConfig(1, 2, 16, widening_factor=2, dropout_rate=dropout_rate)


def probe_losses(
  dropout_rate: float = 0.5, mode: str | None = None
) -> np.ndarray:
  """Returns the losses by step, device of any process, and part."""
  updater = exactness_run.make_updater(make_model(dropout_rate))
  probe = DropoutProbe(updater, exactness_run.start_state(updater))
  run_loop(probe, exactness_run.KEY, mode=mode)
  return probe.losses


def _compute(num_local_devices: int) -> dict[str, np.ndarray]:
  del num_local_devices
  return {"losses": probe_losses()}


if __name__ == "__main__":
  process_job.join(_compute)
