"""Flags with which XLA is right on CPUs, and overlaps collectives elsewhere.

XLA reads its flags once, when it makes the devices, and ends the process at one
that it does not know. Flags come and go with its versions; so one is set only
if its name is in each library that is going to read it. What the user sets
stays as it is, and DISTLM_XLA_FLAGS=off turns all off. It imports no JAX.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distlm.errors import UsageError

SWITCH = "DISTLM_XLA_FLAGS"

_ROOT = Path("/")
# JAX looks for these too, in jax/_src/hardware_utils.py.
_NVIDIA_FILES = (
  *("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg"),
  "proc/driver/nvidia",
)
_TPU_FILES = ("dev/accel*", "dev/vfio/[0-9]*")
_NAMES_OF_PLATFORM = {"gpu": {"gpu", "cuda"}, "tpu": {"tpu"}}

# All names of a library are near each other: it is searched from here on.
_NEARBY_BYTES = 2**24

_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
  "cpu": {
    "XLA_FLAGS": (
      # Not to hand operations to YNNPACK. With jaxlib 0.10.2 some sums in a
      # loop over layers are wrong with it: the gradient of 2 layers, 384 wide,
      # of 16 sequences of 256 tokens was off by 7 %
      # (tests/test_large_batch.py). Products of matrices are no faster with it.
      "--xla_cpu_experimental_ynn_fusion_type=",
    )
  },
  "gpu": {
    "XLA_FLAGS": (
      # Off by default; "to overlap asynchronous communication with computation"
      # (https://docs.jax.dev/en/latest/gpu_performance_tips.html).
      "--xla_gpu_enable_latency_hiding_scheduler=true",
      # Else the sum of a layer's gradient ends within its own iteration of the
      # backward loop, after most of its compute; so it goes on during the next
      # layer's. Compiled for 8 H100, 9 products of matrices are between start
      # and end instead of 1. It was not timed.
      "--xla_gpu_enable_pipelined_all_reduce=true",
      # The same page: "tuning them high enough so as to combine at least a
      # Transformer layer's" weights. XLA's 30 MiB are less than those of a
      # layer from 800 wide on, in f32; 128 MiB are enough up to 1,600. MaxText
      # takes 1 GiB and twice 128 MiB on A3 machines, where all-reduces go
      # between hosts (MaxText/configs/a3/llama_2_7b/16vm.sh).
      "--xla_gpu_all_reduce_combine_threshold_bytes=134217728",
      "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
      "--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
    )
  },
  "tpu": {
    "LIBTPU_INIT_ARGS": (
      # https://openxla.org/xla/flags_guidance: the first two "should be used in
      # conjunction to activate asynchronous all-reduce operations"; all five
      # are CF_FOR_ALL_REDUCE of MaxText's benchmarks/xla_flags_library.py.
      "--xla_tpu_enable_async_collective_fusion=true",
      "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
      "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
      "--xla_tpu_overlap_compute_collective_tc=true",
      "--xla_enable_async_all_reduce=true",
      # Else libtpu combines all gradients into one or two all-reduces, which
      # nothing is left to overlap with: compiled for 16 v5e by libtpu 0.0.42,
      # an update of distlm had no asynchronous all-reduce without this flag,
      # and had them with it. How much time that saves was not measured.
      "--xla_jf_crs_combiner_threshold_in_bytes=1000000",
      # flags_guidance: "to increase overlap opportunities for DCN all-reduces
      # used for data parallel sharding", that is, between slices.
      "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
      "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    )
  },
}

Environ = Mapping[str, str]


class _Flag(NamedTuple):
  """A recommended flag, and why it is not set; "" if it is to be set."""

  variable: str
  flag: str
  objection: str

  @property
  def name(self) -> str:
    return _name(self.flag)


def recommended(platform: str) -> dict[str, list[str]]:
  """Returns flags by the environment variable that they belong in.

  Args:
    platform: "gpu", "tpu" or "cpu".
  """
  return {
    variable: list(flags)
    for variable, flags in _FLAGS.get(platform, {}).items()
  }


def find_platform(environ: Environ, root: Path = _ROOT) -> str:
  """Returns the platform that JAX is going to use: "gpu", "tpu" or "cpu".

  Args:
    environ: the environment variables; JAX_PLATFORMS may exclude a platform.
    root: of the file system.
  """
  wanted = environ.get("JAX_PLATFORMS", "")
  for platform, is_there in (
    ("gpu", has_nvidia_gpu(root) and cuda_plugins()),
    ("tpu", _any_exists(_TPU_FILES, root) and _libtpu(environ)),
  ):
    names = _NAMES_OF_PLATFORM[platform]
    if is_there and (not wanted or names & set(wanted.split(","))):
      return platform
  return "cpu"


def has_nvidia_gpu(root: Path = _ROOT) -> bool:
  """Returns whether the machine has an NVIDIA GPU, whatever JAX makes of it."""
  return _any_exists(_NVIDIA_FILES, root)


def cuda_plugins() -> list[Path]:
  """Returns the directories of JAX's plugins for CUDA that are installed."""
  return [
    path
    for directory in _directories("jax_plugins")
    for path in sorted(directory.glob("xla_cuda*"))
  ]


def find_libraries(platform: str, environ: Environ) -> list[Path]:
  """Returns the libraries that parse the flags of a platform.

  Args:
    platform: "gpu", "tpu" or "cpu".
    environ: the environment variables.
  """
  if platform == "tpu":
    return _libtpu(environ)
  # With GPUs, jaxlib makes the CPU's devices as well, by the same variable.
  plugins = cuda_plugins() if platform == "gpu" else []
  directories = [*_directories("jaxlib"), *plugins]
  return [_largest_library(directory) for directory in directories]


def apply(
  environ: MutableMapping[str, str],
  platform: str | None = None,
  libraries: Sequence[Path] | None = None,
) -> list[str]:
  """Sets the recommended flags; it must come before JAX makes its devices.

  Args:
    environ: the environment variables, which it changes.
    platform: "gpu", "tpu" or "cpu"; None: that of this machine.
    libraries: those that will parse the flags; None: the installed ones.

  Returns:
    The flags that it set.

  Raises:
    UsageError: if DISTLM_XLA_FLAGS is neither on nor off.
  """
  applied = [
    flag
    for flag in _examine(environ, platform, libraries)
    if not flag.objection
  ]
  for variable in {flag.variable for flag in applied}:
    flags = [flag.flag for flag in applied if flag.variable == variable]
    # The user's come last: if in doubt, XLA takes the last.
    environ[variable] = " ".join([*flags, environ.get(variable, "")]).strip()
  return [flag.flag for flag in applied]


def describe(
  environ: Environ,
  platform: str | None = None,
  libraries: Sequence[Path] | None = None,
) -> list[tuple[str, str]]:
  """Returns each recommended flag and what is the case with it, by name.

  Args:
    environ: the environment variables, after `apply`.
    platform: as in `apply`.
    libraries: as in `apply`.
  """
  return [
    (flag.name, flag.objection or f"not set: {flag.flag}")
    for flag in _examine(environ, platform, libraries)
  ]


def _examine(
  environ: Environ,
  platform: str | None,
  libraries: Sequence[Path] | None,
) -> list[_Flag]:
  switch = environ.get(SWITCH, "on")
  if switch not in ("on", "off"):
    raise UsageError(f"{SWITCH}={switch}: it must be on or off")
  if platform is None:
    platform = find_platform(environ)
  flags = [
    _Flag(variable, flag, f"{SWITCH}=off" if switch == "off" else "")
    for variable, flags in recommended(platform).items()
    for flag in flags
  ]
  flags = [
    flag if flag.objection else flag._replace(objection=_given(flag, environ))
    for flag in flags
  ]
  names = [flag.name for flag in flags if not flag.objection]
  if not names:
    return flags
  if libraries is None:
    libraries = find_libraries(platform, environ)
  unknown = find_unknown(names, libraries)
  return [
    flag._replace(objection=f"unknown to {unknown[flag.name]}")
    if flag.name in unknown
    else flag
    for flag in flags
  ]


def _given(flag: _Flag, environ: Environ) -> str:
  """Returns what a variable says of a flag, or "" if nothing."""
  text = environ.get(flag.variable, "").strip()
  if text and not text.startswith("-"):
    # XLA takes it for the name of a file then.
    return f"left to the file {flag.variable}={text}"
  given = re.search(rf"(?:^|\s)(--?(?:no)?{flag.name}(?:=\S*)?)(?!\S)", text)
  return given[1] if given else ""


def find_unknown(
  names: Iterable[str], libraries: Sequence[Path]
) -> dict[str, str]:
  """Returns the flags that not all libraries know, and one that does not.

  Args:
    names: of flags, without dashes.
    libraries: shared libraries; without any, all flags are unknown.
  """
  names = list(names)
  unknown = dict.fromkeys([] if libraries else names, "any library")
  for library in libraries:
    known = _find_known(names, library)
    unknown |= {name: library.name for name in names if name not in known}
  return unknown


def _find_known(names: Iterable[str], library: Path) -> set[str]:
  known, near = set(), 0
  try:
    with (
      open(library, "rb") as file,
      mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
      for name in names:
        # As C's strings end; the name of a longer flag must not do.
        word = b"\0" + name.encode() + b"\0"
        place = data.find(word, near)
        if place < 0:
          place = data.find(word, 0, near + len(word))
        if place >= 0:
          known.add(name)
          near = max(0, place - _NEARBY_BYTES)
  except (OSError, ValueError):  # It cannot be read, or is empty.
    return set()
  return known


def _name(flag: str) -> str:
  return flag.lstrip("-").partition("=")[0]


def _any_exists(patterns: Iterable[str], root: Path) -> bool:
  return any(any(root.glob(pattern)) for pattern in patterns)


def _libtpu(environ: Environ) -> list[Path]:
  if path := environ.get("TPU_LIBRARY_PATH"):
    return [Path(path)]
  paths = [directory / "libtpu.so" for directory in _directories("libtpu")]
  return [path for path in paths if path.exists()]


def _largest_library(directory: Path) -> Path:
  """Returns the one that holds XLA: libjax_common.so, xla_cuda_plugin.so."""
  libraries = [*directory.glob("*.so")]
  return max(
    libraries, key=lambda path: path.stat().st_size, default=directory / "*.so"
  )


def _directories(package: str) -> list[Path]:
  """Returns where a package is installed, without importing it."""
  try:
    spec = importlib.util.find_spec(package)
  except (ImportError, ValueError):
    return []
  return [
    Path(path) for path in (spec and spec.submodule_search_locations) or []
  ]
