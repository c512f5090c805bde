"""Eight fake CPU devices for every test, whatever the machine has."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# XLA's thread pool must exceed the devices by far; see distlm/parallel.py. The
# tests' own child processes inherit it.
os.environ["NPROC"] = "64"
os.environ["JAX_PLATFORMS"] = "cpu"

# The same small programs run in many processes: each is compiled once.
# tests/test_resume.py shows that those of a cache give the same bits.
_compiled = tempfile.mkdtemp(prefix="distlm-compiled-")
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)

import chex  # noqa: E402 - it fixes what is set above.

# For child processes alone: XLA aborted once while this one, of many hundred
# tests, wrote a program into the cache. JAX has read its variables by now.
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# Before the first use of JAX, which fixes the number of devices.
chex.set_n_cpu_devices(8)
