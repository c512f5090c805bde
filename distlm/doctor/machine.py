"""What `distlm doctor` finds out about this machine, without JAX."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import distlm
from distlm import facts, xla_flags
from distlm.cluster import ProcessSpec
from distlm.doctor.report import PROBLEM, WARNING, Report, Row

GIB = 2**30
_LITTLE_ROOM_BYTES = 4 * GIB
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
_MEMORY_FILE = Path("/proc/meminfo")


def examine(report: Report, spec: ProcessSpec, workdir: Path) -> None:
  """Reports versions, accelerators, names, ports, disks and tools.

  Args:
    report: gets the rows.
    spec: which process this is.
    workdir: of the run; it may not exist.
  """
  report.try_check("versions", check_versions)
  report.try_check("accelerators", check_accelerators)
  report.try_check("network", check_network, spec)
  report.try_check("workdir", check_directory, "workdir", workdir)
  if spec.process_id == 0:  # Which alone writes events.
    report.try_check("tools", check_tools)


def check_versions() -> Iterator[Row]:
  """Yields what is installed, and what does not suit each other."""
  found = {
    name.removeprefix("version of "): version
    for name, version in facts.versions().items()
  }
  yield Row("distlm, python", f"{distlm.__version__}, {found.pop('python')}")
  jax, jaxlib = found.pop("jax"), found.pop("jaxlib")
  suits = jax == jaxlib
  yield Row(
    "jax, jaxlib",
    f"{jax}, {jaxlib}",
    *(() if suits else (WARNING, f'pip install "jax=={jax}" "jaxlib=={jax}"')),
  )
  others = [f"{name} {version}" for name, version in found.items()]
  yield Row("libraries", ", ".join(others))
  for name in _PLUGINS:
    try:
      version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
    # JAX leaves a plugin of another version aside, with a warning, and goes on
    # with the CPU.
    suits = name == "libtpu" or version == jaxlib
    yield Row(
      name,
      version,
      *(() if suits else (PROBLEM, f'pip install "{name}=={jaxlib}"')),
    )


def check_accelerators(root: Path = Path("/")) -> list[Row]:
  """Returns which platform JAX is going to use, or why it cannot.

  Args:
    root: of the file system.
  """
  wanted = os.environ.get("JAX_PLATFORMS", "")
  platform = xla_flags.find_platform(os.environ, root)
  if platform != "cpu":
    return [Row("accelerators", platform)]
  if set(wanted.split(",")) & {"cuda", "gpu", "tpu"}:
    # JAX fails, rather than to use the CPU.
    value = f"none that JAX can use, but JAX_PLATFORMS={wanted}"
    return [Row("accelerators", value, PROBLEM, "unset JAX_PLATFORMS")]
  if not xla_flags.has_nvidia_gpu(root):
    return [Row("accelerators", "none, or none that JAX can use")]
  if wanted:
    value = f"an NVIDIA GPU that JAX_PLATFORMS={wanted} leaves unused"
    return [Row("accelerators", value)]
  version = importlib.metadata.version("jax")
  return [
    Row(
      "accelerators",
      "an NVIDIA GPU, and JAX for CPUs alone",
      PROBLEM,
      f'pip install "jax[cuda13]=={version}" (cuda12 for drivers before 580)',
    )
  ]


def check_network(spec: ProcessSpec) -> Iterator[Row]:
  """Yields whether names resolve and ports are free.

  Args:
    spec: which process this is.
  """
  yield _check_hostname(spec)
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    yield Row("loopback", f"port {free.getsockname()[1]} is free")
  yield Row("job", f"{spec.num_processes} process(es), by {spec.found_by}")
  if spec.coordinator is not None:
    yield _check_coordinator(spec.coordinator, spec.process_id == 0)


def _check_hostname(spec: ProcessSpec) -> Row:
  """Returns whether processes of other hosts are led here by its name."""
  name = socket.gethostname()
  advice = f"give {name} its address in the network, in /etc/hosts"
  try:
    addresses = _resolve(name)
  except OSError as error:
    value = f"{name} does not resolve ({error.strerror})"
    verdict = PROBLEM if spec.num_processes > 1 else WARNING
    return Row("hostname", value, verdict, advice)
  value = f"{name}, which is {', '.join(addresses)}"
  # As JAX does with CPUs, where it gives the others what the name resolves to.
  if spec.num_processes > spec.num_local_processes and all(
    ipaddress.ip_address(address.partition("%")[0]).is_loopback
    for address in addresses
  ):
    value += ": other hosts will look for it on themselves"
    return Row("hostname", value, WARNING, advice)
  return Row("hostname", value)


def _check_coordinator(coordinator: str, is_own: bool) -> Row:
  host = coordinator.rpartition(":")[0].strip("[]")
  try:
    addresses = _resolve(host)
  except OSError as error:
    return Row(
      "coordinator",
      f"{coordinator}: {host} does not resolve here ({error.strerror})",
      PROBLEM,
      "add it to /etc/hosts, or give its address",
    )
  value = f"{coordinator}, which is {', '.join(addresses)}"
  if is_own and not any(map(_is_of_this_host, addresses)):
    return Row(
      "coordinator",
      f"{value}: not an address of {socket.gethostname()}, where process 0 is",
      PROBLEM,
      "name the host of process 0, as the others see it",
    )
  return Row("coordinator", value)


def _resolve(host: str) -> list[str]:
  found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  return list(dict.fromkeys(str(address[4][0]) for address in found))


def _is_of_this_host(address: str) -> bool:
  family = socket.AF_INET6 if ":" in address else socket.AF_INET
  try:
    with socket.socket(family, socket.SOCK_STREAM) as server:
      server.bind((address, 0))
  except OSError:
    return False
  return True


def check_directory(name: str, directory: Path) -> list[Row]:
  """Returns whether there can be files in a directory, and how large.

  Args:
    name: of the row.
    directory: it may not exist, and is not made.
  """
  place = existing_parent(directory)
  try:
    with tempfile.TemporaryFile(dir=place) as file:
      file.write(bytes(2**16))
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    value = f"{directory.absolute()}: it cannot be written ({error.strerror})"
    return [Row(name, value, PROBLEM, "use a directory that can")]
  usage = shutil.disk_usage(place)
  value = f"{directory.absolute()}, {usage.free / GIB:.1f} GiB free"
  if usage.total and usage.free < _LITTLE_ROOM_BYTES:
    return [Row(name, value, WARNING, "make room, or use another disk")]
  return [Row(name, value)]


def existing_parent(directory: Path) -> Path:
  """Returns the directory, or the lowest one above that there is."""
  directory = directory.absolute()
  return next(path for path in (directory, *directory.parents) if path.exists())


def check_tools() -> Iterator[Row]:
  """Yields whether curves and profiles can be written and shown."""
  try:
    importlib.import_module("tensorboardX")
    yield Row("tensorboardX", "writes the curves")
  except ImportError as error:
    yield Row(
      "tensorboardX", f"{error}", PROBLEM, "pip install tensorboardX protobuf"
    )
  # The command of this environment need not be on the path.
  here = str(Path(sys.executable).parent)
  command = shutil.which("tensorboard") or shutil.which(
    "tensorboard", path=here
  )
  if command and _is_installed("tensorboard"):
    yield Row("tensorboard", command)
  else:
    advice = 'pip install "distlm[tensorboard]", where the curves are looked at'
    yield Row("tensorboard", "not installed", WARNING, advice)
  found = "shows profiles" if _is_installed("xprof") else "not installed"
  yield Row("xprof (optional)", found)


def _is_installed(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ValueError:  # It was tried before, and is broken.
    return False


def available_memory() -> int | None:
  """Returns the bytes that the host has left, or None if it does not tell."""
  try:
    lines = _MEMORY_FILE.read_text().splitlines()
  except OSError:
    return None
  amounts = [line.split()[1] for line in lines if "MemAvailable" in line]
  return int(amounts[0]) * 1024 if amounts else None
