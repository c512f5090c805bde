"""Tests that `distlm verify` finds wrong sums within the backward loop.

There accelerators sum the gradients of layers; here CPUs are made to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import planted_faults
import pytest
import tiny_run
from verify_run import DEVICES, compare_few, differing

from distlm import experiment, language_model
from distlm.model import transformer
from distlm.settings import RunConfig
from distlm.sharding import Whole
from distlm.updater import GradientUpdater

Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
  path = tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))
  with tiny_run.compiling_once(
    path.parent / "compiled", jax_disable_most_optimizations=True
  ):
    yield path


@pytest.fixture(autouse=True)
def _summing_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
  def make_updater(config: RunConfig, forward: Any) -> GradientUpdater:
    return dataclasses.replace(
      language_model.make_updater(config, forward),
      is_marked=transformer.is_of_layers,
    )

  monkeypatch.setattr(experiment, "make_updater", make_updater)


def _layers_not_summed(patch: pytest.MonkeyPatch) -> None:
  patch.setattr(Whole, "sum_in_backward", lambda _: lambda param: param)


def _layers_summed_twice(patch: pytest.MonkeyPatch) -> None:
  right = Whole.sum_in_backward

  def wrong(sharding: Whole) -> Callable[[Any], Any]:
    mark = right(sharding)
    return lambda param: mark(mark(param))

  patch.setattr(Whole, "sum_in_backward", wrong)


def test_right_sums_are_equal_on_all_layouts(
  config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  found = compare_few(config, monkeypatch)
  assert (differing(found), found.error) == ((), "")


@pytest.mark.parametrize(
  "fault",
  [
    _layers_summed_twice,
    _layers_not_summed,
    planted_faults.embeddings_not_summed_over_devices,
  ],
)
def test_wrong_sums_are_found(
  fault: Fault, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  fault(monkeypatch)
  found = compare_few(config, monkeypatch)
  assert differing(found) == (DEVICES,)
  assert found.error.startswith(f"layout {DEVICES}: step 1 differs by ")
