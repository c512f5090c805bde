"""Runs a job of several processes on this machine: `distlm launch`.

It imports no JAX, so that the processes are started at once.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import itertools
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distlm import cluster
from distlm.errors import RunError, UsageError
from distlm.prefixed_output import Output, descriptor, write
from distlm.supervision import Processes, Signals

_USAGE_CODE = 2
_LONGEST_BACKOFF_SECS = 60
_PORTS = range(61440, 65536)  # Above those of outgoing connections.
_GPU_FILES = "/dev/nvidia[0-9]*"
_JOB_VARIABLES = (
  "DISTLM_COORDINATOR",
  "DISTLM_NUM_PROCESSES",
  "DISTLM_PROCESS_ID",
)
_EXAMPLE = "-- distlm train --config=FILE --workdir=DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of the launcher, which stand before the `--`."""
  parser.usage = f"{parser.prog} --processes=P [flags] -- COMMAND ..."
  parser.epilog = (
    f"Such as: {parser.prog} --processes=2 --devices-per-process=4 {_EXAMPLE}"
  )
  parser.add_argument(
    "--processes", type=int, required=True, help="how many processes"
  )
  parser.add_argument(
    "--devices-per-process",
    type=int,
    help="how many devices each has: GPUs of its own or, on a machine without,"
    " fake CPU ones",
  )
  parser.add_argument(
    "--max-restarts",
    type=int,
    default=0,
    help="how often the whole job is started again after one of its processes"
    " failed (default: %(default)s)",
  )


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits a command line at its first `--`.

  >>> split_command(["--processes=2", "--", "distlm", "train", "--", "x"])
  (['--processes=2'], ['distlm', 'train', '--', 'x'])

  Args:
    argv: what follows `distlm launch`.

  Returns:
    The launcher's own arguments, and the command to run.

  Raises:
    UsageError: if there is no `--`, unless the help is asked for.
  """
  argv = list(argv)
  if "--" in argv:
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
  if not {"-h", "--help"} & set(argv):
    raise UsageError(
      f"distlm launch: there is no `--`; give the command to run after one,"
      f" such as {_EXAMPLE}"
    )
  return argv, []


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
  """Runs a command as a job of processes until all have ended.

  It handles SIGINT and SIGTERM for as long, so that it belongs into the main
  thread.

  Args:
    args: with the flags of `add_arguments`.
    command: what each process runs.

  Returns:
    The exit code: 0 if all processes ended with 0, else that of the first which
    did not; 128 + the signal after one that did not end well.

  Raises:
    UsageError: if a flag or the command cannot work.
    RunError: if a process cannot be started.
  """
  job = _make_job(args, command)
  with Signals() as signals:
    for restart in itertools.count(1):
      end = _run_once(job, signals)
      if end.code == 0 or end.failure is None:
        return end.code
      is_last = restart > args.max_restarts or end.code == _USAGE_CODE
      if is_last or signals.received:
        reason = f": {end.error_line}" if end.error_line else ""
        _say(f"error: {end.failure}{reason}")
        return end.code
      secs = min(2 ** min(restart - 1, 6), _LONGEST_BACKOFF_SECS)
      _say(
        f"{end.failure}; restart {restart} of {args.max_restarts} in {secs} s"
      )
      if signals.wait(secs):
        return 128 + signals.received[0]
  raise AssertionError("unreachable")


class _Job(NamedTuple):
  command: list[str]
  num_processes: int
  num_devices: int | None
  gpus: list[str] | None  # Of each process; None: whatever is there.


class _End(NamedTuple):
  code: int  # of the job
  failure: str | None = None
  error_line: str = ""


def _run_once(job: _Job, signals: Signals) -> _End:
  """Starts all processes and waits until all have ended."""
  num_processes = job.num_processes
  environments = _make_environments(os.environ, job, _free_port())
  with (
    Output(num_processes, lambda: len(signals.received) > 1) as output,
    Processes(signals, output.say) as processes,
  ):
    for index, env in enumerate(environments):
      try:
        with output.open(index) as streams:
          processes.start(index, job.command, env, streams)
      except OSError as error:
        raise RunError(
          f"process {index} of {num_processes}: {job.command[0]} cannot be"
          f" started ({error})"
        ) from error
    output.start()
    processes.wait()
  first = processes.first
  if processes.was_forced:
    return _End(128 + signals.received[1])
  if first is None:
    return _End(0)
  if processes.was_stopped:
    number = signals.received[0] if signals.received else signal.SIGTERM
    return _End(128 + number)
  return _End(
    first.exit_code,
    first.describe(num_processes),
    output.error_line(first.process),
  )


def _say(line: str) -> None:
  write(descriptor(sys.stderr), line.encode(errors="backslashreplace") + b"\n")


def _free_port() -> int:
  """Returns a port that nothing listens on, nor any connection comes from."""
  while True:
    port = random.choice(_PORTS)
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(("127.0.0.1", port))
      return port


def _make_job(args: argparse.Namespace, command: Sequence[str]) -> _Job:
  """Checks what the user gave."""
  if not hasattr(os, "pidfd_open"):
    raise UsageError(
      "distlm launch: it needs Linux; start each process by itself, with"
      " --coordinator, --num-processes and --process-id"
    )
  for flag, least in (
    ("processes", 1),
    ("devices_per_process", 1),
    ("max_restarts", 0),
  ):
    number = getattr(args, flag)
    if number is not None and number < least:
      name = flag.replace("_", "-")
      raise UsageError(f"--{name}={number}: it must be {least} or more")
  gpus = split_gpus(
    visible_gpus(os.environ, len(glob.glob(_GPU_FILES))),
    args.processes,
    args.devices_per_process,
  )
  return _Job(_resolve(command), args.processes, args.devices_per_process, gpus)


def _resolve(command: Sequence[str]) -> list[str]:
  """Returns what to run, with this Python for `distlm` and `python`."""
  if not command:
    raise UsageError(
      f"distlm launch: there is no command after `--`; give one, such as"
      f" {_EXAMPLE}"
    )
  program, *rest = command
  if program == "distlm":
    return [sys.executable, "-m", "distlm", *rest]
  if program == "python":
    return [sys.executable, *rest]
  if shutil.which(program) is None:
    raise UsageError(
      f"-- {program}: there is no such program; give a path, or the name of one"
      " in PATH"
    )
  return list(command)


def visible_gpus(environ: Mapping[str, str], num_found: int) -> list[str]:
  """Returns the NVIDIA GPUs that JAX would use, as CUDA names them.

  >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}, 4)
  ['3', '1']
  >>> visible_gpus({"JAX_PLATFORMS": "cpu"}, 4)
  []

  Args:
    environ: the environment.
    num_found: how many the machine has.
  """
  platforms = environ.get("JAX_PLATFORMS", "")
  if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
    return []
  listed = environ.get("CUDA_VISIBLE_DEVICES")
  if listed is None:
    return [str(index) for index in range(num_found)]
  names = [name.strip() for name in listed.split(",")]
  # CUDA sees those before the first that is none, such as -1.
  return list(itertools.takewhile(lambda x: x not in ("", "-1"), names))


def split_gpus(
  gpus: Sequence[str], num_processes: int, num_devices: int | None
) -> list[str] | None:
  """Shares out the GPUs: each belongs to one process.

  >>> split_gpus(["0", "1", "2", "3"], 2, None)
  ['0,1', '2,3']

  Args:
    gpus: see `visible_gpus`.
    num_processes: of the job.
    num_devices: of each process; None: all GPUs are shared out evenly.

  Returns:
    CUDA_VISIBLE_DEVICES of each process, or None if there are no GPUs.

  Raises:
    UsageError: if there are too few, or they cannot be shared out evenly.
  """
  if not gpus:
    return None
  found = len(gpus)
  if num_devices is None:
    if found % num_processes:
      raise UsageError(
        f"--processes={num_processes}: the {found} GPU(s) cannot be shared out"
        f" evenly; give --devices-per-process, a divisor of {found} as"
        " --processes, or JAX_PLATFORMS=cpu"
      )
    num_devices = found // num_processes
  asked = num_processes * num_devices
  if asked > found:
    raise UsageError(
      f"--processes={num_processes} x --devices-per-process={num_devices}:"
      f" {asked} GPUs are asked for, but there are {found}; ask for fewer, or"
      " set JAX_PLATFORMS=cpu for fake CPU devices"
    )
  return [
    ",".join(gpus[first : first + num_devices])
    for first in range(0, asked, num_devices)
  ]


def _make_environments(
  environ: Mapping[str, str], job: _Job, port: int
) -> list[dict[str, str]]:
  """Returns the environment of each process.

  Args:
    environ: the launcher's own.
    job: what runs.
    port: on which process 0 of several listens.
  """
  shared = {key: environ[key] for key in environ if key not in _JOB_VARIABLES}
  shared["PYTHONUNBUFFERED"] = "1"
  if job.num_devices is not None:
    shared["DISTLM_DEVICES"] = str(job.num_devices)
    # For commands that are not distlm's, which does it itself.
    threads = cluster.pool_threads(job.num_devices, job.num_processes)
    if threads is not None:
      shared.setdefault("NPROC", str(threads))
  environments = []
  for index in range(job.num_processes):
    env = dict(shared)
    env["DISTLM_NUM_PROCESSES"] = str(job.num_processes)
    if job.num_processes > 1:
      env["DISTLM_COORDINATOR"] = f"127.0.0.1:{port}"
      env["DISTLM_PROCESS_ID"] = str(index)
    if job.gpus is not None:
      env["CUDA_VISIBLE_DEVICES"] = job.gpus[index]
      # All of these, or the processes would share what is theirs already.
      env["DISTLM_DEVICES"] = str(job.gpus[index].count(",") + 1)
    environments.append(env)
  return environments
