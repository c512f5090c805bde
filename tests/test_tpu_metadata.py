"""Tests of a TPU VM, whose metadata server knows the other workers."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from scheduler_environments import (
  SLURM,
  VARIABLES,
  Environ,
  find,
)

from distlm import schedulers
from distlm.cluster import ONE_PROCESS, ProcessSpec
from distlm.errors import UsageError


class _Metadata(http.server.BaseHTTPRequestHandler):
  """Answers with the attributes of its server, as a number or a text."""

  def do_GET(self) -> None:
    self.server.num_requests += 1  # type: ignore[attr-defined]
    root, _, name = self.path.rpartition("/")
    attributes = self.server.attributes  # type: ignore[attr-defined]
    known = root == "/computeMetadata/v1/instance/attributes"
    known = known and self.headers["Metadata-Flavor"] == "Google"
    answer = attributes.get(name, 404) if known else 403
    self.send_response(answer if isinstance(answer, int) else 200)
    self.end_headers()
    self.wfile.write(f"{answer}".encode())

  def log_message(self, *unused: Any) -> None:
    pass


@contextlib.contextmanager
def tpu_vm(
  monkeypatch: pytest.MonkeyPatch,
  directory: Path,
  attributes: Mapping[str, str | int],
) -> Iterator[tuple[Any, Environ]]:
  """Makes a machine with a TPU chip and a metadata server."""
  (directory / "accel0").touch()
  monkeypatch.setattr(
    schedulers, "_TPU_CHIPS", (f"{directory / 'accel[0-9]*'}",)
  )
  server: Any = http.server.HTTPServer(("127.0.0.1", 0), _Metadata)
  server.attributes, server.num_requests = attributes, 0
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  try:
    yield server, {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


MULTISLICE = """ACCELERATOR_TYPE: 'v4-16'
MEGASCALE_COORDINATOR_ADDRESS: '192.0.2.9:8080'
MEGASCALE_NUM_SLICES: '2'
MEGASCALE_SLICE_ID: '1'
"""


@pytest.mark.parametrize(
  ("attributes", "expected"),
  [
    (
      {
        "agent-worker-number": "1",
        "worker-network-endpoints": "unknown:unknown:192.0.2.1,x:y:192.0.2.2",
        "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nWORKER_ID: '1'\n",
      },
      ("192.0.2.1:8476", 2, 1, 1, 0, "Cloud TPU"),
    ),
    (
      {
        "agent-worker-number": "0\n",
        "worker-network-endpoints": "t-0,t-1,t-2",
      },
      ("t-0:8476", 3, 0, 1, 0, "Cloud TPU"),
    ),
    (
      {
        "agent-worker-number": "1",
        "worker-network-endpoints": "t-0,t-1",
        "tpu-env": MULTISLICE,
      },
      ("192.0.2.9:8476", 4, 3, 1, 0, "Cloud TPU"),
    ),
    ({"agent-worker-number": "0", "worker-network-endpoints": "t-0"}, None),
    ({"worker-network-endpoints": "t-0,t-1"}, None),
    ({}, None),
  ],
)
def test_a_tpu_vm_asks_its_metadata_server(
  monkeypatch: pytest.MonkeyPatch,
  tmp_path: Path,
  attributes: Environ,
  expected: Any,
) -> None:
  with tpu_vm(monkeypatch, tmp_path, attributes) as (server, environ):
    # Which proxy the user has for the web is no matter.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    spec = ProcessSpec(*expected) if expected else ONE_PROCESS
    assert find(environ) == spec
    assert server.num_requests >= 1


def test_the_metadata_server_is_not_asked_in_vain(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  attributes = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "t-0,t-1",
  }
  with tpu_vm(monkeypatch, tmp_path, attributes) as (server, environ):
    assert find(environ | {"TPU_SKIP_MDS_QUERY": "1"}) == ONE_PROCESS
    assert find(environ, None, 1, None).num_processes == 1
    assert find(environ | VARIABLES).coordinator == "a:1"
    assert find(environ | SLURM).found_by == "SLURM"
    (tmp_path / "accel0").rename(tmp_path / "accel")
    assert find(environ) == ONE_PROCESS
    assert server.num_requests == 0


def test_a_metadata_server_that_fails_is_named(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  attributes = {"agent-worker-number": 503}
  with tpu_vm(monkeypatch, tmp_path, attributes) as (server, environ):
    with pytest.raises(UsageError, match=r"127.0.0.1:.* answers 503"):
      find(environ)
    server.attributes = {"agent-worker-number": "5",
                         "worker-network-endpoints": "a,b"}  # fmt: skip
    with pytest.raises(UsageError, match=r"agent-worker-number=5: .* 0 to 1"):
      find(environ)
  # It is gone by now: then this is no machine of Google's.
  assert find(environ) == ONE_PROCESS
