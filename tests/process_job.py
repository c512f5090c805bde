"""A job of several real processes, joined by gloo on the CPU.

A script hands `join` what each process computes; `run` starts the script.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from distlm import parallel
from distlm.cluster import ProcessSpec

_TIMEOUT_SECS = 180
_POLL_SECS = 0.05

Arrays = dict[str, np.ndarray]


def join(compute: Callable[[int], Arrays]) -> None:
  """Joins the job that the command line names, and writes what it computes.

  Args:
    compute: from the number of devices of a process to its results.
  """
  output, num_devices, coordinator, num_processes, process_id = sys.argv[1:]
  try:
    parallel.start(
      int(num_devices),
      ProcessSpec(coordinator, int(num_processes), int(process_id)),
    )
    np.savez(output, **compute(int(num_devices)))
  except BaseException:
    # An ordinary exit would wait for the other processes, which wait for this.
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def free_address() -> str:
  """Returns where process 0 of a job on this machine may listen."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return f"localhost:{free.getsockname()[1]}"


def run(
  script: str,
  num_processes: int,
  num_devices: int,
  directory: Path,
  env: Mapping[str, str],
) -> list[Arrays]:
  """Runs a script of this directory as a job; returns each process's results.

  Args:
    script: its file name.
    num_processes: of the job.
    num_devices: of each process.
    directory: an empty one, for what the processes write.
    env: their environment.
  """
  coordinator = free_address()
  path = Path(__file__).with_name(script)
  processes: list[subprocess.Popen[bytes]] = []
  try:
    for index in range(num_processes):
      numbers = (num_devices, coordinator, num_processes, index)
      command = [path, directory / f"{index}.npz", *numbers]
      with open(directory / f"{index}.log", "wb") as log:
        processes.append(
          subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
          )
        )
    codes = _wait(processes)
  finally:
    for process in processes:
      process.kill()  # JAX's preemption service swallows SIGTERM.
      process.wait()
  logs = [(directory / f"{i}.log").read_text() for i in range(num_processes)]
  # All, as the errors of one process follow from another's.
  assert codes == [0] * num_processes, "\n".join(logs)
  files = [directory / f"{index}.npz" for index in range(num_processes)]
  return [dict(np.load(file)) for file in files]


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
  """Returns the exit codes when all have ended, or one failed, or too late."""
  deadline = time.monotonic() + _TIMEOUT_SECS
  while time.monotonic() < deadline:
    codes = [process.poll() for process in processes]
    if None not in codes or any(codes):
      break
    time.sleep(_POLL_SECS)
  return codes
