"""Makes the language model and its updater from the settings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from distlm import parallel
from distlm.errors import UsageError
from distlm.losses import lm_loss_fn
from distlm.model import kernels
from distlm.model.transformer import build_forward_fn, is_of_layers
from distlm.optimizer import make_optimizer, make_schedule
from distlm.settings import RunConfig
from distlm.updater import GradientUpdater

_MAX_SKIPS_IN_ROW = 10
_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


def make_model(config: RunConfig, num_tokens: int) -> Any:
  """Returns the language model that `config` describes, by Haiku.

  Args:
    config: the checked settings.
    num_tokens: size of the tokenizer's vocabulary, at most the model's.
  """
  vocab_size = config.model.vocab_size or num_tokens
  if vocab_size < num_tokens:
    raise UsageError(
      f"model.vocab_size={vocab_size}: data.tokenizer={config.data.tokenizer}"
      f" has {num_tokens} tokens; set it to 0 or to at least that"
    )
  length, dtype = config.data.sequence_length, _DTYPES[config.precision]
  attention = kernels.choose(
    config.model.attention,
    parallel.platform(),
    dtype,
    length,
    config.model.key_size,
    parallel.compute_capability(),
  )
  return build_forward_fn(config.model, vocab_size, length, dtype, attention)


def make_updater(config: RunConfig, forward: Any) -> GradientUpdater:
  """Returns the updater of a model made by `make_model`."""
  length = config.data.sequence_length
  schedule = make_schedule(config.optimizer, config.training_steps)

  def init_fn(key: jax.Array) -> Any:
    tokens = jnp.zeros((1, length), jnp.int32)  # [B, T]
    return forward.init(key, tokens, jnp.ones_like(tokens, bool), False)

  return GradientUpdater(
    init_fn=init_fn,
    loss_fn=functools.partial(
      lm_loss_fn, forward.apply, chunk_length=config.loss_chunk
    ),
    optimizer=make_optimizer(config.optimizer, schedule),
    schedule=schedule,
    clip_norm=config.optimizer.clip_norm,
    shard_state=config.optimizer.shard_state,
    reduce_dtype=_DTYPES[config.optimizer.reduce_dtype],
    scales_loss=config.precision == "fp16",
    # On one machine's CPUs there is nothing to hide, and it costs some time.
    is_marked=None if parallel.platform() == "cpu" else is_of_layers,
    max_skips_in_row=max_skips_in_row(config),
  )


def max_skips_in_row(config: RunConfig) -> int:
  """Returns how many updates in a row may be left out as not finite."""
  if config.nonfinite == "abort":
    return 0
  return config.nonfinite_limit or _MAX_SKIPS_IN_ROW
