"""A decoder-only Transformer language model."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from distlm.model.attention import SelfAttention
from distlm.model.kernels import make_mask
from distlm.model.linear import Linear
from distlm.settings import ModelConfig
from distlm.types import Array, Params

# GPT-2 initializes every weight with this standard deviation, and those that
# write into the residual stream with 1/sqrt(number of such writes) of it, so
# that the stream's variance does not grow with depth (Radford et al., 2019,
# "Language Models are Unsupervised Multitask Learners", section 2.3).
_WEIGHT_STDDEV = 0.02
_W_INIT = hk.initializers.RandomNormal(_WEIGHT_STDDEV)
_WRITES_PER_LAYER = 2  # attention and dense block
_LAYERS = "layers"

# What of a layer's activations is kept for the backward pass; the rest is
# computed again (Chen et al., 2016, arXiv:1604.06174).
_REMAT_POLICIES = {
  "full": None,  # only its input
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass
class DenseBlock(hk.Module):
  """Two linear layers with a GELU between, at each position by itself."""

  widening_factor: int
  w_init: hk.initializers.Initializer
  output_w_init: hk.initializers.Initializer
  name: str | None = None

  def __call__(self, h: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
    model_size = h.shape[-1]
    h = Linear(
      self.widening_factor * model_size, w_init=self.w_init, name="widen"
    )(h)
    return Linear(
      model_size,
      w_init=self.output_w_init,
      activation=functools.partial(jax.nn.gelu, approximate=True),
      name="output",
    )(h)


@dataclasses.dataclass
class Transformer(hk.Module):
  """Tokens to logits, with layer norm before each block and at the end.

  Dropout follows the embeddings and each block; attention weights have none,
  because fused attention kernels never hold them.

  The parameters of all layers are stacked, [L, ...] each, and one compiled
  layer runs over them: compile time does not grow with depth.

  Attributes:
    config: the sizes.
    vocab_size: V.
    max_length: the longest sequence, in tokens.
    attention: the kernel; see `distlm.model.kernels`.
    mark: an identity, to apply to each parameter of each layer where it is
      used; None: nothing is applied.
  """

  config: ModelConfig
  vocab_size: int
  max_length: int
  attention: str = "xla"
  mark: Callable[[Array], Array] | None = None
  name: str | None = None

  def __call__(
    self, inputs: jax.Array, padding_mask: jax.Array, is_training: bool
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns what the logits are made of, so that not all need be at once.

    Args:
      inputs: [B, T] int32 tokens, T at most `max_length`.
      padding_mask: [B, T] bool, False at padding.
      is_training: whether to drop activations out, which needs a PRNG key.

    Returns:
      [B, T, D] activations, and the function from those of any positions,
      [..., D], to the float32 logits of the token that follows, [..., V].
    """
    num_positions = inputs.shape[-1]
    if num_positions > self.max_length:
      raise ValueError(
        f"inputs of {num_positions} positions: the model has position"
        f" embeddings for {self.max_length}"
      )
    config = self.config
    dropout_rate = config.dropout_rate if is_training else 0.0
    embed = hk.Embed(
      self.vocab_size, config.model_size, w_init=_W_INIT, name="tokens"
    )
    positions = hk.get_parameter(
      "positions", [self.max_length, config.model_size], init=_W_INIT
    )  # [max_length, D]
    h = embed(inputs)  # [B, T, D]
    h = _dropout(h + positions[:num_positions].astype(h.dtype), dropout_rate)
    layer = functools.partial(
      _layer,
      mask=make_mask(padding_mask, self.attention),
      config=config,
      implementation=self.attention,
      dropout_rate=dropout_rate,
    )
    if config.remat != "none":
      layer = hk.remat(layer, policy=_REMAT_POLICIES[config.remat])
    h = hk.layer_stack(config.num_layers, name=_LAYERS)(
      lambda h: _marked(layer, self.mark, h)
    )(h)
    h = _layer_norm(h, "final_norm")
    if config.tie_embeddings:
      unembedding = embed.embeddings  # [V, D]
    else:
      unembedding = hk.get_parameter(
        "unembedding", [self.vocab_size, config.model_size], init=_W_INIT
      )
    return h, functools.partial(_logits, unembedding)


def _marked(
  layer: Callable[[jax.Array], jax.Array],
  mark: Callable[[Array], Array] | None,
  h: jax.Array,
) -> jax.Array:
  if mark is None:
    return layer(h)
  with hk.custom_getter(lambda getter, value, _: getter(mark(value))):
    return layer(h)


def _layer(
  h: jax.Array,
  mask: jax.Array | None,
  config: ModelConfig,
  implementation: str,
  dropout_rate: float,
) -> jax.Array:  # [B, T, D] -> [B, T, D]
  num_writes = _WRITES_PER_LAYER * config.num_layers
  output_w_init = hk.initializers.RandomNormal(
    _WEIGHT_STDDEV / math.sqrt(num_writes)
  )
  attention = SelfAttention(
    num_heads=config.num_heads,
    key_size=config.key_size,
    w_init=_W_INIT,
    output_w_init=output_w_init,
    implementation=implementation,
    name="attention",
  )
  dense = DenseBlock(
    widening_factor=config.widening_factor,
    w_init=_W_INIT,
    output_w_init=output_w_init,
    name="dense",
  )
  h = h + _dropout(attention(_layer_norm(h, "norm_1"), mask), dropout_rate)
  return h + _dropout(dense(_layer_norm(h, "norm_2")), dropout_rate)


def _logits(unembedding: jax.Array, h: jax.Array) -> jax.Array:
  # In float32, however the activations are: softmax over a vocabulary sums
  # more terms than 16 bits can hold apart.
  return jnp.einsum(
    "...d,vd->...v",
    h,
    unembedding.astype(h.dtype),
    preferred_element_type=jnp.float32,
  )


def _layer_norm(h: jax.Array, name: str) -> jax.Array:
  return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(h)


def _dropout(h: jax.Array, rate: float) -> jax.Array:
  return hk.dropout(hk.next_rng_key(), rate, h) if rate else h


def build_forward_fn(
  config: ModelConfig,
  vocab_size: int,
  max_length: int,
  compute_dtype: Any = jnp.float32,
  attention: str = "xla",
) -> hk.Transformed:
  """Returns the language model as a pair of pure functions.

  Args:
    config: the sizes of the model.
    vocab_size: number of tokens of the tokenizer.
    max_length: the longest sequence that the model will see, in tokens.
    compute_dtype: of activations and matrix products. Parameters are float32
      whatever it is, and so are the sums of layer norm, softmax and loss.
    attention: the kernel, as `kernels.choose` gives it.

  Returns:
    `init(key, inputs, padding_mask, is_training) -> params` and
    `apply(params, key, inputs, padding_mask, is_training) -> logits`, of shape
    [B, T, V] and type float32. With `with_logits=False`, `apply` returns what
    `Transformer` does; `mark` is its attribute. Without dropout the key may be
    None.

  >>> import jax, jax.numpy as jnp
  >>> from distlm.settings import ModelConfig
  >>> sizes = ModelConfig(num_layers=1, num_heads=2, model_size=8)
  >>> forward = build_forward_fn(sizes, vocab_size=10, max_length=6)
  >>> tokens, mask = jnp.zeros((3, 6), int), jnp.ones((3, 6), bool)
  >>> params = forward.init(jax.random.key(0), tokens, mask, False)
  >>> forward.apply(params, None, tokens, mask, False).shape
  (3, 6, 10)
  """
  policy = jmp.Policy(jnp.float32, compute_dtype, compute_dtype)
  norm_policy = jmp.Policy(jnp.float32, jnp.float32, compute_dtype)

  def forward(
    inputs: jax.Array,
    padding_mask: jax.Array,
    is_training: bool,
    with_logits: bool = True,
    mark: Callable[[Array], Array] | None = None,
  ) -> Any:
    with (
      # Haiku makes the parameters of a layer in the type of its input.
      hk.mixed_precision.push_policy(hk.Embed, policy),
      hk.mixed_precision.push_policy(Linear, policy),
      hk.mixed_precision.push_policy(hk.LayerNorm, norm_policy),
    ):
      model = Transformer(config, vocab_size, max_length, attention, mark)
      h, to_logits = model(inputs, padding_mask, is_training)
    return to_logits(h) if with_logits else (h, to_logits)

  return hk.transform(forward)


def is_of_layers(module_name: str) -> bool:
  """Returns whether the parameters of a module are those of the layers."""
  return f"/{_LAYERS}/" in module_name


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
  calls: collections.Counter[str] = collections.Counter()

  def look(
    call: Callable[..., Any],
    arguments: Any,
    named: Any,
    context: hk.MethodContext,
  ) -> Any:
    output = call(*arguments, **named)
    if context.method_name != "__call__":
      return output
    name = context.module.module_name
    if is_of_layer := not name.startswith("transformer"):
      name = f"transformer/{_LAYERS}/{name}"  # Haiku begins anew in a stack.
    arrays = [x for x in jax.tree.leaves(output) if isinstance(x, jax.Array)]
    if not all(jnp.isfinite(x).all() for x in arrays):
      in_layer = f" in layer {calls[name]}" if is_of_layer else ""
      found.append(name + in_layer)
    calls[name] += 1
    return output

  # Without jit, a scan calls each layer with values to look at.
  with hk.intercept_methods(look), jax.disable_jit():
    forward.apply(params, key, inputs, padding_mask, True)
  return found[0] if found else ""
