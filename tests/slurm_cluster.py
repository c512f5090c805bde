"""A SLURM of two nodes on this machine, for as long as a test needs it.

The nodes are called 127.0.0.1 and 127.0.0.2. A job looks for its process 0 by
the name of its first node, and these need no name service and no /etc/hosts:
both are this machine. SLURM shortens the two to 127.0.0.[1-2], as it does with
other names that end in a number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
# A job of the second one has SLURM take back the nodes of one of the first,
# after as many seconds.
PARTITION, URGENT_PARTITION = "batch", "urgent"
GRACE_SECS = 1000
_DAEMONS = ("munged", "slurmctld", "slurmd")
_MUNGE_FILES = ("key", "pid", "log", "seed")
_START_SECS, _STOP_SECS, _COMMAND_SECS = 60, 20, 60
_POLL_SECS = 0.1

# Neither systemd nor cgroups, which a container may not have.
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName={partition} Nodes=ALL Default=YES GraceTime={grace_secs}
PartitionName={urgent_partition} Nodes=ALL PriorityTier=9
"""


def reason_to_skip() -> str | None:
  """Returns why SLURM cannot be started on this machine, or None."""
  missing = [name for name in _DAEMONS if shutil.which(name) is None]
  if missing:
    return f"not installed: {', '.join(missing)}; apt-get install slurm-wlm"
  return "SLURM's daemons need root" if os.geteuid() else None


@dataclasses.dataclass(frozen=True)
class Cluster:
  """A running SLURM."""

  env: dict[str, str]  #: By which its commands find it.

  def run(self, *command: str) -> str:
    """Returns what a command prints, such as `squeue`."""
    return subprocess.run(
      command,
      env=self.env,
      check=True,
      stdout=subprocess.PIPE,
      text=True,
      timeout=_COMMAND_SECS,
    ).stdout

  def fields(self, job: str) -> dict[str, str]:
    """Returns what `scontrol show job` says, such as JobState."""
    words = self.run("scontrol", "show", "job", job, "--oneliner").split()
    return dict(word.partition("=")[::2] for word in words)

  def state(self, job: str) -> str:
    """Returns the state of a job, such as RUNNING."""
    return self.fields(job)["JobState"]


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Cluster]:
  """Starts SLURM, and leaves no process of it or of its jobs behind.

  Args:
    directory: for its files, which nothing else has.
  """
  conf = directory / "slurm.conf"
  _write_files(directory, conf)
  cluster = Cluster({**os.environ, "SLURM_CONF": str(conf)})
  with contextlib.ExitStack() as stack:
    # When all else has ended: what SLURM has started is its own child.
    stack.callback(_kill_rest, conf)
    munged = (
      *("munged", "--foreground", "--force", "--num-threads=1"),
      *(f"--{name}-file={directory}/munge.{name}" for name in _MUNGE_FILES),
      f"--socket={directory}/munge.socket",
    )
    daemons = _Daemons(stack, directory, cluster.env)
    daemons.start(munged, (directory / "munge.socket").exists)
    daemons.start(("slurmctld", "-D", "-c"))
    for node in NODES:
      daemons.start(("slurmd", "-D", "-N", node))
    stack.callback(_end_jobs, cluster)
    daemons.wait_for(lambda: _num_idle(cluster) == len(NODES))
    yield cluster


def _write_files(directory: Path, conf: Path) -> None:
  key = directory / "munge.key"
  key.touch(0o600)
  key.write_bytes(os.urandom(1024))
  (directory / "state").mkdir()
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
    for free in sockets:  # All at once, so that they differ.
      free.bind(("127.0.0.1", 0))
    ports = [free.getsockname()[1] for free in sockets]
  # By default SLURM looks which cgroups there are, and ends if there are none,
  # though nothing here needs them. Old versions cannot be told so, but believe
  # in v1 without a look.
  version = subprocess.check_output(["slurmd", "-V"], text=True).split()[-1]
  is_new = tuple(map(int, version.split(".")[:2])) >= (23, 11)
  plugin = "disabled" if is_new else "cgroup/v1"
  conf.with_name("cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
  conf.write_text(
    _CONF.format(
      host=socket.gethostname().partition(".")[0],
      directory=directory,
      ports=ports,
      nodes=NODES,
      partition=PARTITION,
      urgent_partition=URGENT_PARTITION,
      grace_secs=GRACE_SECS,
    )
  )


class _Daemons:
  """What runs until a stack of contexts is closed."""

  def __init__(
    self, stack: contextlib.ExitStack, directory: Path, env: dict[str, str]
  ) -> None:
    self._stack, self._directory, self._env = stack, directory, env
    self._processes: list[subprocess.Popen[bytes]] = []

  def start(
    self, command: Sequence[str], is_ready: Callable[[], bool] = lambda: True
  ) -> None:
    """Starts a daemon in the foreground, with a log, and waits for it."""
    with open(self._directory / f"{command[0]}.log", "ab") as log:
      process = subprocess.Popen(
        command,
        env=self._env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # So that a Ctrl-C leaves its end to us.
      )
    self._processes.append(process)
    self._stack.callback(_stop, process)
    self.wait_for(is_ready)

  def wait_for(self, is_ready: Callable[[], bool]) -> None:
    """Waits until all is well, or raises what the logs say."""

    def has_ended() -> bool:
      return any(process.poll() is not None for process in self._processes)

    wait_until(lambda: has_ended() or is_ready(), _START_SECS)
    if has_ended() or not is_ready():
      logs = sorted(self._directory.glob("*.log"))
      raise OSError("\n".join(path.read_text()[-2000:] for path in logs))


def _stop(process: subprocess.Popen[bytes]) -> None:
  process.terminate()
  try:
    process.wait(_STOP_SECS)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()


def wait_until(is_true: Callable[[], bool], secs: float) -> bool:
  """Waits until something is true; returns whether it is, after so long."""
  deadline = time.monotonic() + secs
  while not is_true():
    if time.monotonic() > deadline:
      return False
    time.sleep(_POLL_SECS)
  return True


def _num_idle(cluster: Cluster) -> int:
  try:
    states = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T")
  except subprocess.CalledProcessError:  # It does not listen yet.
    return 0
  return len({line for line in states.splitlines() if line.endswith(" idle")})


def _end_jobs(cluster: Cluster) -> None:
  """Kills all jobs, while there is a SLURM to do it."""
  deadline = time.monotonic() + _STOP_SECS
  with contextlib.suppress(subprocess.SubprocessError):
    while cluster.run("squeue", "--noheader") and time.monotonic() < deadline:
      for how in (["--full", "--signal=KILL"], []):
        subprocess.run(
          ["scancel", *how, f"--user={os.geteuid()}"],
          env=cluster.env,
          stderr=subprocess.DEVNULL,
          timeout=_COMMAND_SECS,
        )
      time.sleep(_POLL_SECS)


def leftovers(conf: Path) -> list[int]:
  """Returns the processes that belong to a SLURM, by what they inherited."""
  mark = b"SLURM_CONF=" + os.fsencode(conf) + b"\0"
  found = []
  for path in Path("/proc").glob("[0-9]*/environ"):
    with contextlib.suppress(OSError):  # It has ended.
      if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
        found.append(int(path.parent.name))
  return found


def _kill_rest(conf: Path) -> None:
  for pid in leftovers(conf):
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)
