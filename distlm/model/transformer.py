"""A decoder-only Transformer language model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from distlm.model.attention import SelfAttention, attention_mask
from distlm.settings import ModelConfig
from distlm.types import Array, Params

# GPT-2 initializes every weight with this standard deviation, and those that
# write into the residual stream with 1/sqrt(number of such writes) of it, so
# that the stream's variance does not grow with depth (Radford et al., 2019,
# "Language Models are Unsupervised Multitask Learners", section 2.3).
_WEIGHT_STDDEV = 0.02
_WRITES_PER_LAYER = 2  # attention and dense block


@dataclasses.dataclass
class DenseBlock(hk.Module):
  """Two linear layers with a GELU between, at each position by itself."""

  widening_factor: int
  w_init: hk.initializers.Initializer
  output_w_init: hk.initializers.Initializer
  name: str | None = None

  def __call__(self, h: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
    model_size = h.shape[-1]
    h = hk.Linear(
      self.widening_factor * model_size, w_init=self.w_init, name="widen"
    )(h)
    h = jax.nn.gelu(h, approximate=True)
    return hk.Linear(model_size, w_init=self.output_w_init, name="output")(h)


@dataclasses.dataclass
class Transformer(hk.Module):
  """Tokens to logits, with layer norm before each block and at the end.

  Dropout follows the embeddings and each block; attention weights have none,
  because fused attention kernels never hold them.
  """

  config: ModelConfig
  vocab_size: int
  max_length: int
  name: str | None = None

  def __call__(
    self, inputs: jax.Array, padding_mask: jax.Array, is_training: bool
  ) -> jax.Array:
    """Returns the logits of the token that follows each position.

    Args:
      inputs: [B, T] int32 tokens, T at most `max_length`.
      padding_mask: [B, T] bool, False at padding.
      is_training: whether to drop activations out, which needs a PRNG key.

    Returns:
      [B, T, V] logits.
    """
    num_positions = inputs.shape[-1]
    if num_positions > self.max_length:
      raise ValueError(
        f"inputs of {num_positions} positions: the model has position"
        f" embeddings for {self.max_length}"
      )
    config = self.config
    w_init = hk.initializers.RandomNormal(_WEIGHT_STDDEV)
    num_writes = _WRITES_PER_LAYER * config.num_layers
    output_w_init = hk.initializers.RandomNormal(
      _WEIGHT_STDDEV / math.sqrt(num_writes)
    )
    dropout_rate = config.dropout_rate if is_training else 0.0

    embed = hk.Embed(
      self.vocab_size, config.model_size, w_init=w_init, name="tokens"
    )
    positions = hk.get_parameter(
      "positions", [self.max_length, config.model_size], init=w_init
    )  # [max_length, D]
    h = embed(inputs) + positions[:num_positions]  # [B, T, D]
    h = _dropout(h, dropout_rate)
    mask = attention_mask(padding_mask)  # [B, 1, T, T]
    for layer in range(config.num_layers):
      attention = SelfAttention(
        num_heads=config.num_heads,
        key_size=config.key_size,
        w_init=w_init,
        output_w_init=output_w_init,
        name=f"layer_{layer}_attention",
      )
      dense = DenseBlock(
        widening_factor=config.widening_factor,
        w_init=w_init,
        output_w_init=output_w_init,
        name=f"layer_{layer}_dense",
      )
      attended = attention(_layer_norm(h, f"layer_{layer}_norm_1"), mask)
      h = h + _dropout(attended, dropout_rate)
      transformed = dense(_layer_norm(h, f"layer_{layer}_norm_2"))
      h = h + _dropout(transformed, dropout_rate)
    h = _layer_norm(h, "final_norm")
    if config.tie_embeddings:
      return h @ embed.embeddings.T  # [B, T, V]
    return hk.Linear(
      self.vocab_size, with_bias=False, w_init=w_init, name="unembed"
    )(h)  # [B, T, V]


def _layer_norm(h: jax.Array, name: str) -> jax.Array:
  return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(h)


def _dropout(h: jax.Array, rate: float) -> jax.Array:
  return hk.dropout(hk.next_rng_key(), rate, h) if rate else h


def build_forward_fn(
  config: ModelConfig, vocab_size: int, max_length: int
) -> hk.Transformed:
  """Returns the language model as a pair of pure functions.

  Args:
    config: the sizes of the model.
    vocab_size: number of tokens of the tokenizer.
    max_length: the longest sequence that the model will see, in tokens.

  Returns:
    `init(key, inputs, padding_mask, is_training) -> params` and
    `apply(params, key, inputs, padding_mask, is_training) -> logits`, see
    `Transformer.__call__`. Without dropout the key may be None.

  >>> import jax, jax.numpy as jnp
  >>> from distlm.settings import ModelConfig
  >>> sizes = ModelConfig(num_layers=1, num_heads=2, model_size=8, key_size=4,
  ...   widening_factor=4, dropout_rate=0.0, tie_embeddings=True)
  >>> forward = build_forward_fn(sizes, vocab_size=10, max_length=6)
  >>> tokens, mask = jnp.zeros((3, 6), int), jnp.ones((3, 6), bool)
  >>> params = forward.init(jax.random.key(0), tokens, mask, False)
  >>> forward.apply(params, None, tokens, mask, False).shape
  (3, 6, 10)
  """

  def forward(
    inputs: jax.Array, padding_mask: jax.Array, is_training: bool
  ) -> jax.Array:
    model = Transformer(config, vocab_size, max_length)
    return model(inputs, padding_mask, is_training)

  return hk.transform(forward)


def find_nonfinite_scope(
  forward: hk.Transformed,
  params: Params,
  key: Array | None,
  inputs: Array,
  padding_mask: Array,
) -> str:
  """Returns the first module whose output is not finite, or "".

  It runs the model in training mode, operation by operation: slow, and meant
  for the batch that a run has failed on.

  Args:
    forward: made by `build_forward_fn`.
    params: its parameters.
    key: the PRNG key of dropout.
    inputs: [B, T] int32 tokens.
    padding_mask: [B, T] bool.
  """
  found = []

  def look(
    call: Callable[..., Any],
    arguments: Any,
    named: Any,
    context: hk.MethodContext,
  ) -> Any:
    output = call(*arguments, **named)
    is_finite = all(jnp.isfinite(x).all() for x in jax.tree.leaves(output))
    if context.method_name == "__call__" and not is_finite:
      found.append(context.module.module_name)
    return output

  with hk.intercept_methods(look):
    forward.apply(params, key, inputs, padding_mask, True)
  return found[0] if found else ""
