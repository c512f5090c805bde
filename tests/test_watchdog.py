"""Tests of the watchdog, in processes that it may end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import finish

from distlm.watchdog import Watchdog

TIMEOUT_SECS = 180


def _start(
  body: str, workdir: Path, seconds: float, process: str = "0, 1"
) -> subprocess.Popen[str]:
  """Starts Python with `body` run under a watchdog named `dog`."""
  lines = "\n".join(f"  {line}" for line in body.strip().splitlines())
  code = f"""
import time
from pathlib import Path
from distlm.watchdog import Watchdog

def stuck_here():
  time.sleep({TIMEOUT_SECS * 2})

with Watchdog({seconds}, Path({str(workdir)!r}), {process}) as dog:
  dog.begin("step", 0)
{lines}
print("went on")
"""
  return subprocess.Popen(
    [sys.executable, "-c", code],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


STUCK_AFTER_41 = """
for step in range(42):
  dog.begin("step", step)
stuck_here()
"""


def test_a_stuck_step_ends_the_process_and_shows_where(tmp_path: Path) -> None:
  code, output, errors = finish(_start(STUCK_AFTER_41, tmp_path, 0.5))
  assert (code, output) == (1, "")
  assert "in stuck_here" in errors
  last = errors.splitlines()[-1]
  assert last.startswith("error: process 0 did not get on for ")
  assert "in step after step 41; the stacks of its threads are above" in last
  assert "set watchdog.seconds higher than 0.5" in last
  assert not list(tmp_path.iterdir())  # One process leaves no notes.


def test_activities_that_get_on_are_left_alone(tmp_path: Path) -> None:
  body = """
for step in range(15):
  dog.begin("step", step)
  time.sleep(0.1)
  with dog.doing("save", step):
    time.sleep(0.1)
"""
  assert finish(_start(body, tmp_path, 1.0))[:2] == (0, "went on\n")


@pytest.mark.parametrize(
  ("num_before", "secs", "code"), [(0, 2, 0), (2, 2, 0), (3, 2, 1), (0, 20, 1)]
)
def test_the_first_of_a_kind_may_take_ten_times_as_long(
  tmp_path: Path, num_before: int, secs: float, code: int
) -> None:
  body = f"""
for _ in range({num_before}):
  with dog.doing("save", 0):
    pass
with dog.doing("save", 0):
  time.sleep({secs})
"""
  assert finish(_start(body, tmp_path, 0.5))[0] == code


def test_what_usually_takes_long_may_take_20_times_as_long(
  tmp_path: Path,
) -> None:
  body = """
for step in range(3):
  dog.begin("step", step)
  time.sleep(0.4)
dog.begin("step", 3)
time.sleep(2)
"""
  assert finish(_start(body, tmp_path, 0.5))[0] == 0


def test_0_seconds_are_no_watchdog(tmp_path: Path) -> None:
  body = "dog.begin('step', 1)\ntime.sleep(2)"
  assert finish(_start(body, tmp_path, 0))[:2] == (0, "went on\n")


def test_a_process_that_was_stopped_itself_goes_on(tmp_path: Path) -> None:
  body = "dog.begin('step', 1)\ndog.begin('step', 2)\ntime.sleep(3)"
  process = _start(
    f"Path({str(tmp_path / 'up')!r}).touch()\n{body}", tmp_path, 5
  )
  _wait_for(tmp_path / "up")
  process.send_signal(signal.SIGSTOP)
  time.sleep(7)
  process.send_signal(signal.SIGCONT)
  assert finish(process)[:2] == (0, "went on\n")


def _wait_for(path: Path) -> None:
  deadline = time.monotonic() + TIMEOUT_SECS
  while not path.exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_the_process_that_is_behind_is_named(tmp_path: Path) -> None:
  processes = [
    _start(STUCK_AFTER_41, tmp_path, 1, "0, 3"),
    _start(STUCK_AFTER_41.replace("42", "41"), tmp_path, 1, "1, 3"),
    _start(STUCK_AFTER_41, tmp_path, 1, "2, 3"),
  ]
  for process in processes:
    code, _, errors = finish(process)
    assert code == 1
    last = errors.splitlines()[-1]
    behind = f"process 1 (pid {processes[1].pid} on "
    assert (
      f"{behind}{os.uname().nodename}) is behind, in step after step 40"
      in (last)
    )
    assert "process 2 (" not in last and "process 0 (" not in last


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
  stopped = _start(STUCK_AFTER_41, tmp_path, 1, "1, 2")
  _wait_for(tmp_path / "processes" / "1.json")
  stopped.send_signal(signal.SIGSTOP)
  _, _, errors = finish(
    _start("time.sleep(2)\n" + STUCK_AFTER_41, tmp_path, 1, "0, 2")
  )
  stopped.kill()
  finish(stopped)
  last = errors.splitlines()[-1]
  assert f"process 1 (pid {stopped.pid} on " in last
  assert "was last heard of " in last


def test_a_stop_in_the_same_place_points_at_the_network(tmp_path: Path) -> None:
  processes = [_start(STUCK_AFTER_41, tmp_path, 1, f"{i}, 2") for i in range(2)]
  for process in processes:
    assert "look at the network" in finish(process)[2].splitlines()[-1]


@pytest.mark.parametrize("note", ["", "[]", "{}"])
def test_a_note_that_cannot_be_read_is_no_obstacle(
  tmp_path: Path, note: str
) -> None:
  (tmp_path / "processes").mkdir()
  (tmp_path / "processes" / "1.json").write_text(note)
  code, _, errors = finish(_start(STUCK_AFTER_41, tmp_path, 0.5, "0, 2"))
  assert code == 1
  assert "their notes cannot be read" in errors.splitlines()[-1]
  assert "Traceback" not in errors


def test_a_directory_that_cannot_be_written_is_no_obstacle(
  tmp_path: Path,
) -> None:
  (tmp_path / "processes").write_text("a file")
  code, _, errors = finish(_start(STUCK_AFTER_41, tmp_path, 0.5, "0, 2"))
  assert code == 1
  assert "their notes cannot be read" in errors.splitlines()[-1]


def test_notes_say_what_a_process_does(tmp_path: Path) -> None:
  with Watchdog(60, tmp_path, 3, 4) as dog:
    dog.begin("evaluation", 7)
    path = tmp_path / "processes" / "3.json"
    _wait_for(path)
    deadline = time.monotonic() + TIMEOUT_SECS
    while (note := json.loads(path.read_bytes()))["activity"] != "evaluation":
      assert time.monotonic() < deadline
      time.sleep(0.01)
  assert (note["pid"], note["step"]) == (os.getpid(), 7)
