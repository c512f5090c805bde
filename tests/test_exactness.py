"""Tests that training is exact over devices, processes and accumulation steps.

Fifty updates on the same global batches must agree, whatever the layout, with
each other and with the NumPy training of `reference`, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import exactness_run
import jax.numpy as jnp
import numpy as np
import optax
import process_job
import pytest
import tiny_run
from exactness_run import PADDINGS, Run

from distlm import parallel
from distlm.types import Array, Batch, LossSums, Params
from distlm.updater import GradientUpdater

LAYOUTS = [(r, a) for r in (1, 2, 4, 8) for a in (1, 2, 4)]
TOLERANCE = 1e-5  # relative

# Only these paddings differ by layout, and so do their global batches.
BY_LAYOUT = PADDINGS[2:]


_reference_run = functools.cache(exactness_run.reference_run)


@functools.cache
def _one_device_run(padding: str, batches_for: tuple[int, int]) -> Run:
  return exactness_run.run(padding, 1, 1, batches_for)


def _expected_runs(
  padding: str, num_devices: int, num_parts: int
) -> tuple[Run, Run]:
  layout = (num_devices, num_parts) if padding in BY_LAYOUT else (1, 1)
  return _reference_run(padding, *layout), _one_device_run(padding, layout)


def _assert_agree(actual: Run, expected: Run) -> None:
  assert actual.losses.shape == (exactness_run.NUM_STEPS,)
  np.testing.assert_array_equal(actual.num_tokens, expected.num_tokens)
  for name in ("losses", "grad_norms"):
    np.testing.assert_allclose(
      getattr(actual, name), getattr(expected, name), TOLERANCE, err_msg=name
    )
  assert _param_error(actual.params, expected.params) < TOLERANCE


def _param_error(
  actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> float:
  """Returns the largest relative error, by norm, of any array."""
  errors = [
    np.linalg.norm(x - np.float64(y)) / np.linalg.norm(np.float64(y))
    for x, y in zip(actual, expected, strict=True)
  ]
  return float(np.max(errors))  # NaN if any is.


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("num_devices", "num_parts"), LAYOUTS)
def test_fifty_steps_agree_with_the_reference_and_with_one_device(
  num_devices: int, num_parts: int, padding: str
) -> None:
  run = exactness_run.run(padding, num_devices, num_parts)
  for expected in _expected_runs(padding, num_devices, num_parts):
    _assert_agree(run, expected)
  assert len(run.replicas) == num_devices
  assert len(set(run.replicas)) == 1


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_fifty_steps_train_with_and_without_clipping(padding: str) -> None:
  # Else their agreement would say little.
  run = _reference_run(padding, 8, 4)
  assert run.losses[-5:].mean() < 0.75 * run.losses[:5].mean()
  is_clipped = run.grad_norms > exactness_run.OPTIMIZER.clip_norm
  assert 5 < is_clipped.sum() < 45


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_the_paddings_are_what_their_names_say(num_devices: int) -> None:
  counts = {}
  for padding in PADDINGS:
    mask = exactness_run.global_batch(3, padding, num_devices, 2).mask
    counts[padding] = mask.reshape(num_devices, 2, -1).sum(-1)  # [R, A]
  assert (counts["none"] == counts["none"][0, 0]).all()
  assert len(set(counts["ragged"].ravel())) > 2
  assert ((counts["empty device"].sum(1) == 0).sum()) == 1
  assert ((counts["empty accumulation step"].sum(0) == 0).sum()) == 1


@pytest.mark.parametrize(
  ("num_processes", "num_devices"), [(2, 2), (4, 1)], ids=["2x2", "4x1"]
)
def test_real_processes_agree_with_one_device(
  num_processes: int, num_devices: int, tmp_path: Path
) -> None:
  results = process_job.run(
    "exactness_run.py",
    num_processes,
    num_devices,
    tmp_path,
    tiny_run.environment(None),
  )
  replicas = []
  for arrays in results:
    names = sorted(name for name in arrays if name.startswith("param_"))
    params = [arrays.pop(name) for name in names]
    run = Run(params=params, **arrays)
    for expected in _expected_runs("ragged", 4, 2):
      _assert_agree(run, expected)
    replicas += list(run.replicas)
  assert len(replicas) == 4
  assert len(set(replicas)) == 1


# A model whose gradient is plain: a token's loss is the product of its row with
# the parameters, and the row is its gradient.
ROWS = np.array([[12.0, 0.0], [0.0, 4.0], [0.0, 8.0]], np.float32)
# Of the devices' accumulation steps: one token, none; one token, two.
TOKENS = (([0], []), ([1], [1, 2]))
CLIP_NORM = 1.0


def _row_loss_fn(
  params: Params, key: Array, batch: Batch, is_training: bool
) -> LossSums:
  del key, is_training
  losses = jnp.asarray(ROWS)[batch.inputs] @ params  # [B, T]
  num_tokens = jnp.sum(batch.mask, dtype=jnp.int32)
  return LossSums(jnp.sum(losses, where=batch.mask), num_tokens, num_tokens)


def _row_batch() -> Batch:
  """Returns `TOKENS` as [R, A, B, T] = [2, 2, 1, 2]."""
  inputs, mask = np.zeros((2, 2, 2, 1, 2), np.int32)
  for device, parts in enumerate(TOKENS):
    for part, tokens in enumerate(parts):
      inputs[device, part, 0, : len(tokens)] = tokens
      mask[device, part, 0, : len(tokens)] = 1
  return Batch(inputs, inputs, mask.astype(bool))


def _update_once() -> tuple[np.ndarray, dict[str, Any]]:
  """Returns the step that parameters (1, 1) took, and the scalars."""
  updater = GradientUpdater(
    init_fn=lambda key: jnp.ones(2),
    loss_fn=_row_loss_fn,
    optimizer=optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.sgd(1.0)),
    schedule=optax.constant_schedule(1.0),
  )
  key = exactness_run.replicate(exactness_run.KEY, 2)
  state = parallel.pmap(updater.init)(key)
  update = parallel.pmap(updater.update, donate_argnums=0)
  state, scalars = update(state, exactness_run.shard(_row_batch()), key)
  return 1 - parallel.fetch(state.params), parallel.fetch(scalars)


def _clip(gradient: np.ndarray) -> np.ndarray:
  return gradient * min(1, CLIP_NORM / max(np.linalg.norm(gradient), 1e-9))


def test_the_loss_is_the_mean_over_all_tokens_not_a_mean_of_means() -> None:
  _, scalars = _update_once()
  assert scalars["tokens"] == 4
  assert scalars["loss"] == pytest.approx((12 + 4 + 4 + 8) / 4, rel=1e-6)
  sums = [[ROWS[part].sum() for part in parts] for parts in TOKENS]
  means = {
    "of devices": np.mean([12, 16 / 3]),
    "of parts": np.mean([12, 4, 6]),
    "of parts, the empty one as 0": np.mean([12, 0, 4, 6]),
  }
  assert sums == [[12, 0], [4, 12]]
  for mean in means.values():
    assert abs(mean - 7) > 0.1


def test_the_logged_gradient_norm_is_of_the_mean_before_clipping() -> None:
  _, scalars = _update_once()
  # Of (12, 16) / 4.
  assert scalars["grad_norm"] == pytest.approx(5, rel=1e-6)
  assert scalars["update_norm"] == pytest.approx(CLIP_NORM, rel=1e-6)
  mean_of_means = np.mean([[12, 0], [0, 16 / 3]], axis=0)
  assert abs(np.linalg.norm(mean_of_means) - 5) > 0.5


def test_clipping_happens_once_on_the_global_mean() -> None:
  step, _ = _update_once()
  np.testing.assert_allclose(step, _clip(np.array([3.0, 4.0])), rtol=1e-6)
  parts = [[ROWS[part].sum(0) for part in parts] for parts in TOKENS]
  devices = [sum(sums) for sums in parts]
  by_device = sum(map(_clip, devices))
  by_part = sum(_clip(part) for sums in parts for part in sums)
  others = {
    "on each device, of its sum": by_device / 4,
    "on each device, of its mean": by_device / 2,
    "on each part": by_part / 4,
    "on each part, then averaged": by_part / 3,
    "on each device, then on all": _clip(by_device),
    "on the sum": _clip(devices[0] + devices[1]) / 4,
    "on the mean of means": _clip(devices[0] / 2 + devices[1] / 6),
    "not at all": np.array([3.0, 4.0]),
  }
  for other in others.values():
    assert np.linalg.norm(other - step) > 0.1
