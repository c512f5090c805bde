"""Which process of which job this is, and which GPUs of its host it uses.

Flags go before DISTLM_* variables, and these before what the scheduler says;
see `schedulers.py`. It imports no JAX, whose devices depend on the answer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distlm import messages, schedulers
from distlm.errors import UsageError
from distlm.schedulers import ProcessSpec

ONE_PROCESS = ProcessSpec()

_FLAGS, _VARIABLES = "flags", "DISTLM_* variables"
_NAMES = ("coordinator", "num-processes", "process-id")
_MAX_PORT = 65535
_MIN_POOL_THREADS = 16
_POOL_THREADS_PER_DEVICE = 8

Environ = Mapping[str, str]


class _Value(NamedTuple):
  """One of the three values that a user gave, or that nobody did."""

  value: Any
  setting: str  # As the user wrote it.
  source: str | None


def find_process(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  environ: Environ,
) -> ProcessSpec:
  """Finds out which process of which job this is.

  Each of the three values comes from the first that has it: its flag, its
  variable DISTLM_COORDINATOR, DISTLM_NUM_PROCESSES or DISTLM_PROCESS_ID, or the
  scheduler: Open MPI, SLURM, Cloud TPU, Kubernetes. Without any of them it is a
  job of one process, and so it is with a number of processes of 1, which makes
  whatever comes after its source not matter.

  >>> find_process(None, None, None, {})
  ProcessSpec(coordinator=None, num_processes=1, process_id=0, \
num_local_processes=1, local_process_id=0, found_by='one process')

  Args:
    coordinator: the value of --coordinator, or None.
    num_processes: that of --num-processes.
    process_id: that of --process-id.
    environ: the environment variables.

  Raises:
    UsageError: if a value cannot be, or only some of the three are there.
  """
  flags = (coordinator, num_processes, process_id)
  given = [
    _Value(value, f"--{name}={value}", None if value is None else _FLAGS)
    for name, value in zip(_NAMES, flags, strict=True)
  ]
  if num_processes != 1:
    given = [
      value if value.source else _read_variable(name, environ)
      for name, value in zip(_NAMES, given, strict=True)
    ]
  found = None
  if given[1].value != 1 and not all(value.source for value in given):
    found = schedulers.detect(environ, given[1].value, not given[0].source)
  if found is None and not any(value.source for value in given):
    return ONE_PROCESS
  return _merge(given, found)


def _read_variable(name: str, environ: Environ) -> _Value:
  """Returns what a variable says, or what its flag says: nothing."""
  variable = f"DISTLM_{name.upper().replace('-', '_')}"
  if variable not in environ:
    return _Value(None, f"--{name}=None", None)
  text = environ[variable]
  setting = f"{variable}={text}"
  if name == "coordinator":
    return _Value(text, setting, _VARIABLES)
  if not re.fullmatch(r"-?[0-9]+", text):
    raise UsageError(f"{setting}: it must be a whole number; mend or unset it")
  return _Value(int(text), setting, _VARIABLES)


def _merge(given: list[_Value], found: ProcessSpec | None) -> ProcessSpec:
  """Completes what was given by what the scheduler said, and checks it."""
  if found is not None:
    values = (found.coordinator, found.num_processes, found.process_id)
    given = [
      mine
      if mine.source
      else _Value(
        value, f"--{name}={value} (of {found.found_by})", found.found_by
      )
      for name, mine, value in zip(_NAMES, given, values, strict=True)
    ]
  coordinator, num_processes, process_id = given
  _check_coordinator(coordinator)
  if num_processes.source and num_processes.value < 1:
    raise UsageError(f"{num_processes.setting}: it must be 1 or more")
  is_one = num_processes.value == 1
  if not is_one and not all(value.source for value in given):
    settings = ", ".join(value.setting for value in given)
    raise UsageError(
      f"{settings}: a job of several processes needs all three; a job of one"
      " process none; no scheduler was found that says the rest"
    )
  if process_id.source and not 0 <= process_id.value < num_processes.value:
    raise UsageError(
      f"{process_id.setting}: it must be from 0 to {num_processes.value - 1},"
      f" one less than {num_processes.setting}"
    )
  sources = _join([value.source for value in given if value.source])
  if is_one:
    return ProcessSpec(found_by=sources)
  return ProcessSpec(
    coordinator.value,
    num_processes.value,
    process_id.value,
    *_count_local(given, found),
    sources,
  )


def _check_coordinator(coordinator: _Value) -> None:
  if coordinator.source is None:
    return
  match = re.fullmatch(
    r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):([0-9]{1,5})",
    coordinator.value,
  )
  if match is None or not 1 <= int(match[1]) <= _MAX_PORT:
    raise UsageError(
      f"{coordinator.setting}: it must be HOST:PORT, the same for all"
      f" processes, with a port from 1 to {_MAX_PORT} and brackets around an"
      " IPv6 address"
    )


def _join(sources: list[str]) -> str:
  """Returns "a, b and c", in the order of precedence and each once."""
  order = [name for name in (_FLAGS, _VARIABLES) if name in sources]
  order += [name for name in dict.fromkeys(sources) if name not in order]
  return " and ".join([*filter(None, [", ".join(order[:-1])]), order[-1]])


def _count_local(
  given: list[_Value], found: ProcessSpec | None
) -> tuple[int, int]:
  """Returns how many processes of the job this host has, and which this is."""
  coordinator, num_processes, process_id = (value.value for value in given)
  if found is not None and (num_processes, process_id) == (
    found.num_processes,
    found.process_id,
  ):
    return found.num_local_processes, found.local_process_id
  if messages.bind_address(coordinator) is not None:  # One of this host alone.
    return num_processes, process_id
  return 1, 0


def local_gpu_ids(
  spec: ProcessSpec,
  num_visible_gpus: int,
  num_devices: int | None,
  environ: Environ,
) -> list[int] | None:
  """Returns which of the GPUs that a process sees are its own.

  Processes of a host that see the same GPUs share them equally. A process that
  sees only some of them, as with `srun --gpus-per-task`, has these, and they
  are numbered from 0 whatever their numbers on the host are. Where no scheduler
  tells, so does one that is to use all GPUs in CUDA_VISIBLE_DEVICES.

  >>> second = ProcessSpec("127.0.0.1:1234", 2, 1, 2, 1)
  >>> local_gpu_ids(second, 8, None, {})
  [4, 5, 6, 7]

  Args:
    spec: which process it is.
    num_visible_gpus: how many GPUs CUDA shows it; see `count_visible_gpus`.
    num_devices: how many it is to use, or None.
    environ: its environment variables.

  Returns:
    Ordinals among those that it sees, or None for all.

  Raises:
    UsageError: if there are not so many, or some would be left over.
  """
  num_sharing, of = spec.num_local_processes, "this process has"
  if _is_masked(num_sharing, num_visible_gpus, num_devices, environ):
    num_sharing = 1
  if num_sharing > 1:
    of = f"the {num_sharing} processes on this host share"
  most = num_visible_gpus // num_sharing
  if num_devices is None:
    if num_visible_gpus % num_sharing:
      raise UsageError(
        f"--devices=None: {of} {num_visible_gpus} GPUs, which leaves some over;"
        f" give --devices={most} or less, or start as many processes as divide"
        " them"
      )
    num_devices = most
    if num_sharing == 1:
      return None
  elif num_devices > most and num_visible_gpus:
    raise UsageError(
      f"--devices={num_devices}: {of} {num_visible_gpus} gpu device(s); ask for"
      f" at most {most}"
    )
  first = spec.local_process_id * num_devices if num_sharing > 1 else 0
  return list(range(first, first + num_devices))


def _is_masked(
  num_local: int, num_visible: int, num_devices: int | None, environ: Environ
) -> bool:
  """Returns whether the GPUs that a process sees are its own alone."""
  if num_visible < num_local:
    return True
  per_task = re.search(r"\d+$", environ.get("SLURM_GPUS_PER_TASK", ""))
  if per_task and num_visible <= int(per_task[0]):
    return True
  on_node = environ.get("SLURM_GPUS_ON_NODE", "")
  if on_node.isdecimal():  # Of all tasks of the step.
    return num_visible < int(on_node)
  return "CUDA_VISIBLE_DEVICES" in environ and num_devices == num_visible


def pool_threads(num_devices: int, num_processes: int) -> int | None:
  """Returns the threads that XLA needs for fake CPU devices: NPROC.

  With the default of one thread a device, steps dispatched ahead can fill the
  pool with threads that wait in an all-reduce for a device that gets none, and
  XLA aborts the process after 40 s. A device that waits for no other needs no
  more than the default, and is slower with more: then it is None.

  Args:
    num_devices: of each process.
    num_processes: of the job.
  """
  if num_devices == 1 and num_processes == 1:
    return None
  return max(_MIN_POOL_THREADS, _POOL_THREADS_PER_DEVICE * num_devices)


def count_visible_gpus(environ: Environ) -> int:
  """Returns how many NVIDIA GPUs JAX is going to see in this process.

  CUDA is asked, because neither the files in /dev nor CUDA_VISIBLE_DEVICES tell
  what a container, a cgroup or a partition of a GPU leaves to the process. It
  is 0 where JAX has no CUDA plugin or is told to use other devices.

  Args:
    environ: the environment variables; CUDA reads CUDA_VISIBLE_DEVICES of the
      process itself.
  """
  platforms = environ.get("JAX_PLATFORMS", "")
  if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
    return 0
  return _count_cuda_devices() if _has_cuda_plugin() else 0


def _has_cuda_plugin() -> bool:
  plugins = importlib.util.find_spec("jax_plugins")
  directories = (plugins and plugins.submodule_search_locations) or []
  return any(any(Path(path).glob("xla_cuda*")) for path in directories)


def _count_cuda_devices() -> int:
  try:
    cuda = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return 0
  count = ctypes.c_int(0)
  # Both return 0 for success.
  if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    return 0
  return count.value
