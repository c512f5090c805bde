"""Arrays of any type as the words that they are in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def as_words(leaf: jax.Array) -> jax.Array:
  """Returns the bits of an array, as uint32."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(leaf)
  if jnp.iscomplexobj(leaf):
    return as_words(jnp.stack([leaf.real, leaf.imag]))
  if leaf.dtype.kind == "b":
    return leaf.astype(jnp.uint32)
  width = min(leaf.dtype.itemsize, 4)
  words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * width}")
  return words.astype(jnp.uint32)


def from_words(words: jax.Array, like: jax.Array) -> jax.Array:
  """Undoes `as_words` of an array of the type of `like`.

  XLA makes 0 of a -0 that is part of a complex number.
  """
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
  if jnp.iscomplexobj(like):
    return jax.lax.complex(*(from_words(part, like.real) for part in words))
  if like.dtype.kind == "b":
    return words.astype(bool)
  width = min(like.dtype.itemsize, 4)
  words = words.astype(f"uint{8 * width}")
  return jax.lax.bitcast_convert_type(words, like.dtype)
