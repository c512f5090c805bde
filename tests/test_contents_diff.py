"""Tests of distlm.contents: where two checkpoints differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attribute_experiment import Toy, save_step
from checkpoint_commands import call, fails, save, show

from distlm import parallel
from distlm.checkpoint import DiskCheckpointer
from distlm.errors import RunError


@pytest.fixture(autouse=True)
def _repaired() -> None:
  parallel.repair_jaxline()


def compare(tmp_path: Path, toy: Toy, other: Toy) -> tuple[Path, Path, str]:
  """Returns two checkpoints of one step, and the error of their comparison."""
  paths = save(tmp_path / "a", 1, toy), save(tmp_path / "b", 1, other)
  return *paths, fails(RunError, "diff", *paths)


def with_host(**values: Any) -> Toy:
  toy = Toy(1)
  toy._host.update(values)
  return toy


def test_equal_ones_are_equal(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  toy = with_host(float64=np.array([np.nan, -0.0]))
  paths = save(tmp_path / "a", 1, toy), save(tmp_path / "b", 1, toy)
  assert show(capsys, "diff", tmp_path / "a", tmp_path / "b") == (
    f"first: {paths[0]}\nsecond: {paths[1]}\n"
    "equal: 25 arrays, state and attributes\n"
  )


INT_MAX = 2**63 - 1
ONE_NAN = np.array([0x7FF8000000000000], np.uint64).view(np.float64)
OTHER_NAN = np.array([0x7FF8000000000001], np.uint64).view(np.float64)


@pytest.mark.parametrize(
  ("ours", "theirs", "says"),
  [
    (
      np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32),
      np.array([[1.0, 2.0, 3.0], [4.25, 5.0, 7.5]], np.float32),
      "2 of 6 elements differ, the first at [1, 0], by at most 1.5",
    ),
    (
      np.zeros(1),
      -np.zeros(1),
      "1 of 1 elements differ, the first at [0], by at most 0",
    ),
    (
      ONE_NAN,
      OTHER_NAN,
      "1 of 1 elements differ, the first at [0], by at most nan",
    ),
    (
      np.array([1.0, np.nan]),
      np.array([0.0, np.nan]),
      "1 of 2 elements differ, the first at [0], by at most 1",
    ),
    (
      np.array([1.0, np.nan]),
      np.array([0.0, 1.0]),
      "2 of 2 elements differ, the first at [0], by at most nan",
    ),
    (
      np.array([np.inf]),
      np.array([-np.inf]),
      "1 of 1 elements differ, the first at [0], by at most inf",
    ),
    (
      np.array([-INT_MAX, 1]),
      np.array([INT_MAX, 1]),
      f"1 of 2 elements differ, the first at [0], by at most {2 * INT_MAX}",
    ),
    (
      np.array([2**60]),
      np.array([2**60 + 1]),
      "1 of 1 elements differ, the first at [0], by at most 1",
    ),
    (
      np.array([0], np.uint8),
      np.array([255], np.uint8),
      "1 of 1 elements differ, the first at [0], by at most 255",
    ),
    (
      np.array([True, False]),
      np.array([True, True]),
      "1 of 2 elements differ, the first at [1], by at most 1",
    ),
    (
      jnp.array([1, 2], jnp.bfloat16),
      jnp.array([1, 2.5], jnp.bfloat16),
      "1 of 2 elements differ, the first at [1], by at most 0.5",
    ),
    (
      jnp.array(1, jnp.float16),
      jnp.array(1.5, jnp.float16),
      "1 of 1 elements differ, the first at [], by at most 0.5",
    ),
    (
      jax.random.PRNGKey(3),
      jax.random.PRNGKey(5),
      "1 of 2 elements differ, the first at [1], by at most 2",
    ),
    (0.5, 0.75, "1 of 1 elements differ, the first at [], by at most 0.25"),
  ],
)
def test_an_array_that_differs_is_described(
  tmp_path: Path,
  capsys: pytest.CaptureFixture[str],
  ours: Any,
  theirs: Any,
  says: str,
) -> None:
  a, b, message = compare(
    tmp_path, with_host(array=ours), with_host(array=theirs)
  )
  assert message == f"{a} and {b} differ: host.array: {says}"
  assert capsys.readouterr().out.splitlines()[2:] == [
    f"host.array: {says}",
    "1 of 25 arrays have other elements",
  ]


def test_the_first_of_many_is_named_and_all_are_counted(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  *_, message = compare(tmp_path, Toy(1), Toy(2))
  line = "host.array: 2 of 3 elements differ, the first at [1], by at most 2"
  assert message.endswith(f" differ: {line}")
  output = capsys.readouterr().out
  # Not: x, bool, opt_state of 5, train_step_rng.
  assert f"{line}\n17 of 25 arrays have other elements\n" in output
  assert "attributes.position.step: 3 in the first, 6 in the second" in output
  assert output.count("attributes.") == 1


def test_arrays_of_other_forms_are_named(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  ours = with_host(array=np.zeros((2, 3), np.float32), a=1, z=1)
  theirs = with_host(array=np.zeros((3, 2), np.float32), b=True, z=2)
  theirs._host["long"] = np.int32(1)
  a, b, message = compare(tmp_path, ours, theirs)
  lines = [
    "host.a: int64[] in the first, none in the second",
    "host.array: float32[2, 3] in the first, float32[3, 2] in the second",
    "host.long: int64[] in the first, int32[] in the second",
    "host.b: none in the first, bool[] in the second",
    "host.z: 1 of 1 elements differ, the first at [], by at most 1",
    "1 of 24 arrays have other elements",
  ]
  assert message == f"{a} and {b} differ: {lines[0]}"
  assert capsys.readouterr().out.splitlines()[2:] == lines


def test_containers_without_arrays_are_compared(tmp_path: Path) -> None:
  other = Toy(1)
  other._empty = {"in": {}}
  *_, message = compare(tmp_path, Toy(1), other)
  assert message.endswith(" differ: containers that hold no arrays differ")


@pytest.mark.parametrize(
  ("ours", "theirs", "says"),
  [
    (1, 2, "1 in the first, 2 in the second"),
    (1, 1.0, "1 in the first, 1.0 in the second"),
    (1, True, "1 in the first, true in the second"),
    ([], {}, "[] in the first, {} in the second"),
    (None, "", 'null in the first, "" in the second'),
    ("a" * 200, "b", f'"{"a" * 99}... in the first, "b" in the second'),
    (float("nan"), 0.0, "NaN in the first, 0.0 in the second"),
  ],
)
def test_attributes_are_compared(
  tmp_path: Path, ours: Any, theirs: Any, says: str
) -> None:
  a, b = Toy(1), Toy(1)
  a._position["seen"] = ["a", ours]
  b._position["seen"] = ["a", theirs]
  *_, message = compare(tmp_path, a, b)
  assert message.endswith(f" differ: attributes.position.seen.1: {says}")


def test_equal_nan_and_lost_keys_of_attributes(tmp_path: Path) -> None:
  a, b = Toy(1), Toy(1)
  a._position["seen"] = b._position["seen"] = ["a", float("nan")]
  b._position["more"] = None
  *_, message = compare(tmp_path, a, b)
  assert message.endswith(
    " differ: attributes.position.more: none in the first, null in the second"
  )
  a._position["more"] = None
  again = save(tmp_path / "again", 1, a)
  call("diff", again, tmp_path / "b")


def test_the_config_is_a_note(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  for name, rate in (("a", 0.1), ("b", 0.2)):
    settings = {"seed": 1, "optimizer": {"rate": rate}}
    checkpointer = DiskCheckpointer(
      tmp_path / name / "checkpoints", 3, settings
    )
    state = checkpointer.get_experiment_state("latest")
    state.experiment_module = Toy(1)
    save_step(checkpointer, 1, "latest")
    checkpointer.close()
  lines = show(capsys, "diff", tmp_path / "a", tmp_path / "b").splitlines()
  assert lines[2] == (
    "note: config.optimizer.rate: 0.1 in the first, 0.2 in the second"
  )
  assert lines[3].startswith("equal: 24 arrays")


def test_the_two_newest_of_a_workdir_are_compared(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  for step in (8, 9, 10):
    save(tmp_path, step, Toy(1))
  message = fails(RunError, "diff", tmp_path)
  latest = tmp_path / "checkpoints" / "latest"
  line = "state.global_step: 9 in the first, 10 in the second"
  assert message == f"{latest}/9 and {latest}/10 differ: {line}"
  assert capsys.readouterr().out == (
    f"first: {latest}/9\nsecond: {latest}/10\n{line}\n"
  )
