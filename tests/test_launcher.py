"""Tests of `distlm launch`: what it supervises, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import launched_job
import pytest

from distlm import launcher
from distlm.errors import UsageError

FIRST = "error: process 1 failed first, with exit code"


def test_each_process_knows_its_place(tmp_path: Path) -> None:
  code = "print(*(os.environ.get(f'DISTLM_{name}') for name in sys.argv[1:]))"
  argv = launched_job.command(code, "--devices-per-process=3", processes=3)
  names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "DEVICES")
  with launched_job.started([*argv, *names], tmp_path) as process:
    end, output, errors = launched_job.finish(process)
  assert (end, errors) == (0, "")
  rows = sorted(line.split() for line in output.splitlines())
  host, _, port = rows[0][1].partition(":")
  assert host == "127.0.0.1" and 1024 < int(port) < 65536
  place = f"{host}:{port}"
  assert rows == [[f"[{i}]", place, "3", f"{i}", "3"] for i in range(3)]


def test_one_process_is_no_job_of_several(tmp_path: Path) -> None:
  code = "print([name for name in os.environ if name.startswith('DISTLM_')])"
  inherited = {"DISTLM_PROCESS_ID": "1", "DISTLM_NUM_PROCESSES": "2"}
  end = launched_job.run(code, tmp_path, processes=1, **inherited)
  # Whatever a scheduler says: it is alone.
  assert end == (0, "['DISTLM_NUM_PROCESSES']\n", "")


def test_processes_read_nothing(tmp_path: Path) -> None:
  argv = launched_job.command("print(sys.stdin.read())")
  with launched_job.started(argv, tmp_path, stdin=subprocess.PIPE) as process:
    assert process.wait(launched_job.TIMEOUT_SECS) == 0


def test_distlm_runs_by_this_python(tmp_path: Path) -> None:
  argv = [sys.executable, str(launched_job.LOCAL), "--processes=2", "--"]
  # Were these the launcher's, it would complain of them in other words.
  argv += ["distlm", "train", "--config.model.num_layers=3", "--processes=2"]
  with launched_job.started(argv, tmp_path, PATH="") as process:
    code, output, errors = launched_job.finish(process)
  assert (code, output) == (2, "")
  says = "arguments are required: --config, --workdir; see distlm train --help"
  assert re.search(rf"^\[[01]\] error: the following {says}$", errors, re.M)
  last = rf"error: process [01] failed first, with exit code 2: the .* {says}"
  assert re.fullmatch(last, errors.splitlines()[-1])


def test_a_restart_is_a_new_job(tmp_path: Path) -> None:
  code = """
is_second = os.path.exists("failed")
print(os.environ["DISTLM_COORDINATOR"])
here(f"up{is_second}")
wait_for(f"up{is_second}.0", f"up{is_second}.1")
if not is_second:
  if index == 0:
    time.sleep(99)
  open("failed", "w")
  os.kill(os.getpid(), signal.SIGKILL)
"""
  code, output, errors = launched_job.run(code, tmp_path, "--max-restarts=3")
  line = "process 1 was killed by SIGKILL; restart 1 of 3 in 1 s\n"
  assert (code, errors) == (0, line)
  lines = output.splitlines()
  assert sorted(line[:3] for line in lines) == ["[0]", "[0]", "[1]", "[1]"]
  # Each time all have the same port, and not that of the time before.
  assert len({line[4:] for line in lines}) == 2
  assert len(set(lines)) == 4


@pytest.mark.parametrize(
  ("ending", "flags", "errors"),
  [
    (
      1,
      ["--max-restarts=1"],
      [
        "process 1 failed first, with exit code 1; restart 1 of 1 in 1 s",
        f"{FIRST} 1",
      ],
    ),
    (1, [], [f"{FIRST} 1"]),
    # What is wrong in the command stays wrong.
    (2, ["--max-restarts=9"], [f"{FIRST} 2"]),
  ],
)
def test_a_job_that_fails_again_and_again(
  tmp_path: Path, ending: int, flags: list[str], errors: list[str]
) -> None:
  code = f"time.sleep(0 if index else 99); sys.exit({ending})"
  code, _, lines = launched_job.run(code, tmp_path, *flags)
  assert (code, lines.splitlines()) == (ending, errors)


LEFTOVERS = """
import os, signal, sys, threading
from distlm import arguments, launcher

def owned():
  handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  wakeup = signal.set_wakeup_fd(-1)
  signal.set_wakeup_fd(wakeup)
  return os.listdir("/proc/self/fd"), threading.active_count(), handlers, wakeup

own, command = launcher.split_command(sys.argv[1:])
parser = arguments.Parser()
launcher.add_arguments(parser)
before = owned()
try:
  end = launcher.run(parser.parse_args(own), command)
except Exception as error:
  end = error
assert owned() == before, (owned(), before)
try:
  os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
  print(end, "jax" in sys.modules)
"""


def test_it_gives_back_all_it_took(tmp_path: Path) -> None:
  code = "time.sleep(0 if index else 99); sys.exit(7)"
  argv = launched_job.command(
    code, "--max-restarts=1", launcher=("-c", LEFTOVERS)
  )
  with launched_job.started(argv, tmp_path) as process:
    code, output, errors = launched_job.finish(process)
  assert (code, output) == (0, "7 False\n"), errors


@pytest.mark.parametrize(
  ("first", "says"),
  [
    # Two or three have room for their descriptors.
    (
      """
import resource, subprocess
number = len(os.listdir("/proc/self/fd")) + 20
resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
""",
      r"process [1-8] of 9: \S+ cannot be started \(.*Too many open files",
    ),
    # As in sandboxes that do not know it.
    (
      """
def pidfd_open(pid):
  raise OSError(38, "Function not implemented")
os.pidfd_open = pidfd_open
""",
      r"process 0 of 9: \S+ cannot be started \(.*not implemented",
    ),
  ],
)
def test_so_it_does_when_a_process_cannot_be_started(
  tmp_path: Path, first: str, says: str
) -> None:
  script = LEFTOVERS.replace("own, command", f"{first}\nown, command", 1)
  argv = launched_job.command(
    "time.sleep(99)", processes=9, launcher=("-c", script)
  )
  with launched_job.started(argv, tmp_path) as process:
    code, output, errors = launched_job.finish(process)
  assert code == 0, errors
  assert re.match(says, output)


def test_what_is_no_program_cannot_be_started(tmp_path: Path) -> None:
  program = tmp_path / "program"
  program.write_text("no program")
  program.chmod(0o755)
  argv = launched_job.command("")
  argv[argv.index("--") + 1 :] = [str(program)]
  with launched_job.started(argv, tmp_path) as process:
    code, _, errors = launched_job.finish(process)
  assert code == 1
  assert "error: process 0 of 2: " in errors
  assert "cannot be started ([Errno 8] Exec format error" in errors


@pytest.mark.parametrize(
  ("args", "says"),
  [
    (["--processes=0", "--", "true"], "--processes=0: it must be 1 or more"),
    (["--processes=x", "--", "true"], "--processes: invalid int value: 'x'"),
    (["--", "true"], "required: --processes; see"),
    (
      ["--processes=1", "--devices-per-process=0", "--", "true"],
      "--devices-per-process=0: it must be 1 or more",
    ),
    (
      ["--processes=1", "--max-restarts=-1", "--", "true"],
      "--max-restarts=-1: it must be 0 or more",
    ),
    (["--processes=1", "distlm", "train"], "there is no `--`; give the"),
    (["--processes=1", "--"], "there is no command after `--`; give one"),
    (["--processes=1", "x", "--", "true"], "unrecognized arguments: x; see"),
    (
      ["--processes=1", "--", "./no/program"],
      "-- ./no/program: there is no such program; give a path",
    ),
    (["--processes=1", "--", "/"], "-- /: there is no such program; give"),
    (
      ["--processes=3", "--devices-per-process=2", "--", "true"],
      "--processes=3 x --devices-per-process=2: 6 GPUs are asked for, but",
    ),
  ],
)
def test_bad_input_is_one_line(
  tmp_path: Path, args: list[str], says: str
) -> None:
  argv = [sys.executable, str(launched_job.LOCAL), *args]
  gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "JAX_PLATFORMS": "cuda"}
  with launched_job.started(argv, tmp_path, **gpus) as process:
    code, output, errors = launched_job.finish(process)
  assert (code, output) == (2, "")
  assert errors.startswith("error: ") and errors.count("\n") == 1
  assert says in errors


@pytest.mark.parametrize(
  ("environ", "num_found", "gpus"),
  [
    ({}, 0, []),
    ({}, 2, ["0", "1"]),
    ({"CUDA_VISIBLE_DEVICES": "GPU-8f6d, 3"}, 4, ["GPU-8f6d", "3"]),
    # CUDA sees none, or none after the first that is none.
    ({"CUDA_VISIBLE_DEVICES": ""}, 4, []),
    ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, 4, ["2"]),
    ({"JAX_PLATFORMS": "cpu"}, 4, []),
    ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "1"}, 4, []),
    ({"JAX_PLATFORMS": "cuda,cpu"}, 1, ["0"]),
    ({"JAX_PLATFORMS": "gpu"}, 1, ["0"]),
    ({"JAX_PLATFORMS": ""}, 1, ["0"]),
  ],
)
def test_visible_gpus(
  environ: dict[str, str], num_found: int, gpus: list[str]
) -> None:
  assert launcher.visible_gpus(environ, num_found) == gpus


@pytest.mark.parametrize(
  ("num_processes", "num_devices", "shares"),
  [
    (1, None, ["a,b,c,d"]),
    (1, 3, ["a,b,c"]),
    (2, None, ["a,b", "c,d"]),
    (2, 1, ["a", "b"]),
    (4, 1, ["a", "b", "c", "d"]),
  ],
)
def test_gpus_are_split(
  num_processes: int, num_devices: int | None, shares: list[str]
) -> None:
  assert launcher.split_gpus("abcd", num_processes, num_devices) == shares
  assert launcher.split_gpus("", num_processes, num_devices) is None


@pytest.mark.parametrize(
  ("num_processes", "num_devices", "says"),
  [
    (4, 2, "4 x --devices-per-process=2: 8 GPUs are asked for, but there are"),
    (3, None, "--processes=3: the 4 GPU(s) cannot be shared out evenly; give"),
    (8, None, "--processes=8: the 4 GPU(s) cannot be shared out evenly; give"),
  ],
)
def test_gpus_that_do_not_suffice(
  num_processes: int, num_devices: int | None, says: str
) -> None:
  with pytest.raises(UsageError) as error:
    launcher.split_gpus("abcd", num_processes, num_devices)
  assert says in str(error.value)


def test_each_process_has_gpus_and_threads_of_its_own(tmp_path: Path) -> None:
  names = "CUDA_VISIBLE_DEVICES", "DISTLM_DEVICES", "NPROC"
  code = f"print(*(os.environ[name] for name in {names}))"
  gpus = {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2", "JAX_PLATFORMS": "cuda"}
  argv = launched_job.command(code, "--devices-per-process=3")
  for threads, expected in (("", "24"), ("5", "5")):
    env = {key: os.environ[key] for key in os.environ if key != "NPROC"}
    env |= gpus | ({"NPROC": threads} if threads else {})
    output = subprocess.check_output(argv, env=env, cwd=tmp_path, text=True)
    assert sorted(output.splitlines()) == [
      f"[0] 7,6,5 3 {expected}",
      f"[1] 4,3,2 3 {expected}",
    ]


@pytest.mark.parametrize(
  ("argv", "own", "command"),
  [
    (
      ["--processes=2", "--", "distlm", "train", "--config.a=1"],
      ["--processes=2"],
      ["distlm", "train", "--config.a=1"],
    ),
    (["--", "a", "--", "b"], [], ["a", "--", "b"]),
    (["--help"], ["--help"], []),
  ],
)
def test_the_command_is_left_alone(
  argv: list[str], own: list[str], command: list[str]
) -> None:
  assert launcher.split_command(argv) == (own, command)
