"""How a signal ends a run: after the step under way, and saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from distlm import parallel
from distlm.supervision import ONE_REQUEST_SECS


class StopRequest:
  """Turns a first SIGTERM or Ctrl-C into a request to stop after the step.

  JAXline then leaves its loop and saves. A second signal ends the process at
  once; what is on disk is whole at any time.

  With several processes SIGTERM belongs to JAX's preemption service, by which
  they agree on one step; a Ctrl-C is turned into it.
  """

  def __init__(self) -> None:
    self.signal = 0  # that asked to stop
    self._time = 0.0  # when it did
    self._previous: dict[int, Any] = {}

  @property
  def is_requested(self) -> bool:
    """Whether a signal has come."""
    return self.signal != 0

  def __enter__(self) -> StopRequest:
    numbers = [signal.SIGINT]
    if parallel.process_count() == 1:
      numbers.append(signal.SIGTERM)
    # Python lets only the main thread handle signals.
    if threading.current_thread() is threading.main_thread():
      for number in numbers:
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *error: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    now = time.monotonic()
    if self.is_requested:
      # A scheduler may tell this process and the one that started it, which
      # passes it on: that is one request, not two.
      is_again = number == self.signal == signal.SIGTERM
      if is_again and now - self._time < ONE_REQUEST_SECS:
        return
      os._exit(128 + number)
    self.signal, self._time = number, now
    os.write(2, b"\nstopping after this step; again to leave at once\n")
    if parallel.process_count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)
