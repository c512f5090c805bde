"""What a process is about to run: all processes of a job must agree on it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import distlm
from distlm.settings import flatten

# Different ones may compute different bits, or not understand each other.
_PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "jaxline")


def of_run(
  settings: Mapping[str, Any],
  num_devices: int | None,
  more: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns what identifies a run, by names that a user understands.

  Args:
    settings: nested, of JSON types.
    num_devices: that each process was told to use, if it was.
    more: further facts, such as the fingerprint of the text.
  """
  return {
    **versions(),
    "the code of distlm": fingerprint(
      sorted(Path(distlm.__file__).parent.rglob("*.py"))
    ),
    "--devices": num_devices,
    **{f"config.{key}": value for key, value in flatten(settings)},
    **more,
  }


def versions() -> dict[str, str]:
  """Returns the versions of what computes, by "version of NAME"."""
  found = {"version of python": platform.python_version()}
  for name in _PACKAGES:
    found[f"version of {name}"] = importlib.metadata.version(name)
  return found


def fingerprint(files: Iterable[Path]) -> str:
  """Returns a checksum of the contents of files, in their order."""
  digest = hashlib.sha256()
  for file in files:
    digest.update(hashlib.sha256(file.read_bytes()).digest())
  return digest.hexdigest()[:16]
