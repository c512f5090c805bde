"""Tests of distlm.replicas: a replica that differs is found, named, mended."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import flipped_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from distlm import parallel
from distlm.errors import RunError
from distlm.experiment import LanguageModelExperiment
from distlm.replicas import ReplicaCheck, compare, fingerprint

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "uint32", "bool")
LEAF = flipped_run.LEAF
ON_8 = ("--config.accumulation_steps=1",)


def _tree(dtype: str = "float32") -> dict[str, jax.Array]:
  values = np.random.default_rng(0).integers(0, 2, (3, 5))
  return {
    "a": jnp.zeros((), jnp.int32),
    "b": jnp.asarray(values).astype(dtype),
    "c": jnp.full((0, 2), 1.5),
  }


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_both_numbers_of_its_leaf_alone(
  dtype: str,
) -> None:
  tree = _tree(dtype)
  before = np.asarray(fingerprint(tree))
  assert before.shape == (3, 2)
  width = tree["b"].dtype.itemsize * 8
  # NumPy has no bit pattern of a bool but 0 and 1.
  for bit in range(1 if dtype == "bool" else width):
    for place in (0, 7, 14):
      flipped = flipped_run.flip(
        parallel.replicate(tree["b"]), 2, place=place, bit=bit
      )
      row = parallel.rows(flipped)[2]
      after = np.asarray(fingerprint({**tree, "b": jnp.asarray(row)}))
      assert (after[1] != before[1]).all(), (bit, place)
      np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])


def test_swapped_values_and_signs_of_zero_are_seen() -> None:
  x = jnp.array([1.0, 2.0, 0.0])
  prints = {
    np.asarray(fingerprint(y)).tobytes()
    for y in (x, x[jnp.array([1, 0, 2])], x.at[2].set(-0.0))
  }
  assert len(prints) == 3
  # Two signs: their bits cancel in any sum of the words.
  signs = jnp.array([1.0, 2.0, 3.0, 4.0])
  flipped = signs * jnp.array([1.0, -1.0, 1.0, -1.0])
  assert (fingerprint(signs) != fingerprint(flipped)).any()
  # A NaN is equal to itself: the bits are compared.
  nan = parallel.replicate(jnp.array([jnp.nan]))
  assert parallel.fetch(parallel.pmap(compare)(nan)[0])


def _check(tree: Any, policy: str) -> tuple[Any, ReplicaCheck]:
  module = types.SimpleNamespace(CHECKPOINT_ATTRS={"tree": "tree"}, tree=tree)
  state = types.SimpleNamespace(experiment_module=module)
  return module, ReplicaCheck(state, interval=10, policy=policy)


@pytest.mark.parametrize("device", [0, 3, 7])
def test_the_device_and_the_first_leaf_are_named(device: int) -> None:
  tree = parallel.replicate({"x": jnp.ones(3), "y": {"z": jnp.ones((2, 2))}})
  tree["y"]["z"] = flipped_run.flip(tree["y"]["z"], device)
  _, check = _check(tree, "abort")
  with pytest.raises(RunError) as error:
    check.check_now(20)
  assert (
    f"replicas differ after step 20: device {device} of process 0 from the"
    " other 7 of 8, first in tree.y.z"
  ) in str(error.value)


def test_it_looks_at_its_interval_and_a_step_later() -> None:
  tree = parallel.replicate({"x": jnp.ones(3)})
  module, check = _check(tree, "abort")
  for step in range(1, 11):
    check(0.0, step, {})  # The comparison of step 10 finds them equal.
  module.tree = {"x": flipped_run.flip(tree["x"], 1)}
  for step in range(11, 21):
    check(0.0, step, {})
  with pytest.raises(RunError, match="after step 20: device 1"):
    check(0.0, 21, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", [0, 5])
def test_repair_gives_all_devices_the_bits_of_the_majority(
  dtype: str, device: int, capsys: pytest.CaptureFixture[str]
) -> None:
  tree = _tree(dtype)
  if dtype in ("float32", "bfloat16", "float16"):
    special = jnp.array([-0.0, jnp.nan, jnp.inf, 0, 1]).astype(dtype)
    tree["b"] = tree["b"].at[0].set(special)
  before = jax.tree.map(lambda x: np.asarray(x).tobytes(), tree)
  replicated = parallel.replicate(tree)
  replicated["b"] = flipped_run.flip(replicated["b"], device, bit=0)
  module, check = _check(replicated, "repair")
  check.check_now(20)
  assert f"device {device} of process 0" in capsys.readouterr().err
  for row in parallel.rows(module.tree):
    assert jax.tree.map(lambda x: x.tobytes(), row) == before
  check.check_now(30)


def test_complex_numbers_and_typed_keys_are_compared_and_repaired() -> None:
  tree = {
    "key": jax.random.split(jax.random.key(3), 2),
    "wave": jnp.array([1 + 2j, 0.5 - 1j], jnp.complex64),
    "x": jnp.ones(2),
  }
  replicated = parallel.replicate(tree)
  replicated["x"] = flipped_run.flip(replicated["x"], 2)
  module, check = _check(replicated, "repair")
  check.check_now(20)
  for name, value in tree.items():
    for device in range(8):
      row = module.tree[name][device]
      if name == "key":
        row, value = jax.random.key_data(row), jax.random.key_data(tree[name])
      assert np.asarray(row).tobytes() == np.asarray(value).tobytes()
  changed = {**tree, "wave": tree["wave"].conj()}
  prints = [np.asarray(fingerprint(x)) for x in (tree, changed)]
  assert (prints[0] != prints[1]).any(axis=1).tolist() == [False, True, False]


def test_without_a_majority_there_is_nothing_to_repair_from() -> None:
  array = parallel.replicate(jnp.arange(4.0))
  for device in range(4):
    array = flipped_run.flip(array, device)
  _, check = _check({"x": array}, "repair")
  with pytest.raises(RunError, match="no majority of the devices"):
    check.check_now(20)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


def _plant(monkeypatch: pytest.MonkeyPatch, device: int, at_step: int) -> None:
  step = LanguageModelExperiment.step
  monkeypatch.setattr(
    LanguageModelExperiment,
    "step",
    flipped_run.flipping(step, device, at_step),
  )


SHORT = (
  *ON_8,
  "--config.training_steps=20",
  "--config.evaluation.batches=1",
  "--config.model.dropout_rate=0.1",
)


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
  """Returns the workdir of a run without a fault."""
  workdir = config.parent / "whole"
  args = tiny_run.arguments("train", config, workdir, *SHORT)
  assert tiny_run.run_here(args) == 0
  return workdir


def test_a_run_aborts_and_goes_on_from_before_the_fault(
  config: Path,
  whole: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  # The fault comes between two intervals; what finds it is the next save.
  args = tiny_run.arguments("train", config, tmp_path, *SHORT)
  _plant(monkeypatch, device=3, at_step=12)
  assert tiny_run.run_here(args) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  assert (
    "replicas differ after step 15: device 3 of process 0 from the other 7 of"
    f" 8, first in {LEAF}"
  ) in line
  assert tiny_run.saved_steps(tmp_path) == [5, 10]
  monkeypatch.undo()
  assert tiny_run.run_here(args) == 0
  tiny_run.assert_same_checkpoint(tmp_path, whole)
  assert tiny_run.rows(tmp_path) == tiny_run.rows(whole)


def test_a_repaired_run_goes_on_with_equal_replicas(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  args = tiny_run.arguments("train", config, tmp_path, *SHORT)
  flags = ("policy=repair", "interval=4")
  args += [f"--config.replica_check.{flag}" for flag in flags]
  _plant(monkeypatch, device=0, at_step=7)
  assert tiny_run.run_here(args) == 0
  assert capsys.readouterr().err == (
    "warning: replicas differ after step 8: device 0 of process 0 from the"
    f" other 7 of 8, first in {LEAF}; repaired from the others\n"
  )
  assert tiny_run.saved_steps(tmp_path)[-1] == 20


def test_without_an_interval_nothing_is_compared(
  config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  args = tiny_run.arguments("train", config, tmp_path, *SHORT)
  _plant(monkeypatch, device=3, at_step=7)
  assert tiny_run.run_here([*args, "--config.replica_check.interval=0"]) == 0


@pytest.mark.parametrize(
  ("policy", "is_nan"), [("abort", False), ("repair", False), ("abort", True)]
)
def test_a_replica_of_another_process_is_named_and_mended(
  config: Path, tmp_path: Path, policy: str, is_nan: bool
) -> None:
  args = tiny_run.arguments(
    "train",
    config,
    tmp_path / "run",
    "--devices=2",
    "--config.training_steps=20",
    "--config.evaluation.interval=0",
    "--config.evaluation.batches=1",
    f"--config.replica_check.policy={policy}",
  )
  env = tiny_run.environment(
    None,
    FLIP_PROCESS="1",
    FLIP_DEVICE="0",
    FLIP_STEP="7",
    FLIP_TO_NAN=f"{is_nan:d}",
  )
  processes = tiny_run.start_job(args, 2, env, [flipped_run.__file__])
  ends = [tiny_run.finish(process) for process in processes]
  says = (
    # A NaN shows at the next update, another value at the next save.
    f"replicas differ after step {8 if is_nan else 10}: device 0 of process 1"
    f" from the other 3 of 4, first in {LEAF}"
  )
  assert says in ends[0][2], ends
  if policy == "repair":
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert tiny_run.saved_steps(tmp_path / "run")[-1] == 20
  else:
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert tiny_run.saved_steps(tmp_path / "run") == [5]
