"""Tests of updates that are not finite: left out, counted, explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run

from distlm import experiment as experiments
from distlm import language_model, losses, parallel, snapshot
from distlm.experiment import LanguageModelExperiment
from distlm.types import Batch, LossSums
from distlm.updater import GradientUpdater

NUM_DEVICES = 8
FINE, BAD = 1.0, np.nan
ON_8 = (
  "--config.accumulation_steps=1",
  "--config.training_steps=20",
  "--config.evaluation.batches=1",
)


def _updater(max_skips_in_row: int = 0) -> GradientUpdater:
  """Returns an updater of one weight, whose gradient is the batch's inputs."""

  def loss_fn(params: Any, key: Any, batch: Batch, is_training: bool) -> Any:
    del key, is_training
    loss = jnp.sum(params["w"] * batch.inputs, where=batch.mask)
    return LossSums(loss, jnp.sum(batch.mask, dtype=jnp.int32), jnp.int32(0))

  schedule = optax.linear_schedule(0.0, 1.0, 10)
  return GradientUpdater(
    init_fn=lambda key: {"w": jnp.array([1.0, -0.0])},
    loss_fn=loss_fn,
    optimizer=optax.adam(schedule),
    schedule=schedule,
    max_skips_in_row=max_skips_in_row,
  )


def _batch(value: float, device: int = 5, part: int = 1) -> Batch:
  """Returns [R, A=2, B=1, T=2] ones, and a value in one place."""
  inputs = np.ones((NUM_DEVICES, 2, 1, 2), np.float32)
  inputs[device, part] = value
  return Batch(inputs, inputs, np.ones(inputs.shape, bool))


def _run(updater: GradientUpdater, values: list[float]) -> list[Any]:
  """Returns (state, scalars) after each update, the start first."""
  update = parallel.pmap(updater.update)
  keys = jax.random.split(jax.random.PRNGKey(0), NUM_DEVICES)
  state = parallel.replicate(updater.init(keys[0]))
  results = [(state, {})]
  for value in values:
    results.append(update(results[-1][0], parallel.shard(_batch(value)), keys))
  return results


def _bits(tree: Any) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_place_leaves_every_replica_as_it_was(value: float) -> None:
  (_, _), (before, _), (after, scalars) = _run(_updater(), [FINE, value])
  for part in ("params", "opt_state"):
    assert _bits(getattr(after, part)) == _bits(getattr(before, part))
  assert (np.asarray(after.step) == 2).all()
  for name in ("skipped_steps", "skipped_in_row"):
    assert (np.asarray(scalars[name]) == 1).all()
  assert not np.isfinite(np.asarray(scalars["grad_norm"])).any()
  assert (np.asarray(scalars["update_norm"]) == 0).all()


def test_a_norm_that_overflows_counts_as_infinite() -> None:
  # Clipping by it would make the gradient 0, and nobody would know.
  _, (_, scalars) = _run(_updater(), [1e30])
  assert parallel.fetch(scalars["loss"]) > 1e28
  assert parallel.fetch(scalars["skipped_in_row"]) == 1


def test_skips_are_counted_and_the_optimizer_goes_on_as_if_without_them() -> (
  None
):
  updater = _updater(max_skips_in_row=2)
  results = _run(updater, [FINE, BAD, BAD, FINE, BAD, FINE])
  counts = [
    (int(state.num_skipped[0]), int(state.num_skipped_in_row[0]))
    for state, _ in results
  ]
  assert counts == [(0, 0), (0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (3, 0)]
  [*_, (last, scalars)] = results
  [*_, (wanted, wanted_scalars)] = _run(updater, [FINE] * 3)
  assert _bits(last.params) == _bits(wanted.params)
  assert _bits(last.opt_state) == _bits(wanted.opt_state)
  # The rate that is shown is the rate that was applied.
  np.testing.assert_array_equal(
    scalars["learning_rate"], wanted_scalars["learning_rate"]
  )


def test_after_too_many_in_a_row_nothing_is_applied_any_more() -> None:
  results = _run(_updater(max_skips_in_row=1), [FINE, BAD, BAD, FINE])
  (_, _), (good, _), *others = results
  for state, _ in others:
    assert _bits(state.params) == _bits(good.params)
  assert [int(s["skipped_in_row"][0]) for _, s in results[1:]] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


def _with_bad_losses(
  monkeypatch: pytest.MonkeyPatch, bad_steps: set[int], device: int = 6
) -> None:
  """Makes the loss of one device infinite in some updates, from 1.

  The mask carries the fault to the device: an empty one stands for it.
  """
  process_batch = experiments.Loader.process_batch

  def faulty_batch(self: Any, step: int) -> Batch:
    batch = process_batch(self, step)
    if step + 1 in bad_steps:
      batch.mask[device] = False
    return batch

  def faulty_loss(*arguments: Any, **named: Any) -> LossSums:
    sums = losses.lm_loss_fn(*arguments, **named)
    bad = jnp.where(sums.num_tokens == 0, jnp.inf, 1.0)
    return sums._replace(loss=sums.loss * bad)

  monkeypatch.setattr(experiments.Loader, "process_batch", faulty_batch)
  monkeypatch.setattr(language_model, "lm_loss_fn", faulty_loss)


def _train(config: Path, workdir: Path, *flags: str) -> int:
  return tiny_run.run_here(
    tiny_run.arguments("train", config, workdir, *ON_8, *flags)
  )


@pytest.mark.parametrize("bad_step", [7, 10, 20])
def test_a_run_aborts_without_saving_anything_of_it(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
  bad_step: int,
) -> None:
  _with_bad_losses(monkeypatch, {bad_step})
  assert _train(config, tmp_path) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  assert line.startswith(f"step {bad_step}: ")
  assert "is not finite" in line and "nonfinite=skip" in line
  saves = [step for step in (5, 10, 15, 20) if step < bad_step]
  assert tiny_run.saved_steps(tmp_path) == saves[-3:]
  # The row that shows it is there.
  assert tiny_run.steps(tmp_path, "train")[-1] >= bad_step


def test_the_last_step_is_looked_at_before_the_last_save(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  _with_bad_losses(monkeypatch, {7})
  flags = ("--jaxline_mode=train", "--config.training_steps=7")
  assert _train(config, tmp_path, *flags) == 1
  assert "step 7: " in capsys.readouterr().err
  assert tiny_run.saved_steps(tmp_path) == [5]


def test_a_run_skips_warns_counts_and_ends(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  _with_bad_losses(monkeypatch, {4, 5, 12})
  flags = ("--config.nonfinite=skip", "--config.nonfinite_limit=2")
  assert _train(config, tmp_path, *flags) == 0
  warnings = capsys.readouterr().err.splitlines()
  assert [line.partition(":")[2].partition(":")[0] for line in warnings] == [
    " step 4",
    " step 5",
    " step 12",
  ]
  assert "(2 in a row)" in warnings[1]
  rows = tiny_run.rows(tmp_path, "train")
  counts = [row["skipped_steps"] for row in rows]
  assert counts == [0] * 3 + [1] + [2] * 7 + [3] * 9
  assert rows[3]["loss"] in ("NaN", "Infinity")
  saved = tiny_run.checkpoint(tmp_path)
  assert saved["['train_state']['num_skipped']"] == 3


def test_too_many_skips_in_a_row_end_the_run(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  _with_bad_losses(monkeypatch, set(range(4, 20)))
  assert _train(config, tmp_path, "--config.nonfinite=skip") == 1
  *warnings, last = capsys.readouterr().err.splitlines()
  assert len(warnings) == 10
  assert last.startswith("error: step 14: ")
  assert "as in 11 steps in a row, more than nonfinite_limit" in last
  assert "nonfinite=skip" not in last


def _spoil(
  monkeypatch: pytest.MonkeyPatch, at_step: int, spoil: Callable[[Any], Any]
) -> None:
  """Changes the parameters after an update."""
  step = LanguageModelExperiment.step

  def step_then_spoil(self: Any, **arguments: Any) -> Any:
    scalars = step(self, **arguments)
    if self._data_position["step"] == at_step:
      params = spoil(self._train_state.params)
      self._train_state = self._train_state._replace(params=params)
    return scalars

  monkeypatch.setattr(LanguageModelExperiment, "step", step_then_spoil)


# For [R, L, D].
IN_LAYER_1 = np.array([[1.0], [3e38]], np.float32)


def _scale(module: str, name: str, factor: Any) -> Callable[[Any], Any]:
  def spoil(params: Any) -> Any:
    changed = {**params[module], name: params[module][name] * factor}
    return {**params, module: changed}

  return spoil


@pytest.mark.parametrize(
  ("module", "name", "factor", "says"),
  [
    (
      *("transformer/layers/dense/widen", "w", np.nan),
      "parameter transformer/layers/dense/widen.w is not finite",
    ),
    (
      *("transformer/layers/norm_2", "scale", IN_LAYER_1),
      "the output of transformer/layers/norm_2 in layer 1, on device 0 of"
      " process 0",
    ),
  ],
)
def test_the_first_parameter_or_activation_is_named(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
  module: str,
  name: str,
  factor: Any,
  says: str,
) -> None:
  _spoil(monkeypatch, 7, _scale(module, name, factor))
  assert _train(config, tmp_path) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  assert line.startswith("step 8: ")
  assert says in line


def test_the_first_gradient_is_named_where_all_before_it_is_finite(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  _with_bad_losses(monkeypatch, {7})

  def faulty_loss(
    apply_fn: Any, params: Any, *others: Any, **more: Any
  ) -> LossSums:
    sums = losses.lm_loss_fn(apply_fn, params, *others, **more)
    scale = jnp.sum(params["transformer/final_norm"]["scale"])
    # The slope of the root is infinite at 0.
    root = jnp.sqrt(jnp.where(sums.num_tokens == 0, 0.0, 1.0) * scale**2)
    return sums._replace(loss=sums.loss + root)

  monkeypatch.setattr(language_model, "lm_loss_fn", faulty_loss)
  assert _train(config, tmp_path) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  name = "transformer/final_norm.scale"
  assert line.startswith(f"step 7: the gradient of {name} is not finite")


def test_parameters_that_are_too_large_end_the_run_too(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  flags = ("learning_rate=3e38", "warmup_steps=0", "name=sgd", "clip_norm=0")
  settings = [f"--config.optimizer.{flag}" for flag in flags]
  assert _train(config, tmp_path, *settings) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  assert line.startswith("step 2: ")
  assert "start in another --workdir with a lower learning rate" in line
  assert tiny_run.saved_steps(tmp_path) == []


def test_a_resumed_run_may_allow_fewer_skips(
  config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  with monkeypatch.context() as patch:
    _with_bad_losses(patch, {4, 5, 6})
    flags = ("--config.nonfinite=skip", "--config.training_steps=6")
    assert _train(config, tmp_path, *flags) == 0
  assert _train(config, tmp_path) == 0
  assert tiny_run.rows(tmp_path, "train")[-1]["skipped_steps"] == 3


def test_a_replica_that_is_not_finite_is_blamed_on_its_device(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  _spoil(monkeypatch, 7, _spoil_replica)
  flags = ("--config.replica_check.interval=0",)
  assert _train(config, tmp_path, *flags) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  assert line.startswith(
    "replicas differ after step 8: device 5 of process 0 from the other 7 of 8,"
    " first in train_state.params.transformer/final_norm.offset"
  )


def test_a_repaired_replica_was_the_cause_of_a_bad_update(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  _spoil(monkeypatch, 7, _spoil_replica)
  flags = ("policy=repair", "interval=1")
  settings = [f"--config.replica_check.{flag}" for flag in flags]
  assert _train(config, tmp_path, *settings) == 0
  assert "repaired from the others" in capsys.readouterr().err
  assert tiny_run.rows(tmp_path, "train")[-1]["skipped_steps"] == 1


def _spoil_replica(params: Any) -> Any:
  """Makes a parameter of device 5 a NaN."""
  offset = params["transformer/final_norm"]["offset"]
  shards = [np.array(shard.data) for shard in offset.addressable_shards]
  shards[5][:] = np.nan
  spoilt = jax.make_array_from_single_device_arrays(
    offset.shape,
    offset.sharding,
    [
      jax.device_put(shard, of.device)
      for shard, of in zip(shards, offset.addressable_shards, strict=True)
    ],
  )
  module = {**params["transformer/final_norm"], "offset": spoilt}
  return {**params, "transformer/final_norm": module}


def test_a_checkpoint_with_a_value_that_is_not_finite_is_not_written(
  config: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  # In the optimizer state: no loss shows it.
  step = LanguageModelExperiment.step

  def step_then_spoil(self: Any, **arguments: Any) -> Any:
    scalars = step(self, **arguments)
    if self._data_position["step"] == 10:
      state = self._train_state
      opt_state = jax.tree.map(
        lambda x: x * np.nan if x.dtype == np.float32 else x, state.opt_state
      )
      self._train_state = state._replace(opt_state=opt_state)
    return scalars

  monkeypatch.setattr(LanguageModelExperiment, "step", step_then_spoil)
  flags = ("--config.evaluation.interval=0", "--config.checkpoint.interval=10")
  assert _train(config, tmp_path, *flags) == 1
  line = tiny_run.check_one_line(capsys.readouterr().err)
  assert "checkpoint of step 10: train_state.opt_state" in line
  assert "is not finite, so it is not saved" in line
  assert tiny_run.saved_steps(tmp_path) == []


def test_values_that_are_not_finite_are_found_in_all_float_types() -> None:
  for dtype in ("float32", "bfloat16", "float16", "float64"):
    for value in (np.nan, np.inf, -np.inf):
      array = np.ones((2, 3)).astype(jnp.dtype(dtype))
      assert snapshot.find_nonfinite({"a": {"b": array}}) == ""
      array[1, 2] = value
      assert snapshot.find_nonfinite({"a": {"b": array}}) == "a.b"
  assert snapshot.find_nonfinite({"n": np.array([2**31 - 1]), "x": None}) == ""
  infinite, nan = {"a": np.array([np.inf])}, {"a": np.array([np.nan])}
  assert snapshot.find_nonfinite(infinite, may_be_infinite=True) == ""
  assert snapshot.find_nonfinite(nan, may_be_infinite=True) == "a"
