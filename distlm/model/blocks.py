"""Attention in plain XLA whose scores stay in a CPU's cache.

FlashAttention (Dao et al., 2022, arXiv:2205.14135): the scores of a few
sequences and a block of queries at a time, and of the keys only those that are
not after the block. Of long sequences the blocks are larger, and no longer in
the cache, since each is compiled by itself. The backward pass computes the
scores again, from the logarithm of each query's sum (Dao, 2023,
arXiv:2307.08691, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 128  # queries, at least
_MAX_BLOCKS = 8
# The scores of a block are read some ten times: this is what the second-level
# cache of a core holds.
_BLOCK_BYTES = 2**21
_MASKED = -1e30  # Not -inf, of which differences are NaN.


@jax.custom_vjp
def attend(
  query: jax.Array, key: jax.Array, value: jax.Array, padding_mask: jax.Array
) -> jax.Array:
  """Returns the mean of the values that each query attends to.

  Args:
    query: [B, H, T, K] float32, scaled by 1/sqrt(K).
    key: [B, H, T, K].
    value: [B, H, T, K].
    padding_mask: [B, T] bool, False at padding. A position attends to itself
      and to the unpadded ones before it.

  Returns:
    [B, H, T, K].
  """
  return _forward(query, key, value, padding_mask)[0]


def _forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  output, log_sums = _map(_attend_some, *inputs)
  return output, (*inputs, output, log_sums)


def _backward(kept: tuple[jax.Array, ...], d_output: jax.Array) -> Any:
  return *_map(_gradients_of_some, *kept, d_output), None


attend.defvjp(_forward, _backward)


def _map(function: Any, *arrays: jax.Array) -> Any:
  """Applies a function to as many sequences at a time as fit into the cache."""
  batch_size, num_heads, num_positions, _ = arrays[0].shape
  of_one = num_heads * _block_size(num_positions) * num_positions * 4
  num = max(
    n
    for n in range(1, batch_size + 1)
    if batch_size % n == 0 and (n == 1 or n * of_one <= _BLOCK_BYTES)
  )
  chunks = [x.reshape(-1, num, *x.shape[1:]) for x in arrays]
  results = jax.lax.map(lambda chunk: function(*chunk), chunks)
  return [x.reshape(-1, *x.shape[2:]) for x in results]


def _blocks(num_positions: int) -> Iterator[slice]:
  size = _block_size(num_positions)
  for start in range(0, num_positions, size):
    yield slice(start, min(start + size, num_positions))


def _block_size(num_positions: int) -> int:
  return min(num_positions, max(_BLOCK, -(-num_positions // _MAX_BLOCKS)))


def _scores(
  query: jax.Array, key: jax.Array, padding_mask: jax.Array, block: slice
) -> jax.Array:
  """Returns those of a block of queries, [B, H, Q, S], S the block's end."""
  end = block.stop
  rows, columns = np.arange(block.start, end)[:, None], np.arange(end)
  mask = (columns < rows) & padding_mask[:, None, None, :end]
  scores = jnp.einsum("bhqk,bhsk->bhqs", query[:, :, block], key[:, :, :end])
  return jnp.where(mask | (columns == rows), scores, _MASKED)


def _attend_some(
  query: jax.Array, key: jax.Array, value: jax.Array, padding_mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the output and the logarithm of the sum of each query's scores."""
  outputs, log_sums = [], []
  for block in _blocks(query.shape[2]):
    scores = _scores(query, key, padding_mask, block)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    values = value[:, :, : block.stop]
    outputs.append(jnp.einsum("bhqs,bhsk->bhqk", weights, values) / total)
    log_sums.append(largest + jnp.log(total))
  return jnp.concatenate(outputs, 2), jnp.concatenate(log_sums, 2)


def _gradients_of_some(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  padding_mask: jax.Array,
  output: jax.Array,
  log_sums: jax.Array,
  d_output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  # Of what all scores of a query have in common: they only move against each
  # other (Dao et al., 2022, appendix B.2).
  shared = (output * d_output).sum(-1, keepdims=True)  # [B, H, T, 1]
  d_query = []
  d_key, d_value = jnp.zeros_like(key), jnp.zeros_like(value)
  for block in _blocks(query.shape[2]):
    end = block.stop
    scores = _scores(query, key, padding_mask, block)
    weights = jnp.exp(scores - log_sums[:, :, block])
    d_block = d_output[:, :, block]
    d_weights = jnp.einsum("bhqk,bhsk->bhqs", d_block, value[:, :, :end])
    d_scores = weights * (d_weights - shared[:, :, block])
    d_query.append(jnp.einsum("bhqs,bhsk->bhqk", d_scores, key[:, :, :end]))
    d_key = d_key.at[:, :, :end].add(
      jnp.einsum("bhqs,bhqk->bhsk", d_scores, query[:, :, block])
    )
    d_value = d_value.at[:, :, :end].add(
      jnp.einsum("bhqs,bhqk->bhsk", weights, d_block)
    )
  return jnp.concatenate(d_query, 2), d_key, d_value
