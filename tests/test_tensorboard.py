"""A real TensorBoard server shows what distlm.writers wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlm.writers import RunWriter

_DEADLINE_SECS = 120


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
  """The address of a TensorBoard that looks at `tmp_path`."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  binary = Path(sys.executable).with_name("tensorboard")
  command = [str(binary), "--logdir", str(tmp_path / "tensorboard")]
  command += ["--host", "127.0.0.1", "--port", str(port)]
  with (tmp_path / "server.log").open("w") as log:
    # A group of its own, because the server starts a data server.
    server = subprocess.Popen(
      command, stdout=log, stderr=log, start_new_session=True
    )
    try:
      yield f"http://127.0.0.1:{port}/data/plugin/scalars"
    finally:
      os.killpg(server.pid, signal.SIGKILL)
      server.wait()


def _wait_for(url: str, expected: Any) -> None:
  """Asserts that the JSON at `url` becomes what is expected."""
  deadline = time.monotonic() + _DEADLINE_SECS
  answer = None
  while answer != expected and time.monotonic() < deadline:
    time.sleep(0.2)
    with (
      contextlib.suppress(OSError),
      urllib.request.urlopen(url, timeout=5) as response,
    ):
      # Of a curve without the wall times, which come first.
      answer = json.load(response)
      if isinstance(answer, list):
        answer = [point[1:] for point in answer]
  assert answer == expected


def _write(workdir: Path, resume_step: int | None, values: list[float]) -> None:
  first = 1 if resume_step is None else resume_step + 1
  with RunWriter(workdir, resume_step, lambda *_: None) as writer:
    for step, value in enumerate(values, start=first):
      writer.for_split("train").write_scalars(step, {"loss": value})
    writer.for_split("eval").write_scalars(step, {"perplexity": 2.0})


def test_server_shows_a_resumed_run(tmp_path: Path, server_url: str) -> None:
  _write(tmp_path, None, [5.0, 4.0, 3.5, 3.25])
  _write(tmp_path, 2, [3.0])
  plain = {"displayName": "", "description": ""}
  tags = {"train": {"loss": plain}, "eval": {"perplexity": plain}}
  _wait_for(f"{server_url}/tags", tags)
  _wait_for(
    f"{server_url}/scalars?tag=loss&run=train", [[1, 5.0], [2, 4.0], [3, 3.0]]
  )
