"""Multi-head self-attention with a causal and a padding mask."""

from __future__ import annotations

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from distlm.model.kernels import attend
from distlm.model.linear import Linear


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
  implementation: str = "xla"
  name: str | None = None

  def __call__(self, h: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mixes positions.

    Args:
      h: [B, T, D].
      mask: as `kernels.make_mask` gives it for `implementation`.

    Returns:
      [B, T, D].
    """
    batch_size, num_positions, model_size = h.shape
    width = self.num_heads * self.key_size
    qkv = Linear(3 * width, w_init=self.w_init, name="qkv")(h)
    query, key, value = jnp.moveaxis(
      qkv.reshape(batch_size, num_positions, 3, self.num_heads, self.key_size),
      2,
      0,
    )  # 3 x [B, T, H, K]
    mixed = attend(query, key, value, mask, self.implementation)
    mixed = mixed.reshape(batch_size, num_positions, width)  # [B, T, H*K]
    return Linear(model_size, w_init=self.output_w_init, name="output")(mixed)
