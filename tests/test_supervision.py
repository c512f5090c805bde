"""Tests of how a job of `distlm launch` ends: failures, and signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import launched_job
import pytest

FIRST = "error: process 1 failed first, with exit code"


@pytest.mark.parametrize(
  ("ending", "code", "last"),
  [
    ("sys.exit(3)", 3, f"{FIRST} 3: x"),
    # As distlm ends; and as processes do that print more after the reason.
    ("sys.exit('error:  no disk')", 1, f"{FIRST} 1: no disk"),
    (
      "e = ValueError('no'); e.add_note('---\\nSee JAX.'); raise e",
      1,
      f"{FIRST} 1: ValueError: no",
    ),
    (
      "os.write(2, b'F0726 1 a.cc:9] no\\n    @ 0x9'); os.abort()",
      134,
      "error: process 1 was killed by SIGABRT: F0726 1 a.cc:9] no",
    ),
    ("sys.exit('last\\n \\n')", 1, f"{FIRST} 1: last"),
    (
      "os.write(2, b'\\xff'); os.kill(os.getpid(), signal.SIGKILL)",
      137,
      "error: process 1 was killed by SIGKILL: \\xff",
    ),
    # Not because we asked it to.
    (
      "os.kill(os.getpid(), signal.SIGTERM)",
      143,
      "error: process 1 was killed by SIGTERM: x",
    ),
    (
      "os.kill(os.getpid(), 40)",
      168,
      "error: process 1 was killed by signal 40: x",
    ),
  ],
)
def test_the_last_line_says_who_failed_and_how(
  tmp_path: Path, ending: str, code: int, last: str
) -> None:
  text = f"if index != 1: time.sleep(99)\nprint('x', file=sys.stderr); {ending}"
  end, output, errors = launched_job.run(text, tmp_path, processes=3)
  assert (end, output) == (code, "")
  assert errors.splitlines()[0] == "[1] x"
  assert errors.splitlines()[-1] == last


def test_the_first_failure_is_the_one_blamed(tmp_path: Path) -> None:
  names = [f"up.{i}" for i in range(4)]
  argv = launched_job.command("here('up'); time.sleep(99)", processes=4)
  with launched_job.started(argv, tmp_path) as process:
    pids = launched_job.pids(tmp_path, *names)
    # The launcher sees all at once, and has nothing but the kernel's order.
    process.send_signal(signal.SIGSTOP)
    for index in (2, 0, 3, 1):
      launched_job.kill_and_wait(pids[index])
    process.send_signal(signal.SIGCONT)
    end = launched_job.finish(process)
  assert end == (137, "", "error: process 2 was killed by SIGKILL\n")


GRANDCHILD = (
  "child = subprocess.Popen([sys.executable, '-c', 'import time;"
  " time.sleep(99)']); open('child.0', 'w').write(str(child.pid))"
)
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize(
  ("prepares", "then"),
  [
    ("pass", "time.sleep(99)"),
    (STUBBORN, "time.sleep(99)"),
    ("pass", "os.kill(os.getpid(), signal.SIGSTOP)"),
    # Which inherits it.
    (f"{STUBBORN}; {GRANDCHILD}", "time.sleep(99)"),
    (
      f"{STUBBORN}; {GRANDCHILD}; signal.signal(15, signal.SIG_DFL)",
      "time.sleep(99)",
    ),
  ],
  ids=["plain", "stubborn", "stopped", "with a child", "leaving a child"],
)
def test_after_a_failure_nothing_is_left(
  tmp_path: Path, prepares: str, then: str
) -> None:
  code = f"if index == 0:\n  {prepares}; here('up'); {then}\n"
  code += "wait_for('up.0'); sys.exit(5)"
  code, _, errors = launched_job.run(code, tmp_path)
  assert (code, errors) == (5, f"{FIRST} 5\n")
  paths = [*tmp_path.glob("up.0"), *tmp_path.glob("child.0")]
  assert len(paths) == 1 + ("child" in prepares)
  for pid in (int(path.read_text()) for path in paths):
    launched_job.wait_until(lambda pid=pid: not launched_job.is_alive(pid))


def test_after_a_failure_the_others_are_asked_first(tmp_path: Path) -> None:
  code = """
def tidy_up(number, frame):
  here("asked")
  sys.exit()
if index == 0:
  signal.signal(signal.SIGTERM, tidy_up)
  here("up")
  time.sleep(99)
wait_for("up.0")
sys.exit(5)
"""
  end = launched_job.run(code, tmp_path)
  assert end == (5, "", f"{FIRST} 5\n")
  assert (tmp_path / "asked.0").exists()


def test_children_of_a_process_that_succeeds_end_with_it(
  tmp_path: Path,
) -> None:
  assert launched_job.run(GRANDCHILD, tmp_path, processes=1) == (0, "", "")
  (child,) = launched_job.pids(tmp_path, "child.0")
  launched_job.wait_until(lambda: not launched_job.is_alive(child))


def test_an_early_success_is_waited_on(tmp_path: Path) -> None:
  code = "here('up')\nif index: sys.exit()\nwait_for('gone'); print('done')"
  argv = launched_job.command(code, processes=3)
  with launched_job.started(argv, tmp_path) as process:
    _, *others = launched_job.pids(tmp_path, "up.0", "up.1", "up.2")
    launched_job.wait_until(lambda: not any(map(launched_job.state, others)))
    (tmp_path / "gone").touch()
    assert launched_job.finish(process) == (0, "[0] done\n", "")


STOPPING = "stopping; again to kill at once"
both_signals = pytest.mark.parametrize(
  "number", [signal.SIGINT, signal.SIGTERM]
)


def _stop(
  tmp_path: Path, code: str, *numbers: int, flags: tuple[str, ...] = ()
) -> tuple[int, list[str]]:
  """Signals a job of two once both have come to `here("up")`.

  Args:
    tmp_path: where the job runs.
    code: of each process.
    *numbers: the signals; the second comes when the first was answered.
    flags: of the launcher.

  Returns:
    The exit code, and the lines of the standard error.
  """
  argv = launched_job.command(code, *flags)
  with launched_job.started(argv, tmp_path) as process:
    pids = launched_job.pids(tmp_path, "up.0", "up.1")
    assert process.stderr is not None
    first = b""
    for number in numbers:
      process.send_signal(number)
      first = first or process.stderr.readline()
    end, _, errors = launched_job.finish(process)
  assert not any(map(launched_job.is_alive, pids))
  return end, (first.decode() + errors).splitlines()


def _when_asked(*handlers: str) -> str:
  """Returns code of which process i does `handlers[i]` on SIGTERM."""
  return f"""
def save(secs):
  time.sleep(secs)
  here("saved")
  sys.exit()
signal.signal(signal.SIGTERM, [{", ".join(handlers)}][index])
here("up")
time.sleep(99)
"""


# Longer than processes have after the failure of another.
LONG_SECS = 2.5


@pytest.mark.parametrize(
  ("number", "secs"), [(signal.SIGINT, LONG_SECS), (signal.SIGTERM, 0)]
)
def test_a_signal_lets_all_processes_save(
  tmp_path: Path, number: signal.Signals, secs: float
) -> None:
  code = _when_asked(f"lambda *_: save({secs})", "lambda *_: save(0)")
  end = _stop(tmp_path, code, number, flags=("--max-restarts=1",))
  assert end == (0, [STOPPING])
  launched_job.pids(tmp_path, "saved.0", "saved.1")


@pytest.mark.parametrize(
  ("number", "handler", "secs"),
  [
    (signal.SIGINT, "signal.SIG_DFL", LONG_SECS),
    (signal.SIGTERM, "signal.SIG_DFL", 0),
    # As with `distlm train --signal-exit-code`.
    (signal.SIGINT, "lambda *_: sys.exit(143)", LONG_SECS),
  ],
)
def test_to_end_when_asked_is_no_failure(
  tmp_path: Path, number: signal.Signals, handler: str, secs: float
) -> None:
  code = _when_asked(f"lambda *_: save({secs})", handler)
  end = _stop(tmp_path, code, number, flags=("--max-restarts=1",))
  assert end == (128 + number, [STOPPING])
  launched_job.pids(tmp_path, "saved.0")


def test_a_failure_while_stopping_is_one(tmp_path: Path) -> None:
  code = _when_asked("signal.SIG_IGN", "lambda *_: sys.exit('error: no disk')")
  code, errors = _stop(
    tmp_path, code, signal.SIGTERM, flags=("--max-restarts=9",)
  )
  assert (code, errors[0]) == (1, STOPPING)
  assert sorted(errors[1:]) == ["[1] error: no disk", f"{FIRST} 1: no disk"]


def test_only_the_processes_are_asked_to_stop(tmp_path: Path) -> None:
  # Which may need what they started to end well.
  child = "import time; time.sleep(1); open('child', 'w')"
  code = f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
  code += _when_asked(*["lambda *_: sys.exit(child.wait())"] * 2)
  assert _stop(tmp_path, code, signal.SIGTERM) == (0, [STOPPING])
  assert (tmp_path / "child").exists()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills(tmp_path: Path, second: signal.Signals) -> None:
  code = _when_asked("signal.SIG_IGN", "signal.SIG_IGN")
  numbers = (signal.SIGINT, second)
  end = _stop(tmp_path, code, *numbers, flags=("--max-restarts=1",))
  assert end == (128 + second, [STOPPING])


def test_sigterm_by_two_ways_at_once_is_one_request(tmp_path: Path) -> None:
  code = _when_asked(
    "lambda *_: (time.sleep(1), sys.exit(0))", "signal.SIG_DFL"
  )
  numbers = [signal.SIGTERM] * 2
  assert _stop(tmp_path, code, *numbers) == (143, [STOPPING])


def test_a_process_that_was_asked_itself_has_stopped_the_job(
  tmp_path: Path,
) -> None:
  code = "sys.exit(143 if index == 0 else 0)"
  argv = launched_job.command(code, "--max-restarts=3")
  with launched_job.started(argv, tmp_path) as process:
    assert launched_job.finish(process) == (143, "", "")


@both_signals
def test_a_signal_ends_the_wait_for_a_restart(
  tmp_path: Path, number: signal.Signals
) -> None:
  code = "here(f'up{os.getpid()}'); sys.exit(1)"
  argv = launched_job.command(code, "--max-restarts=30", processes=1)
  with launched_job.started(argv, tmp_path) as process:
    assert process.stderr is not None
    while b"restart 2 of 30 in 2 s" not in process.stderr.readline():
      assert process.poll() is None
    process.send_signal(number)
    assert launched_job.finish(process) == (128 + number, "", "")
  assert len(list(tmp_path.glob("up*"))) == 2


def test_that_wait_is_ended_at_once(tmp_path: Path) -> None:
  code = "from distlm import supervision\nwith supervision.Signals() as s:\n"
  code += "  print('up', flush=True); print(s.wait(999), s.received)"
  argv = [sys.executable, "-c", code]
  with launched_job.started(argv, tmp_path) as process:
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    launched_job.wait_until(lambda: launched_job.state(process.pid) == "S")
    process.send_signal(signal.SIGTERM)
    assert launched_job.finish(process) == (0, "True [15]\n", "")


def test_killed_it_leaves_no_process(tmp_path: Path) -> None:
  code = f"{STUBBORN}; here('up'); time.sleep(99)"
  argv = launched_job.command(code, processes=3)
  with launched_job.started(argv, tmp_path) as process:
    pids = launched_job.pids(tmp_path, *(f"up.{i}" for i in range(3)))
    process.kill()
    for pid in pids:
      launched_job.wait_until(lambda pid=pid: not launched_job.is_alive(pid))


def test_a_process_whose_launcher_is_gone_already_ends() -> None:
  code = "from distlm import supervision as s; s._die_with(0, s._prctl())"
  argv = [sys.executable, "-c", f"{code}; print('alive')"]
  end = subprocess.run(argv, check=False, capture_output=True)
  assert (end.returncode, end.stdout) == (-signal.SIGKILL, b"")
