"""`distlm` with a memory fault: one bit of one replica flips after a step.

As a script it is `distlm`, with the fault of the variables FLIP_PROCESS,
FLIP_DEVICE and FLIP_STEP; FLIP_TO_NAN=1 makes the value a NaN.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distlm import parallel
from distlm.experiment import LanguageModelExperiment

BIT = 12
# All bits of a float32's exponent, and one of its fraction.
NAN_BITS = 0x7FC00000
LEAF = "train_state.params.transformer/layers/dense/widen.w"


def flip(
  array: jax.Array,
  device: int,
  place: int = 0,
  bit: int = BIT,
  is_nan: bool = False,
) -> jax.Array:
  """Returns [R, ...] with one bit flipped, or a NaN, in one device's row."""
  rows = [np.array(shard.data) for shard in array.addressable_shards]
  row = rows[device].reshape(-1).view(f"u{min(array.dtype.itemsize, 4)}")
  if is_nan:
    row[place] = NAN_BITS
  else:
    row[place] ^= row.dtype.type(1 << bit)
  return jax.make_array_from_single_device_arrays(
    array.shape,
    array.sharding,
    [
      jax.device_put(row, shard.device)
      for row, shard in zip(rows, array.addressable_shards, strict=True)
    ],
  )


def flipping(
  step: Callable[..., Any], device: int, at_step: int, is_nan: bool = False
) -> Any:
  """Wraps `LanguageModelExperiment.step`."""

  def step_then_flip(self: Any, **arguments: Any) -> Any:
    scalars = step(self, **arguments)
    if self._data_position["step"] == at_step:
      weights = self._train_state.params["transformer/layers/dense/widen"]
      weights["w"] = flip(weights["w"], device, place=5, is_nan=is_nan)
    return scalars

  return step_then_flip


def main() -> None:
  from distlm import cli

  step = LanguageModelExperiment.step

  def step_of_process(self: Any, **arguments: Any) -> Any:
    if parallel.process_index() != int(os.environ["FLIP_PROCESS"]):
      return step(self, **arguments)
    device, at_step = (
      int(os.environ[f"FLIP_{name}"]) for name in ("DEVICE", "STEP")
    )
    is_nan = os.environ.get("FLIP_TO_NAN") == "1"
    return flipping(step, device, at_step, is_nan)(self, **arguments)

  LanguageModelExperiment.step = step_of_process  # type: ignore[method-assign]
  cli.main()


if __name__ == "__main__":
  main()
