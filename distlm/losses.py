"""The language-model loss, as sums that add up over devices and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distlm.types import Array, Batch, LossSums, Params

# apply(params, key, inputs, padding_mask, is_training) -> logits [B, T, V], and
# with `with_logits=False` the activations [B, T, D] and what makes logits of
# those of any positions.
ApplyFn = Callable[..., Any]


def lm_loss_fn(
  apply_fn: ApplyFn,
  params: Params,
  key: Array | None,
  batch: Batch,
  is_training: bool,
  chunk_length: int = 0,
  **options: Any,
) -> LossSums:
  """Sums the negative log likelihood of the target tokens of a batch.

  A sum and a count, not a mean: the mean is taken once, over the tokens of all
  devices and accumulation steps, else devices with fewer tokens weigh too much.

  Args:
    apply_fn: the model, `build_forward_fn(...).apply`.
    params: its parameters.
    key: the PRNG key of dropout, or None where there is none.
    batch: [B, T] sequences.
    is_training: whether dropout is on.
    chunk_length: positions of each sequence whose logits are in memory at
      once, a divisor of T; the backward pass computes them again. 0: all.
    **options: further ones of `apply_fn`.

  Returns:
    The sums over the unmasked targets, in nats and tokens.
  """
  inputs = params, key, batch.inputs, batch.mask, is_training
  if not chunk_length:
    return _sum_losses(apply_fn(*inputs, **options), batch.targets, batch.mask)
  h, to_logits = apply_fn(*inputs, with_logits=False, **options)

  @jax.checkpoint
  def add_chunk(
    sums: LossSums, chunk: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[LossSums, None]:
    h, targets, mask = chunk
    of_chunk = _sum_losses(to_logits(h), targets, mask)
    return jax.tree.map(jnp.add, sums, of_chunk), None

  chunks = jax.tree.map(
    lambda x: _split_positions(x, chunk_length), (h, batch.targets, batch.mask)
  )
  zero = LossSums(jnp.zeros([]), jnp.int32(0), jnp.int32(0))
  sums, _ = jax.lax.scan(add_chunk, zero, chunks)
  return sums


def _split_positions(x: jax.Array, length: int) -> jax.Array:
  """Cuts sequences: [B, T, ...] to [T / length, B, length, ...]."""
  num_chunks = x.shape[1] // length
  return jnp.moveaxis(
    x.reshape(x.shape[0], num_chunks, length, *x.shape[2:]), 1, 0
  )


def _sum_losses(
  logits: jax.Array, targets: jax.Array, mask: jax.Array
) -> LossSums:
  logits = logits.astype(jnp.float32)  # [B, T, V]
  target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  losses = jax.nn.logsumexp(logits, axis=-1) - target_logits[..., 0]  # [B, T]
  correct = jnp.argmax(logits, axis=-1) == targets  # [B, T]
  return LossSums(
    loss=jnp.sum(losses, where=mask),
    num_tokens=jnp.sum(mask, dtype=jnp.int32),
    num_correct=jnp.sum(correct, where=mask, dtype=jnp.int32),
  )
