"""The directory of a run: its settings, and the locks of who uses it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distlm.atomic import write_atomically
from distlm.config import differing_keys
from distlm.data import corpora
from distlm.errors import UsageError

CONFIG_FILE = "config.json"
# Checksums of the documents that a run is trained on, by their names.
CORPUS_FILE = "corpus.json"

MODES = ("train", "eval", "train_eval")


def has_checkpoint(workdir: Path) -> bool:
  """Returns whether a directory holds a run that can go on."""
  return any(path.name.isdigit() for path in workdir.glob("checkpoints/*/*"))


def check_settings(workdir: Path, settings: Mapping[str, Any]) -> None:
  """Checks that a directory is free, or of a run with these settings.

  What a run left that never saved a checkpoint binds nobody.

  Raises:
    UsageError: naming the settings that differ.
  """
  path = workdir / CONFIG_FILE
  if not has_checkpoint(workdir):
    return
  try:
    theirs = json.loads(path.read_bytes())
    if not isinstance(theirs, dict):
      raise ValueError("it is not an object")
  except FileNotFoundError:
    return
  except (OSError, ValueError) as error:
    raise UsageError(
      f"--workdir={workdir}: {path} cannot be read ({error}); mend it or use"
      " another directory"
    ) from error
  differing = differing_keys(settings, theirs)
  if differing:
    raise UsageError(
      f"--workdir={workdir}: it holds a run with other settings:"
      f" {'; '.join(differing)}; keep them or use another directory"
    )


def check_corpus(
  workdir: Path,
  source: Sequence[str],
  documents: Sequence[corpora.Document],
) -> None:
  """Checks that the text of a run is still what it was trained on.

  Raises:
    UsageError: naming the first document that is not.
  """
  if not has_checkpoint(workdir):
    return
  try:
    described = json.loads((workdir / CORPUS_FILE).read_bytes())
  except (OSError, ValueError):
    return  # The checkpoint's own fingerprint of the text is checked later.
  if not isinstance(described, dict):
    return
  changes = corpora.find_changes(documents, described)
  if changes:
    more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
    raise UsageError(
      f"data.source={', '.join(source)}: {changes[0]}{more} since the run in"
      f" --workdir={workdir} began; restore the text or use another --workdir"
    )


def write_corpus(workdir: Path, documents: Sequence[corpora.Document]) -> None:
  """Notes in a directory which text its run is trained on."""
  text = json.dumps(corpora.describe(documents), indent=0, sort_keys=True)
  write_atomically(workdir / CORPUS_FILE, [text.encode()])


def check_mode(workdir: Path, mode: str, once: bool) -> None:
  """Checks what a command asks of a directory, before any other work.

  Raises:
    UsageError: if there is no such mode, or nothing to evaluate.
  """
  if mode not in MODES:
    raise UsageError(
      f"--jaxline_mode={mode}: it must be one of {', '.join(MODES)}"
    )
  if once and mode != "eval":
    raise UsageError(
      f"--once: it has no effect with --jaxline_mode={mode}; leave it out, or"
      " use distlm eval"
    )
  if mode == "eval" and not workdir.is_dir():
    raise UsageError(
      f"--workdir={workdir}: there is no such directory; name that of a run"
    )


@contextlib.contextmanager
def claim(
  workdir: Path, settings: Mapping[str, Any], mode: str, once: bool
) -> Iterator[None]:
  """Holds a directory for this process, making it where there is none.

  One process may train in it, and one may evaluate what comes. An evaluation
  of one checkpoint writes only its row, so any number may run.

  The locks are the kernel's: they end with the process, however it ends, so a
  dead run never blocks the next one.

  Args:
    workdir: the directory of the run.
    settings: of JSON types; who trains writes them there.
    mode: of JAXline.
    once: whether it evaluates one checkpoint.

  Raises:
    UsageError: if the directory cannot be written, is in use, or is of a run
      with other settings.
  """
  with contextlib.ExitStack() as stack:
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      for role in () if once else mode.split("_"):
        stack.enter_context(_lock(workdir, role))
      # Again, since the directory may have got a run since the first time.
      check_settings(workdir, settings)
      if mode != "eval":
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        write_atomically(workdir / CONFIG_FILE, [text.encode()])
    except OSError as error:
      raise UsageError(
        f"--workdir={workdir}: it cannot be written ({error.strerror}); use a"
        " directory that can"
      ) from error
    yield


@contextlib.contextmanager
def _lock(workdir: Path, role: str) -> Iterator[None]:
  with open(workdir / f".{role}.lock", "a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise UsageError(
        f"--workdir={workdir}: it is in use by {file.read().strip()} ({role});"
        " wait for it to end, stop it, or use another directory"
      ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    yield
