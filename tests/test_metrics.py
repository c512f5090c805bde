"""Tests of distlm.metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from distlm import metrics
from distlm.types import LossSums


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
  """Lets the clock of `metrics` stand still, and returns how to move it."""
  now = [100.0]
  monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

  def wait(secs: float) -> None:
    now[0] += secs

  return wait


def _rates(tokens_per_sec: float) -> dict[str, float]:
  return dict.fromkeys(
    ("tokens_per_sec", "tokens_per_sec_per_device"), tokens_per_sec
  )


def test_evaluation_scalars_are_ratios_of_the_sums() -> None:
  sums = LossSums(np.float32(60.0), np.int32(40), np.int32(10))
  scalars = metrics.evaluation_scalars(sums, num_bytes=120)
  assert scalars == {
    "loss": 1.5,
    "perplexity": pytest.approx(math.exp(1.5), rel=1e-12),
    "bits_per_byte": pytest.approx(0.5 / math.log(2), rel=1e-12),
    "accuracy": 0.25,
    "tokens": 40,
  }
  assert {type(value) for value in scalars.values()} == {int, float}


def test_a_byte_model_that_knows_nothing_has_8_bits_per_byte() -> None:
  scalars = metrics.evaluation_scalars(LossSums(7 * math.log(256), 7, 0), 7)
  assert scalars["bits_per_byte"] == pytest.approx(8, rel=1e-12)
  assert scalars["perplexity"] == pytest.approx(256, rel=1e-12)


def test_a_rate_needs_two_updates(wait: Callable[[float], None]) -> None:
  rate = metrics.TokenRate()
  assert rate.scalars() == {}
  rate.update(1000)
  assert rate.scalars() == {}  # How long it took is not known.
  wait(2)
  rate.update(500)
  assert rate.scalars() == _rates(250)


def test_a_rate_is_all_tokens_by_all_time(
  wait: Callable[[float], None],
) -> None:
  rate = metrics.TokenRate()
  rate.update(0)
  for secs, tokens in ((1, 100), (4, 200)):
    wait(secs)
    rate.update(tokens)
  assert rate.scalars() == _rates(60)  # The mean rate is 75.


def test_a_pause_does_not_slow_the_rate(wait: Callable[[float], None]) -> None:
  rate = metrics.TokenRate()
  rate.update(0)
  wait(1)
  rate.update(100)
  rate.pause()
  wait(1000)
  rate.update(999)  # It ends the pause, and does not count itself.
  assert rate.scalars() == _rates(100)
  wait(1)
  rate.update(300)
  assert rate.scalars() == _rates(200)


def test_a_rate_forgets_old_updates(wait: Callable[[float], None]) -> None:
  rate = metrics.TokenRate()
  rate.update(0)
  for secs in [1000] * 5 + [2] * 20:
    wait(secs)
    rate.update(10)
  assert rate.scalars() == _rates(5)


def test_a_rate_by_device_and_as_a_share_of_the_peak(
  wait: Callable[[float], None],
) -> None:
  rate = metrics.TokenRate(4, flops_per_token=8e8, peak_flops=1e14)
  rate.update(0)
  wait(2)
  rate.update(600_000)
  assert rate.scalars() == {
    "tokens_per_sec": 300_000,
    "tokens_per_sec_per_device": 75_000,
    # 3e5 tokens/s x 8e8 FLOPs are 2.4e14 of 4 x 1e14 FLOP/s.
    "mfu": pytest.approx(0.6),
  }
