"""Where text comes from: files, globs and Python's own standard library."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distlm.errors import UsageError

STDLIB = "python-stdlib"

# Installed packages differ between machines; tests hold invalid files on
# purpose; `encodings` is generated tables of numbers.
_NOT_STDLIB_TEXT = frozenset(
  {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
  }
)


@dataclasses.dataclass(frozen=True)
class Document:
  """A text that is read as one piece, and what to call it in messages."""

  name: str
  content: bytes


def read_documents(sources: Sequence[str]) -> list[Document]:
  """Returns the documents of all sources, in an order that never varies.

  Args:
    sources: each is `python-stdlib`, the path of a file, or a glob (in which
      `**` matches any number of directories). They are read in this order; the
      files of one glob in the order of their sorted paths.

  Returns:
    The documents that are not empty, byte for byte as they are on disk.

  Raises:
    UsageError: if a source names no file, a file cannot be read, or there is
      no text at all.
  """
  documents = []
  for source in sources:
    for name, path in _find_files(source):
      try:
        content = path.read_bytes()
      except OSError as error:
        raise UsageError(
          f"data.source={source}: {path} cannot be read ({error.strerror});"
          " change its permissions or leave it out"
        ) from error
      if content:
        documents.append(Document(name, content))
  if not documents:
    raise UsageError(
      f"data.source={', '.join(sources)}: it must hold some text, but all its"
      " files are empty; give another path or glob"
    )
  return documents


def describe(documents: Sequence[Document]) -> dict[str, str]:
  """Returns a checksum of each document by its name, to be kept with a run."""
  return {
    document.name: hashlib.blake2b(document.content, digest_size=16).hexdigest()
    for document in documents
  }


def find_changes(
  documents: Sequence[Document], described: Mapping[str, str]
) -> list[str]:
  """Returns what changed since `describe`, as "NAME is changed|missing|new"."""
  now = describe(documents)
  return [
    f"{name} is "
    + (
      "missing"
      if name not in now
      else "new"
      if name not in described
      else "changed"
    )
    for name in sorted({*now, *described})
    if now.get(name) != described.get(name)
  ]


def _find_files(source: str) -> Iterator[tuple[str, Path]]:
  """Yields the name and path of each file of one source."""
  if source == STDLIB:
    yield from _find_stdlib_files()
    return
  path = Path(os.path.expanduser(source))
  if path.is_file():  # First, as a file's own name may look like a glob.
    yield source, path
  elif path.is_dir():
    raise UsageError(
      f"data.source={source}: it is a directory, and must be a file or a glob;"
      f" use a glob such as {source.rstrip('/')}/**/*.txt"
    )
  elif path.exists():
    raise UsageError(
      f"data.source={source}: it must be a regular file; copy it into one"
    )
  elif glob.has_magic(str(path)):
    matches = glob.glob(str(path), recursive=True)
    files = sorted(match for match in matches if os.path.isfile(match))
    if not files:
      raise UsageError(
        f"data.source={source}: no file matches this glob; check it, from the"
        f" directory {os.getcwd()}"
      )
    yield from ((file, Path(file)) for file in files)
  else:
    raise UsageError(
      f"data.source={source}: there is no such file; give a path that exists,"
      f" a glob, or {STDLIB}"
    )


def _find_stdlib_files() -> Iterator[tuple[str, Path]]:
  root = Path(sysconfig.get_path("stdlib"))
  names = []
  for directory, subdirectories, files in os.walk(root):
    subdirectories[:] = set(subdirectories) - _NOT_STDLIB_TEXT
    relative = Path(directory).relative_to(root)
    names += [
      (relative / file).as_posix() for file in files if file.endswith(".py")
    ]
  if not names:
    raise UsageError(
      f"data.source={STDLIB}: this Python has no source files in {root}; give"
      " the path of a text"
    )
  for name in sorted(names):
    yield f"{STDLIB}/{name}", root / name
