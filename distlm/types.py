"""Types that travel between modules, and the letters of array shapes.

Every array in distlm carries its shape in a comment, in these letters:

  R  replicas: the devices of this process (the leading axis of pmapped values)
  A  accumulation steps of one update
  B  sequences in one batch: of one device and accumulation step, unless said
  T  positions of a sequence (`data.sequence_length`)
  D  width of the residual stream (`model.model_size`)
  H  attention heads (`model.num_heads`)
  K  width of one head (`model.key_size`)
  V  vocabulary of the tokenizer
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

# Of NumPy on the host and of JAX on devices. Any, because both travel in the
# same types, and because `jax.tree.map` turns one into the other.
Array: TypeAlias = Any
# Nested containers of arrays, as Haiku and Optax make them.
Params: TypeAlias = Any
OptState: TypeAlias = Any


class Batch(NamedTuple):
  """Sequences and the tokens to predict at each of their positions.

  `mask` is False at padding: such a position is neither attended to nor
  scored, and its entries in `inputs` and `targets` are any valid token.
  """

  inputs: Array  # [..., B, T] int32
  targets: Array  # [..., B, T] int32: the token that follows inputs
  mask: Array  # [..., B, T] bool


class LossScale(NamedTuple):
  """What float16 gradients are multiplied by, so that few of them vanish."""

  value: Array  # [] float32
  num_good: Array  # [] int32: applied updates since it last changed


class TrainState(NamedTuple):
  """All that an update changes; donated whole to the next update."""

  step: Array  # [] int32: completed updates, skipped ones included
  params: Params
  opt_state: OptState
  num_skipped: Array  # [] int32: updates whose gradient was not finite
  num_skipped_in_row: Array  # [] int32: the last of them, 0 after a good one
  loss_scale: LossScale | None = None  # of precision=fp16 alone


class LossSums(NamedTuple):
  """Sums over the unmasked target tokens of some sequences.

  They add up over sequences, accumulation steps, devices and batches; means
  are taken once, of the global sums.
  """

  loss: Array  # [] float32: negative log likelihood, in nats
  num_tokens: Array  # [] int32
  num_correct: Array  # [] int32: tokens that the model ranks first
