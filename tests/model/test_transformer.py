"""Tests of distlm.model.transformer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from distlm.model.attention import SelfAttention
from distlm.model.transformer import DenseBlock, build_forward_fn
from distlm.settings import ModelConfig

T, D, V = 5, 8, 7
# Padding patterns: none, right, left, holes, and a fully masked row.
MASK = np.array(
  [
    [1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0],
    [0, 0, 1, 1, 1],
    [1, 0, 1, 0, 1],
    [0, 0, 0, 0, 0],
  ],
  bool,
)
B = len(MASK)
KEY = jax.random.PRNGKey(3)


def _config(**settings: Any) -> ModelConfig:
  sizes = {"num_layers": 2, "num_heads": 2, "model_size": D}
  return ModelConfig(**{**sizes, "widening_factor": 2, **settings})


def _parametrize_models(*num_layers: int) -> pytest.MarkDecorator:
  configs = [
    _config(num_layers=layers, tie_embeddings=tied, dropout_rate=rate)
    for layers in num_layers
    for tied in (True, False)
    for rate in (0.0, 0.25)
  ]
  names = [
    f"{c.num_layers}-{'tied' if c.tie_embeddings else 'untied'}"
    f"-{c.dropout_rate}"
    for c in configs
  ]
  return pytest.mark.parametrize("config", configs, ids=names)


def _tokens() -> NDArray[np.int32]:
  return np.random.default_rng(0).integers(V, size=(B, T), dtype=np.int32)


@functools.cache
def _noisy_params(config: ModelConfig) -> Any:
  """Returns parameters with which all that flows at all flows visibly."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32),
    _init_shapes(config, V, T),
  )


def _init_shapes(config: ModelConfig, vocab_size: int, max_length: int) -> Any:
  init = build_forward_fn(config, vocab_size, max_length).init
  tokens = jnp.zeros((1, 1), int)
  return jax.eval_shape(lambda: init(KEY, tokens, tokens == 0, False))


@functools.cache
def _apply_fn(config: ModelConfig) -> Callable[..., Any]:
  """Returns the jitted (params, key, inputs, mask, is_training) -> logits."""
  apply = build_forward_fn(config, V, T).apply
  return jax.jit(apply, static_argnums=4)


def _train_logits(config: ModelConfig, inputs: Any) -> NDArray[np.float32]:
  """Returns logits [B, T, V] with dropout on, always by the same key."""
  logits = _apply_fn(config)(_noisy_params(config), KEY, inputs, MASK, True)
  return np.asarray(logits)


@_parametrize_models(1, 2, 3)
def test_gradients_flow_from_the_unpadded_past_alone(
  config: ModelConfig,
) -> None:
  apply = build_forward_fn(config, V, T).apply

  def logits(shift: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
    def move_lookups(
      call: Any, args: Any, kwargs: Any, context: hk.MethodContext
    ) -> Any:
      y = call(*args, **kwargs)
      if isinstance(context.module, hk.Embed):
        return y + shift if context.method_name == "__call__" else y
      return y

    with hk.intercept_methods(move_lookups):
      return apply(_noisy_params(config), KEY, _tokens(), MASK, True)

  # [B, T, V, B, T, D]: of each logit by each embedding that was looked up.
  jacobian = jax.jit(jax.jacrev(logits))(jnp.zeros((B, T, D)))
  influence = np.abs(np.asarray(jacobian)).max((2, 5))  # [B, T, B, T]
  for b, t, row, s in np.ndindex(influence.shape):
    may_flow = b == row and (s == t or (s < t and MASK[b, s]))
    assert (influence[b, t, row, s] != 0) == may_flow, (b, t, row, s)


@_parametrize_models(3)
def test_a_changed_token_changes_no_bit_elsewhere_but_later(
  config: ModelConfig,
) -> None:
  before = _train_logits(config, _tokens())
  for row, s in np.ndindex(B, T):
    inputs = _tokens()
    inputs[row, s] = (inputs[row, s] + 1) % V
    changed = (_train_logits(config, inputs) != before).any(-1)  # [B, T]
    expected = np.zeros((B, T), bool)
    expected[row, s] = True
    expected[row, s + 1 :] = MASK[row, s]
    np.testing.assert_array_equal(changed, expected)


@_parametrize_models(2)
def test_fully_masked_rows_give_finite_logits_and_gradients(
  config: ModelConfig,
) -> None:
  apply = build_forward_fn(config, V, T).apply

  def sum_of_squares(params: Any) -> jax.Array:
    mask = np.zeros_like(MASK)
    return jnp.sum(apply(params, KEY, _tokens(), mask, True) ** 2)

  found = jax.jit(jax.value_and_grad(sum_of_squares))(_noisy_params(config))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
  config = _config(dropout_rate=0.0)
  params, apply = _noisy_params(config), _apply_fn(config)
  together = apply(params, None, _tokens(), MASK, False)
  for b in range(B):
    row = slice(b, b + 1)
    alone = apply(params, None, _tokens()[row], MASK[row], False)
    np.testing.assert_allclose(alone, together[row], rtol=1e-5, atol=1e-6)


def test_shorter_inputs_get_the_logits_of_a_prefix() -> None:
  config = _config(dropout_rate=0.0)
  params, apply = _noisy_params(config), _apply_fn(config)
  whole = apply(params, None, _tokens(), MASK, False)
  prefix = apply(params, None, _tokens()[:, :3], MASK[:, :3], False)
  np.testing.assert_allclose(prefix, whole[:, :3], rtol=1e-5, atol=1e-6)


def test_inputs_longer_than_the_position_embeddings_are_refused() -> None:
  with pytest.raises(ValueError, match=r"6 positions.*embeddings for 5"):
    _apply_fn(_config())(
      _noisy_params(_config()),
      KEY,
      np.zeros((1, 6), int),
      np.ones((1, 6)),
      True,
    )


@pytest.mark.parametrize("num_layers", [1, 3])
def test_fresh_parameters_have_the_deviations_of_gpt_2(num_layers: int) -> None:
  config = _config(num_layers=num_layers, model_size=64, tie_embeddings=False)
  forward = build_forward_fn(config, 128, 64)
  tokens = np.zeros((1, 2), np.int32)
  params = forward.init(jax.random.PRNGKey(0), tokens, tokens == 0, False)
  num_matrices = 0
  for module, arrays in params.items():
    for name, x in arrays.items():
      assert x.dtype == jnp.float32
      if name in ("b", "offset", "scale"):
        np.testing.assert_array_equal(x, float(name == "scale"))
        continue
      num_matrices += 1
      stddev = 0.02
      if module.endswith("/output"):
        stddev /= math.sqrt(2 * num_layers)
      # Of 4096 numbers or more: the standard error is at most 1.1 percent.
      assert np.std(x) == pytest.approx(stddev, rel=0.05), module
      assert abs(np.mean(x)) < 0.1 * stddev, module
  assert num_matrices == 4 + 3
  matrices = []
  for module, arrays in params.items():
    for name, x in arrays.items():
      if name not in ("b", "offset", "scale"):
        matrices += list(x) if "/layers/" in module else [x]
  assert len(matrices) == 4 * num_layers + 3
  means = {float(np.mean(x)) for x in matrices}
  assert len(means) == len(matrices), "two matrices are from one key"


def test_a_tied_model_has_no_unembedding() -> None:
  tied, untied = (
    _init_shapes(_config(tie_embeddings=tie), V, T) for tie in (True, False)
  )
  unembedding = untied["transformer"].pop("unembedding")
  assert unembedding.shape == (V, D)
  assert tied == untied
  layers = [
    f"transformer/layers/{part}"
    for part in (
      "attention/output",
      "attention/qkv",
      "dense/output",
      "dense/widen",
      "norm_1",
      "norm_2",
    )
  ]
  others = ["", "/final_norm", "/tokens"]
  assert sorted(tied) == sorted([*layers, *(f"transformer{x}" for x in others)])


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_2_small_has_124_million_parameters(tied: bool) -> None:
  config = ModelConfig(12, 12, 768, tie_embeddings=tied)
  params = _init_shapes(config, 50257, 1024)
  num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  # The published model, whose head is tied.
  assert num_params == 124_439_808 + (0 if tied else 50257 * 768)


def test_dropout_is_drawn_from_the_key_and_in_training_only() -> None:
  config = _config(dropout_rate=0.25)
  params, inputs = _noisy_params(config), _tokens()

  def logits(seed: int, is_training: bool = True) -> Any:
    key = jax.random.PRNGKey(seed)
    return _apply_fn(config)(params, key, inputs, MASK, is_training)

  np.testing.assert_array_equal(logits(0), logits(0))
  assert (logits(0) != logits(1)).any(-1).all()
  without = _apply_fn(_config(dropout_rate=0.0))
  for key, is_training in ((None, True), (None, False), (KEY, True)):
    np.testing.assert_array_equal(
      without(params, key, inputs, MASK, is_training), logits(0, False)
    )
  with pytest.raises(ValueError, match="PRNG"):
    _apply_fn(config)(params, None, inputs, MASK, True)


def test_dropout_keeps_the_mean_and_differs_from_place_to_place() -> None:
  config = _config(num_layers=1, model_size=64, dropout_rate=0.25)
  forward = build_forward_fn(config, V, 64)
  tokens = np.zeros((8, 64), np.int32)
  params = forward.init(KEY, tokens, tokens == 0, False)
  table, positions = (
    params["transformer/tokens"]["embeddings"],
    params["transformer"]["positions"],
  )
  stream, written = [], [table[tokens] + positions]  # each [8, 64, 64]

  def watch(
    call: Any, args: Any, kwargs: Any, context: hk.MethodContext
  ) -> Any:
    y = call(*args, **kwargs)
    if context.method_name == "__call__":
      if isinstance(context.module, hk.LayerNorm):
        stream.append(args[0])
      if isinstance(context.module, SelfAttention | DenseBlock):
        written.append(y)
    return y

  with hk.intercept_methods(watch), jax.disable_jit():
    forward.apply(params, KEY, tokens, tokens == 0, True)
  dropped = [stream[0], stream[1] - stream[0], stream[2] - stream[1]]
  is_kept = []
  for before, after in zip(written, dropped, strict=True):
    kept = np.abs(after) > 0.5 * np.abs(before)
    # A difference of two rounded numbers: absolutely, not relatively, exact.
    np.testing.assert_allclose(
      after, np.where(kept, before / 0.75, 0), atol=1e-6
    )
    assert kept.mean() == pytest.approx(0.75, abs=0.01)
    is_kept.append(kept)
  for one, other in ((0, 1), (0, 2), (1, 2)):
    agreement = (is_kept[one] == is_kept[other]).mean()
    assert agreement == pytest.approx(0.75**2 + 0.25**2, abs=0.01)


def test_remat_by_dots_computes_fewer_products_again_than_full_remat() -> None:
  counts = {}
  for remat in ("none", "dots", "full"):
    forward = build_forward_fn(_config(remat=remat), V, T)
    tokens, mask = jnp.zeros((B, T), jnp.int32), jnp.ones((B, T), bool)
    params = forward.init(jax.random.key(0), tokens, mask, False)

    def total(
      params: Any, forward: Any = forward, inputs: Any = (tokens, mask)
    ) -> jax.Array:
      return forward.apply(params, None, *inputs, False).sum()

    program = str(jax.make_jaxpr(jax.grad(total))(params))
    counts[remat] = program.count("dot_general")
  assert counts["none"] < counts["dots"] < counts["full"]
