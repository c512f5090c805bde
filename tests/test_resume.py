"""Tests that a run ends with the same bits, however often it is stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_run

from distlm.writers import read_metrics

STEPS = 40


class Whole(NamedTuple):
  """A run that nothing stopped."""

  config: Path
  workdir: Path
  env: dict[str, str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
  directory = tmp_path_factory.mktemp("whole")
  config = tiny_run.write_inputs(directory)
  env = tiny_run.environment(directory / "compiled")
  workdir = directory / "run"
  tiny_run.run(_arguments(config, workdir), env)
  return Whole(config, workdir, env)


def _arguments(config: Path, workdir: Path, *more: str) -> list[str]:
  return tiny_run.arguments("train", config, workdir, "--devices=4", *more)


def _assert_same(workdir: Path, whole: Whole) -> None:
  for series in ("latest", "best"):
    tiny_run.assert_same_checkpoint(workdir, whole.workdir, series)
  # And nothing of a save that was cut short.
  saved = (workdir / "checkpoints" / "latest").iterdir()
  assert sorted(path.name for path in saved) == ["30", "35", "40"]
  assert tiny_run.rows(workdir) == tiny_run.rows(whole.workdir)


def test_compiled_programs_of_a_cache_give_the_same_bits(
  whole: Whole, tmp_path: Path
) -> None:
  env = tiny_run.environment(None)
  env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  tiny_run.run(_arguments(whole.config, tmp_path), env)
  _assert_same(tmp_path, whole)


@pytest.mark.parametrize("step", [7, 22])
def test_killed_and_resumed(whole: Whole, tmp_path: Path, step: int) -> None:
  arguments = _arguments(whole.config, tmp_path)
  process = tiny_run.start(arguments, whole.env)
  code, _, _ = tiny_run.interrupt(process, tmp_path, step, signal.SIGKILL)
  assert code == -signal.SIGKILL
  assert max(tiny_run.saved_steps(tmp_path), default=0) < STEPS
  tiny_run.run(arguments, whole.env)
  _assert_same(tmp_path, whole)


def test_killed_before_the_first_checkpoint(
  whole: Whole, tmp_path: Path
) -> None:
  process = tiny_run.start(
    _arguments(whole.config, tmp_path, "--config.checkpoint.interval=1000"),
    whole.env,
  )
  tiny_run.interrupt(process, tmp_path, 12, signal.SIGKILL)
  assert tiny_run.saved_steps(tmp_path) == []
  output = tiny_run.run(_arguments(whole.config, tmp_path), whole.env)
  assert "from 0 to 40" in output
  _assert_same(tmp_path, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_and_resumed(
  whole: Whole, tmp_path: Path, number: signal.Signals
) -> None:
  arguments = _arguments(whole.config, tmp_path)
  process = tiny_run.start(arguments, whole.env)
  code, output, errors = tiny_run.interrupt(process, tmp_path, 12, number)
  assert (code, errors.strip()) == (
    0,
    "stopping after this step; again to leave at once",
  )
  # Saved where it stopped, with every row up to there.
  [*_, stopped] = tiny_run.saved_steps(tmp_path)
  assert 12 <= stopped < STEPS
  assert tiny_run.steps(tmp_path, "train") == list(range(1, stopped + 1))
  assert f"{stopped} of 40; saved" in output
  output = tiny_run.run(arguments, whole.env)
  assert f"from {stopped} to 40 (resumed)" in output
  _assert_same(tmp_path, whole)


def test_a_second_signal_ends_at_once(whole: Whole, tmp_path: Path) -> None:
  process = tiny_run.start(_arguments(whole.config, tmp_path), whole.env)
  tiny_run.wait_until(lambda: 6 in tiny_run.steps(tmp_path, "train"), process)
  process.send_signal(signal.SIGTERM)
  assert process.stderr is not None
  assert process.stderr.readline() == "\n"
  process.send_signal(signal.SIGTERM)
  code, _, _ = tiny_run.finish(process)
  # Or it had just ended.
  assert code in (0, 128 + signal.SIGTERM)
  tiny_run.run(_arguments(whole.config, tmp_path), whole.env)
  _assert_same(tmp_path, whole)


def test_a_finished_run_ends_at_once_and_goes_on_to_more_steps(
  whole: Whole, tmp_path: Path
) -> None:
  arguments = _arguments(whole.config, tmp_path)
  tiny_run.run([*arguments, "--config.training_steps=20"], whole.env)
  before = read_metrics(tmp_path)
  output = tiny_run.run([*arguments, "--config.training_steps=20"], whole.env)
  assert "from 20 to 20 (resumed)" in output
  assert read_metrics(tmp_path) == before
  assert tiny_run.saved_steps(tmp_path) == [10, 15, 20]
  tiny_run.run(arguments, whole.env)
  assert read_metrics(tmp_path)[: len(before)] == before
  assert tiny_run.steps(tmp_path, "train") == list(range(1, STEPS + 1))
  assert tiny_run.steps(tmp_path, "eval") == [10, 20, 30, 40]
  # The schedule is constant: nothing depends on where the run was to end.
  _assert_same(tmp_path, whole)
