"""Tests of distlm.runner and distlm.loop with an experiment of another's."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import toy_experiment
from jaxline.experiment import AbstractExperiment
from tensorboard.backend.event_processing import event_accumulator

from distlm import parallel, runner
from distlm.checkpoint import DiskCheckpointer
from distlm.writers import read_metrics

TESTS = Path(__file__).parent
FAIL_IN_STEP = "--config.experiment_kwargs.fail_at_step=7"
FAIL_IN_EVALUATION = "--config.experiment_kwargs.fail_in_evaluation=true"


def _arguments(workdir: Path, *arguments: str) -> list[str]:
  config = f"--config={TESTS / 'toy_config.py'}"
  return [config, f"--workdir={workdir}", *arguments]


def _run_process(
  workdir: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
  # What conftest sets for this process would decide the devices of that one.
  env = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
  script = str(TESTS / "toy_experiment.py")
  return subprocess.run(
    [sys.executable, script, *_arguments(workdir, *arguments)],
    env=env,
    capture_output=True,
    text=True,
    timeout=120,
  )


def _run(
  workdir: Path,
  *arguments: str,
  experiment: Any = toy_experiment.ToyExperiment,
) -> int:
  """Runs in this process, on its eight devices; returns the exit code."""
  with pytest.raises(SystemExit) as end:
    runner.main(experiment, _arguments(workdir, *arguments))
  return int(end.value.code or 0)


def _rows(workdir: Path, split: str) -> dict[int, dict[str, Any]]:
  """Returns the rows of a split by their steps, which must be distinct."""
  rows = [row for row in read_metrics(workdir) if row["split"] == split]
  by_step = {row["step"]: row for row in rows}
  assert len(by_step) == len(rows)
  return by_step


def _steps(workdir: Path, series: str) -> list[int]:
  directory = workdir / "checkpoints" / series
  return sorted(int(path.name) for path in directory.glob("*"))


def _weights(workdir: Path, series: str = "latest") -> Any:
  """Returns the weights of the newest checkpoint."""
  parallel.repair_jaxline()
  checkpointer = DiskCheckpointer(workdir / "checkpoints", 9, {})
  state = checkpointer.get_experiment_state(series)
  state.experiment_module = toy_experiment.ToyExperiment("eval")
  checkpointer.restore(series)
  return np.asarray(state.experiment_module._weights)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns the workdir of a run of 20 steps by a real process."""
  workdir = tmp_path_factory.mktemp("toy") / "run"
  result = _run_process(workdir, "--devices=4", "--jaxline_mode=train_eval")
  assert result.returncode == 0, result.stderr
  assert result.stderr == ""
  assert "20 of 20" in result.stdout
  return workdir


def test_train_eval_writes_all_that_a_run_has(trained: Path) -> None:
  train, evaluations = _rows(trained, "train"), _rows(trained, "eval")
  assert list(train) == list(range(1, 21))
  assert list(evaluations) == [10, 20]
  assert train[20]["mse"] < 0.01 < train[1]["mse"]
  assert evaluations[20]["mse"] < evaluations[10]["mse"] < 1
  assert _steps(trained, "latest") == [5, 10, 15, 20]
  assert _steps(trained, "best") == [20]
  np.testing.assert_allclose(
    _weights(trained), toy_experiment.TRUE_WEIGHTS, atol=0.1
  )
  for split, tag in (("train", "steps_per_sec"), ("eval", "mse")):
    accumulator = event_accumulator.EventAccumulator(
      str(trained / "tensorboard" / split)
    )
    accumulator.Reload()
    steps = [event.step for event in accumulator.Scalars(tag)]
    assert steps == list(_rows(trained, split))


def test_eval_once_shows_the_evaluation_again(trained: Path) -> None:
  before = read_metrics(trained)
  result = _run_process(trained, "--devices=2", "--jaxline_mode=eval", "--once")
  assert result.returncode == 0, result.stderr
  row = _rows(trained, "eval")[20]
  assert result.stdout == f"eval step 20  mse {row['mse']:.4g}\n"
  assert read_metrics(trained) == before


def test_mode_train_evaluates_nothing_and_a_resumed_run_goes_on(
  tmp_path: Path, trained: Path
) -> None:
  result = _run_process(tmp_path, "--devices=4", "--config.training_steps=12")
  assert result.returncode == 0, result.stderr
  assert (list(_rows(tmp_path, "train")), _rows(tmp_path, "eval")) == (
    list(range(1, 13)),
    {},
  )
  assert _steps(tmp_path, "best") == []
  result = _run_process(tmp_path, "--devices=4", "--jaxline_mode=train_eval")
  assert result.returncode == 0, result.stderr
  assert "from 12 to 20 (resumed)" in result.stdout
  for split in ("train", "eval"):
    rows, expected = _rows(tmp_path, split), _rows(trained, split)
    if split == "eval":
      del expected[10]
    assert {step: row["mse"] for step, row in rows.items()} == {
      step: row["mse"] for step, row in expected.items()
    }
  np.testing.assert_array_equal(_weights(tmp_path), _weights(trained))


@pytest.mark.parametrize(
  "experiment",
  [toy_experiment.OldStyleExperiment, toy_experiment.OwnSnapshotExperiment],
)
def test_other_kinds_of_experiment(
  tmp_path: Path,
  experiment: type[AbstractExperiment],
  capsys: pytest.CaptureFixture[str],
) -> None:
  mode = "--jaxline_mode=train_eval"
  assert _run(tmp_path / "plain", mode) == 0
  for steps in (12, 20):  # Interrupted and resumed.
    arguments = (mode, f"--config.training_steps={steps}")
    assert _run(tmp_path / "other", *arguments, experiment=experiment) == 0
  plain, other = (
    {step: row["mse"] for step, row in _rows(tmp_path / name, "eval").items()}
    for name in ("plain", "other")
  )
  assert {step: other[step] for step in plain} == plain
  capsys.readouterr()
  once = ("--jaxline_mode=eval", "--once")
  assert _run(tmp_path / "other", *once, experiment=experiment) == 0
  assert capsys.readouterr().out == f"eval step 20  mse {plain[20]:.4g}\n"


@pytest.mark.parametrize(
  ("mode", "flag", "says", "last_row"),
  [
    ("train", FAIL_IN_STEP, "the toy step fails", 7),
    ("train_eval", FAIL_IN_STEP, "the toy step fails", 7),
    ("train_eval", FAIL_IN_EVALUATION, "the toy evaluation fails", 10),
  ],
)
def test_a_failure_ends_the_job_with_its_traceback(
  tmp_path: Path, mode: str, flag: str, says: str, last_row: int
) -> None:
  result = _run_process(tmp_path, "--devices=2", f"--jaxline_mode={mode}", flag)
  assert result.returncode == 1
  assert "Traceback (most recent call last)" in result.stderr
  assert result.stderr.rstrip().endswith(f"ArithmeticError: {says}")
  assert max(_rows(tmp_path, "train")) == last_row
  # What was saved before is whole, and the lock is free.
  assert _steps(tmp_path, "latest") == [5]
  assert _run(tmp_path) == 2  # Other settings.


@pytest.mark.parametrize("key", ["evaluation", "replica_check"])
@pytest.mark.parametrize("value", ["-3", "often"])
def test_an_interval_that_is_no_number_of_steps_is_refused(
  tmp_path: Path, key: str, value: str
) -> None:
  flag = f"--config.{key}_interval={value}"
  result = _run_process(tmp_path, "--devices=2", flag)
  assert result.returncode == 2
  assert f"config.{key}_interval={value}: it must be" in result.stderr


def test_a_failing_evaluator_ends_too(tmp_path: Path) -> None:
  arguments = (FAIL_IN_EVALUATION, "--config.training_steps=5")
  assert _run(tmp_path, *arguments) == 0
  assert _run(tmp_path, *arguments, "--jaxline_mode=eval") == 1


SCORES = "--config.experiment_kwargs.scores=[0.5, 0.25, 0.75, 0.5]"
METRIC = "--config.best_model_eval_metric=score"


@pytest.mark.parametrize(
  ("higher_is_better", "steps", "best"),
  [
    (False, 40, 20),
    (True, 20, 10),
    (True, 40, 30),
  ],
)
def test_the_best_model_survives_a_restart(
  tmp_path: Path, higher_is_better: bool, steps: int, best: int
) -> None:
  higher = f"best_model_eval_metric_higher_is_better={higher_is_better}"
  arguments = (
    *("--jaxline_mode=train_eval", SCORES, METRIC, f"--config.{higher}"),
    *("--config.save_checkpoint_interval=10", "--config.training_steps"),
  )
  assert _run(tmp_path, *arguments, f"{steps - 10}") == 0
  assert _run(tmp_path, *arguments, f"{steps}") == 0
  assert _steps(tmp_path, "best") == [best]
  mse = np.mean((_weights(tmp_path, "best") - toy_experiment.TRUE_WEIGHTS) ** 2)
  np.testing.assert_allclose(mse, _rows(tmp_path, "eval")[best]["mse"], 1e-6)
  scalars = DiskCheckpointer(tmp_path / "checkpoints", 1, {}).read_scalars
  expected = {10: 0.5, 20: 0.25, 30: 0.75, 40: 0.5}[best]
  assert scalars("best") == {
    "global_step": best,
    "best_eval_metric_value": expected,
    "best_model_eval_metric": "score",
  }


class ScoredExperiment(toy_experiment.ToyExperiment):
  """Returns given scores, one an evaluation."""

  scores: ClassVar[list[float]] = []

  def evaluate(self, **_: Any) -> dict[str, Any]:
    return {"score": self.scores.pop(0)}

  def on_new_best_model(self, best_state: Any) -> None:
    best_state.note = {"seen": [1, "two"], "array": np.arange(3)}


@pytest.mark.parametrize(
  ("scores", "best"), [([math.nan, 0.5], 20), ([0.5, math.nan], 10)]
)
def test_a_nan_is_never_the_best(
  tmp_path: Path, scores: list[float], best: int
) -> None:
  class Experiment(ScoredExperiment):
    on_new_best_model = toy_experiment.ToyExperiment.on_new_best_model

  Experiment.scores = scores
  arguments = ("--jaxline_mode=train_eval", METRIC)
  assert _run(tmp_path, *arguments, experiment=Experiment) == 0
  assert _steps(tmp_path, "best") == [best]


def test_what_an_experiment_adds_to_the_best_state_is_saved(
  tmp_path: Path,
) -> None:
  ScoredExperiment.scores = [1.0, 2.0]
  arguments = ("--jaxline_mode=train_eval", METRIC)
  assert _run(tmp_path, *arguments, experiment=ScoredExperiment) == 0
  checkpointer = DiskCheckpointer(tmp_path / "checkpoints", 1, {})
  assert checkpointer.read_scalars("best")["note"] == {
    "seen": [1, "two"],
    "array": [0, 1, 2],
  }


@pytest.mark.parametrize("mode", ["train", "train_eval"])
@pytest.mark.parametrize(
  ("setting", "train_rows", "checkpoints"),
  [
    ("save_checkpoint_interval=0", 20, [20]),  # At the end alone.
    ("log_train_data_interval=None", 0, [5, 10, 15, 20]),
  ],
)
def test_what_jaxline_lets_be_turned_off(
  tmp_path: Path,
  mode: str,
  setting: str,
  train_rows: int,
  checkpoints: list[int],
) -> None:
  assert _run(tmp_path, f"--config.{setting}", f"--jaxline_mode={mode}") == 0
  assert len(_rows(tmp_path, "train")) == train_rows
  assert _steps(tmp_path, "latest") == checkpoints


def test_a_resumed_run_may_evaluate_more_often(tmp_path: Path) -> None:
  mode = "--jaxline_mode=train_eval"
  assert _run(tmp_path, mode, "--config.training_steps=10") == 0
  assert _run(tmp_path, mode, "--config.evaluation_interval=5") == 0
  assert list(_rows(tmp_path, "eval")) == [10, 15, 20]


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (["--config.train_checkpoint_all_hosts=true"], "process 0 alone saves"),
    (["--config.best_checkpoint_all_hosts=true"], "process 0 alone saves"),
    (["--config.interval_type=days"], "interval_type"),
    (["--jaxline_mode=test"], "--jaxline_mode=test: it must be one of"),
    (["--once"], "--once: it has no effect with --jaxline_mode=train"),
    (["--jaxline_mode=eval", "--once"], "there is no checkpoint"),
    (["--devices=0"], "--devices=0: it must be 1 or more"),
    (["--config.training_step=3"], "did you mean training_steps?"),
    (["--config.experiment_kwargs.score=1"], "did you mean experiment_kwargs"),
  ],
)
def test_bad_input_is_one_line(
  tmp_path: Path, arguments: list[str], says: str
) -> None:
  # A process of its own, whose flags JAXline has not parsed yet.
  result = _run_process(tmp_path, *arguments)
  assert result.returncode == 2, result.stderr
  assert result.stderr.count("\n") == 1
  assert result.stderr.startswith("error: ")
  assert says in result.stderr


def test_a_config_that_lacks_what_jaxline_needs(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  path = tmp_path / "config.py"
  path.write_text(
    "from ml_collections import ConfigDict\n"
    "def get_config():\n  return ConfigDict({'training_steps': 3})\n"
  )
  with pytest.raises(SystemExit) as end:
    runner.main(
      toy_experiment.ToyExperiment,
      [f"--config={path}", f"--workdir={tmp_path}"],
    )
  assert end.value.code == 2
  assert capsys.readouterr().err.startswith(f"error: --config={path}: ")


def test_a_best_metric_that_evaluate_does_not_return(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  arguments = ("--jaxline_mode=train_eval", METRIC)
  assert _run(tmp_path, *arguments) == 1
  assert capsys.readouterr().err == (
    "error: best_model_eval_metric=score: evaluate() returned only mse; name"
    " one of these\n"
  )
