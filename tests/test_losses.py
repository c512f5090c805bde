"""Tests of distlm.losses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distlm.losses import lm_loss_fn
from distlm.types import Batch, LossSums

B, T, V = 3, 5, 7
# A row padded left, a row with holes, and an unmasked row.
MASK = np.array([[0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1]], bool)


def _constant(params: Any, *unused: Any) -> Any:
  """Is a model whose logits are its parameters."""
  del unused
  return params


def _batch_and_logits() -> tuple[Batch, Any]:
  rng = np.random.default_rng(0)
  inputs, targets = rng.integers(V, size=(2, B, T), dtype=np.int32)
  logits = rng.normal(0, 3, (B, T, V)).astype(np.float32)
  # Right at half of the positions, masked ones included.
  right = (np.arange(B * T) % 2).reshape(B, T).astype(bool)
  targets = np.where(right, logits.argmax(-1), targets).astype(np.int32)
  return Batch(inputs, targets, MASK), logits


def _loss(logits: Any, batch: Batch) -> tuple[jax.Array, LossSums]:
  sums = lm_loss_fn(_constant, logits, None, batch, True)
  return sums.loss, sums


def test_sums_equal_plain_numpy() -> None:
  batch, logits = _batch_and_logits()
  losses, hits = [], []
  for b, t in zip(*np.nonzero(MASK), strict=True):
    row, target = logits[b, t].astype(np.float64), batch.targets[b, t]
    losses.append(math.log(sum(math.exp(x) for x in row)) - row[target])
    hits.append(all(row[target] >= row))
  sums = _loss(logits, batch)[1]
  assert sums.num_tokens == len(losses) == MASK.sum()
  assert sums.num_correct == sum(hits) and 0 < sum(hits) < len(hits)
  np.testing.assert_allclose(sums.loss, sum(losses), rtol=1e-6)
  assert [x.dtype for x in sums] == [jnp.float32, jnp.int32, jnp.int32]
  assert all(x.shape == () for x in sums)


def test_the_gradient_is_softmax_minus_one_hot_where_unmasked() -> None:
  batch, logits = _batch_and_logits()
  exps = np.exp(logits.astype(np.float64))
  one_hot = np.arange(V) == batch.targets[..., None]
  expected = (exps / exps.sum(-1, keepdims=True) - one_hot) * MASK[..., None]
  grad, _ = jax.grad(_loss, has_aux=True)(logits, batch)
  np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)
  assert (np.asarray(grad)[~MASK] == 0).all()


@pytest.mark.parametrize("huge", [1e30, -1e30, 3e38])
def test_what_is_masked_has_no_influence(huge: float) -> None:
  batch, logits = _batch_and_logits()
  value_and_grad = jax.value_and_grad(_loss, has_aux=True)
  (_, expected), expected_grad = value_and_grad(logits, batch)
  garbage = logits.copy()
  garbage[~MASK] = 0
  garbage[~MASK, 0] = huge
  targets = np.where(MASK, batch.targets, V - 1 - batch.targets)
  (_, sums), grad = value_and_grad(garbage, batch._replace(targets=targets))
  assert sums == expected
  np.testing.assert_array_equal(grad, expected_grad)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sums_leave_out_what_is_masked_even_if_not_finite(bad: float) -> None:
  batch, logits = _batch_and_logits()
  expected = _loss(logits, batch)[1]
  assert _loss(np.where(MASK[..., None], logits, bad), batch)[1] == expected


def test_a_batch_without_targets_is_zero_with_a_zero_gradient() -> None:
  batch, logits = _batch_and_logits()
  batch = batch._replace(mask=np.zeros_like(MASK))
  (_, sums), grad = jax.value_and_grad(_loss, has_aux=True)(logits, batch)
  assert sums == (0, 0, 0)
  np.testing.assert_array_equal(grad, np.zeros_like(logits))


def test_huge_logits_give_the_loss_without_overflow() -> None:
  batch, logits = _batch_and_logits()
  loss, _ = _loss(1e5 * logits, batch)
  gaps = logits.max(-1) - np.take_along_axis(
    logits, batch.targets[..., None], -1
  ).squeeze(-1)
  np.testing.assert_allclose(loss, 1e5 * gaps[MASK].sum(), rtol=1e-6)


def test_logits_of_half_precision_are_summed_in_single() -> None:
  # In bfloat16 a sum stops at 256 when ones are added to it.
  batch = Batch(*np.zeros((2, 1000, 1), np.int32), np.ones((1000, 1), bool))
  loss, _ = _loss(jnp.zeros((1000, 1, V), jnp.bfloat16), batch)
  np.testing.assert_allclose(loss, 1000 * math.log(V), rtol=1e-5)


def test_the_model_gets_the_inputs_the_mask_and_the_mode() -> None:
  batch, logits = _batch_and_logits()
  seen = []

  def apply_fn(*arguments: Any) -> Any:
    seen.append(arguments)
    return logits

  lm_loss_fn(apply_fn, "params", "key", batch, False)
  [arguments] = seen
  assert arguments == ("params", "key", batch.inputs, batch.mask, False)


@pytest.mark.parametrize("chunk_length", [1, T])
def test_chunks_give_the_same_sums_and_gradient(chunk_length: int) -> None:
  rng = np.random.default_rng(3)
  batch, _ = _batch_and_logits()
  params = {
    "h": rng.normal(size=(*batch.mask.shape, 5)).astype(np.float32),
    "w": rng.normal(size=(V, 5)).astype(np.float32),
  }
  sizes = []

  def apply_fn(params: Any, *arguments: Any, with_logits: bool = True) -> Any:
    def to_logits(h: jax.Array) -> jax.Array:
      sizes.append(h.shape[1])
      return h @ params["w"].T

    h = params["h"]
    return to_logits(h) if with_logits else (h, to_logits)

  def loss(params: Any, chunk_length: int) -> Any:
    sums = lm_loss_fn(apply_fn, params, None, batch, True, chunk_length)
    return sums.loss, sums

  gradient = jax.value_and_grad(loss, has_aux=True)
  (whole, sums), grads = gradient(params, 0)
  sizes.clear()
  (chunked, chunked_sums), chunked_grads = gradient(params, chunk_length)
  assert set(sizes) == {chunk_length}
  assert chunked_sums[1:] == sums[1:]
  np.testing.assert_allclose(chunked, whole, rtol=1e-6)
  for name in params:
    np.testing.assert_allclose(
      chunked_grads[name], grads[name], rtol=1e-5, atol=1e-6
    )
