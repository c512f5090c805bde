"""Tests of distlm.workdir: who may use a directory, and for which run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from distlm import atomic
from distlm.errors import UsageError
from distlm.settings import RunConfig
from distlm.workdir import check_mode, check_settings, claim

SETTINGS = RunConfig().to_dict()
HOLDER = """
import sys
from pathlib import Path
from distlm.settings import RunConfig
from distlm.workdir import claim
workdir, mode, once = sys.argv[1:]
with claim(Path(workdir), RunConfig().to_dict(), mode, once == "True"):
  print("held", flush=True)
  sys.stdin.read()
"""


@contextlib.contextmanager
def _holder(
  workdir: Path, mode: str, once: bool = False
) -> Iterator[subprocess.Popen[str]]:
  """Runs another process that claims a directory until its input ends."""
  process = subprocess.Popen(
    [sys.executable, "-c", HOLDER, str(workdir), mode, str(once)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
      yield process
    finally:
      process.kill()


def _claim_briefly(
  workdir: Path,
  mode: str = "train_eval",
  once: bool = False,
  settings: Mapping[str, Any] = SETTINGS,
) -> None:
  with claim(workdir, settings, mode, once):
    pass


@pytest.mark.parametrize(
  ("theirs", "ours", "role"),
  [
    ("train", "train", "train"),
    ("train", "train_eval", "train"),
    ("train_eval", "train", "train"),
    ("train_eval", "eval", "eval"),
    ("eval", "train_eval", "eval"),
    ("eval", "eval", "eval"),
  ],
)
def test_a_role_is_held_by_one_process_at_a_time(
  tmp_path: Path, theirs: str, ours: str, role: str
) -> None:
  with _holder(tmp_path, theirs) as process:
    with pytest.raises(UsageError) as error:
      _claim_briefly(tmp_path, ours)
    message = str(error.value)
    assert message.startswith(f"--workdir={tmp_path}: it is in use by ")
    assert f"process {process.pid} on {socket.gethostname()}" in message
    assert f"({role})" in message
    # A refused claim leaves the name of the holder for the next one.
    with pytest.raises(UsageError, match=f"process {process.pid} on"):
      _claim_briefly(tmp_path, ours)


@pytest.mark.parametrize(
  ("theirs", "ours", "once"),
  [
    ("train", "eval", False),
    ("eval", "train", False),
    ("train_eval", "eval", True),
    ("eval", "eval", True),
  ],
)
def test_other_roles_and_a_single_evaluation_are_free(
  tmp_path: Path, theirs: str, ours: str, once: bool
) -> None:
  with _holder(tmp_path, theirs):
    _claim_briefly(tmp_path, ours, once)


def test_a_single_evaluation_holds_nothing(tmp_path: Path) -> None:
  with _holder(tmp_path, "eval", once=True):
    _claim_briefly(tmp_path)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
  with _holder(tmp_path, "train_eval") as process:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _claim_briefly(tmp_path)


def test_a_lock_ends_with_its_context_and_with_an_error(tmp_path: Path) -> None:
  _claim_briefly(tmp_path)
  with (
    pytest.raises(OSError, match="of the run"),
    claim(tmp_path, SETTINGS, "train_eval", False),
  ):
    raise OSError("of the run itself")
  _claim_briefly(tmp_path)


def test_who_trains_writes_the_settings(tmp_path: Path) -> None:
  workdir = tmp_path / "runs" / "new"
  with claim(workdir, SETTINGS, "train", False):
    text = (workdir / "config.json").read_text()
    assert json.loads(text) == SETTINGS
    assert text.endswith("}\n")
    assert {path.name for path in workdir.iterdir()} == {
      "config.json",
      ".train.lock",
    }


def test_who_evaluates_writes_no_settings(tmp_path: Path) -> None:
  _claim_briefly(tmp_path, "eval")
  _claim_briefly(tmp_path, "eval", once=True)
  assert {path.name for path in tmp_path.iterdir()} == {".eval.lock"}


def test_a_resumed_run_may_change_what_does_not_decide_the_result(
  tmp_path: Path,
) -> None:
  _claim_briefly(tmp_path)
  changed = json.loads(json.dumps(SETTINGS))
  changed["training_steps"] = 5000
  changed["evaluation"]["interval"] = 1
  _claim_briefly(tmp_path, settings=changed)
  assert json.loads((tmp_path / "config.json").read_bytes()) == changed


def _save_checkpoint(workdir: Path) -> None:
  """Leaves what makes a directory one of a run that can go on."""
  (workdir / "checkpoints" / "latest" / "20").mkdir(parents=True)


def test_a_run_that_never_saved_binds_nobody(tmp_path: Path) -> None:
  _claim_briefly(tmp_path)
  other = json.loads(json.dumps(SETTINGS))
  other["model"]["num_layers"] = 7
  _claim_briefly(tmp_path, settings=other)
  assert json.loads((tmp_path / "config.json").read_bytes()) == other


@pytest.mark.parametrize(
  ("mode", "once"), [("train", False), ("eval", False), ("eval", True)]
)
def test_a_run_with_other_settings_is_refused(
  tmp_path: Path, mode: str, once: bool
) -> None:
  _claim_briefly(tmp_path)
  _save_checkpoint(tmp_path)
  before = (tmp_path / "config.json").read_bytes()
  other = json.loads(json.dumps(SETTINGS))
  other["model"]["num_layers"] = 7
  other["random_seed"] = 1
  for check in (
    lambda: check_settings(tmp_path, other),
    lambda: _claim_briefly(tmp_path, mode, once, other),
  ):
    with pytest.raises(UsageError) as error:
      check()
    message = str(error.value)
    assert "model.num_layers: 4 -> 7; random_seed: 42 -> 1" in message
    assert "another directory" in message
  assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(
  "content", [b"", b'{"model"', b"\xff\xfe\x00", b"[]", b'"text"', b"null"]
)
def test_settings_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
  path = tmp_path / "config.json"
  path.write_bytes(content)
  _save_checkpoint(tmp_path)
  with pytest.raises(UsageError, match=re.escape(f"{path} cannot be read")):
    check_settings(tmp_path, SETTINGS)
  with pytest.raises(UsageError, match="mend it or use another directory"):
    _claim_briefly(tmp_path)
  assert path.read_bytes() == content


def test_a_directory_in_place_of_the_settings(tmp_path: Path) -> None:
  (tmp_path / "config.json").mkdir()
  _save_checkpoint(tmp_path)
  with pytest.raises(UsageError, match="cannot be read"):
    _claim_briefly(tmp_path)


def _fail(*_: object) -> None:
  raise OSError(28, "No space left on device")


def test_a_crash_while_writing_leaves_the_old_settings(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  _claim_briefly(tmp_path)
  before = (tmp_path / "config.json").read_bytes()
  monkeypatch.setattr(atomic.os, "replace", _fail)
  with pytest.raises(UsageError, match="No space left on device"):
    _claim_briefly(tmp_path, settings={**SETTINGS, "training_steps": 5000})
  assert (tmp_path / "config.json").read_bytes() == before
  assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_a_reader_never_sees_a_part_of_the_settings(tmp_path: Path) -> None:
  path = tmp_path / "config.json"
  done = threading.Event()
  failures = []

  def read() -> None:
    while not done.is_set():
      try:
        if json.loads(path.read_bytes()) != SETTINGS:
          failures.append("other content")
      except ValueError as error:
        failures.append(str(error))

  _claim_briefly(tmp_path)
  reader = threading.Thread(target=read)
  reader.start()
  for _ in range(50):
    _claim_briefly(tmp_path)
  done.set()
  reader.join()
  assert not failures


@pytest.mark.parametrize("mode", ["train", "train_eval"])
def test_a_file_in_place_of_the_directory(tmp_path: Path, mode: str) -> None:
  workdir = tmp_path / "file"
  workdir.write_text("precious")
  for path in (workdir, workdir / "below"):
    with pytest.raises(UsageError, match=re.escape(f"--workdir={path}: ")):
      _claim_briefly(path, mode)
  assert workdir.read_text() == "precious"


def test_a_directory_that_cannot_be_written() -> None:
  # Not one without permissions: tests may run as root.
  workdir = Path("/proc/distlm/run")
  check_settings(workdir, SETTINGS)
  with pytest.raises(UsageError, match="it cannot be written"):
    _claim_briefly(workdir)


@pytest.mark.parametrize(
  ("mode", "once", "says"),
  [
    ("training", False, "one of train, eval, train_eval"),
    ("", False, "one of train, eval, train_eval"),
    ("eval_train", False, "one of train, eval, train_eval"),
    ("train", True, "--once: it has no effect with --jaxline_mode=train"),
    ("train_eval", True, "--once: it has no effect"),
    ("eval", False, "there is no such directory"),
    ("eval", True, "there is no such directory"),
  ],
)
def test_what_a_mode_needs(
  tmp_path: Path, mode: str, once: bool, says: str
) -> None:
  with pytest.raises(UsageError, match=re.escape(says)):
    check_mode(tmp_path / "none", mode, once)


@pytest.mark.parametrize(
  ("mode", "once"),
  [("train", False), ("train_eval", False), ("eval", False), ("eval", True)],
)
def test_modes_that_are_fine(tmp_path: Path, mode: str, once: bool) -> None:
  check_mode(tmp_path, mode, once)
