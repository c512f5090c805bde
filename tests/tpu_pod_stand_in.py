"""A Cloud TPU for tests: a checkout, and programs that play gcloud and so on.

The stand-in for gcloud notes its calls. What is copied to the only worker, and
what that is told to run, goes to a directory of this machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_SCRIPT = Path(__file__).parents[1] / "launch" / "tpu_pod.sh"
_TIMEOUT_SECS = 120

_GCLOUD = """
import json, os, shutil, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
args, env = sys.argv[1:], os.environ
with open(env["CALLS"], "a") as calls:
  calls.write(json.dumps(args) + "\\n")
verb, home = args[3], env.get("WORKER_HOME")
if env.get("FAILS") == verb:
  sys.exit(3)
if verb == "describe":
  print(env["STATE"])
  sys.exit(not env["STATE"])
if verb == "scp" and home:
  shutil.copy(args[4], os.path.join(home, args[5].split(":")[1]))
if verb == "ssh":
  sys.stdin.read()
if verb == "ssh" and home:
  command = [a for a in args if a.startswith("--command=")][0][10:]
  env = {**env, "HOME": home}
  bash = subprocess.run(["bash", "-c", command], cwd=home, env=env)
  sys.exit(bash.returncode)
"""
# It trains until the file `end` holds the exit code, or a SIGTERM comes.
_DISTLM = """
import json, os, signal, sys, time
from pathlib import Path
home = Path(os.environ["HOME"])
def stop(*_):
  print("saved", flush=True)
  sys.exit(int(os.environ.get("STOP_CODE", 0)))
signal.signal(signal.SIGTERM, stop)
print("training", flush=True)
(home / "args.tmp").write_text(json.dumps(sys.argv[1:]))
(home / "args.tmp").rename(home / "args.json")
deadline = time.monotonic() + 60
while not (home / "end").exists() and time.monotonic() < deadline:
  time.sleep(0.02)
sys.exit(int((home / "end").read_text()))
"""
_RECORDER = """
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["WORKER_CALLS"], "a") as calls:
  calls.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
sys.exit(name == "mountpoint")
"""
# Those of the machine that runs the tests must not count.
_SETTINGS = (
  *("TPU_NAME", "ZONE", "PROJECT", "ACCELERATOR_TYPE", "RUNTIME_VERSION"),
  *("SPOT", "NFS_SHARE", "CONFIG", "WORKDIR"),
)


@dataclasses.dataclass(frozen=True)
class Pod:
  """A checkout, and a pod whose only worker is a directory."""

  directory: Path
  env: dict[str, str]

  @property
  def checkout(self) -> Path:
    return self.directory / "my checkout"

  @property
  def home(self) -> Path:
    return self.directory / "home"

  def start(self, *args: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
      [self.checkout / "launch" / "tpu_pod.sh", *args],
      cwd=self.directory,
      env={**self.env, **settings},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
      text=True,
    )

  def run(self, *args: str, **settings: str) -> tuple[int, str, str]:
    """Returns exit code, output and errors of the script."""
    return finish(self.start(*args, **settings))

  def calls(self, name: str = "CALLS") -> list[list[str]]:
    """Returns, and forgets, the arguments of the calls so far."""
    path = Path(self.env[name])
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [json.loads(line) for line in lines]

  def verbs(self) -> list[str]:
    return [call[3] for call in self.calls()]

  def wait_for_training(self) -> list[str]:
    """Returns the arguments of distlm once it trains."""
    deadline = time.monotonic() + _TIMEOUT_SECS
    while not (self.home / "args.json").exists():
      assert time.monotonic() < deadline
      time.sleep(0.01)
    return list(json.loads((self.home / "args.json").read_text()))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
  with process:
    try:
      output, errors = process.communicate(timeout=_TIMEOUT_SECS)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      raise
  return process.returncode, output, errors


def _write_program(path: Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!{sys.executable} -SE\n{text}")
  path.chmod(0o755)


def make(directory: Path) -> Pod:
  """Makes a pod that is not there yet, and a checkout with much in it."""
  env = {key: os.environ[key] for key in os.environ if key not in _SETTINGS}
  env |= {"TPU_NAME": "my-tpu", "ZONE": "us-west4-a", "STATE": ""}
  env |= {"CALLS": str(directory / "calls")}
  env |= {"WORKER_CALLS": str(directory / "worker_calls")}
  env["PATH"] = f"{directory / 'bin'}:{env['PATH']}"
  pod = Pod(directory, env)
  _write_program(directory / "bin" / "gcloud", _GCLOUD)
  for name in ("bin/python3", "bin/sudo", "bin/mountpoint"):
    _write_program(directory / name, _RECORDER)
  _write_program(pod.home / ".local" / "bin" / "uv", _RECORDER)
  for name in (
    *("experiments/tiny.py", "my experiments/it's.py", "distlm/cli.py"),
    *("distlm/__pycache__/cli.pyc", ".git/HEAD", ".venv/bin/python"),
    *(".coverage.vm", "runs/old", "constraints.txt", "launch/tpu_pod.sh"),
  ):
    (pod.checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (pod.checkout / name).touch()
  shutil.copy(_SCRIPT, pod.checkout / "launch")
  return pod


def with_worker(pod: Pod) -> Pod:
  """Returns a pod with distlm on its worker, which does what it is told."""
  _write_program(pod.home / "distlm" / "venv" / "bin" / "distlm", _DISTLM)
  (pod.home / "distlm" / "code").mkdir()
  return dataclasses.replace(
    pod, env={**pod.env, "STATE": "READY", "WORKER_HOME": str(pod.home)}
  )
