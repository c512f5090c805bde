"""What several processes cost, and how soon a supervised job goes on.

  python benchmarks/launch.py

It trains experiments/tiny.py on 4 fake devices as 1 x 4, 2 x 2 and 4 x 1
processes under `distlm launch`, in turns. It prints the time from the command
to the first finished step, the median time of a step, and, for each fault of
one process, the time from it to the end of its job (detection) and to the next
finished step of the restarted one. Programs are compiled before; on the CPU,
JAX keeps those of process 0 alone, so that the others compile theirs again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUM_DEVICES = 4
PROCESS_COUNTS = (1, 2, 4)
NUM_ROUNDS = 2
NUM_STEPS = 40
WATCHDOG_SECS = 5
POLL_SECS = 0.01
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def main() -> None:
  """Prints the tables."""
  with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    for count in PROCESS_COUNTS:  # Compiles what the others find.
      _train(directory, count)
    print("| processes x devices | first step after, s | step, ms |")
    print("|---|---|---|")
    rounds = [
      [_train(directory, count) for count in PROCESS_COUNTS]
      for _ in range(NUM_ROUNDS)
    ]
    for count, runs in zip(
      PROCESS_COUNTS, zip(*rounds, strict=True), strict=True
    ):
      first, step = map(statistics.median, zip(*runs, strict=True))
      print(f"| {count} x {NUM_DEVICES // count} | {first:.1f} | {step:.0f} |")
    print(
      f"\n| fault, watchdog.seconds={WATCHDOG_SECS} | processes | of |"
      " job ended after, s | next step after, s |\n|---|---|---|---|---|"
    )
    for fault, count, target in itertools.product(FAULTS, (2, 4), (0, 1)):
      ended, resumed = _survive(directory, count, target, FAULTS[fault])
      role = "worker" if target else "coordinator"
      print(f"| {fault} | {count} | {role} | {ended:.1f} | {resumed:.1f} |")


@contextlib.contextmanager
def _job(directory: Path, count: int, num_steps: int) -> Iterator[Any]:
  """Starts a job; gives its process and its workdir."""
  workdir = Path(tempfile.mkdtemp(dir=directory))
  env = {
    **os.environ,
    "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  command = [
    *(sys.executable, "-m", "distlm", "launch", f"--processes={count}"),
    *(f"--devices-per-process={NUM_DEVICES // count}", "--max-restarts=1"),
    *("--", "distlm", "train", "--config=experiments/tiny.py"),
    *(f"--workdir={workdir}", "--config.evaluation.interval=0"),
    *("--config.log_train_data_interval=1", "--config.checkpoint.interval=10"),
    f"--config.training_steps={num_steps}",
    "--config.optimizer.warmup_steps=10",
    "--config.evaluation.batches=1",
    f"--config.watchdog.seconds={WATCHDOG_SECS}",
  ]
  with open(workdir / "output", "wb") as output:
    process = subprocess.Popen(
      command, env=env, stdout=output, stderr=subprocess.STDOUT
    )
  try:
    yield process, workdir
  finally:
    process.kill()
    process.wait()


def _train(directory: Path, count: int) -> tuple[float, float]:
  """Returns the seconds to the first step, and the milliseconds of one."""
  start = time.monotonic()
  with _job(directory, count, NUM_STEPS) as (process, workdir):
    first = _wait(lambda: _last_step(workdir) >= 1, process) - start
    if process.wait():
      raise RuntimeError((workdir / "output").read_text())
  rows = _rows(workdir)[NUM_STEPS // 4 :]
  rates = [row["tokens"] / row["tokens_per_sec"] for row in rows]
  return first, 1e3 * statistics.median(rates)


def _survive(
  directory: Path, count: int, target: int, number: int
) -> tuple[float, float]:
  """Returns the seconds until a job has ended, and until it goes on."""
  with _job(directory, count, 10_000) as (process, workdir):
    # The watchdog has seen some steps by then.
    _wait(lambda: _last_step(workdir) >= 15, process)
    notes = [workdir / "processes" / f"{i}.json" for i in range(count)]
    pids = [json.loads(note.read_bytes())["pid"] for note in notes]
    os.kill(pids[target], number)
    start, at = time.monotonic(), _last_step(workdir)
    ended = _wait(
      lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), process
    )
    resumed = _wait(lambda: _last_step(workdir) > at, process)
  return ended - start, resumed - start


def _wait(is_true: Callable[[], bool], process: Any) -> float:
  while not is_true():
    if process.poll() is not None:
      raise RuntimeError("the job ended too early")
    time.sleep(POLL_SECS)
  return time.monotonic()


def _rows(workdir: Path) -> list[dict[str, Any]]:
  path = workdir / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  rows = [json.loads(line) for line in lines]
  return [row for row in rows if row["split"] == "train"]


def _last_step(workdir: Path) -> int:
  return max((row["step"] for row in _rows(workdir)), default=0)


if __name__ == "__main__":
  main()
