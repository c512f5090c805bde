"""Commands that find a workdir as an earlier command left it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

from distlm import checksums
from distlm.writers import read_metrics

# In this process there are 8 devices, and 2 accumulation steps.
MORE = ("--config.data.global_batch_size=16", "--config.training_steps=20")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  workdir = tmp_path_factory.mktemp("run") / "workdir"
  assert _run("train", config, workdir) == 0
  return workdir


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
  """A copy of the finished run that a test may spoil."""
  return Path(shutil.copytree(finished, tmp_path / "copy"))


def _run(command: str, config: Path, workdir: Path, *more: str) -> int:
  return tiny_run.run_here(
    tiny_run.arguments(command, config, workdir, *MORE, *more)
  )


def _error(capsys: pytest.CaptureFixture[str]) -> str:
  return tiny_run.check_one_line(capsys.readouterr().err)


def test_an_evaluation_of_one_checkpoint_changes_nothing(
  config: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  # As if the best model were of another step, and the newest beat it.
  [best] = (workdir / "checkpoints" / "best").iterdir()
  best = best.rename(best.with_name("10"))
  metadata = json.loads((best / "metadata" / "metadata").read_text())
  metadata["state"]["best_eval_metric_value"] = 99.0
  (best / "metadata" / "metadata").write_text(json.dumps(metadata))
  before = best.stat().st_mtime_ns, read_metrics(workdir)
  assert _run("eval", config, workdir, "--once") == 0
  assert "eval step 20  loss" in capsys.readouterr().out
  assert (best.stat().st_mtime_ns, read_metrics(workdir)) == before
  assert tiny_run.saved_steps(workdir, "best") == [10]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_checkpoint_that_is_intact_but_cannot_be_read_is_named(
  config: Path,
  workdir: Path,
  damage: str,
  capsys: pytest.CaptureFixture[str],
) -> None:
  newest = workdir / "checkpoints" / "latest" / "20"
  if damage == "truncated":
    (newest / "metadata" / "metadata").write_text('{"state"')
  else:
    shutil.rmtree(newest / "arrays")
  checksums.write_checksums(newest)
  assert _run("train", config, workdir) == 1
  message = _error(capsys)
  assert f"checkpoint {newest}: it cannot be read" in message
  # The way out that it names.
  newest.rename(workdir / "elsewhere")
  assert _run("train", config, workdir) == 0
  assert tiny_run.saved_steps(workdir)[-2:] == [15, 20]


def test_fewer_steps_than_were_done(
  config: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert _run("train", config, workdir, "--config.training_steps=10") == 2
  message = _error(capsys)
  assert "training_steps=10" in message
  assert "at step 20 already" in message


def test_another_tokenizer_than_that_of_the_run(
  config: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (workdir / "config.json").unlink()
  assert _run("train", config, workdir, "--config.data.tokenizer=char") == 2
  assert "data.tokenizer=char" in _error(capsys)


def test_a_run_trained_without_evaluation_is_evaluated_at_its_end(
  config: Path, tmp_path: Path
) -> None:
  short = ("--config.training_steps=6", "--config.model.num_layers=1")
  mode = "--jaxline_mode=train"
  assert _run("train", config, tmp_path, *short, mode) == 0
  assert tiny_run.steps(tmp_path, "eval") == []
  for _ in range(2):  # Once is enough.
    assert _run("train", config, tmp_path, *short) == 0
    assert tiny_run.steps(tmp_path, "eval") == [6]


def test_a_failed_first_attempt_leaves_the_directory_free(
  config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  short = ("--config.training_steps=6", "--config.model.num_layers=1")
  for vocab_size, code in ((10, 2), (300, 0)):
    more = f"--config.model.vocab_size={vocab_size}"
    assert _run("train", config, tmp_path, *short, more) == code
  assert "model.vocab_size=10" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("setting", "says"),
  [
    ("--config.random_seed=4294967296", "below 2**32"),
    ("--config.data.source=[{[]: 1}]", "it must be one text"),
    ("--config.optimizer.eps=0", "it must be positive"),
    ("--workdir=", "it must not be empty"),
  ],
)
def test_values_that_cannot_work(
  config: Path,
  tmp_path: Path,
  setting: str,
  says: str,
  capsys: pytest.CaptureFixture[str],
) -> None:
  assert _run("train", config, tmp_path / "new", setting) == 2
  assert says in _error(capsys)
  assert not (tmp_path / "new").exists()


def test_a_reader_that_leaves_does_not_end_the_run(
  config: Path, tmp_path: Path
) -> None:
  args = tiny_run.arguments(
    "train", config, tmp_path, *MORE, "--config.model.num_layers=1"
  )
  process = subprocess.Popen(
    [sys.executable, "-m", "distlm", *args],
    env=tiny_run.environment(None),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout
  assert process.stdout.readline() == "training\n"
  process.stdout.close()
  assert process.stderr
  errors = process.stderr.read()
  assert (process.wait(tiny_run.TIMEOUT_SECS), errors) == (0, "")
  assert tiny_run.steps(tmp_path, "eval") == [10, 20]


@pytest.mark.parametrize(
  ("receiver", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)]
)
def test_a_signal_to_one_process_stops_all_at_one_step(
  config: Path, tmp_path: Path, receiver: int, number: int
) -> None:
  args = tiny_run.arguments(
    "train",
    config,
    tmp_path / "run",
    "--devices=1",
    "--config.training_steps=100000",
    "--config.model.num_layers=1",
    "--config.evaluation.interval=0",
  )
  env = tiny_run.environment(None, **tiny_run.COMPILING_FAST)
  processes = tiny_run.start_job(args, 2, env)
  tiny_run.wait_until(
    lambda: len(tiny_run.steps(tmp_path / "run", "train")) > 3, processes[0]
  )
  processes[receiver].send_signal(number)
  ends = [tiny_run.finish(process) for process in processes]
  assert [code for code, _, _ in ends] == [0, 0], ends
  last = tiny_run.steps(tmp_path / "run", "train")[-1]
  assert tiny_run.saved_steps(tmp_path / "run")[-1] == last
  assert f"stopped\n  steps      {last} of 100,000" in ends[0][1]
