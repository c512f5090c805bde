"""Multi-head self-attention with a causal and a padding mask."""

from __future__ import annotations

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp


def attention_mask(padding_mask: jax.Array) -> jax.Array:
  """Returns which positions each position attends to.

  A position attends to itself and to the unpadded positions before it. Itself
  always, padded or not: so no row is empty, softmax stays finite, and a padded
  position does not fall back to an average over all positions, the future ones
  included.

  Args:
    padding_mask: [B, T] bool, False at padding.

  Returns:
    [B, 1, T, T] bool, indexed by sequence, head, query and key.
  """
  num_positions = padding_mask.shape[-1]
  causal = jnp.tri(num_positions, dtype=bool)  # [T, T]
  itself = jnp.eye(num_positions, dtype=bool)  # [T, T]
  mask = causal & (padding_mask[:, None, :] | itself)  # [B, T, T]
  return mask[:, None]


@dataclasses.dataclass
class SelfAttention(hk.Module):
  """Self-attention (Vaswani et al., 2017, arXiv:1706.03762, section 3.2).

  Queries, keys and values come from one matrix multiplication, three times as
  wide: one read of the input instead of three.
  """

  num_heads: int
  key_size: int
  w_init: hk.initializers.Initializer
  output_w_init: hk.initializers.Initializer
  name: str | None = None

  def __call__(self, h: jax.Array, mask: jax.Array) -> jax.Array:
    """Mixes positions.

    Args:
      h: [B, T, D].
      mask: [B, 1, T, T] bool, as `attention_mask` gives it.

    Returns:
      [B, T, D].
    """
    batch_size, num_positions, model_size = h.shape
    width = self.num_heads * self.key_size
    qkv = hk.Linear(3 * width, w_init=self.w_init, name="qkv")(h)
    query, key, value = jnp.moveaxis(
      qkv.reshape(batch_size, num_positions, 3, self.num_heads, self.key_size),
      2,
      0,
    )  # 3 x [B, T, H, K]
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask)
    mixed = mixed.reshape(batch_size, num_positions, width)  # [B, T, H*K]
    return hk.Linear(model_size, w_init=self.output_w_init, name="output")(
      mixed
    )
