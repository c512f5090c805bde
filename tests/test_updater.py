"""Tests of distlm.updater: exactness over devices and accumulation steps.

The oracle is the NumPy step of `reference`, in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import exactness_run
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from exactness_run import MODEL, PADDINGS, N, T, V, replicate, shard, update_fn

from distlm import parallel
from distlm.losses import lm_loss_fn
from distlm.model.transformer import build_forward_fn
from distlm.optimizer import make_optimizer, make_schedule
from distlm.settings import ModelConfig, OptimizerConfig
from distlm.types import Batch, LossSums, TrainState
from distlm.updater import GradientUpdater

NUM_STEPS = 12
KEY = jax.random.PRNGKey(0)
LAYOUTS = [(r, a) for r in (1, 2, 4, 8) for a in (1, 2, 4)]
OPTIMIZER = dataclasses.replace(
  exactness_run.OPTIMIZER, warmup_steps=0, clip_norm=0.1
)
HYPER = exactness_run.hyper(OPTIMIZER, NUM_STEPS)

every_layout = pytest.mark.parametrize(("num_devices", "num_parts"), LAYOUTS)


def _record() -> optax.GradientTransformation:
  """Keeps the last gradient as its state."""
  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (updates, updates),
  )


@functools.cache
def _updater(
  model: ModelConfig = MODEL, optimizer: OptimizerConfig = OPTIMIZER
) -> GradientUpdater:
  """Returns an updater that keeps the clipped gradient in opt_state[0]."""
  forward = build_forward_fn(model, V, T)
  schedule = make_schedule(optimizer, NUM_STEPS)
  tokens = np.zeros((1, T), np.int32)
  return GradientUpdater(
    init_fn=lambda key: forward.init(key, tokens, tokens == 0, False),
    loss_fn=functools.partial(lm_loss_fn, forward.apply),
    optimizer=optax.chain(_record(), make_optimizer(optimizer, schedule)),
    schedule=schedule,
    clip_norm=optimizer.clip_norm,
  )


@functools.cache
def _noisy_params() -> Any:
  """Returns parameters without the zeros and ones of a fresh model."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: np.asarray(x + rng.normal(0, 0.2, x.shape), np.float32),
    jax.jit(_updater().init_fn)(KEY),
  )


def _start(updater: GradientUpdater, num_devices: int) -> TrainState:
  return replicate(updater.start(_noisy_params()), num_devices)


def _update(updater: GradientUpdater, state: TrainState, batch: Batch) -> Any:
  keys = jax.random.split(KEY, len(batch.mask))
  return update_fn(updater)(state, shard(batch), shard(keys))


def _batch(seed: int, padding: str, num_devices: int, num_parts: int) -> Batch:
  """Returns a global batch as [R, A, B, T]."""
  rng = np.random.default_rng(seed)
  shape = (num_devices, num_parts, -1, T)
  inputs, targets = rng.integers(V, size=(2, N, T), dtype=np.int32)
  mask = np.ones((N, T), bool)
  if padding == "ragged":
    # Sequences of 0 to T tokens, some padded left, some with holes.
    mask = np.arange(T) < rng.integers(T + 1, size=(N, 1))
    mask[1::3] = mask[1::3, ::-1]
    mask &= rng.random(mask.shape) < 0.9
  mask = mask.reshape(shape)
  if padding == "empty device":
    # All of the only device would be all; then it is all parts but the first.
    mask[-1, 1 if num_devices == 1 else 0 :] = False
  if padding == "empty accumulation step":
    mask[:, 0, : None if num_parts > 1 else 1] = False
  return Batch(inputs.reshape(shape), targets.reshape(shape), mask)


def _error(actual: Any, expected: Any) -> float:
  """Returns the largest relative error, by norm, of any array of a tree."""
  if isinstance(expected, dict):  # of parameters
    actual, expected = map(reference.as_float64, (actual, expected))
  actual = jax.tree.map(lambda x: np.asarray(x, np.float64), actual)
  errors = jax.tree.map(
    lambda x, y: np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30),
    actual,
    expected,
  )
  return max(jax.tree.leaves(errors))


@pytest.mark.parametrize("padding", PADDINGS)
@every_layout
def test_first_update_equals_the_reference(
  num_devices: int, num_parts: int, padding: str
) -> None:
  batch = _batch(1, padding, num_devices, num_parts)
  assert batch.mask.any()
  params = reference.as_float64(_noisy_params())
  loss_sum, num_tokens, num_correct, sums = reference.loss_and_grads(
    params, *batch, HYPER.num_heads, HYPER.tie_embeddings
  )
  expected_grads = reference.clip_by_global_norm(
    reference.tree_map(lambda g: g / num_tokens, sums), HYPER.clip_norm
  )
  expected_params, _, expected = reference.train_step(
    params, reference.adamw_init(params), 0, batch, HYPER
  )
  assert expected["grad_norm"] > HYPER.clip_norm

  updater = _updater()
  state, scalars = parallel.fetch(
    _update(updater, _start(updater, num_devices), batch)
  )

  assert state.step == 1
  assert _error(state.opt_state[0], expected_grads) < 1e-6
  assert _error(state.params, expected_params) < 1e-6
  assert scalars["tokens"] == num_tokens
  change = reference.tree_map(np.subtract, expected_params, params)
  assert {name: float(x) for name, x in scalars.items()} == pytest.approx(
    {
      "loss": loss_sum / num_tokens,
      "accuracy": num_correct / num_tokens,
      "grad_norm": expected["grad_norm"],
      "update_norm": reference.global_norm(change),
      "param_norm": reference.global_norm(expected_params),
      "learning_rate": expected["learning_rate"],
      "tokens": num_tokens,
      "skipped_steps": 0,
      "skipped_in_row": 0,
    },
    rel=1e-6,
  )


@functools.cache
def _reference_run() -> tuple[list[float], Any]:
  """Returns losses and gradient norms of ragged steps, and parameters."""
  params = reference.as_float64(_noisy_params())
  state, curve = reference.adamw_init(params), []
  for step in range(NUM_STEPS):
    batch = _batch(step, "ragged", 1, 1)
    params, state, scalars = reference.train_step(
      params, state, step, batch, HYPER
    )
    curve += [scalars["loss"], scalars["grad_norm"]]
  return curve, params


@functools.cache
def _run(num_devices: int, num_parts: int) -> tuple[list[float], Any]:
  """Returns the same by the updater."""
  updater, curve = _updater(), []
  state = _start(updater, num_devices)
  for step in range(NUM_STEPS):
    batch = _batch(step, "ragged", num_devices, num_parts)
    state, scalars = _update(updater, state, batch)
    scalars = parallel.fetch(scalars)
    curve += [scalars["loss"], scalars["grad_norm"]]
  return curve, parallel.fetch(state.params)


@every_layout
def test_losses_and_parameters_of_a_run_agree_over_layouts(
  num_devices: int, num_parts: int
) -> None:
  curve, params = _run(num_devices, num_parts)
  for expected_curve, expected_params in (_reference_run(), _run(1, 1)):
    np.testing.assert_allclose(curve, expected_curve, rtol=1e-5)
    assert _error(params, expected_params) < 1e-5
  assert curve[-2] < 0.95 * curve[0]  # It was training.


def test_a_batch_of_padding_alone_has_a_zero_gradient() -> None:
  updater, batch = _updater(), _batch(0, "none", 4, 2)
  batch = batch._replace(mask=np.zeros_like(batch.mask))
  state, scalars = parallel.fetch(_update(updater, _start(updater, 4), batch))
  assert all((x == 0).all() for x in jax.tree.leaves(state.opt_state[0]))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, scalars)))
  assert scalars["tokens"] == scalars["loss"] == scalars["grad_norm"] == 0


def test_a_gradient_within_the_clip_norm_stays_as_it_is() -> None:
  batch, results = _batch(0, "ragged", 4, 2), []
  for clip_norm in (0.0, 1e3):
    updater = _updater(
      optimizer=dataclasses.replace(OPTIMIZER, clip_norm=clip_norm)
    )
    results.append(
      parallel.fetch(_update(updater, _start(updater, 4), batch)[0])
    )
  jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
  ("num_devices", "num_parts"), [(1, 1), (2, 4), (4, 2), (8, 1), (8, 4)]
)
def test_evaluation_counts_each_token_once(
  num_devices: int, num_parts: int
) -> None:
  evaluate = parallel.pmap(_updater().evaluate)
  params = replicate(_noisy_params(), num_devices)
  for padding in PADDINGS:
    batch = _batch(2, padding, num_devices, num_parts)
    sums = parallel.fetch(evaluate(params, shard(batch)))
    loss, num_tokens, num_correct, _ = reference.loss_and_grads(
      _noisy_params(), *batch, HYPER.num_heads, HYPER.tie_embeddings
    )
    assert sums.num_tokens == num_tokens == batch.mask.sum()
    assert sums.num_correct == num_correct
    assert sums.loss == pytest.approx(loss, rel=1e-6)


def test_without_an_axis_one_device_computes_the_same() -> None:
  updater, batch = _updater(), _batch(3, "ragged", 1, 2)
  pmapped = parallel.fetch(_update(updater, _start(updater, 1), batch))
  update = jax.jit(dataclasses.replace(updater, axis_name=None).update)
  state, batch, key = jax.tree.map(
    lambda x: x[0], (_start(updater, 1), batch, jax.random.split(KEY, 1))
  )
  assert _error(update(state, batch, key), pmapped) < 1e-6


def test_a_faked_pmap_without_jit_computes_the_same() -> None:
  # A bigram model: its parameters are the logits by the token before.
  loss_fn = functools.partial(lm_loss_fn, lambda params, key, x, *_: params[x])
  updater = dataclasses.replace(
    _updater(), loss_fn=loss_fn, init_fn=lambda key: jnp.eye(V)
  )
  key, batch = parallel.replicate(KEY), _batch(3, "ragged", 8, 2)

  def run() -> Any:
    state = parallel.pmap(updater.init)(key)
    update = parallel.pmap(updater.update, donate_argnums=0)
    return parallel.fetch(update(state, batch, key))

  real = run()
  with chex.fake_pmap_and_jit():
    faked = run()
  assert _error(faked, real) < 1e-6


def test_first_step_of_a_fresh_model_is_as_ever() -> None:
  updater, batch = _updater(), _batch(0, "ragged", 1, 1)
  state = parallel.pmap(updater.init)(replicate(KEY, 1))
  scalars = parallel.fetch(_update(updater, state, batch)[1])
  assert float(scalars["loss"]) == pytest.approx(2.3948819637298584, rel=1e-6)
  assert float(scalars["grad_norm"]) == pytest.approx(
    0.8146540522575378, rel=1e-6
  )


@pytest.fixture(scope="module")
def run_with_dropout() -> tuple[list[TrainState], list[int]]:
  """Returns the states of a run on all devices, and its traces until each."""
  updater = _updater(
    dataclasses.replace(MODEL, num_layers=1, dropout_rate=0.25)
  )
  num_traces = 0

  def loss_fn(*arguments: Any) -> LossSums:
    nonlocal num_traces
    num_traces += 1
    return updater.loss_fn(*arguments)

  # No recorder: it does not read its old state, which so is not donated.
  counting = dataclasses.replace(
    updater,
    loss_fn=loss_fn,
    optimizer=make_optimizer(OPTIMIZER, updater.schedule),
  )
  states, traces = [parallel.pmap(counting.init)(replicate(KEY, 8))], [0]
  for step in range(5):
    batch = _batch(step, "ragged", 8, 2)
    states.append(_update(counting, states[-1], batch)[0])
    traces.append(num_traces)
  return states, traces


def test_replicas_are_equal_to_the_bit(run_with_dropout: Any) -> None:
  *_, last = run_with_dropout[0]
  for x in jax.tree.leaves(last):
    rows = [np.asarray(shard.data) for shard in x.addressable_shards]
    assert len(rows) == 8 and rows[0].shape == (1, *x.shape[1:])
    assert len({row.tobytes() for row in rows}) == 1


def test_states_are_donated_whole(run_with_dropout: Any) -> None:
  *old, last = run_with_dropout[0]
  assert all(x.is_deleted() for x in jax.tree.leaves(old))
  assert not any(x.is_deleted() for x in jax.tree.leaves(last))


def test_steps_after_the_first_trace_nothing(run_with_dropout: Any) -> None:
  before, first, *others = run_with_dropout[1]
  assert before < first and set(others) == {first}
