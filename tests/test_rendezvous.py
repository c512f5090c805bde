"""Tests of the meeting of processes, over real sockets on loopback."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import process_job
import pytest

from distlm import messages
from distlm.cluster import ProcessSpec
from distlm.errors import RunError, UsageError
from distlm.rendezvous import Meeting

FACTS = {"config.model.num_layers": 2, "the text": "abc", "list": [1, 2]}
SECS = 30.0


def _meet(
  spec: ProcessSpec, facts: Mapping[str, Any], secs: float
) -> Exception | None:
  try:
    meeting = Meeting(spec, secs)
    with meeting.attended():
      meeting.compare(facts)
  except (UsageError, RunError) as error:
    return error
  return None


def _meet_all(
  facts: Sequence[Mapping[str, Any]],
  specs: Sequence[ProcessSpec] | None = None,
  secs: float = SECS,
) -> list[Exception | None]:
  """Returns with which error each process leaves the meeting."""
  address = process_job.free_address()
  if specs is None:
    count = len(facts)
    specs = [ProcessSpec(address, count, i) for i in range(count)]
  with concurrent.futures.ThreadPoolExecutor(len(specs)) as pool:
    return list(pool.map(_meet, specs, facts, [secs] * len(specs)))


def _specs(numbers: Sequence[tuple[int, int]]) -> list[ProcessSpec]:
  """Returns specs of (number of processes, process id)."""
  address = process_job.free_address()
  return [ProcessSpec(address, *pair) for pair in numbers]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_processes_meet(count: int) -> None:
  assert _meet_all([FACTS] * count) == [None] * count


def test_one_process_neither_listens_nor_waits() -> None:
  meeting = Meeting(ProcessSpec("256.0.0.1:1", 1, 0), 0.1)
  with meeting.attended():
    meeting.compare(FACTS)
  assert meeting.is_first


def test_the_address_is_free_afterwards() -> None:
  address = process_job.free_address()
  specs = [ProcessSpec(address, 2, i) for i in range(2)]
  for _ in range(2):
    assert _meet_all([FACTS, FACTS], specs) == [None, None]
  with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
    pass


def test_a_difference_names_process_and_key_to_all() -> None:
  other = {**FACTS, "config.model.num_layers": 3, "more": True}
  errors = _meet_all([FACTS, FACTS, other])
  assert len({str(error) for error in errors}) == 1
  assert all(isinstance(error, UsageError) for error in errors)
  assert str(errors[0]).startswith("process 2 (pid ")
  assert "config.model.num_layers is 3 there and 2 in process 0" in str(
    errors[0]
  )
  assert "more is True there and None in process 0" in str(errors[0])


def test_many_differences_are_counted_not_listed() -> None:
  other = {f"key {i}": i for i in range(10)}
  [first, _] = _meet_all([{}, other])
  assert "key 2" in str(first)
  assert "and 7 more" in str(first)
  assert "key 3" not in str(first)


@pytest.mark.parametrize(
  ("numbers", "says"),
  [
    (
      [(3, 0), (3, 1), (3, 1)],
      "--process-id=1: two processes have it, pid ",
    ),
    ([(2, 0), (3, 1)], "--num-processes=3: process 1 "),
    ([(2, 0), (2, 5)], "--process-id=5: it must be from 0 to 1"),
  ],
)
def test_wrong_numbers_end_all(
  numbers: Sequence[tuple[int, int]], says: str
) -> None:
  errors = _meet_all([FACTS] * len(numbers), _specs(numbers))
  for error in errors:
    assert isinstance(error, UsageError)
    assert str(error).startswith(says)


def test_two_processes_of_number_0() -> None:
  errors = _meet_all([FACTS] * 3, _specs([(3, 0), (3, 0), (3, 1)]), secs=1.0)
  assert any(
    isinstance(error, UsageError) and "cannot listen there" in str(error)
    for error in errors
  )


def test_who_does_not_come_is_named() -> None:
  errors = _meet_all([FACTS] * 2, _specs([(4, 0), (4, 2)]), secs=1.0)
  for error in errors:
    assert isinstance(error, RunError)
    assert str(error).startswith("process(es) 1, 3 of 4 did not come to ")


@pytest.mark.parametrize(
  ("host", "reason"), [("127.0.0.1", "refused"), ("no.invalid", "")]
)
def test_no_process_0(host: str, reason: str) -> None:
  port = process_job.free_address().rpartition(":")[2]
  error = _meet(ProcessSpec(f"{host}:{port}", 2, 1), FACTS, 0.5)
  # A name that never stands for a host is a wrong one.
  assert type(error) is (UsageError if host == "no.invalid" else RunError)
  assert f"could not reach process 0 at --coordinator={host}:{port} " in str(
    error
  )
  assert reason in str(error)
  assert f"a firewall closes port {port}" in str(error)


def test_process_0_may_come_late() -> None:
  specs = _specs([(2, 0), (2, 1)])
  with concurrent.futures.ThreadPoolExecutor() as pool:
    waiting = pool.submit(_meet, specs[1], FACTS, SECS)
    time.sleep(1)
    assert _meet(specs[0], FACTS, SECS) is None
    assert waiting.result() is None


def test_the_port_is_in_use() -> None:
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    error = _meet(ProcessSpec(f"127.0.0.1:{port}", 2, 0), FACTS, SECS)
  assert isinstance(error, UsageError)
  assert f"--coordinator=127.0.0.1:{port}: process 0 cannot listen there" in (
    str(error)
  )
  assert "use another port" in str(error)


@pytest.mark.parametrize(
  "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n", b"[]\n"]
)
def test_another_program_listens_there(answer: bytes) -> None:
  with socket.create_server(("127.0.0.1", 0)) as server:

    def serve() -> None:
      connection, _ = server.accept()
      with connection:
        connection.recv(2**16)
        connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    port = server.getsockname()[1]
    error = _meet(ProcessSpec(f"127.0.0.1:{port}", 2, 1), FACTS, 5.0)
  assert isinstance(error, RunError)
  assert "another program listens there" in str(error)


@pytest.mark.parametrize(
  "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process_id": "1"}\n']
)
def test_strangers_do_not_disturb(noise: bytes) -> None:
  specs = _specs([(2, 0), (2, 1)])
  assert specs[0].coordinator is not None
  port = int(specs[0].coordinator.rpartition(":")[2])
  with concurrent.futures.ThreadPoolExecutor() as pool:
    first = pool.submit(_meet, specs[0], FACTS, SECS)
    with _connection(port) as stranger:
      stranger.sendall(noise)
    assert _meet(specs[1], FACTS, SECS) is None
    assert first.result() is None


def _connection(port: int) -> socket.socket:
  deadline = time.monotonic() + SECS
  while True:
    with contextlib.suppress(ConnectionRefusedError):
      return socket.create_connection(("127.0.0.1", port))
    assert time.monotonic() < deadline
    time.sleep(0.01)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("kind", [UsageError, RunError])
def test_a_process_that_fails_before_it_is_there_ends_all(
  failing: int, kind: Callable[[str], Exception]
) -> None:
  def attend(spec: ProcessSpec) -> Exception | None:
    try:
      meeting = Meeting(spec, SECS)
      with meeting.attended():
        if spec.process_id == failing:
          raise kind("the disk is full")
        meeting.compare(FACTS)
    except (UsageError, RunError) as error:
      return error
    return None

  start = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    errors = list(pool.map(attend, _specs([(3, 0), (3, 1), (3, 2)])))
  assert time.monotonic() - start < SECS / 2
  for process_id, error in enumerate(errors):
    name = "" if process_id == failing else f"process {failing}: "
    assert type(error) is kind
    assert str(error) == f"{name}the disk is full"


def _wait_as_a_guest(specs: Sequence[ProcessSpec]) -> socket.socket:
  """Says hello as process 1, as `Meeting` does, and does not go on."""
  assert specs[1].coordinator is not None
  guest = _connection(int(specs[1].coordinator.rpartition(":")[2]))
  hello = {"process_id": 1, "num_processes": 3, "name": "x", "facts": FACTS}
  guest.sendall(json.dumps(hello).encode() + b"\n")
  time.sleep(0.5)
  return guest


@pytest.mark.parametrize("comes_again", [True, False])
def test_a_process_that_died_while_it_waited_may_come_again(
  comes_again: bool,
) -> None:
  specs = _specs([(3, 0), (3, 1), (3, 2)])
  with concurrent.futures.ThreadPoolExecutor() as pool:
    first = pool.submit(_meet, specs[0], FACTS, 2.0)
    _wait_as_a_guest(specs).close()
    ids = (1, 2) if comes_again else (2,)
    others = [pool.submit(_meet, specs[i], FACTS, 2.0) for i in ids]
    ends = [first.result(), *(other.result() for other in others)]
  if comes_again:
    assert ends == [None, None, None]
  for end in ends:
    assert comes_again or "process(es) 1 of 3 did not come to" in str(end)


def test_what_is_not_a_number_is_equal_to_itself() -> None:
  nan = {"config.note": float("nan")}
  assert _meet_all([nan, nan]) == [None, None]
  [error, _] = _meet_all([nan, {"config.note": 0.0}])
  assert "config.note is 0.0 there and nan in process 0" in str(error)


def test_what_fails_later_is_not_told() -> None:
  specs = _specs([(2, 0), (2, 1)])
  with concurrent.futures.ThreadPoolExecutor() as pool:
    other = pool.submit(_meet, specs[1], FACTS, SECS)
    meeting = Meeting(specs[0], SECS)
    start = time.monotonic()
    with pytest.raises(RunError, match="later"), meeting.attended():
      meeting.compare(FACTS)
      raise RunError("later")
    assert other.result() is None
  assert time.monotonic() - start < SECS / 2


@pytest.mark.parametrize(
  ("coordinator", "bound"),
  [
    ("localhost:80", ("127.0.0.1", 80)),
    ("127.0.0.1:80", ("127.0.0.1", 80)),
    ("[::1]:80", ("::1", 80)),
    ("n1:80", None),
    ("10.0.0.1:80", None),
  ],
)
def test_a_job_of_one_machine_listens_on_loopback(
  coordinator: str, bound: tuple[str, int] | None
) -> None:
  assert messages.bind_address(coordinator) == bound


def test_facts_are_compared_as_json() -> None:
  as_tuple = {**FACTS, "list": (1, 2)}
  assert json.loads(json.dumps(as_tuple)) == FACTS
  assert _meet_all([as_tuple, FACTS]) == [None, None]
