"""Tests that gradients of layers are summed in the loop that makes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import distlm
from distlm import config as configs
from distlm import language_model, losses, parallel
from distlm.model import transformer
from distlm.types import Batch, Params
from distlm.updater import GradientUpdater

NUM_DEVICES, B, T, V = 8, 2, 8, 16


def _updater(**overrides: str) -> GradientUpdater:
  tree = distlm.get_base_config()
  tree.model.update(num_layers=3, model_size=16, num_heads=2)
  tree.data.sequence_length = T
  tree.optimizer.warmup_steps = 0
  texts = [(k.replace("__", "."), text) for k, text in overrides.items()]
  configs.apply_overrides(tree, texts)
  config = configs.parse_config(tree)
  model = language_model.make_model(config, V)
  updater = language_model.make_updater(config, model)
  # As on accelerators.
  return dataclasses.replace(updater, is_marked=transformer.is_of_layers)


def _batch(num_steps: int) -> Batch:
  rng = np.random.default_rng(0)
  shape = (NUM_DEVICES, num_steps, B, T)
  inputs, targets = rng.integers(V, size=(2, *shape), dtype=np.int32)
  mask = rng.random(shape) < 0.8
  mask[-1] = False  # A device may have no token to count.
  return Batch(inputs, targets, mask)


def _sums_in_loops(jaxpr: Any, is_in_loop: bool = False) -> Iterator[str]:
  """Yields the type of each float array that is summed within a scan."""
  for equation in jaxpr.eqns:
    if is_in_loop and equation.primitive.name.startswith("psum"):
      yield from (str(x.aval.dtype) for x in equation.invars)
    is_scan = equation.primitive.name == "scan"
    for inner in core.jaxprs_in_params(equation.params):
      yield from _sums_in_loops(inner, is_in_loop or is_scan)


def _found(updater: GradientUpdater, num_steps: int = 1) -> list[str]:
  keys = jax.random.split(jax.random.PRNGKey(0), NUM_DEVICES)
  state = jax.eval_shape(parallel.pmap(updater.init), keys)
  update = parallel.pmap(updater.update)
  traced = jax.make_jaxpr(update)(state, _batch(num_steps), keys)
  return list(_sums_in_loops(traced.jaxpr))


@pytest.mark.parametrize("remat", [{}, {"model__remat": "full"}])
def test_each_array_of_a_layer_is_summed_in_the_backward_loop(
  remat: dict[str, str],
) -> None:
  # 2 norms, 4 linear layers, 2 arrays each.
  assert _found(_updater(**remat)) == ["float32"] * 12


def test_they_are_summed_in_the_type_for_it() -> None:
  updater = _updater(optimizer__reduce_dtype="bf16")
  assert _found(updater) == ["bfloat16"] * 12


def test_several_steps_are_summed_once_after_the_last() -> None:
  assert _found(_updater(), num_steps=2) == []


def test_parts_are_scattered_after_the_loop() -> None:
  assert _found(_updater(optimizer__shard_state="true")) == []


def _gradient(updater: GradientUpdater) -> Any:
  """Returns gradient and sums, [R, ...]."""
  same = jnp.tile(jax.random.PRNGKey(0), (NUM_DEVICES, 1))
  params = parallel.pmap(updater.init_fn)(same)
  keys = jax.random.split(jax.random.PRNGKey(1), NUM_DEVICES)
  # As if a loss was scaled.
  factors = np.full(NUM_DEVICES, 2.0**10, np.float32)
  return parallel.pmap(updater.gradient)(params, _batch(1), keys, factors)


@pytest.mark.parametrize(
  "settings",
  [
    {},
    {"model__remat": "dots", "precision": "fp16"},
    {
      **{"model__remat": "full", "model__tie_embeddings": "False"},
      **{"precision": "bf16", "optimizer__reduce_dtype": "bf16"},
      "loss_chunk": "4",
    },
  ],
  ids=lambda settings: "-".join(settings.values()) or "default",
)
def test_they_are_the_sums_after_the_loop_bit_for_bit(
  settings: dict[str, str],
) -> None:
  updater = _updater(model__dropout_rate="0.3", **settings)
  ours = _gradient(updater)
  theirs = _gradient(dataclasses.replace(updater, is_marked=None))
  for leaf, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
    assert jnp.isfinite(leaf).all() and jnp.any(leaf != 0)
    np.testing.assert_array_equal(leaf, other)


def test_a_faked_pmap_without_jit_sums_the_same() -> None:
  # As by --jaxline_disable_pmap_jit, on an accelerator. Op by op the model
  # would take long; these layers are products.
  def apply(params: Params, *given: Any, mark: Any) -> jax.Array:
    _, inputs, *_ = given
    h, _ = jax.lax.scan(
      lambda h, w: (jnp.tanh(h @ mark(w)), None),
      jax.nn.one_hot(inputs, V),
      params["layers"]["w"],
    )
    return h

  updater = dataclasses.replace(
    _updater(),
    init_fn=lambda key: {"layers": {"w": jax.random.normal(key, (2, V, V))}},
    loss_fn=functools.partial(losses.lm_loss_fn, apply),
    is_marked=lambda name: name == "layers",
  )
  real = _gradient(updater)
  with chex.fake_pmap_and_jit():
    faked = _gradient(updater)
  for leaf, other in zip(*map(jax.tree.leaves, (faked, real)), strict=True):
    np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)
