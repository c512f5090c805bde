"""Tests of training in 16 bits: what stays float32, and the loss scale."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import exactness_run
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from exactness_run import MODEL, T, V

from distlm import parallel
from distlm.losses import lm_loss_fn
from distlm.model.transformer import build_forward_fn
from distlm.types import Batch, LossScale, TrainState
from distlm.updater import GradientUpdater

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
NUM_STEPS = 12
every_precision = pytest.mark.parametrize("precision", DTYPES)


@functools.cache
def _updater(precision: str) -> GradientUpdater:
  forward = build_forward_fn(MODEL, V, T, DTYPES[precision])
  tokens = np.zeros((1, T), np.int32)
  return dataclasses.replace(
    exactness_run.make_updater(),
    init_fn=lambda key: forward.init(key, tokens, tokens == 0, False),
    loss_fn=functools.partial(lm_loss_fn, forward.apply),
    scales_loss=precision == "fp16",
  )


def _batch(step: int) -> Batch:
  return exactness_run.split(
    exactness_run.global_batch(step, "ragged", 4, 2), 4, 2
  )


def _run(
  updater: GradientUpdater, state: TrainState, num_steps: int
) -> tuple[TrainState, list[dict[str, np.ndarray]]]:
  state, rows = exactness_run.replicate(state, 4), []
  keys = exactness_run.shard(jax.random.split(jax.random.PRNGKey(0), 4))
  for step in range(num_steps):
    state, scalars = exactness_run.update_fn(updater)(
      state, exactness_run.shard(_batch(step)), keys
    )
    rows.append(parallel.fetch(scalars))
  return parallel.fetch(state), rows


def _dtypes(tree: Any) -> set[Any]:
  return {x.dtype for x in jax.tree.leaves(tree)}


@every_precision
def test_parameters_and_optimizer_state_stay_float32(precision: str) -> None:
  updater = _updater(precision)
  state, _ = _run(updater, jax.jit(updater.start)(_params()), 2)
  whole_numbers = {np.dtype(np.int32)}
  assert _dtypes(state.params) == {np.dtype(np.float32)}
  assert _dtypes(state.opt_state) - whole_numbers == {np.dtype(np.float32)}


def _params() -> Any:
  return exactness_run.start_params(exactness_run.make_updater())


@every_precision
def test_products_are_of_16_bits_and_what_adds_up_is_not(
  precision: str,
) -> None:
  dtype = np.dtype(DTYPES[precision])
  forward = build_forward_fn(MODEL, V, T, DTYPES[precision])
  tokens = np.zeros((2, T), np.int32)
  jaxpr = jax.make_jaxpr(
    lambda params: forward.apply(params, None, tokens, tokens == 0, True)
  )(_params())
  inputs: dict[str, set[Any]] = {}
  for equation in _equations(jaxpr.jaxpr):
    names = inputs.setdefault(equation.primitive.name, set())
    names |= {x.aval.dtype for x in equation.invars if x.aval.shape}
  # JAX's attention in float16 does not compile for CPUs; see `kernels.attend`.
  others = {np.dtype(np.float32)} if precision == "fp16" else set()
  assert inputs["dot_general"] == {dtype} | others
  # Of softmax and layer norm.
  for name in ("exp", "reduce_sum", "rsqrt"):
    assert inputs[name] == {np.dtype(np.float32)}, name
  [logits] = jaxpr.out_avals
  assert logits.dtype == np.float32


def _equations(jaxpr: Any) -> Any:
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from _equations(inner)


@every_precision
def test_training_is_close_to_that_in_32_bits(precision: str) -> None:
  wide, updater = exactness_run.make_updater(), _updater(precision)
  _, expected = _run(wide, jax.jit(wide.start)(_params()), NUM_STEPS)
  _, rows = _run(updater, jax.jit(updater.start)(_params()), NUM_STEPS)
  # bfloat16 rounds to 8 bits, float16 to 11.
  tolerance = {"bf16": 2e-2, "fp16": 2e-3}[precision]
  for name in ("loss", "grad_norm"):
    actual, wanted = ([row[name] for row in x] for x in (rows, expected))
    np.testing.assert_allclose(actual, wanted, rtol=tolerance)
    assert actual != wanted


def _with_scale(value: float, num_good: int = 0) -> TrainState:
  updater = _updater("fp16")
  state = jax.jit(updater.start)(_params())
  scale = LossScale(jnp.float32(value), jnp.int32(num_good))
  return state._replace(loss_scale=scale)


def test_the_loss_scale_leaves_no_trace_in_the_gradient() -> None:
  # Powers of two, where nothing overflows: the same but for what vanishes.
  rows = [
    _run(_updater("fp16"), _with_scale(scale), 1)[1][0] for scale in (64, 1024)
  ]
  assert rows[0]["loss"] == rows[1]["loss"]
  np.testing.assert_allclose(
    rows[0]["grad_norm"], rows[1]["grad_norm"], rtol=1e-3
  )


def test_an_overflow_halves_the_scale_and_changes_nothing_else() -> None:
  start = _with_scale(2.0**30)
  state, rows = _run(_updater("fp16"), start, 2)
  assert [row["loss_scale"] for row in rows] == [2.0**30, 2.0**29]
  assert not any(np.isfinite(row["grad_norm"]) for row in rows)
  assert all(np.isfinite(row["loss"]) for row in rows)
  assert (state.loss_scale.value, state.loss_scale.num_good) == (2.0**28, 0)
  # Skipped and counted, but nothing that ends a run.
  assert (state.num_skipped, state.num_skipped_in_row) == (2, 0)
  for new, old in zip(
    jax.tree.leaves((state.params, state.opt_state)),
    jax.tree.leaves((start.params, start.opt_state)),
    strict=True,
  ):
    np.testing.assert_array_equal(new, old)


def test_the_scale_comes_down_until_training_goes_on() -> None:
  state, rows = _run(_updater("fp16"), _with_scale(2.0**30), 24)
  assert 1 < state.num_skipped < 20
  assert rows[-1]["skipped_in_row"] == 0 and np.isfinite(rows[-1]["grad_norm"])
  assert rows[-1]["loss"] < rows[0]["loss"]


def test_many_good_updates_double_the_scale() -> None:
  state, _ = _run(_updater("fp16"), _with_scale(64, num_good=1999), 1)
  assert (state.loss_scale.value, state.loss_scale.num_good) == (128, 0)


def test_at_the_least_scale_what_is_not_finite_counts_in_a_row() -> None:
  start = _with_scale(1.0)
  params = jax.tree.map(lambda x: x * np.float32(1e30), start.params)
  state, rows = _run(_updater("fp16"), start._replace(params=params), 2)
  assert [row["skipped_in_row"] for row in rows] == [1, 2]
  assert state.loss_scale.value == 1
