"""A job under the launcher whose processes are a few lines of Python each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TIMEOUT_SECS = 180
LOCAL = Path(__file__).parent.parent / "launch" / "local.py"
# `here` makes a file, with its number, that says a process has come so far.
PRELUDE = """
import os, signal, subprocess, sys, time
index = int(os.environ.get("DISTLM_PROCESS_ID", 0))
def here(name):
  new = f"new.{name}.{index}"
  with open(new, "w") as file:
    file.write(str(os.getpid()))
  os.rename(new, f"{name}.{index}")
def wait_for(*names):
  while not all(map(os.path.exists, names)):
    time.sleep(0.01)
"""


def command(
  code: str, *flags: str, processes: int = 2, launcher: Sequence[str] = ()
) -> list[str]:
  """Returns the command line of a job; each process runs `code`."""
  return [
    sys.executable,
    *(launcher or [str(LOCAL)]),
    f"--processes={processes}",
    *flags,
    "--",
    "python",
    "-c",
    PRELUDE + code,
  ]


@contextlib.contextmanager
def started(
  argv: Sequence[str],
  directory: Path,
  stdout: int = subprocess.PIPE,
  stderr: int = subprocess.PIPE,
  stdin: int | None = None,
  **env: str,
) -> Iterator[subprocess.Popen[bytes]]:
  """Starts a command in a directory; kills it if it is still there."""
  with subprocess.Popen(
    argv,
    cwd=directory,
    env={**os.environ, **env},
    stdout=stdout,
    stderr=stderr,
    stdin=stdin,
    bufsize=0,  # What a first read takes too much, `communicate` would miss.
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
  """Returns exit code, output and errors of a launcher that ends by itself."""
  output, errors = process.communicate(timeout=TIMEOUT_SECS)
  return (
    process.returncode,
    (output or b"").decode(errors="replace"),
    (errors or b"").decode(errors="replace"),
  )


def run(
  code: str, directory: Path, *flags: str, processes: int = 2, **env: str
) -> tuple[int, str, str]:
  """Runs a job; returns exit code, output and errors of the launcher."""
  argv = command(code, *flags, processes=processes)
  with started(argv, directory, **env) as process:
    return finish(process)


def wait_until(is_true: Callable[[], bool]) -> None:
  deadline = time.monotonic() + TIMEOUT_SECS
  while not is_true():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def pids(directory: Path, *names: str) -> list[int]:
  """Returns the processes that made these files, once all are there."""
  paths = [directory / name for name in names]
  wait_until(lambda: all(path.exists() for path in paths))
  return [int(path.read_text()) for path in paths]


def state(pid: int) -> str:
  """Returns the letter of Linux for what a process does; "" if it is gone."""
  try:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
  except (FileNotFoundError, ProcessLookupError):
    return ""


def is_alive(pid: int) -> bool:
  return state(pid) not in ("", "Z")


def kill_and_wait(pid: int) -> None:
  """Kills a process of someone who does not reap it now."""
  os.kill(pid, signal.SIGKILL)
  wait_until(lambda: state(pid) == "Z")
