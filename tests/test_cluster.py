"""Tests of which process of which job a process is, and of its GPUs."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
from scheduler_environments import (
  OPEN_MPI_4,
  OPEN_MPI_4_IN_SLURM,
  OPEN_MPI_5,
  POD,
  SLURM,
  SLURM_ONE_NODE,
  TPU,
  TPU_SLICES,
  VARIABLES,
  Environ,
  find,
  slurm,
)

from distlm import cluster, schedulers
from distlm.cluster import ProcessSpec
from distlm.errors import UsageError


@pytest.fixture(autouse=True)
def no_chips(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(schedulers, "_TPU_CHIPS", ())


@pytest.mark.parametrize(
  ("environ", "flags", "expected"),
  [
    (SLURM | VARIABLES, ("b:2", 5, 1), ("b:2", 5, 1, 1, 0, "flags")),
    (SLURM, ("b:2", None, None), ("b:2", 3, 2, 1, 0, "flags and SLURM")),
    # On which host that process is, nobody said.
    (SLURM_ONE_NODE, ("b:2", None, 0), ("b:2", 2, 0, 1, 0, "flags and SLURM")),
    (
      VARIABLES,
      (None, None, 0),
      ("a:1", 4, 0, 1, 0, "flags and DISTLM_* variables"),
    ),
    (
      SLURM | {"DISTLM_PROCESS_ID": "0"},
      ("b:2", None, None),
      ("b:2", 3, 0, 1, 0, "flags, DISTLM_* variables and SLURM"),
    ),
    # What cannot be found need not be, once it is given.
    (
      {k: v for k, v in OPEN_MPI_4.items() if k.startswith("OMPI_COMM")},
      ("b:2", None, None),
      ("b:2", 2, 1, 2, 1, "flags and Open MPI"),
    ),
    (
      {"JOB_COMPLETION_INDEX": "3"},
      ("b:2", 4, None),
      ("b:2", 4, 3, 1, 0, "flags and Kubernetes"),
    ),
    ({}, ("[::1]:65535", 2, 1), ("[::1]:65535", 2, 1, 2, 1, "flags")),
    ({}, ("127.0.0.1:1", 2, 0), ("127.0.0.1:1", 2, 0, 2, 0, "flags")),
    # A number of 1 is all that it takes to leave a job.
    *(
      (environ, (None, 1, None), (None, 1, 0, 1, 0, "flags"))
      for environ in (SLURM, OPEN_MPI_4, TPU, POD, VARIABLES)
    ),
    (
      SLURM | {"DISTLM_NUM_PROCESSES": "1"},
      (None, None, None),
      (None, 1, 0, 1, 0, "DISTLM_* variables"),
    ),
    ({}, ("b:2", 1, 0), (None, 1, 0, 1, 0, "flags")),
    (VARIABLES | {"DISTLM_PROCESS_ID": "x"}, ("b:2", 2, 0),
     ("b:2", 2, 0, 1, 0, "flags")),
  ],
)  # fmt: skip
def test_flags_go_before_variables_before_schedulers(
  environ: Environ, flags: Any, expected: Any
) -> None:
  assert find(environ, *flags) == ProcessSpec(*expected)


@pytest.mark.parametrize(
  ("environ", "flags", "message"),
  [
    (
      {},
      (None, 2, None),
      "--coordinator=None, --num-processes=2, --process-id=None: a job of"
      " several processes needs all three; a job of one process none",
    ),
    ({}, (None, 2, 0), "--coordinator=None, .* needs all three"),
    ({}, ("a:1", 2, None), ".*--process-id=None: .* needs all three"),
    ({}, ("a:1", None, 0), ".*--num-processes=None, .* needs all three"),
    (
      {"DISTLM_NUM_PROCESSES": "2"},
      ("a:1", None, None),
      "--coordinator=a:1, DISTLM_NUM_PROCESSES=2, --process-id=None: .*three",
    ),
    (
      {},
      ("a:1", 2, 2),
      "--process-id=2: it must be from 0 to 1, one less than",
    ),
    ({}, ("a:1", 2, -1), "--process-id=-1: it must be from 0 to 1"),
    ({}, ("a:1", 1, 1), "--process-id=1: it must be from 0 to 0"),
    ({}, ("a:1", 0, 0), "--num-processes=0: it must be 1 or more"),
    (
      VARIABLES,
      (None, 2, None),
      "DISTLM_PROCESS_ID=3: it must be from 0 to 1, .* --num-processes=2",
    ),
    (
      SLURM,
      (None, 2, None),
      r"--process-id=2 \(of SLURM\): it must be from 0 to 1",
    ),
    *(
      ({}, (text, 2, 0), "--coordinator=.*: it must be HOST:PORT, the same for")
      for text in (
        *("x", ":1", "x:", "x:0", "x:65536", "x:1x", "::1:1", "http://x:1"),
        *("x y:1", "[::1]", "[]:1", "", "x:-1"),
      )
    ),
    (
      VARIABLES | {"DISTLM_COORDINATOR": ""},
      (None, None, None),
      "DISTLM_COORDINATOR=: it must be HOST:PORT",
    ),
    *(
      (
        VARIABLES | {f"DISTLM_{name}": text},
        (None, None, None),
        f"DISTLM_{name}={text}: it must be a whole number",
      )
      for name in ("NUM_PROCESSES", "PROCESS_ID")
      for text in ("", "2.0", "two", "1_0", "٢")
    ),
    # Process 0 knows that it is not where the others look for it.
    (
      slurm("n[1-2]", "1,1", 0, 1, 0, 2),
      (None, None, None),
      "--coordinator=None: SLURM has put process 0 on another host",
    ),
    (
      OPEN_MPI_4_IN_SLURM | {"OMPI_COMM_WORLD_RANK": "0"},
      (None, None, None),
      "--coordinator=None: Open MPI does not say on which host process 0 is",
    ),
    (
      OPEN_MPI_5
      | {
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_SERVER_URI41": "prterun-n1-a-24049@0.10;tcp4://127.0.0.1:45941",
      },
      (None, None, None),
      "--coordinator=None: Open MPI does not say on which host process 0 is",
    ),
    (
      {k: v for k, v in OPEN_MPI_4.items() if k.startswith("OMPI_COMM")},
      (None, None, None),
      ".*Open MPI does not say.* give --coordinator=HOST:PORT",
    ),
    (TPU | {"TPU_WORKER_ID": "2"}, (None,) * 3, "TPU_WORKER_ID=2: .* 0 to 1"),
    (TPU | {"TPU_WORKER_ID": ""}, (None,) * 3, "TPU_WORKER_ID=: .* 0 to 1"),
    (
      TPU_SLICES | {"MEGASCALE_SLICE_ID": "3"},
      (None,) * 3,
      "MEGASCALE_SLICE_ID=3: .* from 0 to 2",
    ),
    (
      TPU_SLICES | {"MEGASCALE_NUM_SLICES": "x"},
      (None,) * 3,
      "MEGASCALE_NUM_SLICES=x: it must be a number",
    ),
    (
      TPU_SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""},
      (None,) * 3,
      "MEGASCALE_COORDINATOR_ADDRESS=: it must name the first host",
    ),
  ],
)
def test_what_cannot_be_is_one_line_of_error(
  environ: Environ, flags: Any, message: str
) -> None:
  with pytest.raises(UsageError, match=f"^{message}") as error:
    find(environ, *flags)
  assert "\n" not in f"{error.value}"


# (processes of the host, GPUs that each sees, --devices, environ, GPUs of each)
GPUS: list[tuple[int, int, int | None, Environ, list[list[int] | None]]] = [
  (1, 4, None, {}, [None]),
  (1, 4, 2, {}, [[0, 1]]),
  (2, 4, None, {}, [[0, 1], [2, 3]]),
  (2, 4, 1, {}, [[0], [1]]),
  (2, 5, 2, {}, [[0, 1], [2, 3]]),
  # srun --gres=gpu:4 -n2
  (
    2,
    4,
    None,
    {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"},
    [[0, 1], [2, 3]],
  ),
  # srun --gpus-per-task=1 -n2, --gpu-bind=single:1, map_gpu:0,1: each sees one.
  (
    2,
    1,
    None,
    {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"},
    [None, None],
  ),
  # srun --gpus-per-task=2 -n2, --gpu-bind=per_task:2 or mask_gpu:0x3,0xc
  (
    2,
    2,
    None,
    {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4"},
    [None, None],
  ),
  (2, 2, 1, {"SLURM_GPUS_ON_NODE": "4"}, [[0], [0]]),
  # srun --gpus-per-task=2 -n2 --gpu-bind=none
  (
    2,
    4,
    None,
    {"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4"},
    [[0, 1], [2, 3]],
  ),
  # A SLURM that does not say what is on the node.
  (2, 2, None, {"SLURM_GPUS_PER_TASK": "a100:2"}, [None, None]),
  # Masks by hand.
  (2, 1, None, {"CUDA_VISIBLE_DEVICES": "3"}, [None, None]),
  (2, 2, 2, {"CUDA_VISIBLE_DEVICES": "2,3"}, [[0, 1], [0, 1]]),
  (2, 2, None, {"CUDA_VISIBLE_DEVICES": "2,3"}, [[0], [1]]),
  # Without a GPU; other accelerators take the first.
  (2, 0, None, {}, [None, None]),
  (1, 0, 2, {}, [[0, 1]]),
]


@pytest.mark.parametrize(
  ("num_local", "num_visible", "num_devices", "environ", "expected"), GPUS
)
def test_which_gpus_are_a_process_s_own(
  num_local: int,
  num_visible: int,
  num_devices: int | None,
  environ: Environ,
  expected: list[list[int] | None],
) -> None:
  # Of a job of more hosts, on the second of them.
  specs = [
    ProcessSpec("n1:1", 8, 4 + i, num_local, i) for i in range(num_local)
  ]
  assert expected == [
    cluster.local_gpu_ids(spec, num_visible, num_devices, environ)
    for spec in specs
  ]


@pytest.mark.parametrize(
  ("num_local", "num_visible", "num_devices", "environ", "message"),
  [
    (3, 4, None, {}, "the 3 processes on this host share 4 .*--devices=1 or"),
    (2, 4, 4, {}, "--devices=4: the 2 processes .* share 4 .*at most 2"),
    (2, 4, 3, {}, "--devices=3: the 2 processes .* share 4 .*at most 2"),
    (1, 4, 5, {}, "--devices=5: this process has 4 gpu .*at most 4"),
    (
      2,
      2,
      2,
      {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"},
      "--devices=2: the 2 processes .* share 2 .*at most 1",
    ),
    (2, 1, 2, {"SLURM_GPUS_ON_NODE": "2"}, "this process has 1 gpu"),
  ],
)
def test_more_gpus_than_there_are_is_an_error(
  num_local: int,
  num_visible: int,
  num_devices: int | None,
  environ: Environ,
  message: str,
) -> None:
  spec = ProcessSpec("n1:1", 8, 4, num_local, 0)
  with pytest.raises(UsageError, match=message):
    cluster.local_gpu_ids(spec, num_visible, num_devices, environ)


class _Cuda:
  """Stands in for CUDA's driver with three GPUs; see `cuDeviceGetCount`."""

  def __init__(self, error: int) -> None:
    self._error = error

  def cuInit(self, flags: int) -> int:  # noqa: N802 - CUDA's name
    assert flags == 0
    return self._error

  def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
    ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 3
    return 0


@pytest.mark.parametrize(
  ("platforms", "has_plugin", "error", "count"),
  [
    ({}, True, 0, 3),
    ({"JAX_PLATFORMS": ""}, True, 0, 3),
    ({"JAX_PLATFORMS": "cuda,cpu"}, True, 0, 3),
    ({"JAX_PLATFORMS": "gpu"}, True, 0, 3),
    ({"JAX_PLATFORMS": "cpu"}, True, 0, 0),
    ({}, False, 0, 0),
    ({}, True, 100, 0),  # CUDA_ERROR_NO_DEVICE
    ({}, True, None, 0),  # No driver.
  ],
)
def test_cuda_is_asked_what_jax_will_see(
  monkeypatch: pytest.MonkeyPatch,
  tmp_path: Path,
  platforms: Environ,
  has_plugin: bool,
  error: int | None,
  count: int,
) -> None:
  def load(name: str) -> _Cuda:
    assert name == "libcuda.so.1"
    if error is None:
      raise OSError(name)
    return _Cuda(error)

  monkeypatch.setattr(ctypes, "CDLL", load)
  name = "xla_cuda13" if has_plugin else "mlx"
  (tmp_path / "jax_plugins" / name).mkdir(parents=True)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
  assert cluster.count_visible_gpus(platforms) == count


@pytest.mark.parametrize(
  ("num_devices", "num_processes", "expected"),
  [(1, 1, None), (1, 2, 16), (2, 1, 16), (4, 1, 32)],
)
def test_threads_for_devices_that_wait_for_others(
  num_devices: int, num_processes: int, expected: int | None
) -> None:
  assert cluster.pool_threads(num_devices, num_processes) == expected
