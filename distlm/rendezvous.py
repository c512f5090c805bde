"""How the processes of a job meet, before JAX joins them.

JAX answers a process that is missing, doubled or different by a hang or an
abort. So they meet first: process 0 listens at the coordinator's address until
every other one has said who it is and what it is about to run. It compares,
tells all of them what it found, and leaves the address to JAX.

A message is one line of JSON. A process that fails before it is there says so,
and then all of them end with its error.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distlm import messages
from distlm.cluster import ProcessSpec
from distlm.errors import RunError, UsageError

_POLL_SECS = 0.2
_HELLO_SECS = 5.0  # A stranger that connects and says nothing costs as much.
# For how long a process that failed looks for the others, to tell them.
_REFUSAL_SECS = 5.0
_MAX_NAMED = 3

Facts = Mapping[str, Any]


class Meeting:
  """The meeting of a job of several processes; of one, it is none at all."""

  def __init__(self, spec: ProcessSpec, timeout_secs: float) -> None:
    """Meets nobody yet.

    Args:
      spec: which process this is.
      timeout_secs: how long to wait for the others.
    """
    self.spec = spec  #: Which process of which job this is.
    self._deadline = 0.0
    self._timeout_secs = timeout_secs
    self._is_over = spec.num_processes == 1

  @property
  def is_first(self) -> bool:
    """Whether this is process 0, which alone writes."""
    return self.spec.process_id == 0

  @contextlib.contextmanager
  def attended(self) -> Iterator[None]:
    """Tells the other processes what goes wrong in its body, before `compare`.

    After it, they find each other by JAX.
    """
    try:
      yield
    except (UsageError, RunError) as error:
      if not self._is_over:
        self._is_over = True
        self._refuse(error)
      raise

  def compare(self, facts: Facts) -> None:
    """Waits for all processes, and checks that they are about to run the same.

    Args:
      facts: by their names, of JSON types, equal in all processes.

    Raises:
      UsageError: naming the process that is doubled or differs, and in what.
      RunError: if a process does not come in time.
    """
    if self._is_over:
      return
    self._is_over = True
    # Not from the start: a text may take long to read.
    self._deadline = time.monotonic() + self._timeout_secs
    # As the others will read them.
    facts = json.loads(json.dumps(facts))
    if self.spec.process_id == 0:
      _Host(self.spec, self._deadline, self._timeout_secs).receive(facts)
    else:
      answer = self._say({"facts": facts})
      if error := answer.get("error"):
        raise (UsageError if answer.get("is_usage") else RunError)(error)

  def _refuse(self, error: Exception) -> None:
    self._deadline = time.monotonic() + _REFUSAL_SECS
    verdict = {
      "error": f"process {self.spec.process_id}: {error}",
      "is_usage": isinstance(error, UsageError),
    }
    # They may be gone, or never come: this process's own error is what counts.
    with contextlib.suppress(UsageError, RunError):
      if self.spec.process_id == 0:
        _Host(self.spec, self._deadline, _REFUSAL_SECS).refuse(verdict)
      else:
        self._say(verdict)

  def _say(self, message: Mapping[str, Any]) -> dict[str, Any]:
    """Sends process 0 a message, and returns its answer."""
    spec = self.spec
    with self._connect() as connection:
      messages.send(
        connection,
        {
          "process_id": spec.process_id,
          "num_processes": spec.num_processes,
          "name": _own_name(),
          **message,
        },
      )
      # Process 0 knows who did not come: its word comes before this one's.
      answer = messages.receive(connection, self._deadline + _REFUSAL_SECS)
    if answer is None or answer.get("from") != "distlm":
      raise RunError(
        f"process {spec.process_id}: process 0 at {spec.coordinator} gave no"
        " answer: it ended, its job has begun already, or another program"
        " listens there; see the error of process 0, or use another port"
      )
    return answer

  def _connect(self) -> socket.socket:
    assert self.spec.coordinator is not None
    host, _, port = self.spec.coordinator.rpartition(":")
    while True:
      try:
        left = max(_POLL_SECS, self._deadline - time.monotonic())
        return socket.create_connection(
          (host.strip("[]"), int(port)), timeout=min(left, _HELLO_SECS)
        )
      except OSError as error:
        if time.monotonic() > self._deadline:
          is_name = isinstance(error, socket.gaierror)
          raise (UsageError if is_name else RunError)(
            f"process {self.spec.process_id} on {socket.gethostname()}: it"
            f" could not reach process 0 at --coordinator={host}:{port} in"
            f" {self._timeout_secs:g} s ({_reason(error)}); look whether"
            f" process 0 runs, whether {host} is its host as seen from here,"
            f" and whether a firewall closes port {port}"
          ) from error
      time.sleep(_POLL_SECS)


class _Host:
  """Process 0, which the others come to."""

  def __init__(
    self, spec: ProcessSpec, deadline: float, timeout_secs: float
  ) -> None:
    self._spec = spec
    self._deadline = deadline
    self._timeout_secs = timeout_secs
    self._guests: dict[int, tuple[socket.socket, dict[str, Any]]] = {}

  def receive(self, facts: Facts) -> None:
    """Waits for all, and tells them whether they agree."""
    error: UsageError | RunError | None = None
    with contextlib.ExitStack() as stack:
      server = stack.enter_context(_listen(self._spec))
      while error is None and not self._all_are_there():
        error = self._welcome(server, stack)
        self._forget_who_is_gone()
      if error is None:
        error = self._difference(facts)
      verdict = {}
      if error is not None:
        verdict = {
          "error": str(error),
          "is_usage": isinstance(error, UsageError),
        }
      for connection, _ in self._guests.values():
        _answer(connection, verdict)
      if error is not None and time.monotonic() < self._deadline:
        # Those who are still to come should not wait for nothing.
        self._deadline = time.monotonic() + _REFUSAL_SECS
        self._turn_away(server, stack, verdict)
    if error is not None:
      raise error

  def refuse(self, verdict: Mapping[str, Any]) -> None:
    """Tells all who come why this process cannot go on."""
    with contextlib.ExitStack() as stack:
      self._turn_away(stack.enter_context(_listen(self._spec)), stack, verdict)

  def _turn_away(
    self,
    server: socket.socket,
    stack: contextlib.ExitStack,
    verdict: Mapping[str, Any],
  ) -> None:
    while not self._all_are_there() and time.monotonic() < self._deadline:
      before = set(self._guests)
      self._welcome(server, stack)
      for process_id in set(self._guests) - before:
        _answer(self._guests[process_id][0], verdict)

  def _forget_who_is_gone(self) -> None:
    """Makes room for those that come again, after they died while waiting."""
    for process_id, (connection, hello) in [*self._guests.items()]:
      if "error" not in hello and messages.is_gone(connection):
        del self._guests[process_id]

  def _all_are_there(self) -> bool:
    return len(self._guests) == self._spec.num_processes - 1

  def _welcome(
    self, server: socket.socket, stack: contextlib.ExitStack
  ) -> UsageError | RunError | None:
    """Waits a moment for somebody to come; returns what is wrong with them."""
    count = self._spec.num_processes
    try:
      connection, _ = server.accept()
    except TimeoutError:
      if time.monotonic() < self._deadline:
        return None
      missing = sorted(set(range(1, count)) - set(self._guests))
      return RunError(
        f"process(es) {', '.join(map(str, missing))} of {count} did not come to"
        f" {self._spec.coordinator} in {self._timeout_secs:g} s; look at their"
        " errors, and whether their hosts reach this address"
      )
    stack.enter_context(connection)
    hello = messages.receive(connection, time.monotonic() + _HELLO_SECS)
    if hello is None or not isinstance(hello.get("process_id"), int):
      return None  # A stranger, such as a port scanner.
    return self._register(connection, hello)

  def _register(
    self, connection: socket.socket, hello: dict[str, Any]
  ) -> UsageError | RunError | None:
    self._forget_who_is_gone()
    process_id, name = hello["process_id"], hello.get("name")
    count = self._spec.num_processes
    error = None
    if hello.get("num_processes") != count:
      error = (
        f"--num-processes={hello.get('num_processes')}: process {process_id}"
        f" ({name}) was started with it, process 0 ({_own_name()}) with"
        f" {count}; start all with the same"
      )
    elif process_id == 0 or process_id in self._guests:
      other = _own_name()
      if process_id:
        other = self._guests[process_id][1]["name"]
      error = (
        f"--process-id={process_id}: two processes have it, {other} and {name};"
        f" give each its own, from 0 to {count - 1}"
      )
    elif not 0 < process_id < count:
      error = f"--process-id={process_id}: it must be from 0 to {count - 1}"
    if error is not None:
      _answer(connection, {"error": error, "is_usage": True})
      return UsageError(error)
    self._guests[process_id] = connection, hello
    if "error" in hello:
      kind = UsageError if hello.get("is_usage") else RunError
      return kind(str(hello["error"]))
    return None

  def _difference(self, facts: Facts) -> UsageError | None:
    for process_id, (_, hello) in sorted(self._guests.items()):
      differing = differences(hello.get("facts", {}), facts)
      if differing:
        return UsageError(
          f"process {process_id} ({hello['name']}) is about to run something"
          f" else: {differing}; start all processes with the same command,"
          " code, versions and text"
        )
    return None


def differences(theirs: Facts, ours: Facts) -> str:
  """Returns in what a process differs from process 0, or "".

  Args:
    theirs: the facts of the process.
    ours: those of process 0.
  """
  found = [
    f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} in process 0"
    for key in sorted({*ours, *theirs})
    # As texts, for a NaN is not equal to itself.
    if repr(theirs.get(key)) != repr(ours.get(key))
  ]
  if len(found) > _MAX_NAMED:
    found[_MAX_NAMED:] = [f"and {len(found) - _MAX_NAMED} more"]
  return "; ".join(found)


def _listen(spec: ProcessSpec) -> socket.socket:
  assert spec.coordinator is not None
  port = int(spec.coordinator.rpartition(":")[2])
  address = messages.bind_address(spec.coordinator)
  try:
    if address is None:
      dual = socket.has_dualstack_ipv6()
      server = socket.create_server(
        ("", port),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
      )
    else:
      family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
      server = socket.create_server(address, family=family)
  except OSError as error:
    raise UsageError(
      f"--coordinator={spec.coordinator}: process 0 cannot listen there"
      f" ({_reason(error)}); is another job running? use another port"
    ) from error
  server.settimeout(_POLL_SECS)
  return server


def _own_name() -> str:
  return f"pid {os.getpid()} on {socket.gethostname()}"


def _reason(error: OSError) -> str:
  return error.strerror or str(error)


def _answer(connection: socket.socket, verdict: Mapping[str, Any]) -> None:
  with contextlib.suppress(OSError):  # Who is gone needs no answer.
    # What else may listen there does not know this word.
    messages.send(connection, {"from": "distlm", **verdict})
