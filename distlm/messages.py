"""Messages over a socket: one line of JSON each, and never anything else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

_MIN_SECS = 0.2
_SEND_SECS = 5.0
_MAX_BYTES = 2**20


def bind_address(coordinator: str) -> tuple[str, int] | None:
  """Returns where process 0 listens; None: at all addresses of its host.

  A job of one machine is nobody else's business.
  """
  host, _, port = coordinator.rpartition(":")
  if host == "localhost" or host.startswith("127."):
    return "127.0.0.1", int(port)
  return ("::1", int(port)) if host == "[::1]" else None


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
  """Sends a message of JSON types."""
  connection.sendall(json.dumps(message).encode() + b"\n")


def receive(
  connection: socket.socket, deadline: float
) -> dict[str, Any] | None:
  """Returns a message, or None for what is not one, or not in time."""
  received = b""
  try:
    while not received.endswith(b"\n") and len(received) < _MAX_BYTES:
      connection.settimeout(max(_MIN_SECS, deadline - time.monotonic()))
      chunk = connection.recv(2**16)
      if not chunk:
        return None
      received += chunk
    message = json.loads(received)
  except (OSError, ValueError):
    return None
  return message if isinstance(message, dict) else None


def is_gone(connection: socket.socket) -> bool:
  """Returns whether the other side has closed it."""
  connection.setblocking(False)
  try:
    return connection.recv(1, socket.MSG_PEEK) == b""
  except BlockingIOError:
    return False
  except OSError:
    return True
  finally:
    connection.settimeout(_SEND_SECS)
