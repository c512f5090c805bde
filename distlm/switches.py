"""What a process sets for its C library and for JAX, to start and run faster.

Each is left alone where the user has set it. It imports no JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from distlm import xla_flags
from distlm.settings import default_cache_directory

# XLA on CPUs allocates what a step needs anew in each step. The C library
# should ask for 2 MiB pages, of which 512 times fewer must be made present, and
# keep what was freed. The textbook model of benchmarks/throughput.py takes a
# quarter less time for it, on 2 cores and the small size.
_TUNABLES = "GLIBC_TUNABLES"
MALLOC = ":".join(
  f"glibc.malloc.{name}={value}"
  for name, value in (
    ("hugetlb", 1),
    ("mmap_threshold", 2**32),
    ("trim_threshold", 2**33),
    ("top_pad", 2**26),
  )
)

# Of compilation; reading it again takes some milliseconds.
_SECS_WORTH_KEEPING = 0.1

VARIABLES = (
  *("JAX_PLATFORMS", "NPROC", "XLA_FLAGS", "LIBTPU_INIT_ARGS"),
  _TUNABLES,
)

Environ = Mapping[str, str]


def in_effect(environ: Environ) -> str:
  """Returns the variables that decide how fast a process is, as a shell has."""
  return " ".join(
    f"{name}={shlex.quote(environ[name])}"
    for name in VARIABLES
    if environ.get(name)
  )


def restart_with_malloc_settings(
  environ: MutableMapping[str, str],
  execute: Callable[..., object] = os.execve,
) -> None:
  """Starts this command again, as the same process, where that is of use.

  The C library reads its settings when a program starts, and never again.

  Args:
    environ: the environment variables; with GLIBC_TUNABLES, even empty, nothing
      is done.
    execute: as `os.execve`.
  """
  if _TUNABLES in environ or not _is_glibc() or not _can_start_again():
    return
  if xla_flags.find_platform(environ) != "cpu":
    return
  environ[_TUNABLES] = MALLOC
  with contextlib.suppress(OSError):  # It is but slower.
    execute(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _can_start_again() -> bool:
  """Returns whether the same program would come to the same command."""
  # Else its text came from standard input, or it chose the command itself.
  is_of_user = sys.orig_argv[-len(sys.argv[1:]) :] == sys.argv[1:]
  return is_of_user and sys.argv[0] not in ("", "-")


def _is_glibc() -> bool:
  try:
    return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
  except (AttributeError, ValueError):  # No POSIX; another C library.
    return False


def keep_compiled(config: Any, environ: Environ) -> None:
  """Has JAX keep what it compiles, unless the user says where or says no.

  Each kind of CPU has a directory: code of one may not run on another, which
  JAX does not tell apart.

  Args:
    config: `jax.config`.
    environ: the environment variables; they say where caches are.
  """
  if config.jax_compilation_cache_dir is not None:
    return
  # RuntimeError: there is no home directory. Without a cache it is but slower.
  with contextlib.suppress(OSError, RuntimeError):
    path = default_cache_directory(environ) / "compiled" / _kind_of_cpu()
    path.mkdir(parents=True, exist_ok=True)
    if os.access(path, os.W_OK):
      config.update("jax_compilation_cache_dir", str(path))
      config.update(
        "jax_persistent_cache_min_compile_time_secs", _SECS_WORTH_KEEPING
      )


def _kind_of_cpu() -> str:
  facts = {platform.machine(), platform.processor()}
  with contextlib.suppress(OSError):
    facts |= {
      line
      for line in Path("/proc/cpuinfo").read_text().splitlines()
      if line.startswith(("model", "vendor", "flags", "Features", "CPU"))
    }
  return hashlib.blake2b(
    "\n".join(sorted(facts)).encode(), digest_size=8
  ).hexdigest()
