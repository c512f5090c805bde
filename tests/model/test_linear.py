from __future__ import annotations

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distlm.model import linear
from distlm.model.linear import Linear

W_INIT = hk.initializers.RandomNormal(0.3)


def _value_and_grads(module: Any, h: jax.Array) -> Any:
  def forward(h: jax.Array) -> jax.Array:
    return module(5, w_init=W_INIT, name="linear")(h)

  pure = hk.without_apply_rng(hk.transform(forward))
  params = pure.init(jax.random.key(1), h)
  # What is linear in the bias would hide its value.
  params["linear"]["b"] += 0.1
  params = jax.tree.map(lambda x: x.astype(h.dtype), params)

  def loss(params: Any, h: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(pure.apply(params, h).astype(jnp.float32)))

  value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, h)
  return pure.apply(params, h), value, grads


@pytest.mark.parametrize("shape", [(3,), (7, 3), (2, 4, 3), (0, 3)])
def test_it_equals_that_of_haiku(shape: tuple[int, ...]) -> None:
  h = jax.random.normal(jax.random.key(0), shape)
  actual, expected = (_value_and_grads(x, h) for x in (Linear, hk.Linear))
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(actual),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=str(path))


def test_its_activation_is_of_the_input() -> None:
  h = jax.random.normal(jax.random.key(0), (7, 3))
  own = functools.partial(Linear, activation=jnp.tanh)

  def reference(*args: Any, **kwargs: Any) -> Any:
    return lambda h: hk.Linear(*args, **kwargs)(jnp.tanh(h))

  actual, expected = (_value_and_grads(x, h) for x in (own, reference))
  for x, y in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_only_what_the_activation_is_given_is_kept() -> None:
  layer = hk.without_apply_rng(
    hk.transform(lambda h: Linear(5, W_INIT, activation=jnp.tanh)(h))
  )
  h = jax.random.normal(jax.random.key(0), (7, 3))
  params = layer.init(jax.random.key(1), h)
  _, vjp = jax.vjp(layer.apply, params, h)
  wide = [x for x in jax.tree.leaves(vjp) if x.shape == h.shape]
  assert wide
  for x in wide:
    np.testing.assert_array_equal(x, h)


def test_in_16_bits_it_sums_in_32() -> None:
  # 2,048 ones are as far as bfloat16 can count in ones.
  ones = jnp.ones((4096, 1), jnp.bfloat16)
  _, vjp = jax.vjp(
    lambda w, b: linear._affine(ones, w, b),
    jnp.zeros((1, 1), jnp.bfloat16),
    jnp.zeros(1, jnp.bfloat16),
  )
  for grad in vjp(ones):
    assert grad.dtype == jnp.bfloat16 and grad.item() == 4096
