"""Tests that no two dropout masks of a run are the same, nor depend on more.

The masks are seen through the losses of `dropout_probe`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import dropout_probe
import exactness_run
import jax
import numpy as np
import optax
import process_job
import pytest
import tiny_run
from dropout_probe import NUM_PARTS, NUM_STEPS, DropoutProbe, make_model

import distlm
from distlm import parallel
from distlm.data.token_store import TokenStore
from distlm.data.tokenizers import make_tokenizer
from distlm.experiment import LanguageModelExperiment
from distlm.losses import lm_loss_fn
from distlm.model.transformer import build_forward_fn
from distlm.settings import RunConfig
from distlm.types import Batch
from distlm.updater import GradientUpdater

KEYS = np.array([[0, 1], [0, 2]], np.uint32)
PERIOD = np.arange(60, 68)  # Of a text for the experiment.
SAME_ON_ALL_DEVICES = "same_host_same_device"

probe_losses = functools.cache(dropout_probe.probe_losses)


def _num_distinct(losses: np.ndarray) -> int:
  return len(np.unique(losses))


def test_masks_differ_over_steps_devices_and_accumulation_steps() -> None:
  losses = probe_losses()
  assert losses.shape == (NUM_STEPS, 8, NUM_PARTS)
  assert _num_distinct(losses) == losses.size


def test_masks_are_the_same_where_the_keys_are() -> None:
  # So what differs in the test above is nothing but the masks.
  losses = probe_losses(mode=SAME_ON_ALL_DEVICES)
  assert (losses == losses[:, :1]).all()
  assert _num_distinct(losses) == NUM_STEPS * NUM_PARTS
  np.testing.assert_array_equal(dropout_probe.probe_losses(), probe_losses())


def test_masks_differ_over_processes(tmp_path: Path) -> None:
  first, second = process_job.run(
    "dropout_probe.py", 2, 2, tmp_path, tiny_run.environment(None)
  )
  losses = first["losses"]
  np.testing.assert_array_equal(second["losses"], losses)
  assert losses.shape == (NUM_STEPS, 4, NUM_PARTS)
  assert _num_distinct(losses) == losses.size
  # Those of the first process are of the same keys as here.
  np.testing.assert_allclose(losses[:, :2], probe_losses()[:, :2], rtol=1e-6)


def test_without_dropout_all_losses_are_the_same() -> None:
  assert _num_distinct(probe_losses(dropout_rate=0.0)) == 1


def _batch() -> Batch:
  """Returns ragged sequences, of the shape that the probe's have."""
  batch = exactness_run.global_batch(0, "ragged", 1, 1)
  batch = jax.tree.map(lambda x: x[: 8 * NUM_PARTS], batch)
  return parallel.shard(exactness_run.split(batch, 8, NUM_PARTS))


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_an_update_depends_on_the_key_only_with_dropout(
  dropout_rate: float,
) -> None:
  updater = exactness_run.make_updater(make_model(dropout_rate))
  state = parallel.replicate(exactness_run.start_state(updater))
  results = []
  for key in KEYS:
    keys = parallel.shard(np.asarray(jax.random.split(key, 8)))
    result = dropout_probe.update_fn(updater)(state, _batch(), keys)
    results.append(jax.tree.leaves(parallel.fetch(result)))
  is_same = [x.tobytes() == y.tobytes() for x, y in zip(*results, strict=True)]
  assert all(is_same) == (dropout_rate == 0)


def _experiment_settings() -> RunConfig:
  config = distlm.get_base_config()
  config.model.update(num_layers=1, model_size=16, num_heads=2)
  config.model.dropout_rate = 0.5
  config.data.sequence_length = 8
  config.data.global_batch_size = 8 * NUM_PARTS
  config.accumulation_steps = NUM_PARTS
  config.training_steps = NUM_STEPS
  # Too little to change a parameter.
  config.optimizer.update(learning_rate=1e-30, schedule="constant")
  config.optimizer.warmup_steps = 0
  return distlm.parse_config(config)


def _probe(settings: RunConfig, vocab_size: int, init_key: Any) -> DropoutProbe:
  """Returns a probe of the model that an experiment makes of `settings`."""
  length = settings.data.sequence_length
  forward = build_forward_fn(settings.model, vocab_size, length)
  tokens = np.zeros((1, length), np.int32)
  updater = GradientUpdater(
    init_fn=lambda key: forward.init(key, tokens, tokens == 0, False),
    loss_fn=functools.partial(lm_loss_fn, forward.apply),
    optimizer=optax.sgd(0.0),
    schedule=optax.constant_schedule(0.0),
  )
  state = jax.jit(updater.init)(init_key)
  return DropoutProbe(updater, state, np.resize(PERIOD, length + 1))


def test_the_experiment_drops_out_by_the_keys_of_jaxline() -> None:
  settings, (train_step_key, init_key) = _experiment_settings(), KEYS
  # A text of one sequence over and over, and parameters that stay: a step's
  # loss is the mean of what the probe sees of its devices and parts.
  tokenizer = make_tokenizer("byte", [])
  tokens = np.tile(PERIOD, 500).astype(tokenizer.dtype)
  store = TokenStore(tokens, tokenizer, "fingerprint", 1, tokens.size)
  experiment = LanguageModelExperiment("train", init_key, settings, store)
  losses = []
  with contextlib.closing(experiment):
    dropout_probe.run_loop(
      experiment,
      train_step_key,
      [lambda t, step, scalars: losses.append(np.array(scalars["loss"]))],
    )
  probe = _probe(settings, tokenizer.vocab_size, init_key)
  dropout_probe.run_loop(probe, train_step_key)
  means = probe.losses.mean((1, 2))
  np.testing.assert_allclose(np.ravel(losses), means, rtol=1e-6)
  # Which says something only if steps and devices are told apart.
  assert np.ptp(means) > 1e-4
  assert np.ptp(probe.losses.mean(2), axis=1).min() > 1e-4


def _loss_and_gradient(
  updater: GradientUpdater, key: np.ndarray
) -> tuple[float, list[np.ndarray], str]:
  """Returns them, in an update, and the program that computed them."""
  # An optimizer whose state is the last gradient.
  updater = dataclasses.replace(updater, optimizer=optax.trace(decay=0.0))
  state = parallel.replicate(exactness_run.start_state(updater))
  keys = parallel.shard(np.asarray(jax.random.split(key, 8)))
  update = dropout_probe.update_fn(updater)
  program = str(jax.make_jaxpr(update)(state, _batch(), keys))
  after, scalars = parallel.fetch(update(state, _batch(), keys))
  return float(scalars["loss"]), jax.tree.leaves(after.opt_state), program


def _distance(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
  """Returns the largest relative difference, by norm, of any array."""
  distances = [
    np.linalg.norm(x - y) / np.linalg.norm(y)
    for x, y in zip(actual, expected, strict=True)
  ]
  return float(np.max(distances))  # NaN if any is.


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_masks_are_the_same_with_rematerialisation(remat: str) -> None:
  updater, rematerialised = (
    exactness_run.make_updater(dataclasses.replace(make_model(0.5), remat=name))
    for name in ("none", remat)
  )
  loss, gradient, program = _loss_and_gradient(updater, KEYS[0])
  remat_loss, remat_gradient, remat_program = _loss_and_gradient(
    rematerialised, KEYS[0]
  )
  # Without, an activation alone is computed again.
  assert remat_program.count("remat") > program.count("remat")
  assert remat_loss == pytest.approx(loss, rel=1e-6)
  assert _distance(remat_gradient, gradient) < 1e-5
  # By other masks they would be others.
  other_loss, other_gradient, _ = _loss_and_gradient(rematerialised, KEYS[1])
  assert abs(other_loss - loss) > 1e-2
  assert _distance(other_gradient, gradient) > 0.1
