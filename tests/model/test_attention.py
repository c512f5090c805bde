"""Tests of distlm.model.attention."""

from __future__ import annotations

import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from distlm.model.attention import SelfAttention
from distlm.model.kernels import make_mask

T, D, H, K = 6, 8, 2, 3
# Padding patterns: none, right, left, holes, and a fully masked row.
MASK = np.array(
  [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 1, 1, 1, 1],
    [1, 0, 1, 0, 0, 1],
    [0, 0, 0, 0, 0, 0],
  ],
  bool,
)


def _transformed() -> hk.Transformed:
  init = hk.initializers.RandomNormal(0.5)

  def forward(h: jax.Array, padding_mask: jax.Array) -> jax.Array:
    attention = SelfAttention(
      num_heads=H, key_size=K, w_init=init, output_w_init=init, name="attention"
    )
    return attention(h, make_mask(padding_mask, "xla"))

  return hk.without_apply_rng(hk.transform(forward))


def _random_params_and_input() -> tuple[hk.Params, NDArray[np.float32]]:
  rng = np.random.default_rng(0)
  h = rng.normal(size=(len(MASK), T, D)).astype(np.float32)
  params = _transformed().init(jax.random.PRNGKey(0), h, MASK)
  # Fresh biases are zeros, which would hide where they are added.
  params = jax.tree.map(
    lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), params
  )
  return params, h


def _loop_attention(
  params: hk.Params, h: NDArray[np.float32]
) -> NDArray[np.float64]:
  """Attends for one sequence, head and query at a time, in float64."""

  def linear(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    module = params[f"attention/{name}"]
    w, b = (np.asarray(module[key], np.float64) for key in ("w", "b"))
    return np.array(x @ w + b)

  qkv = linear("qkv", h.astype(np.float64))  # [B, T, 3 * H * K]
  mixed = np.zeros((len(h), T, H * K))
  for b, head, t in np.ndindex(len(h), H, T):
    columns = [
      slice((i * H + head) * K, (i * H + head + 1) * K) for i in range(3)
    ]
    query, keys, values = (qkv[b][:, part] for part in columns)
    seen = [s for s in range(t + 1) if MASK[b, s] or s == t]
    scores = [query[t] @ keys[s] / math.sqrt(K) for s in seen]
    weights = np.exp(scores) / np.exp(scores).sum()
    mixed[b, t, columns[0]] = weights @ values[seen]
  return linear("output", mixed)


def test_mask_is_the_unpadded_past_and_the_position_itself() -> None:
  mask = make_mask(jnp.asarray(MASK), "xla")
  assert mask.shape == (len(MASK), 1, T, T) and mask.dtype == bool
  for b, t, s in np.ndindex(len(MASK), T, T):
    assert mask[b, 0, t, s] == (s == t or (s < t and MASK[b, s])), (b, t, s)


def test_attention_equals_plain_numpy() -> None:
  params, h = _random_params_and_input()
  actual = _transformed().apply(params, h, MASK)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(
    actual, _loop_attention(params, h), rtol=1e-5, atol=1e-6
  )


def test_parameters_are_one_qkv_matrix_and_one_output_matrix() -> None:
  params, _ = _random_params_and_input()
  assert jax.tree.map(jnp.shape, params) == {
    "attention/qkv": {"w": (D, 3 * H * K), "b": (3 * H * K,)},
    "attention/output": {"w": (H * K, D), "b": (D,)},
  }


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_fully_masked_rows_and_sharp_scores_stay_finite(scale: float) -> None:
  params, h = _random_params_and_input()

  def sum_of_squares(params: hk.Params, h: jax.Array) -> jax.Array:
    return jnp.sum(_transformed().apply(params, h, MASK) ** 2)

  value, grads = jax.value_and_grad(sum_of_squares, (0, 1))(params, scale * h)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, grads)))
