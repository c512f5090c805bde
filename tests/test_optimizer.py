"""Tests of distlm.optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
import pytest
import reference
from numpy.typing import NDArray

from distlm.optimizer import decay_mask, make_optimizer, make_schedule
from distlm.settings import OptimizerConfig

Array: TypeAlias = NDArray[np.float64]
# step(param, gradients until now, oldest first, rate) -> param
Step: TypeAlias = Callable[[Array, list[Array], float], Array]

PEAK, END, WARMUP, STEPS = 0.8, 0.2, 4, 12
RATES = (0.1, 0.05, 0.2)


def _schedule(name: str, warmup_steps: int = WARMUP, end: float = END) -> Any:
  config = OptimizerConfig(
    schedule=name,
    learning_rate=PEAK,
    warmup_steps=warmup_steps,
    end_learning_rate=end,
  )
  return make_schedule(config, STEPS)


def _assert_rates(schedule: Any, expected: dict[int, float]) -> None:
  for step, rate in expected.items():
    # Both as the host counts and as the optimizer does, under jit.
    for actual in (schedule(step), jax.jit(schedule)(np.int32(step))):
      np.testing.assert_allclose(actual, rate, 1e-6, 1e-8, err_msg=str(step))


def test_cosine() -> None:
  bend = (PEAK - END) / 2 / math.sqrt(2)
  expected = {0: 0, 1: 0.2, 2: 0.4, 4: 0.8, 6: 0.5 + bend, 8: 0.5}
  expected |= {10: 0.5 - bend, 12: END, 100: END}
  _assert_rates(_schedule("cosine"), expected)
  for step in range(STEPS + 2):
    rate = reference.learning_rate(step, PEAK, WARMUP, STEPS, END)
    _assert_rates(_schedule("cosine"), {step: rate})


def test_linear() -> None:
  expected = {0: 0, 3: 0.6, 4: 0.8, 6: 0.65, 8: 0.5, 12: END, 100: END}
  _assert_rates(_schedule("linear"), expected)


def test_constant() -> None:
  _assert_rates(
    _schedule("constant", end=0.0), {0: 0, 2: 0.4, 4: PEAK, 12: PEAK, 99: PEAK}
  )


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_without_warmup_the_first_step_has_the_peak(name: str) -> None:
  end = 0.0 if name == "constant" else END
  last = PEAK if name == "constant" else END
  _assert_rates(_schedule(name, warmup_steps=0, end=end), {0: PEAK, 12: last})


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_warmup_may_fill_the_whole_run(name: str) -> None:
  schedule = _schedule(name, warmup_steps=STEPS)
  _assert_rates(schedule, {0: 0, 6: 0.4, 11: PEAK * 11 / 12, 12: PEAK})


def _averages(b: float, values: list[Array]) -> Array:
  """Returns the exponential average of `values`, without bias correction."""
  average = np.zeros_like(values[0])
  for value in values:
    average = b * average + (1 - b) * value
  return average


def _adam(b1: float, b2: float, eps: float, decay: float) -> Step:
  def step(param: Array, grads: list[Array], rate: float) -> Array:
    m = _averages(b1, grads) / (1 - b1 ** len(grads))
    v = _averages(b2, [g**2 for g in grads]) / (1 - b2 ** len(grads))
    return param - rate * (m / (np.sqrt(v) + eps) + decay * param)

  return step


def _lion(b1: float, b2: float, decay: float) -> Step:
  def step(param: Array, grads: list[Array], rate: float) -> Array:
    *past, grad = grads
    m = _averages(b2, past) if past else np.zeros_like(grad)
    return param - rate * (np.sign(b1 * m + (1 - b1) * grad) + decay * param)

  return step


def _sgd(momentum: float) -> Step:
  def step(param: Array, grads: list[Array], rate: float) -> Array:
    ages = range(len(grads) - 1, -1, -1)
    trace = sum(
      momentum**age * grad for age, grad in zip(ages, grads, strict=True)
    )
    return np.array(param - rate * trace)

  return step


# Settings of each optimizer and its formula for matrices and for vectors.
ADAM = {"b1": 0.8, "b2": 0.7, "eps": 1e-3}
CASES: dict[str, tuple[dict[str, Any], Step, Step]] = {
  "adamw": (
    {**ADAM, "weight_decay": 0.3},
    _adam(**ADAM, decay=0.3),
    _adam(**ADAM, decay=0),
  ),
  "adam": (ADAM, _adam(**ADAM, decay=0), _adam(**ADAM, decay=0)),
  "lion": (
    {"b1": 0.6, "b2": 0.7, "weight_decay": 0.3},
    _lion(0.6, 0.7, 0.3),
    _lion(0.6, 0.7, 0),
  ),
  "sgd": ({"momentum": 0.6}, _sgd(0.6), _sgd(0.6)),
}


def _rate(step: Any) -> Any:
  return jax.numpy.asarray(RATES)[step]


def _random_tree(seed: int) -> dict[str, Any]:
  rng = np.random.default_rng(seed)
  # By the names in Haiku; of a stack of layers, and flat parts of a device.
  shapes = {"w": (3, 4), "embeddings": (7,), "b": (2, 4), "scale": ()}
  return {
    name: np.asarray(rng.normal(size=shape), np.float32)
    for name, shape in shapes.items()
  }


def _run(config: OptimizerConfig, trees: list[Any]) -> dict[str, Any]:
  """Returns the parameters after the gradients `trees`."""
  params, optimizer = _random_tree(0), make_optimizer(config, _rate)
  state = optimizer.init(params)
  for grads in trees:
    updates, state = optimizer.update(grads, state, params)
    params = jax.tree.map(np.add, params, updates)
  return params


DECAYED = {"w": True, "embeddings": True, "b": False, "scale": False}


@pytest.mark.parametrize("name", CASES)
def test_optimizers_follow_their_formulas(name: str) -> None:
  settings, matrix_step, vector_step = CASES[name]
  config = OptimizerConfig(name=name, **settings)
  trees = [
    {name: np.float32(scale) * g for name, g in _random_tree(seed).items()}
    for seed, scale in ((1, 1.0), (2, 30.0), (3, 5.0))
  ]
  actual = _run(config, trees)
  for key, start in _random_tree(0).items():
    step = matrix_step if DECAYED[key] else vector_step
    expected = start.astype(np.float64)
    grads = [np.asarray(tree[key], np.float64) for tree in trees]
    for i, rate in enumerate(RATES):
      expected = step(expected, grads[: i + 1], rate)
    error = np.linalg.norm(actual[key] - expected) / np.linalg.norm(expected)
    assert error < 1e-6, key


@pytest.mark.parametrize(
  ("name", "defaults"),
  [
    ("adamw", {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-4}),
    ("adam", {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    ("lion", {"b1": 0.9, "b2": 0.99, "weight_decay": 1e-3}),
    ("sgd", {"momentum": 0.0, "weight_decay": 0.0}),
  ],
)
def test_settings_left_out_are_those_that_optax_documents(
  name: str, defaults: dict[str, float]
) -> None:
  trees = [_random_tree(seed) for seed in (1, 2, 3)]
  left_out, given = (
    _run(OptimizerConfig(name=name, **settings), trees)
    for settings in ({}, defaults)
  )
  jax.tree.map(np.testing.assert_array_equal, left_out, given)


def test_muon_evens_out_the_singular_values_of_each_matrix() -> None:
  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=(3, 4, 6)), "b": rng.normal(size=(3, 6))}
  grads = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
  config = OptimizerConfig(name="muon", weight_decay=0.3)
  optimizer = make_optimizer(config, lambda step: 0.1)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  left = np.asarray(updates["w"]) + 0.1 * 0.3 * params["w"]
  for update, grad in zip(left, grads["w"], strict=True):
    u, s, v = np.linalg.svd(grad, full_matrices=False)
    inner = u.T @ (-update / (0.1 * 0.2 * np.sqrt(6))) @ v.T
    assert s.max() / s.min() > 2
    np.testing.assert_allclose(inner, np.diag(inner.diagonal()), atol=1e-4)
    assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.25
  adam = optax.nadamw(0.1, weight_decay=0)
  expected, _ = adam.update(grads["b"], adam.init(params["b"]), params["b"])
  np.testing.assert_allclose(updates["b"], expected, rtol=1e-6)


def test_sgd_adds_the_decay_to_the_gradient_before_momentum() -> None:
  config = OptimizerConfig(name="sgd", momentum=0.6, weight_decay=0.3)
  trees = [_random_tree(seed) for seed in (1, 2, 3)]
  actual = _run(config, trees)
  for name, start in _random_tree(0).items():
    param, trace = start.astype(np.float64), 0.0
    decay = 0.3 if DECAYED[name] else 0.0
    for tree, rate in zip(trees, RATES, strict=True):
      trace = 0.6 * trace + tree[name] + decay * param
      param = param - rate * trace
    error = np.linalg.norm(actual[name] - param) / np.linalg.norm(param)
    assert error < 1e-6, name


def test_matrices_alone_are_decayed() -> None:
  tree = {"layers/qkv": _random_tree(0)}
  assert decay_mask(tree) == {"layers/qkv": DECAYED}
