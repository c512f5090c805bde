"""Runs that shard the optimizer state: as those that do not, and exchangeable.

Their parameters agree as far as sums in other orders do.
"""

from __future__ import annotations

from pathlib import Path

import flipped_run
import numpy as np
import pytest
import tiny_run

from distlm.experiment import LanguageModelExperiment

SHORT = (
  "--config.training_steps=20",
  "--config.accumulation_steps=1",
  "--config.evaluation.batches=1",
  "--config.model.num_layers=2",
  "--config.model.dropout_rate=0.0",
  "--config.optimizer.eps=1e-3",
)
SHARDED = "--config.optimizer.shard_state=True"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


def _train(config: Path, workdir: Path, *more: str) -> int:
  return tiny_run.run_here(
    tiny_run.arguments("train", config, workdir, *SHORT, *more)
  )


@pytest.fixture(scope="module")
def sharded(config: Path) -> Path:
  assert _train(config, config.parent / "sharded", SHARDED) == 0
  return config.parent / "sharded"


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
  assert _train(config, config.parent / "whole") == 0
  return config.parent / "whole"


def _assert_near(workdir: Path, other: Path, series: str = "latest") -> None:
  have, want = (tiny_run.checkpoint(path, series) for path in (workdir, other))
  assert have.keys() == want.keys()
  for name, value in want.items():
    if isinstance(value, np.ndarray):
      assert have[name].shape == value.shape
      error = np.linalg.norm(np.float64(have[name]) - value)
      assert error <= 1e-4 * np.linalg.norm(np.float64(value)) + 1e-9, name


@pytest.mark.parametrize("series", ["latest", "best"])
def test_the_checkpoints_are_those_of_a_run_without(
  sharded: Path, whole: Path, series: str
) -> None:
  _assert_near(sharded, whole, series)


def test_a_resumed_run_ends_with_the_same_bits(
  config: Path, sharded: Path, tmp_path: Path
) -> None:
  assert _train(config, tmp_path, SHARDED, "--config.training_steps=10") == 0
  assert _train(config, tmp_path, SHARDED) == 0
  tiny_run.assert_same_checkpoint(tmp_path, sharded)


@pytest.mark.parametrize("first", [True, False])
def test_sharding_may_begin_and_end_within_a_run(
  config: Path, whole: Path, tmp_path: Path, first: bool
) -> None:
  flag = "--config.optimizer.shard_state="
  for is_sharded, steps in ((first, 10), (not first, 20)):
    more = (f"{flag}{is_sharded}", f"--config.training_steps={steps}")
    assert _train(config, tmp_path, *more) == 0
  _assert_near(tmp_path, whole)


@pytest.mark.parametrize("policy", ["abort", "repair"])
def test_a_wrong_replica_of_the_parameters_is_found(
  config: Path,
  tmp_path: Path,
  policy: str,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  step = LanguageModelExperiment.step
  monkeypatch.setattr(
    LanguageModelExperiment, "step", flipped_run.flipping(step, 3, 12)
  )
  more = f"--config.replica_check.policy={policy}"
  assert _train(config, tmp_path, SHARDED, more) == (policy == "abort")
  assert (
    "replicas differ after step 15: device 3 of process 0 from the other 7"
  ) in capsys.readouterr().err
  last = 10 if policy == "abort" else 20
  assert tiny_run.saved_steps(tmp_path)[-1] == last


def test_two_processes_save_what_all_devices_hold(
  config: Path, sharded: Path, tmp_path: Path
) -> None:
  args = tiny_run.arguments(
    "train", config, tmp_path, *SHORT, SHARDED, "--devices=2"
  )
  env = tiny_run.environment(None)
  for process in tiny_run.start_job(args, 2, env):
    code, _, errors = tiny_run.finish(process)
    assert code == 0, errors
  _assert_near(tmp_path, sharded)
  _assert_near(tmp_path, sharded, "best")
