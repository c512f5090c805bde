"""Eight fake CPU devices for every test, whatever the machine has."""

from __future__ import annotations

import os

# XLA's thread pool must exceed the devices by far; see distlm/parallel.py. The
# tests' own child processes inherit it.
os.environ["NPROC"] = "64"
os.environ["JAX_PLATFORMS"] = "cpu"

import chex

# Before the first use of JAX, which fixes the number of devices.
chex.set_n_cpu_devices(8)
