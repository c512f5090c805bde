"""Tests of the language model end to end: `distlm train` and `distlm eval`."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jaxline.train
import process_job
import pytest
import tiny_run
from tensorboard.backend.event_processing import event_accumulator

import distlm
from distlm.profiling import read_trace
from distlm.writers import read_metrics

TRAIN_SCALARS = {
  *("loss", "accuracy", "grad_norm", "update_norm", "param_norm"),
  *("learning_rate", "tokens", "steps_per_sec", "epoch"),
  *("tokens_per_sec", "tokens_per_sec_per_device", "mfu"),
  *("skipped_steps", "tokens_seen", "tokens_padded", "tokens_repeated"),
}
EVAL_SCALARS = {"loss", "perplexity", "bits_per_byte", "accuracy", "tokens"}
# For this process: its eight devices.
ON_8 = ("--config.accumulation_steps=1",)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def env(config: Path) -> dict[str, str]:
  return tiny_run.environment(config.parent / "compiled")


@pytest.fixture(scope="module", autouse=True)
def _caching(config: Path) -> Iterator[None]:
  with tiny_run.compiling_once(config.parent / "compiled"):
    yield


@pytest.fixture(scope="module")
def trained(config: Path) -> Path:
  """Returns the workdir of a run of `distlm train`; not to be changed."""
  workdir = config.parent / "trained"
  keep_all = "--config.checkpoint.keep=9"
  args = tiny_run.arguments("train", config, workdir, *ON_8, keep_all)
  assert tiny_run.run_here(args) == 0
  return workdir


def test_the_losses_fall_and_rows_are_complete(trained: Path) -> None:
  train = tiny_run.rows(trained, "train")
  evaluations = tiny_run.rows(trained, "eval")
  assert [row["step"] for row in train] == list(range(1, 41))
  assert [row["step"] for row in evaluations] == [10, 20, 30, 40]
  assert train[0]["loss"] == pytest.approx(math.log(258), abs=0.5)
  losses = [row["loss"] for row in evaluations]
  # No better than the letters' frequencies would be 2.5.
  assert losses == sorted(losses, reverse=True)
  assert losses[-1] < 2.2
  for row in evaluations:
    assert set(row) == {"step", "split", *EVAL_SCALARS}
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    # A byte is a token here.
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))
    assert row["tokens"] == 3 * 8 * 16
  last = [x for x in read_metrics(trained) if x["split"] == "train"][-1]
  assert set(last) == {"step", "split", *TRAIN_SCALARS}
  assert last["tokens"] == 8 * 16
  # 19,000 tokens to train on make 1188 sequences.
  assert last["epoch"] == pytest.approx(40 * 8 / 1188)


def test_the_workdir_holds_what_is_promised(trained: Path) -> None:
  settings = json.loads((trained / "config.json").read_bytes())
  assert settings["model"]["num_layers"] == 2
  assert settings["accumulation_steps"] == 1
  assert tiny_run.saved_steps(trained) == list(range(5, 41, 5))
  assert tiny_run.saved_steps(trained, "best") == [40]
  assert json.loads((trained / "tokenizer.json").read_bytes()) == {
    "name": "byte"
  }
  assert "[jaxline] training loop" in (trained / "train_eval.log").read_text()


@pytest.mark.parametrize(
  ("split", "tags", "steps"),
  [
    ("train", TRAIN_SCALARS, list(range(1, 41))),
    ("eval", EVAL_SCALARS, [10, 20, 30, 40]),
  ],
)
def test_tensorboard_shows_every_scalar(
  trained: Path, split: str, tags: set[str], steps: list[int]
) -> None:
  accumulator = event_accumulator.EventAccumulator(
    str(trained / "tensorboard" / split), size_guidance={"scalars": 0}
  )
  accumulator.Reload()
  assert set(accumulator.Tags()["scalars"]) == tags
  rows = {
    row["step"]: row for row in read_metrics(trained) if row["split"] == split
  }
  for tag in tags:
    curve = {event.step: event.value for event in accumulator.Scalars(tag)}
    is_rate = tag.startswith("tokens_per_sec") or tag == "mfu"
    expected = steps[2:] if is_rate else steps
    assert list(curve) == expected
    for step, value in curve.items():
      assert value == pytest.approx(rows[step][tag], rel=1e-6)


def test_mode_train_and_eval_once_are_the_parts_of_train(
  config: Path, trained: Path, tmp_path: Path
) -> None:
  profile = (
    "--config.profile.start_step=3",
    "--config.profile.num_steps=4",
    "--config.profile.device_memory=true",
  )
  args = tiny_run.arguments("train", config, tmp_path, *ON_8, *profile)
  assert tiny_run.run_here([*args, "--jaxline_mode=train"]) == 0
  train = tiny_run.rows(trained, "train")
  assert tiny_run.rows(tmp_path) == train
  assert not (tmp_path / "tensorboard" / "eval").exists()
  assert tiny_run.saved_steps(tmp_path, "best") == []
  once = tiny_run.arguments("eval", config, tmp_path, *ON_8, "--once")
  assert tiny_run.run_here(once) == 0
  assert tiny_run.rows(tmp_path, "train") == train
  assert tiny_run.rows(tmp_path, "eval") == tiny_run.rows(trained, "eval")[-1:]
  # And what was profiled on the way.
  report = read_trace(tmp_path / "profile")
  assert (report.num_steps, report.is_empty) == (4, False)
  assert report.collective_secs > 0
  pprof = tmp_path / "profile" / "device_memory.pprof.gz"
  assert pprof.read_bytes()[:2] == b"\x1f\x8b"


def test_an_evaluation_of_another_process_has_the_same_loss(
  config: Path, env: dict[str, str], trained: Path, tmp_path: Path
) -> None:
  shutil.copytree(trained, tmp_path / "run")
  (tmp_path / "run" / "metrics.jsonl").unlink()
  tiny_run.run(
    tiny_run.arguments(
      "eval", config, tmp_path / "run", *ON_8, "--once", "--devices=2"
    ),
    env,
  )
  [row] = tiny_run.rows(tmp_path / "run")
  expected = tiny_run.rows(trained, "eval")[-1]
  assert row["step"] == expected["step"]
  assert row["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_a_continuous_evaluation_ends_after_the_last_step(
  config: Path,
  trained: Path,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  steps = iter([10, 30, 40])

  def let_training_go_on(secs: float) -> None:
    del secs
    step = f"checkpoints/latest/{next(steps)}"
    shutil.copytree(trained / step, tmp_path / step)

  monkeypatch.setattr(jaxline.train, "time", _FakeTime(let_training_go_on))
  args = tiny_run.arguments("eval", config, tmp_path, *ON_8)
  assert tiny_run.run_here(args) == 0
  wanted = [row for row in tiny_run.rows(trained, "eval") if row["step"] != 20]
  assert tiny_run.rows(tmp_path) == wanted
  assert next(steps, None) is None


class _FakeTime:
  """The module `time` with another sleep."""

  def __init__(self, sleep: object) -> None:
    self.sleep = sleep
    self.time = time.time


def test_without_an_interval_only_the_end_is_evaluated(
  config: Path, trained: Path, tmp_path: Path
) -> None:
  interval = "--config.evaluation.interval=0"
  args = tiny_run.arguments("train", config, tmp_path, *ON_8, interval)
  assert tiny_run.run_here(args) == 0
  assert tiny_run.rows(tmp_path, "eval") == tiny_run.rows(trained, "eval")[-1:]


def test_a_run_leaves_no_threads_and_no_children(
  config: Path, tmp_path: Path
) -> None:
  gc.collect()
  before = set(threading.enumerate())
  args = tiny_run.arguments("train", config, tmp_path, *ON_8)
  assert tiny_run.run_here([*args, "--config.training_steps=6"]) == 0
  # JAXline's threads end with their executors, which form cycles.
  gc.collect()
  deadline = time.monotonic() + 60
  while (left := set(threading.enumerate()) - before) and (
    time.monotonic() < deadline
  ):
    time.sleep(0.05)
  assert not left
  children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
  assert children.read_text() == ""


def test_two_processes_compute_what_one_does(
  config: Path, env: dict[str, str], tmp_path: Path
) -> None:
  more = (
    # Dropout by the global number of a device, not by its process.
    "--config.random_mode_train=same_host_unique_device",
    "--config.training_steps=12",
    "--config.model.num_layers=1",
  )
  one, two = tmp_path / "one", tmp_path / "two"
  alone = tiny_run.start(
    tiny_run.arguments("train", config, one, *more, "--devices=4"), env
  )
  coordinator = process_job.free_address()
  args = tiny_run.arguments("train", config, two, *more, "--devices=2")
  processes = [
    tiny_run.start(
      [*args, "--num-processes=2"],
      {
        **env,
        "DISTLM_COORDINATOR": coordinator,
        "DISTLM_PROCESS_ID": f"{index}",
      },
    )
    for index in range(2)
  ]
  ends = [tiny_run.finish(process) for process in (*processes, alone)]
  # All errors, as those of one process follow from another's.
  assert [code for code, _, _ in ends] == [0, 0, 0], [e for *_, e in ends]
  # Process 0 alone shows and writes the run.
  assert ["finished" in output for _, output, _ in ends] == [True, False, True]
  assert tiny_run.steps(two, "train") == list(range(1, 13))
  for ours, theirs in zip(tiny_run.rows(two), tiny_run.rows(one), strict=True):
    assert (ours["step"], ours["split"]) == (theirs["step"], theirs["split"])
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
  for split in ("train", "eval"):
    [_] = (two / "tensorboard" / split).iterdir()
  assert {path.name for path in two.iterdir()} - {
    path.name for path in one.iterdir()
  } == {"processes", "train_eval.1.log"}


@pytest.mark.slow
def test_op_by_op_for_a_debugger(
  config: Path, env: dict[str, str], tmp_path: Path
) -> None:
  tiny_run.run(
    tiny_run.arguments(
      "train",
      config,
      tmp_path,
      "--jaxline_disable_pmap_jit",
      "--config.model.num_layers=1",
      "--config.data.sequence_length=4",
      "--config.data.global_batch_size=2",
      "--config.accumulation_steps=1",
      "--config.training_steps=2",
      "--config.optimizer.warmup_steps=0",
      "--config.evaluation.batches=1",
    ),
    env,
  )
  assert tiny_run.steps(tmp_path, "train") == [1, 2]
  assert tiny_run.steps(tmp_path, "eval") == [2]
  assert tiny_run.saved_steps(tmp_path) == [2]


SCRIPT = [str(Path(sys.executable).parent / "distlm")]
MODULE = [sys.executable, "-m", "distlm"]


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (["--version"], f"distlm {distlm.__version__}\n"),
    (["--help"], "usage: distlm [-h] [--version]"),
    (["train", "--help"], "--config.model.num_layers=6"),
    (["eval", "--help"], "--once"),
  ],
)
def test_the_command_answers_at_once(
  command: list[str], arguments: list[str], says: str
) -> None:
  result = subprocess.run(
    [*command, *arguments], capture_output=True, text=True, timeout=120
  )
  assert (result.returncode, result.stderr) == (0, "")
  assert says in result.stdout
