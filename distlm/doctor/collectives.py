"""Tries the collectives that training lives by, and says how fast they are.

Sums and contents are known before, and are whole numbers that f32 holds, of up
to 4,000 devices: the results must be equal to the last bit. Bandwidths are what
the links of a device have to carry at least, "busbw" in
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, so that
they can be compared with what the hardware promises.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distlm import collectives, parallel
from distlm.errors import RunError

SIZES_BYTES = (4 * 2**10, 2**20, 64 * 2**20)
_NUM_TIMES = 5
# Far more than a collective of these sizes takes, with its compilation.
_LONGEST_SECS = 120.0
_FAILURE_CODE = 1
# Prime, so that no chunk of a ring looks like another one.
_PERIOD = 1021
_ITEM_BYTES = 4


class Trial(NamedTuple):
  """A collective that was tried.

  Attributes:
    name: "psum" or "all_gather".
    num_bytes: of its result on one device.
    secs: the median.
    num_wrong: elements of the results on this process's devices that differ
      from what they must be.
    bus_share: bytes that a device sends at least, relative to `num_bytes`.
  """

  name: str
  num_bytes: int
  secs: float
  num_wrong: int
  bus_share: float

  @property
  def gigabytes_per_sec(self) -> float:
    """The bus bandwidth."""
    return self.bus_share * self.num_bytes / self.secs / 1e9


def gather_texts(text: str) -> list[str]:
  """Returns the texts of all processes, in their order, on each of them.

  Args:
    text: this process's.

  Raises:
    RunError: if all_gather does not give this process back what it sent.
  """
  data = text.encode()
  header = np.array([parallel.process_index(), len(data)], np.uint32)
  headers = _gather(header)  # [N, 2]
  senders = set(headers[:, 0].tolist())
  if (
    senders != set(range(parallel.process_count()))
    or header.tolist() not in headers.tolist()
  ):
    raise RunError(
      "all_gather does not return what the processes sent; look at the devices"
      " and at the network between them"
    )
  # In words, since not every interconnect takes bytes.
  longest = int(headers[:, 1].max())
  words = np.zeros(-(-longest // _ITEM_BYTES), "<u4")
  words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
  rows = _gather(words)  # [N, L]
  texts = {}
  for (process_id, size), row in zip(headers, rows, strict=True):
    content = row.astype("<u4").tobytes()[:size]
    texts[int(process_id)] = content.decode(errors="replace")
  return [texts[process_id] for process_id in sorted(texts)]


def _gather(row: np.ndarray) -> np.ndarray:
  gathered = parallel.pmap(collectives.all_gather)(parallel.replicate(row))
  return parallel.fetch(gathered)


def try_psum(num_bytes: int) -> Trial:
  """Sums an array of a size over all devices.

  Args:
    num_bytes: of the array of each device.
  """
  count = _num_devices()

  def is_wrong(total: jax.Array) -> jax.Array:  # [n]
    # Device k of 1 to N has k + i % 1021 in place i.
    return total != count * (count + 1) // 2 + count * _pattern(total.size)

  secs, num_wrong = _try(
    lambda x: collectives.psum(x, parallel.AXIS),
    is_wrong,
    num_bytes // _ITEM_BYTES,
  )
  share = 2 * (count - 1) / count
  return Trial("psum", num_bytes, secs, num_wrong, share)


def try_all_gather(num_bytes: int) -> Trial:
  """Gathers an array from all devices, on all devices.

  Args:
    num_bytes: of the result.
  """
  count = _num_devices()
  length = max(1, num_bytes // _ITEM_BYTES // count)

  def is_wrong(gathered: jax.Array) -> jax.Array:  # [N, n]
    # In whatever order the devices come.
    firsts = gathered[:, :1]
    order = jnp.sort(gathered[:, 0]) != 1 + _pattern(count)
    return jnp.concatenate(
      [order, jnp.ravel(gathered != firsts + _pattern(length))]
    )

  secs, num_wrong = _try(collectives.all_gather, is_wrong, length)
  share = (count - 1) / count
  return Trial(
    "all_gather", count * length * _ITEM_BYTES, secs, num_wrong, share
  )


def _num_devices() -> int:
  return parallel.process_count() * parallel.local_device_count()


def _pattern(length: int) -> jax.Array:
  return jnp.arange(length, dtype=jnp.int32) % _PERIOD


def _try(
  collective: Callable[[Any], Any],
  is_wrong: Callable[[jax.Array], jax.Array],
  length: int,
) -> tuple[float, int]:
  """Returns the median time, and how many elements are wrong here.

  Args:
    collective: runs on each device.
    is_wrong: says so for each element of its result, [...] to bools.
    length: of the argument of `collective` on each device.
  """
  num_local = parallel.local_device_count()
  first = parallel.process_index() * num_local + 1
  numbers = np.arange(first, first + num_local, dtype=np.int32)  # [R]
  # Three programs: what XLA knows of the argument or does not need of the
  # result, it could leave out of the one that is tried.
  make = parallel.pmap(
    lambda number: (number + _pattern(length)).astype(jnp.float32)
  )
  argument = make(parallel.shard(numbers))  # [R, length]
  run = parallel.pmap(collective)
  result = jax.block_until_ready(run(argument))
  secs = []
  for _ in range(_NUM_TIMES):
    start = time.perf_counter()
    result = jax.block_until_ready(run(argument))
    secs.append(time.perf_counter() - start)
  count = parallel.pmap(lambda x: jnp.sum(is_wrong(x), dtype=jnp.int32))
  num_wrong = sum(int(row) for row in parallel.rows(count(result)))
  return statistics.median(secs), num_wrong


@contextlib.contextmanager
def not_for_ever(what: str, secs: float = _LONGEST_SECS) -> Iterator[None]:
  """Ends the process when its body takes too long.

  A collective that hangs can be ended in no other way.

  Args:
    what: is done in the body.
    secs: how long it may take.
  """
  timer = threading.Timer(secs, _give_up, (what, secs))
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _give_up(what: str, secs: float) -> None:
  if sys.__stderr__ is not None:
    print(
      f"error: {what} did not end in {secs:g} s, in process"
      f" {parallel.process_index()} on {socket.gethostname()}; look for a"
      " process that ended, and at the network between the hosts (firewalls,"
      " and on GPUs NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO tells more)",
      file=sys.__stderr__,
      flush=True,
    )
  os._exit(_FAILURE_CODE)
