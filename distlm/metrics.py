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
  """Tokens per second over the last updates, without pauses between them."""

  def __init__(self) -> None:
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
    """Returns `tokens_per_sec`, or nothing before the second update."""
    if not self._updates:
      return {}
    secs, tokens = (sum(column) for column in zip(*self._updates, strict=True))
    return {"tokens_per_sec": tokens / secs}
