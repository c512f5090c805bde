"""The same model as a textbook writes it in Haiku, on one device.

  python benchmarks/peer_haiku.py SHARED --size=small --steps=80

`hk.MultiHeadAttention`, a module for each layer, `optax.adamw` and a jitted
train step. It takes distlm's initial parameters and batches, which
benchmarks/throughput.py writes, and prints the seconds and the losses of its
steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sizes import (
  CLIP_NORM,
  LEARNING_RATE,
  SIZES,
  WEIGHT_DECAY,
  WIDENING_FACTOR,
  Shared,
  Size,
)


class Transformer(hk.Module):
  """Tokens to logits."""

  def __init__(self, size: Size, vocab_size: int) -> None:
    super().__init__()
    self._size = size
    self._vocab_size = vocab_size

  def __call__(self, inputs: jax.Array) -> jax.Array:  # [B, T] -> [B, T, V]
    size, width = self._size, self._size.model_size
    w_init = hk.initializers.TruncatedNormal(0.02)
    embed = hk.Embed(self._vocab_size, width, name="tokens")
    positions = hk.get_parameter(
      "positions", [size.sequence_length, width], init=w_init
    )
    h = embed(inputs) + positions  # [B, T, D]
    length = inputs.shape[-1]
    mask = jnp.tril(jnp.ones((1, 1, length, length)))  # [B, H, T, T]
    for i in range(size.num_layers):
      attention = hk.MultiHeadAttention(
        num_heads=size.num_heads,
        key_size=width // size.num_heads,
        model_size=width,
        w_init=w_init,
        name=f"attention_{i}",
      )
      normed = _layer_norm(h, f"norm_1_{i}")
      h = h + attention(normed, normed, normed, mask=mask)
      dense = hk.Sequential(
        [
          hk.Linear(WIDENING_FACTOR * width, name=f"widen_{i}"),
          jax.nn.gelu,  # By tanh.
          hk.Linear(width, name=f"output_{i}"),
        ]
      )
      h = h + dense(_layer_norm(h, f"norm_2_{i}"))
    return _layer_norm(h, "final_norm") @ embed.embeddings.T


def _layer_norm(h: jax.Array, name: str) -> jax.Array:
  return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(h)


def map_parameters(shared: Shared, size: Size) -> dict[str, dict[str, Any]]:
  """Returns distlm's initial parameters under the names of this model."""

  def linear(name: str, i: int) -> dict[str, Any]:
    return {key: shared.parameter(f"{name}/{key}", i) for key in ("w", "b")}

  def norm(name: str, i: int | None) -> dict[str, Any]:
    return {
      key: shared.parameter(f"{name}/{key}", i) for key in ("scale", "offset")
    }

  params = {
    "": {"positions": shared.parameter("positions")},
    "tokens": {"embeddings": shared.parameter("tokens/embeddings")},
    "final_norm": norm("final_norm", None),
  }
  for i in range(size.num_layers):
    qkv = linear("attention/qkv", i)
    for index, name in enumerate(("query", "key", "value")):
      params[f"attention_{i}/{name}"] = {
        key: np.split(value, 3, axis=-1)[index] for key, value in qkv.items()
      }
    params |= {
      f"attention_{i}/linear": linear("attention/output", i),
      f"norm_1_{i}": norm("norm_1", i),
      f"norm_2_{i}": norm("norm_2", i),
      f"widen_{i}": linear("dense/widen", i),
      f"output_{i}": linear("dense/output", i),
    }
  return {f"transformer/{k}".rstrip("/"): v for k, v in params.items()}


def main() -> None:
  """Prints {"step_secs": [...], "losses": [...], "version": "..."}."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("shared")
  parser.add_argument("--size", choices=SIZES, required=True)
  parser.add_argument("--steps", type=int, required=True)
  args = parser.parse_args()
  shared, size = Shared(args.shared), SIZES[args.size]
  model = hk.without_apply_rng(
    hk.transform(lambda inputs: Transformer(size, shared.vocab_size)(inputs))
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(CLIP_NORM),
    optax.adamw(
      LEARNING_RATE,
      weight_decay=WEIGHT_DECAY,
      mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
    ),
  )

  @jax.jit
  def train_step(params: Any, opt_state: Any, inputs: Any, targets: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
      logits = model.apply(params, inputs)
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, targets
      ).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = jax.device_put(map_parameters(shared, size))
  opt_state = optimizer.init(params)
  step_secs, losses = [], []
  for inputs, targets in shared.batches(args.steps):
    start = time.perf_counter()
    params, opt_state, loss = train_step(params, opt_state, inputs, targets)
    losses.append(float(jax.block_until_ready(loss)))
    jax.block_until_ready(params)
    step_secs.append(time.perf_counter() - start)
  print(
    json.dumps(
      {"step_secs": step_secs, "losses": losses, "version": hk.__version__}
    )
  )


if __name__ == "__main__":
  main()
