"""The language-model loss, as sums that add up over devices and batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from distlm.types import Array, Batch, LossSums, Params

# apply(params, key, inputs, padding_mask, is_training) -> logits [B, T, V]
ApplyFn = Callable[..., jax.Array]


def lm_loss_fn(
  apply_fn: ApplyFn,
  params: Params,
  key: Array | None,
  batch: Batch,
  is_training: bool,
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

  Returns:
    The sums over the unmasked targets, in nats and tokens.
  """
  logits = apply_fn(params, key, batch.inputs, batch.mask, is_training)
  logits = logits.astype(jnp.float32)  # [B, T, V]
  target_logits = jnp.take_along_axis(
    logits, batch.targets[..., None], axis=-1
  )[..., 0]  # [B, T]
  losses = jax.nn.logsumexp(logits, axis=-1) - target_logits  # [B, T]
  correct = jnp.argmax(logits, axis=-1) == batch.targets  # [B, T]
  return LossSums(
    loss=jnp.sum(losses, where=batch.mask),
    num_tokens=jnp.sum(batch.mask, dtype=jnp.int32),
    num_correct=jnp.sum(correct, where=batch.mask, dtype=jnp.int32),
  )
