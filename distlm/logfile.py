"""The log of JAXline and Orbax, in a file of the workdir."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from absl import logging as absl_logging

from distlm import parallel


class _QuietHandler(logging.FileHandler):
  """Drops what cannot be written: a full disk is shown by what matters."""

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
    """Is called by `logging`, which would print a traceback for each line."""


@contextlib.contextmanager
def logging_to_file(workdir: Path, mode: str) -> Iterator[None]:
  """Sends JAXline's and Orbax's log to a file, not between the user's lines."""
  process = parallel.process_index()
  suffix = f".{process}" if process else ""
  # Process 0, which makes it, may come later.
  workdir.mkdir(parents=True, exist_ok=True)
  handler = _QuietHandler(workdir / f"{mode}{suffix}.log")
  handler.setFormatter(
    logging.Formatter("%(asctime)s %(levelname)s %(filename)s %(message)s")
  )
  logger = absl_logging.get_absl_logger()
  previous = logger.level, logger.propagate
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  logger.propagate = False
  try:
    yield
  finally:
    logger.level, logger.propagate = previous
    logger.removeHandler(handler)
    handler.close()
