"""Checksums of the files of a directory, kept in it.

They tell a checkpoint that is as it was written from one that a failing disk,
a cut copy or a crash of the machine has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from distlm.atomic import write_atomically

CHECKSUMS_FILE = "checksums.json"


def write_checksums(directory: Path) -> None:
  """Writes the checksums of all files in the subdirectories of a directory.

  Those in the directory itself are Orbax's notes on the time and state of the
  save, which it still changes.

  Raises:
    OSError: if a file cannot be read, or the checksums not be written.
  """
  checksums = {name: _checksum(path) for name, path in _files(directory)}
  content = json.dumps(checksums, indent=2, sort_keys=True) + "\n"
  write_atomically(directory / CHECKSUMS_FILE, [content.encode()])


def find_damage(directory: Path) -> str:
  """Returns what is wrong with a directory, or "" if it is as it was written.

  Files that came after the checksums are not looked at.
  """
  try:
    checksums = json.loads((directory / CHECKSUMS_FILE).read_bytes())
    if not isinstance(checksums, dict) or not checksums:
      return f"{CHECKSUMS_FILE} holds no checksums"
  except FileNotFoundError:
    return f"{CHECKSUMS_FILE} is missing"
  except (OSError, ValueError, RecursionError) as error:
    return f"{CHECKSUMS_FILE} cannot be read ({error})"
  present = dict(_files(directory))
  for name, checksum in sorted(checksums.items()):
    if name not in present:
      return f"{name} is missing"
    try:
      if _checksum(present[name]) != checksum:
        return f"{name} is not as it was written"
    except OSError as error:
      return f"{name} cannot be read ({error.strerror})"
  return ""


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
  for path in directory.glob("*/**/*"):
    if path.is_file():
      yield path.relative_to(directory).as_posix(), path


def _checksum(path: Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(
      file, lambda: hashlib.blake2b(digest_size=16)
    ).hexdigest()
