"""Tests of distlm.writers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxline import utils as jaxline_utils
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from distlm.writers import METRICS_FILE, RunWriter, SplitWriter, read_metrics


def _show_nothing(split: str, step: int, scalars: Any) -> None:
  del split, step, scalars


def _write_run(
  workdir: Path, resume_step: int | None, steps: range, offset: float = 0.0
) -> None:
  """Writes a train row each step and an eval row each fourth."""
  with RunWriter(workdir, resume_step, _show_nothing) as writer:
    for step in steps:
      writer.for_split("train").write_scalars(step, {"loss": step + offset})
      if step % 4 == 0:
        writer.for_split("eval").write_scalars(step, {"loss": -step - offset})


def _accumulate(
  workdir: Path, split: str
) -> event_accumulator.EventAccumulator:
  accumulator = event_accumulator.EventAccumulator(
    str(workdir / "tensorboard" / split), size_guidance={"scalars": 0}
  )
  accumulator.Reload()
  return accumulator


def _curve(workdir: Path, split: str, tag: str) -> list[tuple[int, float]]:
  scalars = _accumulate(workdir, split).Scalars(tag)
  return [(event.step, event.value) for event in scalars]


def test_scalars_of_all_kinds_reach_tensorboard_and_metrics(
  tmp_path: Path,
) -> None:
  scalars = {
    "python": 1.5,
    "integer": 3,
    "numpy": np.float32(0.1),
    "array": np.array(2.5, np.float16),
    "row": np.array([7], np.int64),
  }
  with RunWriter(tmp_path, None, _show_nothing) as writer:
    writer.for_split("train").write_scalars(10, scalars)
  for tag, value in scalars.items():
    [(step, read)] = _curve(tmp_path, "train", tag)
    assert (step, read) == (10, np.float32(np.asarray(value).item()))
  [row] = read_metrics(tmp_path)
  assert list(row) == ["step", "split", *scalars]
  assert row["step"] == 10 and row["split"] == "train"
  assert all(row[tag] == np.asarray(v).item() for tag, v in scalars.items())


def test_non_finite_values_keep_the_lines_strict_json(tmp_path: Path) -> None:
  values = {"a": float("nan"), "b": np.float32("inf"), "c": -np.inf}
  with RunWriter(tmp_path, None, _show_nothing) as writer:
    writer.for_split("train").write_scalars(1, values)

  def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")

  text = (tmp_path / METRICS_FILE).read_text()
  row = json.loads(text, parse_constant=refuse)
  assert [row["a"], row["b"], row["c"]] == ["NaN", "Infinity", "-Infinity"]
  assert float(row["b"]) == np.inf
  assert _curve(tmp_path, "train", "c") == [(1, -np.inf)]


def test_resumed_run_has_the_rows_of_an_uninterrupted_one(
  tmp_path: Path,
) -> None:
  whole, resumed = tmp_path / "whole", tmp_path / "resumed"
  _write_run(whole, None, range(1, 13))
  # Other values after the checkpoint show which rows were kept.
  _write_run(resumed, None, range(1, 7))
  _write_run(resumed, 6, range(7, 11), offset=0.5)
  _write_run(resumed, 6, range(7, 13))
  assert (whole / METRICS_FILE).read_bytes() == (
    resumed / METRICS_FILE
  ).read_bytes()
  for split in ("train", "eval"):
    assert _curve(whole, split, "loss") == _curve(resumed, split, "loss")
  assert len(_curve(resumed, "train", "loss")) == 12


def test_rows_after_the_checkpoint_vanish_even_if_none_follows(
  tmp_path: Path,
) -> None:
  _write_run(tmp_path, None, range(1, 9))
  _write_run(tmp_path, 6, range(0))
  assert [step for step, _ in _curve(tmp_path, "train", "loss")][-1] == 6
  assert [step for step, _ in _curve(tmp_path, "eval", "loss")] == [4]


def test_run_killed_before_its_first_checkpoint_starts_over(
  tmp_path: Path,
) -> None:
  _write_run(tmp_path, None, range(0, 6), offset=0.5)
  _write_run(tmp_path, None, range(1, 3))
  assert _curve(tmp_path, "train", "loss") == [(1, 1.0), (2, 2.0)]
  assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_resume_drops_a_torn_last_line(tmp_path: Path) -> None:
  _write_run(tmp_path, None, range(1, 4))
  path = tmp_path / METRICS_FILE
  complete = path.read_bytes()
  path.write_bytes(complete + b'{"step": 4, "split": "tra\xc3')
  assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
  _write_run(tmp_path, 3, range(0))
  assert path.read_bytes() == complete
  assert not list(tmp_path.glob("*.tmp"))


def test_failed_truncation_leaves_the_old_file(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  _write_run(tmp_path, None, range(1, 4))
  before = (tmp_path / METRICS_FILE).read_bytes()

  def fail(*_: object) -> None:
    raise OSError("killed here")

  monkeypatch.setattr(os, "replace", fail)
  with pytest.raises(OSError, match="killed here"):
    RunWriter(tmp_path, 1, _show_nothing)
  assert (tmp_path / METRICS_FILE).read_bytes() == before


_CHILD = """
import sys
from pathlib import Path
from distlm.writers import RunWriter
splits, steps = sys.argv[2].split(","), range(*map(int, sys.argv[3:]))
writer = RunWriter(Path(sys.argv[1]), None, lambda *_: None, splits)
for step in steps:
  writer.for_split(splits[0]).write_scalars(step, {"text" * 50: step / 7})
print("written", flush=True)
sys.stdin.read()
"""


def _start_child(
  workdir: Path, splits: str, num_rows: int, first_step: int = 1
) -> subprocess.Popen[str]:
  steps = [str(first_step), str(first_step + num_rows)]
  return subprocess.Popen(
    [sys.executable, "-c", _CHILD, str(workdir), splits, *steps],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def test_kill_right_after_a_write_loses_nothing(tmp_path: Path) -> None:
  with _start_child(tmp_path, "train,eval", 25) as child:
    assert child.stdout and child.stdout.readline() == "written\n"
    child.kill()
  assert child.returncode == -signal.SIGKILL
  steps = list(range(1, 26))
  assert [step for step, _ in _curve(tmp_path, "train", "text" * 50)] == steps
  assert [row["step"] for row in read_metrics(tmp_path)] == steps


def test_trainer_and_evaluator_append_whole_lines(tmp_path: Path) -> None:
  _write_run(tmp_path, None, range(1, 3))
  with (
    _start_child(tmp_path, "eval", 300) as one,
    _start_child(tmp_path, "eval", 300, first_step=301) as other,
  ):
    for child in (one, other):
      assert child.stdout and child.stdout.readline() == "written\n"
      child.kill()
  lines = (tmp_path / METRICS_FILE).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  # The evaluators dropped nothing and tore nothing.
  assert [row["split"] for row in rows[:2]] == ["train", "train"]
  assert sorted(row["step"] for row in rows[2:]) == list(range(1, 601))


def test_evaluator_shows_again_but_does_not_write_again(tmp_path: Path) -> None:
  shown = []
  for loss in (1.0, 2.0):
    with RunWriter(
      tmp_path, None, lambda *row: shown.append(row), splits=("eval",)
    ) as writer:
      writer.for_split("eval").write_scalars(7, {"loss": loss})
  assert shown == [("eval", 7, {"loss": loss}) for loss in (1.0, 2.0)]
  assert read_metrics(tmp_path) == [{"step": 7, "split": "eval", "loss": 1.0}]
  assert _curve(tmp_path, "eval", "loss") == [(7, 1.0)]


def test_config_is_shown_as_text_and_hparams_once(tmp_path: Path) -> None:
  config = {
    "model": {"num_layers": 4, "tie": True},
    "optimizer": {"name": "adamw", "b1": None},
    "source": ["a", "b"],
  }
  for resume_step in (None, 0):
    with RunWriter(tmp_path, resume_step, _show_nothing) as writer:
      writer.write_config(config)
      writer.for_split("train").write_scalars(1, {"loss": 1.0})
  accumulator = _accumulate(tmp_path, "train")
  [event] = accumulator.Tensors("config")
  page = event.tensor_proto.string_val[0].decode()
  block = re.fullmatch(r"```json\n(.*)\n```", page, re.DOTALL)
  assert block and json.loads(block[1]) == config

  metadata = accumulator.SummaryMetadata("_hparams_/session_start_info")
  data = plugin_data_pb2.HParamsPluginData.FromString(
    metadata.plugin_data.content
  )
  hparams = data.session_start_info.hparams
  assert hparams["model.num_layers"].number_value == 4
  assert hparams["model.tie"].bool_value is True
  assert hparams["optimizer.name"].string_value == "adamw"
  assert hparams["source"].string_value == "['a', 'b']"
  # In the directory of the curves, not in one of its own.
  assert not [
    p for p in (tmp_path / "tensorboard/train").iterdir() if p.is_dir()
  ]


def test_full_disk_is_raised_now_and_at_the_end(tmp_path: Path) -> None:
  writer = RunWriter(tmp_path, None, _show_nothing)
  (tmp_path / METRICS_FILE).symlink_to("/dev/full")
  with pytest.raises(OSError, match="No space left") as first:
    writer.for_split("train").write_scalars(1, {"loss": 1.0})
  with pytest.raises(OSError) as later:
    writer.for_split("eval").write_scalars(2, {"loss": 1.0})
  assert later.value is first.value
  with pytest.raises(OSError):
    writer.raise_if_failed()
  for _ in range(2):
    with pytest.raises(OSError):
      writer.close()


def test_full_disk_under_tensorboard_is_raised(tmp_path: Path) -> None:
  writer = RunWriter(tmp_path, None, _show_nothing)
  full = os.open("/dev/full", os.O_WRONLY)
  [path] = (tmp_path / "tensorboard/train").iterdir()
  [number] = [
    int(fd)
    for fd in os.listdir("/proc/self/fd")
    if os.path.realpath(f"/proc/self/fd/{fd}") == str(path.resolve())
  ]
  os.dup2(full, number)
  os.close(full)
  with pytest.raises(OSError, match="No space left"):
    writer.for_split("train").write_scalars(1, {"loss": 1.0})
  with pytest.raises(OSError):
    writer.close()


def test_error_of_the_last_write_of_jaxline_ends_the_run(
  tmp_path: Path,
) -> None:
  workdir = tmp_path / "run"
  workdir.mkdir()
  with (
    pytest.raises(FileNotFoundError),
    RunWriter(workdir, None, _show_nothing) as writer,
  ):
    action = jaxline_utils.PeriodicAction(
      writer.for_split("train").write_scalars, "steps", 1
    )
    action.update_time(0.0, 0)
    workdir.rename(tmp_path / "gone")
    action(1.0, 1, {"loss": 1.0})
    # The thread fails, and JAXline does not tell: this raises nothing.
    futures.wait([action._apply_fn_future])
    action.wait_to_finish()


def test_rows_of_several_threads_do_not_mix(tmp_path: Path) -> None:
  showing = []

  def show(split: str, step: int, scalars: Any) -> None:
    showing.append(step)
    time.sleep(0.001)
    assert showing == [step]
    showing.clear()

  with (
    RunWriter(tmp_path, None, show) as writer,
    futures.ThreadPoolExecutor(8) as pool,
  ):
    write = writer.for_split("train").write_scalars
    for future in [pool.submit(write, i, {"loss": i}) for i in range(100)]:
      future.result()
  assert sorted(row["step"] for row in read_metrics(tmp_path)) == [*range(100)]


def test_error_of_the_run_is_not_hidden(tmp_path: Path) -> None:
  with (
    pytest.raises(KeyError, match="the run"),
    RunWriter(tmp_path, None, _show_nothing) as writer,
  ):
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError):
      writer.for_split("train").write_scalars(1, {"loss": 1.0})
    raise KeyError("the run")


def test_closed_writer_refuses_rows(tmp_path: Path) -> None:
  writer = RunWriter(tmp_path, None, _show_nothing)
  writer.close()
  writer.close()
  with pytest.raises(ValueError, match="closed"):
    SplitWriter(writer, "train").write_scalars(1, {"loss": 1.0})
