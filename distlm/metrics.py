"""Figures that are computed from sums, bytes and times."""

from __future__ import annotations

import collections
import math
import time

import numpy as np

from distlm.types import LossSums

# Updates over which the rate of training is averaged.
_RATE_WINDOW_STEPS = 20


def evaluation_scalars(sums: LossSums, num_bytes: int) -> dict[str, float]:
  """Returns the figures of an evaluation.

  Args:
    sums: over all scored targets.
    num_bytes: of the text that these targets stand for.

  Returns:
    `loss` in nats per token, its exponential `perplexity`, `bits_per_byte`,
    which compares models across tokenizers, `accuracy`, and `tokens`, the
    number of targets.

  >>> figures = evaluation_scalars(LossSums(30.0, 10, 5), num_bytes=20)
  >>> {name: round(value, 3) for name, value in figures.items()}
  {'loss': 3.0, 'perplexity': 20.086, 'bits_per_byte': 2.164, \
'accuracy': 0.5, 'tokens': 10}
  """
  loss = float(sums.loss) / int(sums.num_tokens)
  return {
    "loss": loss,
    "perplexity": float(np.exp(loss)),
    "bits_per_byte": float(sums.loss) / math.log(2) / num_bytes,
    "accuracy": int(sums.num_correct) / int(sums.num_tokens),
    "tokens": int(sums.num_tokens),
  }


class TokenRate:
  """How fast the last updates were, without the pauses between them."""

  def __init__(
    self,
    num_devices: int = 1,
    flops_per_token: float = 0.0,
    peak_flops: float | None = None,
  ) -> None:
    """Counts from the first update on.

    Args:
      num_devices: of all processes.
      flops_per_token: of the model; see `distlm.flops`.
      peak_flops: that a device can do per second, or None if unknown.
    """
    self._num_devices = num_devices
    self._flops_per_token = flops_per_token
    self._peak_flops = peak_flops
    self._updates: collections.deque[tuple[float, int]] = collections.deque(
      maxlen=_RATE_WINDOW_STEPS
    )
    self._last_time: float | None = None

  def pause(self) -> None:
    """Leaves the time until the next update out: it was not training."""
    self._last_time = None

  def update(self, num_tokens: int) -> None:
    """Counts an update that has just ended."""
    now = time.perf_counter()
    if self._last_time is not None:
      self._updates.append((now - self._last_time, num_tokens))
    self._last_time = now

  def scalars(self) -> dict[str, float]:
    """Returns the figures, or nothing before the second update.

    They are `tokens_per_sec` of all devices, `tokens_per_sec_per_device`, and
    `mfu`, the share of the devices' peak that the model's FLOPs take.
    """
    if not self._updates:
      return {}
    secs, tokens = (sum(column) for column in zip(*self._updates, strict=True))
    per_device = tokens / secs / self._num_devices
    figures = {
      "tokens_per_sec": tokens / secs,
      "tokens_per_sec_per_device": per_device,
    }
    if self._peak_flops is not None:
      figures["mfu"] = per_device * self._flops_per_token / self._peak_flops
    return figures
