"""Tests of distlm.sharding: parts of an update make the whole update.

The oracle of training is Optax alone, on one device and the summed gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exactness_run import replicate, shard

from distlm import collectives, parallel
from distlm.sharding import (
  Split,
  Whole,
  gather_state,
  make_sharding,
  replicated_state,
  split_state,
)

AXIS = collectives.AXIS
NUM_STEPS = 20
# Scalars, one element, sizes that 2, 4 and 8 divide, and that they do not.
SHAPES: dict[str, tuple[int, ...]] = {
  "scale": (),
  "one": (1,),
  "bias": (7,),
  "stacked_bias": (2, 8),
  "w": (5, 3),
  "even_w": (4, 2, 2),
}


def decay_mask(params: Any) -> dict[str, bool]:
  """By name: the rank of parts is 1, and stacked biases are matrices."""
  return {name: name.endswith("w") for name in params}


OPTIMIZERS = {
  "adamw": optax.adamw(0.01, eps=1e-3, weight_decay=0.1, mask=decay_mask),
  "adam": optax.adam(optax.linear_schedule(0.0, 0.01, 10), eps=1e-3),
  "lion": optax.lion(0.01, weight_decay=0.1, mask=decay_mask),
  "sgd": optax.chain(
    optax.add_decayed_weights(0.1, decay_mask), optax.sgd(0.01, momentum=0.9)
  ),
}

every_count = pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def _draw(seed: int, *axes: int) -> dict[str, np.ndarray]:
  """Returns values in (-2, -1) and (1, 2): no relative error is of a zero."""
  rng = np.random.default_rng(seed)
  values = {}
  for name, shape in SHAPES.items():
    signs = rng.choice([-1.0, 1.0], (*axes, *shape))
    magnitudes = rng.uniform(1, 2, (*axes, *shape))
    values[name] = np.asarray(signs * magnitudes, np.float32)
  return values


def _gradient(params: Any, scale: jax.Array) -> Any:
  """Differs between devices, by their scale, and between elements."""
  return jax.tree.map(lambda x: scale * (x - 2.0) + jnp.sin(3.0 * x), params)


def _train(
  sharding: Whole, name: str, num_devices: int, clip_norm: float = 3.0
) -> tuple[Any, Any]:
  """Returns params and optimizer state [R, ...] after `NUM_STEPS`."""
  optimizer = OPTIMIZERS[name]

  def start(params: Any) -> Any:
    return params, optimizer.init(sharding.own(params))

  def update(params: Any, state: Any, scale: jax.Array) -> Any:
    grads = sharding.sum_gradients(_gradient(params, scale))
    norm = jnp.sqrt(sharding.total(optax.tree.norm(grads, squared=True)))
    factor = jnp.minimum(1.0, clip_norm / norm)
    grads = jax.tree.map(lambda g: factor * g, grads)
    updates, state = optimizer.update(grads, state, sharding.own(params))
    updates = sharding.gather(updates, params)
    return optax.apply_updates(params, updates), state

  params, state = parallel.pmap(start)(replicate(_draw(0), num_devices))
  scales = shard(np.arange(1, num_devices + 1, dtype=np.float32))
  run = parallel.pmap(update)
  for _ in range(NUM_STEPS):
    params, state = run(params, state, scales)
  return params, state


@functools.cache
def _trained_split(name: str, num_devices: int) -> tuple[Any, Any]:
  return _train(Split(AXIS), name, num_devices)


def _reference(name: str, num_devices: int) -> tuple[Any, Any]:
  optimizer, params = OPTIMIZERS[name], _draw(0)
  state = optimizer.init(params)

  @jax.jit
  def update(params: Any, state: Any) -> Any:
    scales = jnp.arange(1.0, num_devices + 1)
    grads = jax.vmap(_gradient, (None, 0))(params, scales)
    grads = jax.tree.map(lambda g: g.sum(0), grads)
    clip = optax.clip_by_global_norm(3.0)
    grads, _ = clip.update(grads, clip.init(params))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(NUM_STEPS):
    params, state = update(params, state)
  return params, state


def _assert_near(actual: Any, expected: Any) -> None:
  """Compares each array, by norm."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape
    assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y)


def _bits(tree: Any) -> Any:
  return jax.tree.map(
    lambda x: (x.shape, x.dtype, x.tobytes()), jax.tree.map(np.asarray, tree)
  )


def _rows(tree: Any) -> list[Any]:
  """Returns what each device holds of [R, ...] arrays."""
  host = jax.tree.map(np.asarray, tree)
  num_devices = len(jax.tree.leaves(host)[0])
  return [jax.tree.map(lambda x, r=r: x[r], host) for r in range(num_devices)]


def _map_state(fn: Callable[..., Any], name: str, *args: Any) -> Any:
  """Runs one of the functions of sharded states on all devices."""
  return parallel.pmap(functools.partial(fn, Split(AXIS), OPTIMIZERS[name]))(
    *args
  )


def _canonical(name: str, num_devices: int) -> Any:
  params, state = _trained_split(name, num_devices)
  return _map_state(gather_state, name, state, params)


@every_count
def test_parts_are_rows_of_the_padded_array_and_gather_undoes_them(
  num_devices: int,
) -> None:
  tree = _draw(1)
  special = [-0.0, np.nan, np.inf, 1e-40, -np.inf]
  tree["bias"][:5] = tree["w"].ravel()[-5:] = special
  tree["one"][0] = -0.0
  sharding = Split(AXIS)
  parts = parallel.pmap(sharding.own)(replicate(tree, num_devices))
  for name, x in tree.items():
    size = -(-x.size // num_devices)
    assert parts[name].shape == (num_devices, size)
    padded = np.zeros(num_devices * size, np.float32)
    padded[: x.size] = x.ravel()
    assert np.asarray(parts[name]).tobytes() == padded.tobytes(), name
  shapes = jax.eval_shape(lambda: tree)
  wholes = parallel.pmap(lambda p: sharding.gather(p, shapes))(parts)
  for row in _rows(wholes):
    assert _bits(row) == _bits(tree)


@every_count
def test_the_gathered_sum_of_gradients_is_that_of_psum(
  num_devices: int,
) -> None:
  grads = _draw(2, num_devices)
  split, whole = Split(AXIS), Whole(AXIS)

  def sums(grads: Any) -> Any:
    return split.gather(split.sum_gradients(grads), grads), whole.gather(
      whole.sum_gradients(grads), grads
    )

  of_split, of_whole = parallel.pmap(sums)(shard(grads))
  expected = jax.tree.map(lambda x: x.astype(np.float64).sum(0), grads)
  for sum_of_all in (of_split, of_whole):
    for row in _rows(sum_of_all):
      _assert_near(row, expected)


def test_the_total_of_parts_is_that_of_the_whole() -> None:
  tree = _draw(3)

  def norms(tree: Any) -> Any:
    return [
      sharding.total(optax.tree.norm(sharding.own(tree), squared=True))
      for sharding in (Split(AXIS), Whole(AXIS))
    ]

  expected = sum(np.sum(x.astype(np.float64) ** 2) for x in tree.values())
  for norm in parallel.pmap(norms)(replicate(tree, 8)):
    np.testing.assert_allclose(np.asarray(norm), expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("name", "num_devices"),
  [*((name, 8) for name in OPTIMIZERS), ("adamw", 1), ("adamw", 4)],
)
def test_steps_and_state_are_those_of_one_device(
  name: str, num_devices: int
) -> None:
  expected, expected_state = _reference(name, num_devices)
  split, _ = _trained_split(name, num_devices)
  whole, whole_state = _train(Whole(AXIS), name, num_devices)
  for params in (split, whole):
    first, *others = _rows(params)
    _assert_near(first, expected)
    assert all(_bits(row) == _bits(first) for row in others)
  _assert_near(parallel.fetch(whole_state), expected_state)
  canonical = _canonical(name, num_devices)
  _assert_near(parallel.fetch(canonical), expected_state)
  assert jax.tree.structure(canonical) == jax.tree.structure(expected_state)


@every_optimizer
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_state_of_8_devices_comes_back_from_any_other_number(
  name: str, num_devices: int
) -> None:
  canonical = parallel.fetch(_canonical(name, 8))
  params = replicate(_draw(0), num_devices)
  parts = _map_state(split_state, name, replicate(canonical, num_devices))
  back = _map_state(gather_state, name, parts, params)
  for row in _rows(back):
    assert _bits(row) == _bits(canonical)
  again = _map_state(split_state, name, replicate(canonical, 8))
  assert _bits(again) == _bits(_trained_split(name, 8)[1])


@every_optimizer
def test_without_sharding_the_state_stays_as_it_is(name: str) -> None:
  state = OPTIMIZERS[name].init(_draw(0))
  whole = Whole(AXIS)
  for same in (
    gather_state(whole, OPTIMIZERS[name], state, _draw(0)),
    split_state(whole, OPTIMIZERS[name], state),
    replicated_state(whole, OPTIMIZERS[name], state),
  ):
    assert _bits(same) == _bits(state)


@every_optimizer
def test_what_is_replicated_of_a_sharded_state_are_its_counts(
  name: str,
) -> None:
  _, state = _trained_split(name, 8)
  left = replicated_state(Split(AXIS), OPTIMIZERS[name], state)
  counts = [x for x in jax.tree.leaves(state) if x.dtype == np.int32]
  assert _bits(jax.tree.leaves(left)) == _bits(counts)
  assert len(counts) == {"adamw": 1, "adam": 2, "lion": 1, "sgd": 0}[name]


@every_count
def test_a_device_keeps_its_share_of_the_state(num_devices: int) -> None:
  start = parallel.pmap(lambda x: OPTIMIZERS["adamw"].init(Split(AXIS).own(x)))
  state = start(replicate(_draw(0), num_devices))
  of_device = dict.fromkeys(jax.local_devices()[:num_devices], 0)
  for leaf in jax.tree.leaves(state):
    for piece in leaf.addressable_shards:
      of_device[piece.device] += piece.data.nbytes
  sizes = [np.prod(shape, dtype=int) for shape in SHAPES.values()]
  part_sizes = [-(-size // num_devices) for size in sizes]
  count, moments = 4, 2 * 4 * sum(part_sizes)
  assert set(of_device.values()) == {count + moments}
  # With no padding but that of six arrays.
  assert sum(part_sizes) <= sum(sizes) / num_devices + len(sizes)


@pytest.mark.parametrize("shard_state", [True, False])
def test_gradients_are_summed_in_the_dtype_asked_for(
  shard_state: bool,
) -> None:
  num_devices, grads = 4, _draw(4, 4)
  sharding = make_sharding(AXIS, shard_state, jnp.bfloat16)
  assert isinstance(sharding, Split) == shard_state

  def gathered_sum(grads: Any) -> Any:
    return sharding.gather(sharding.sum_gradients(grads), grads)

  actual = parallel.fetch(parallel.pmap(gathered_sum)(shard(grads)))
  has_rounded = False
  for name, x in grads.items():
    x = x.astype(np.float64)
    error = np.abs(actual[name].astype(np.float64) - x.sum(0))
    assert actual[name].dtype == np.float32
    # Half a unit of 8 bits, for each summand and each sum but the last.
    bound = num_devices * 2.0**-9 * np.abs(x).sum(0)
    assert (error <= bound).all(), name
    has_rounded |= (error > 1e-4 * np.abs(x).sum(0)).any()
  assert has_rounded


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  ("shard_state", "primitive"), [(True, "reduce_scatter"), (False, "psum")]
)
def test_what_travels_is_of_that_dtype(
  shard_state: bool, primitive: str, dtype: Any
) -> None:
  sharding = make_sharding(AXIS, shard_state, dtype)
  program = jax.make_jaxpr(sharding.sum_gradients, axis_env=[(AXIS, 4)])(
    _draw(0)
  )
  moved = [
    x.aval.dtype
    for eqn in program.eqns
    if eqn.primitive.name.startswith(primitive)
    for x in eqn.invars
  ]
  assert len(moved) == len(SHAPES)
  assert set(moved) == {jnp.dtype(dtype)}


def test_one_device_without_an_axis_needs_no_pmap() -> None:
  tree, sharding = _draw(5), make_sharding(None, True)
  for same in (sharding.sum_gradients(tree), sharding.own(tree)):
    assert _bits(same) == _bits(tree)
  assert _bits(sharding.gather(tree, tree)) == _bits(tree)
  assert sharding.total(jnp.float32(3)) == 3
