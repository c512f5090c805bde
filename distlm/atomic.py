"""Files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
  """Writes a file that no reader, and no crash, ever shows in part.

  Args:
    path: the file, replaced if it exists; its directory must exist.
    chunks: what to write, in order.

  Raises:
    OSError: if it cannot be written; then `path` is unchanged.
  """
  # Not `tempfile`, whose files only their owner may read: caches are shared.
  temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
  try:
    with open(temporary, "xb") as file:
      for chunk in chunks:
        file.write(chunk)
      file.flush()
      # Without it, the new name may survive a power cut that the content
      # does not.
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
