"""Checks the NumPy oracle against definitions written out a second way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from reference import Array, Grads, Params

V, T, T_MAX, D, H, NUM_LAYERS = 7, 5, 6, 4, 2, 2
HYPER = reference.Hyper(
  num_heads=H,
  tie_embeddings=True,
  learning_rate=0.1,
  warmup_steps=2,
  training_steps=6,
  end_learning_rate=0.01,
  clip_norm=0.5,
  b1=0.8,
  b2=0.9,
  eps=1e-3,
  weight_decay=0.3,
)


def make_params(tied: bool) -> Grads:
  """Returns random parameters, without the zeros and ones of a fresh model."""
  rng = np.random.default_rng(0)

  def linear(num_in: int, num_out: int) -> dict[str, Array]:
    w = rng.normal(size=(num_in, num_out)) / math.sqrt(num_in)
    return {"w": w, "b": rng.normal(size=num_out)}

  def norm() -> dict[str, Array]:
    return {"scale": rng.normal(1, 0.3, D), "offset": rng.normal(size=D)}

  params = {
    reference.FINAL_NORM: norm(),
    reference.TOKEN_EMBEDDINGS[0]: {
      reference.TOKEN_EMBEDDINGS[1]: rng.normal(size=(V, D))
    },
    reference.POSITION_EMBEDDINGS[0]: {
      reference.POSITION_EMBEDDINGS[1]: rng.normal(size=(T_MAX, D))
    },
  }
  for layer in range(NUM_LAYERS):
    for names, width in ((reference.ATTENTION, 3 * D), (reference.DENSE, 8)):
      num_in = D if names == reference.ATTENTION else width
      modules = (norm(), linear(D, width), linear(num_in, D))
      for name, module in zip(names, modules, strict=True):
        params[name.format(layer)] = module
  if not tied:
    params[reference.UNEMBED] = {"w": rng.normal(size=(D, V))}
  return params


def make_batch() -> tuple[Array, Array, Array]:
  """Returns 4 sequences: full, padded right, padded left and all padding."""
  rng = np.random.default_rng(1)
  mask = np.ones((4, T), bool)
  mask[1, 3:], mask[2, :2], mask[3] = False, False, False
  inputs, targets = rng.integers(V, size=(2, 4, T))
  return inputs, targets, mask


def loop_mix(qkv: dict[int, Array], t: int) -> Array:
  """Returns what attention mixes at `t`, [D], from `qkv`, [3 * D] each."""
  heads = []
  for start in range(0, D, D // H):
    q, k, v = (slice(i * D + start, i * D + start + D // H) for i in range(3))
    scores = {
      s: math.exp(qkv[t][q] @ qkv[s][k] / math.sqrt(D // H))
      for s in qkv
      if s <= t
    }
    total = sum(scores.values())
    heads.append(sum(scores[s] / total * qkv[s][v] for s in scores))
  return np.concatenate(heads)


def scalar_gelu(x: float) -> float:
  inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  return x / 2 * (1 + math.tanh(inner))


def loop_log_probs(params: Params, tied: bool) -> dict[tuple[int, int], Array]:
  """Returns log probabilities [V] by (sequence, position), one at a time.

  Padding is left out rather than masked, so that it cannot have a part.
  """

  def apply(name: str, x: Array) -> Array:
    if "w" in params[name]:
      return np.array(x @ params[name]["w"] + params[name].get("b", 0.0))
    deviations = x - sum(x) / D
    normal = deviations / math.sqrt(sum(deviations**2) / D + 1e-5)
    return np.array(normal * params[name]["scale"] + params[name]["offset"])

  inputs, _, mask = make_batch()
  tokens, positions = (
    params[module][name]
    for module, name in (
      reference.TOKEN_EMBEDDINGS,
      reference.POSITION_EMBEDDINGS,
    )
  )
  unembed = tokens.T if tied else params[reference.UNEMBED]["w"]
  result = {}
  for b in range(len(inputs)):
    h = {t: tokens[inputs[b, t]] + positions[t] for t in range(T) if mask[b, t]}
    for layer in range(NUM_LAYERS):
      norm, first, last = (n.format(layer) for n in reference.ATTENTION)
      qkv = {t: apply(first, apply(norm, h[t])) for t in h}
      h = {t: h[t] + apply(last, loop_mix(qkv, t)) for t in h}
      norm, first, last = (n.format(layer) for n in reference.DENSE)
      for t in h:
        hidden = apply(first, apply(norm, h[t]))
        h[t] = h[t] + apply(last, np.array([scalar_gelu(x) for x in hidden]))
    for t in h:
      logits = apply(reference.FINAL_NORM, h[t]) @ unembed
      result[b, t] = logits - math.log(sum(math.exp(x) for x in logits))
  return result


def assert_trees_close(actual: Params, expected: Params) -> None:
  assert actual.keys() == expected.keys()
  for module in expected:
    assert actual[module].keys() == expected[module].keys()
    for name, array in expected[module].items():
      np.testing.assert_allclose(
        actual[module][name], array, 1e-11, 1e-13, err_msg=f"{module} {name}"
      )


@pytest.mark.parametrize("tied", [True, False])
def test_forward_equals_loops_over_unpadded_positions(tied: bool) -> None:
  params, (inputs, targets, mask) = make_params(tied), make_batch()
  logits, _ = reference.forward(params, inputs, mask, H, tied)
  # Right at padding and at every other position: both kinds must be told apart.
  right = ~mask | (np.arange(T) % 2 == 0)
  targets = np.where(right, logits.argmax(-1), targets)
  log_probs = loop_log_probs(params, tied)
  losses = [-log_probs[i][targets[i]] for i in log_probs]
  num_right = sum(log_probs[i].argmax() == targets[i] for i in log_probs)
  assert 0 < num_right < len(losses)

  loss, num_tokens, num_correct, _ = reference.loss_and_grads(
    params, inputs, targets, mask, H, tied
  )

  np.testing.assert_allclose(loss, sum(losses), rtol=1e-12)
  assert (num_tokens, num_correct) == (len(losses), num_right)


@pytest.mark.parametrize("tied", [True, False])
def test_grads_equal_central_differences(tied: bool) -> None:
  params, batch = make_params(tied), make_batch()
  grads = reference.loss_and_grads(params, *batch, H, tied)[3]

  def loss_at(array: Array, index: tuple[int, ...], value: Array) -> float:
    kept, array[index] = array[index], value
    loss = reference.loss_and_grads(params, *batch, H, tied)[0]
    array[index] = kept
    return loss

  def differentiate(array: Array) -> Array:
    # Of fourth order, so that a step large enough to lose no digits to
    # rounding is small enough for 1e-6.
    result, step = np.zeros_like(array), 1e-3
    for index in np.ndindex(array.shape):
      near, far = (
        loss_at(array, index, array[index] + i * step)
        - loss_at(array, index, array[index] - i * step)
        for i in (1, 2)
      )
      result[index] = (8 * near - far) / (12 * step)
    return result

  numeric = reference.tree_map(differentiate, params)
  for module, arrays in params.items():
    assert set(grads[module]) == set(arrays)
    for name in arrays:
      np.testing.assert_allclose(
        grads[module][name],
        numeric[module][name],
        rtol=1e-6,
        atol=1e-10,  # rounding of a loss of about 30, over the step
        err_msg=f"{module} {name}",
      )


def test_padding_tokens_and_leading_axes_change_nothing() -> None:
  params, (inputs, targets, mask) = make_params(True), make_batch()
  expected = reference.loss_and_grads(params, inputs, targets, mask, H, True)
  split = (
    np.where(mask, inputs, 0).reshape(2, 1, 2, T),
    np.where(mask, targets, 1).reshape(2, 1, 2, T),
    mask.reshape(2, 1, 2, T),
  )

  loss, num_tokens, _, grads = reference.loss_and_grads(params, *split, H, True)

  assert (loss, num_tokens) == expected[:2]
  assert_trees_close(grads, expected[3])


def test_parameters_that_the_model_does_not_use_are_refused() -> None:
  with pytest.raises(ValueError, match="unembed"):
    reference.loss_and_grads(make_params(False), *make_batch(), H, True)


def test_learning_rate_at_known_steps() -> None:
  rates = [reference.learning_rate(i, 0.1, 2, 6, 0.01) for i in range(8)]
  # A quarter of the way down, the cosine is cos(pi / 4) = 1 / sqrt(2).
  bend = 0.045 / math.sqrt(2)
  expected = [0, 0.05, 0.1, 0.055 + bend, 0.055, 0.055 - bend, 0.01, 0.01]
  np.testing.assert_allclose(rates, expected, rtol=1e-12)


def test_clipping_keeps_small_gradients_and_direction() -> None:
  grads = {"a": {"w": np.array([[3.0]]), "b": np.array([0.0])}}
  grads["c"] = {"w": np.array([-4.0])}
  assert reference.global_norm(grads) == 5
  assert_trees_close(reference.clip_by_global_norm(grads, 6), grads)
  clipped = reference.clip_by_global_norm(grads, 1)
  np.testing.assert_allclose(clipped["a"]["w"], [[0.6]])
  np.testing.assert_allclose(clipped["c"]["w"], [-0.8])


def closed_form_adamw(p: Array, rate: float, *gs: Array) -> Array:
  """Returns `p` after an update, from all gradients until now, oldest first."""
  ages = range(len(gs) - 1, -1, -1)
  m, v = (
    sum(b**age * g**power for age, g in zip(ages, gs, strict=True))
    / sum(b**age for age in ages)
    for b, power in ((HYPER.b1, 1), (HYPER.b2, 2))
  )
  decayed = p * (1 - rate * HYPER.weight_decay * (p.ndim > 1))
  return np.array(decayed - rate * m / (np.sqrt(v) + HYPER.eps))


def test_train_step_equals_adamw_in_closed_form() -> None:
  params, batch = make_params(True), make_batch()
  state, history = reference.adamw_init(params), []
  for step, rate in enumerate([0, 0.05, 0.1, 0.055 + 0.045 / math.sqrt(2)]):
    loss_sum, num_tokens, num_correct, grads = reference.loss_and_grads(
      params, *batch, H, True
    )
    arrays = [grad for module in grads.values() for grad in module.values()]
    norm = math.sqrt(sum((grad**2).sum() for grad in arrays)) / num_tokens
    assert norm > HYPER.clip_norm
    factor = HYPER.clip_norm / norm / num_tokens
    history.append(
      reference.tree_map(lambda g, factor=factor: g * factor, grads)
    )
    rates = reference.tree_map(lambda _, rate=rate: rate, params)
    expected = reference.tree_map(closed_form_adamw, params, rates, *history)

    params, state, metrics = reference.train_step(
      params, state, step, batch, HYPER
    )

    assert_trees_close(params, expected)
    assert state.count == step + 1
    assert metrics == pytest.approx(
      {
        "loss": loss_sum / num_tokens,
        "num_tokens": num_tokens,
        "num_correct": num_correct,
        "grad_norm": norm,
        "learning_rate": rate,
      }
    )


def test_clip_norm_0_clips_nothing() -> None:
  params, batch = make_params(True), make_batch()
  start = reference.adamw_init(params), 1, batch
  off, huge = (
    reference.train_step(params, *start, HYPER._replace(clip_norm=norm))[0]
    for norm in (0.0, 1e9)
  )
  assert_trees_close(off, huge)
