"""Eight fake CPU devices for every test, whatever the machine has."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# XLA's thread pool must exceed the devices by far; see distlm/parallel.py. The
# tests' own child processes inherit it.
os.environ["NPROC"] = "64"
os.environ["JAX_PLATFORMS"] = "cpu"

from distlm import xla_flags

# As `parallel.start` does; XLA reads them once.
xla_flags.apply(os.environ)

# The same small programs run in many processes: each is compiled once.
# tests/test_resume.py shows that those of a cache give the same bits.
_compiled = tempfile.mkdtemp(prefix="distlm-compiled-")
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)

import chex  # noqa: E402 - it fixes what is set above.
import jax  # noqa: E402

# For child processes alone: JAX has read its variables by now.
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# Before the first use of JAX, which fixes the number of devices.
chex.set_n_cpu_devices(8)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
  """Frees what a module compiled.

  Each compiled program holds memory mappings, and a process may have 65,530
  (vm.max_map_count): LLVM aborts at the next one.
  """
  yield
  jax.clear_caches()
  gc.collect()
