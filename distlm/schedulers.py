"""What the variables of a scheduler say about the processes of a job.

A scheduler counts only if all its variables are there and agree. An ssh session
on a node, a shell of `salloc` or a batch script have some of them, and are no
process of any job.
"""

from __future__ import annotations

import dataclasses
import glob
import http.client
import itertools
import re
import socket
from collections.abc import Mapping

from distlm.errors import UsageError

# Above what Linux gives to outgoing connections; JAX takes the same ports.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
# Neither two steps of a job nor two neighbouring jobs get the same port.
_STEP_STRIDE = 1021
# The one that the firewall of a TPU VM lets through.
_FIXED_PORT = 8476
_TPU_CHIPS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# An address, because looking up a name may take longer than the time limit.
_METADATA_HOST = "169.254.169.254"
_METADATA_SECS = 2.0
_WAY_OUT = (
  "or give --coordinator, --num-processes and --process-id, or just"
  " --num-processes=1 to run this process alone"
)

Environ = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
  """Which process of which job a process is; by default, the only one."""

  coordinator: str | None = None
  """host:port on which process 0 listens; None in a job of one process."""
  num_processes: int = 1
  process_id: int = 0
  num_local_processes: int = 1
  """Of the job, on this host."""
  local_process_id: int = 0
  found_by: str = "one process"
  """What said so, such as "flags and SLURM"."""


def detect(
  environ: Environ, num_processes: int | None, needs_coordinator: bool
) -> ProcessSpec | None:
  """Asks the schedulers which process of which job this is.

  Args:
    environ: the environment variables.
    num_processes: of the job, where the user gave it: a Kubernetes Job does not
      tell its pods.
    needs_coordinator: whether to find the coordinator too.

  Returns:
    What the first scheduler says that started several processes, or None.

  Raises:
    UsageError: if it does not say enough.
  """
  # Open MPI first: its daemons are tasks of SLURM, whose variables its
  # processes inherit.
  for find in (_open_mpi, _slurm, _cloud_tpu):
    found = find(environ, needs_coordinator)
    if found is not None:
      return found
  return _kubernetes(environ, num_processes, needs_coordinator)


def _numbers(environ: Environ, *names: str) -> list[int] | None:
  """Returns the values of variables, or None unless all are numbers."""
  texts = [environ.get(name, "") for name in names]
  if not all(re.fullmatch(r"[0-9]+", text) for text in texts):
    return None
  return [int(text) for text in texts]


def _open_mpi(environ: Environ, needs_coordinator: bool) -> ProcessSpec | None:
  names = ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
  found = _numbers(environ, *(f"OMPI_COMM_WORLD_{name}" for name in names))
  if found is None:
    return None
  size, rank, local_size, local_rank = found
  if not (rank < size > 1 and local_rank < local_size <= size):
    return None
  coordinator = None
  if needs_coordinator:
    coordinator = _open_mpi_coordinator(environ, rank, local_size == size)
  return ProcessSpec(
    coordinator, size, rank, local_size, local_rank, "Open MPI"
  )


def _open_mpi_coordinator(
  environ: Environ, rank: int, is_one_host: bool
) -> str:
  """Returns an address on the host of mpirun, and a port of its own."""
  # 4: 925564928.0;tcp://192.0.2.2,198.51.100.2:48445;tcp6://[fd00::2]:40181
  uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
  daemon = environ.get("OMPI_MCA_orte_local_daemon_uri", uri)
  # 5: prterun-HOST-PID@1, with the daemon prterun-HOST-PID@0.NUMBER;tcp4://...
  namespace = re.fullmatch(
    r"[^-]+-(.+)-(\d+)@(\d+)", environ.get("PMIX_NAMESPACE", "")
  )
  if job := re.match(r"(\d+)\.", uri):
    number = int(job[1]) >> 16
    host = re.search(r"tcp://([^,:;]+)|tcp6://(\[[^],]+)", uri)
    name = host and (host[1] or f"{host[2]}]")
    is_first_host = daemon.partition(";")[0] == uri.partition(";")[0]
  elif namespace:
    name = namespace[1]
    number = int(namespace[2]) + _STEP_STRIDE * int(namespace[3])
    daemons = [environ[k] for k in environ if k.startswith("PMIX_SERVER_URI")]
    is_first_host = all(re.match(r"[^;]*\.0;", uri) for uri in daemons)
  else:
    name, number, is_first_host = None, 0, False
  port = _FIRST_PORT + number % _NUM_PORTS
  if number and is_one_host:
    return f"127.0.0.1:{port}"
  if name is None or (rank == 0 and not is_first_host):
    raise UsageError(
      "--coordinator=None: Open MPI does not say on which host process 0 is;"
      " give --coordinator=HOST:PORT with that host, or run mpirun on it"
    )
  return f"{name}:{port}"


def _slurm(environ: Environ, needs_coordinator: bool) -> ProcessSpec | None:
  names = ("JOB_ID", "STEP_ID", "STEP_NUM_TASKS", "PROCID", "NODEID", "LOCALID")
  found = _numbers(environ, *(f"SLURM_{name}" for name in names))
  nodes = environ.get("SLURM_STEP_NODELIST", "")
  counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
  if found is None or not nodes:
    return None
  job, step, num_tasks, task, node, local_task = found
  agree = (
    task < num_tasks == sum(counts)
    and node < len(counts)
    and local_task < counts[node]
    and environ.get("SLURM_JOBID", f"{job}") == f"{job}"
    and environ.get("SLURM_STEPID", f"{step}") == f"{step}"
  )
  if num_tasks < 2 or not agree:
    return None
  coordinator = None
  if needs_coordinator:
    if task == 0 and node > 0:
      raise UsageError(
        "--coordinator=None: SLURM has put process 0 on another host than the"
        " first of the step; give --coordinator=HOST:PORT with its host"
      )
    host = "127.0.0.1" if len(counts) == 1 else _first_host(nodes)
    port = _FIRST_PORT + (job + _STEP_STRIDE * step) % _NUM_PORTS
    coordinator = f"{host}:{port}"
  return ProcessSpec(
    coordinator, num_tasks, task, counts[node], local_task, "SLURM"
  )


def _first_host(nodes: str) -> str:
  """Returns "a01-b" of "a[01-03,7]-b,c"."""
  first = re.match(r"([^,[]|\[[^]]*\])+", nodes)
  return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else nodes)


def _tasks_per_node(text: str) -> list[int]:
  """Returns [2, 2, 1] of "2(x2),1", and [] of what has no such form."""
  counts: list[int] = []
  for part in text.split(","):
    match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
    if match is None:
      return []
    counts += [int(match[1])] * int(match[2] or 1)
  return counts


def _cloud_tpu(environ: Environ, needs_coordinator: bool) -> ProcessSpec | None:
  found = _tpu_workers(environ)
  if found is None:
    return None
  facts, id_name, addresses = found
  hosts = [_without_port(address) for address in addresses]
  num_slices = _number(facts, "MEGASCALE_NUM_SLICES", range(1, 2**31), "1")
  if len(hosts) * num_slices < 2:
    return None
  worker = _number(facts, id_name, range(len(hosts)))
  slice_id, first = 0, hosts[0]
  if num_slices > 1:
    slice_id = _number(facts, "MEGASCALE_SLICE_ID", range(num_slices))
    # On the host of worker 0 of slice 0.
    first = _without_port(facts.get("MEGASCALE_COORDINATOR_ADDRESS", ""))
    if needs_coordinator and not first:
      raise UsageError(
        "MEGASCALE_COORDINATOR_ADDRESS=: it must name the first host of the"
        f" {num_slices} slices; set it, {_WAY_OUT}"
      )
  # libtpu listens on those ports, where a host has several processes.
  port = next(
    port
    for port in itertools.count(_FIXED_PORT)
    if not any(address.endswith(f":{port}") for address in addresses)
  )
  return ProcessSpec(
    f"{first}:{port}" if needs_coordinator else None,
    len(hosts) * num_slices,
    worker + slice_id * len(hosts),
    hosts.count(hosts[worker]),
    hosts[:worker].count(hosts[worker]),
    "Cloud TPU",
  )


def _tpu_workers(environ: Environ) -> tuple[Environ, str, list[str]] | None:
  """Returns the facts, which of them is the worker's id, and all addresses.

  On GKE the environment has them. On a TPU VM the metadata server has.
  """
  for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
    if environ.get(name):
      return environ, "TPU_WORKER_ID", environ[name].split(",")
  has_chips = any(glob.glob(pattern) for pattern in _TPU_CHIPS)
  if not has_chips or "TPU_SKIP_MDS_QUERY" in environ:
    return None
  id_name = "agent-worker-number"
  host = environ.get("GCE_METADATA_HOST", _METADATA_HOST)
  try:
    worker = _read_metadata(host, id_name)
    if worker is None:
      return None
    endpoints = _read_metadata(host, "worker-network-endpoints") or ""
    text = _read_metadata(host, "tpu-env") or ""
  except (OSError, http.client.HTTPException):  # Not a machine of Google's.
    return None
  # Lines such as MEGASCALE_NUM_SLICES: '2'.
  facts = dict(re.findall(r"^\s*(\w+)\s*:\s*'?(.*?)'?\s*$", text, re.M))
  # Either HOST or NAME:ID:HOST.
  addresses = [part.split(":")[-1] for part in endpoints.split(",")]
  return {**facts, **environ, id_name: worker}, id_name, addresses


def _read_metadata(host: str, name: str) -> str | None:
  """Returns an attribute of this VM, or None if it has none of this name."""
  connection = http.client.HTTPConnection(host, timeout=_METADATA_SECS)
  try:
    path = f"/computeMetadata/v1/instance/attributes/{name}"
    connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
  finally:
    connection.close()
  if response.status == http.HTTPStatus.NOT_FOUND:
    return None
  if response.status != http.HTTPStatus.OK:
    raise UsageError(
      f"GCE_METADATA_HOST={host}: the metadata server answers {response.status}"
      f" for {name}; try again, {_WAY_OUT}"
    )
  return text.strip()


def _without_port(address: str) -> str:
  return re.sub(r":\d+$", "", address.strip())


def _number(
  facts: Environ, name: str, allowed: range, default: str = ""
) -> int:
  text = facts.get(name) or default
  if not (re.fullmatch(r"[0-9]+", text) and int(text) in allowed):
    raise UsageError(
      f"{name}={text}: it must be a number from {allowed[0]} to {allowed[-1]}"
      f" on this Cloud TPU; mend it, {_WAY_OUT}"
    )
  return int(text)


def _kubernetes(
  environ: Environ, num_processes: int | None, needs_coordinator: bool
) -> ProcessSpec | None:
  """Makes a process of each pod of an indexed Job."""
  found = _numbers(environ, "JOB_COMPLETION_INDEX")
  if found is None or num_processes is None:
    return None
  [index] = found
  coordinator = None
  if needs_coordinator:
    host, dot, domain = _own_name().partition(".")
    if not dot or not host.endswith(f"-{index}"):
      raise UsageError(
        f"--coordinator=None: this pod, {host}{dot}{domain}, has no name of the"
        f" form JOB-{index}.SERVICE, which a Job with a headless Service as its"
        f" subdomain gives; make one, {_WAY_OUT}"
      )
    first = f"{host.removesuffix(f'{index}')}0.{domain}"
    coordinator = f"{first}:{_FIXED_PORT}"
  return ProcessSpec(coordinator, num_processes, index, found_by="Kubernetes")


def _own_name() -> str:
  return socket.getfqdn()
