"""Devices and processes: the only module that knows pmap.

A replicated value has one equal copy on each device, as a leading axis R over
the devices of this process; a sharded value has different rows there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jaxline.utils
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlm import bits, cluster, collectives, messages, switches, xla_flags
from distlm.cluster import ProcessSpec
from distlm.collectives import AXIS
from distlm.errors import RunError, UsageError

T = TypeVar("T")

_JOIN_SECS = 120  # All are there, since they have met.
# JAX's 100 s is long for those who wait; its heartbeats need no Python.
_HEARTBEAT_SECS = 30

_limit: int | None = None  # See `first_devices`.


def start(
  num_devices: int | None = None,
  spec: ProcessSpec = cluster.ONE_PROCESS,
  num_fake_devices: int = 1,
) -> None:
  """Makes the devices of this process and joins it to its job.

  It must come before any other JAX work, which fixes the devices.

  Args:
    num_devices: the number of fake CPU devices to make or, on a machine with
      accelerators, the number of them to use. None: `num_fake_devices`, or all
      accelerators that are this process's.
    spec: which process of which job this is.
    num_fake_devices: see `num_devices`.

  Raises:
    UsageError: if there are not so many devices, or the processes have
      different numbers of them.
  """
  _set_device_count(num_devices, num_fake_devices, spec)
  xla_flags.apply(os.environ)
  switches.keep_compiled(jax.config, os.environ)
  if spec.coordinator is not None:
    _join(spec, spec.coordinator)
  try:
    found = jax.local_device_count()
  # JAX asserts that it finds the platform that it is told to use.
  except (RuntimeError, AssertionError) as error:
    raise UsageError(
      f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX cannot use its"
      f" devices ({error}); mend it or unset it"
    ) from error
  if num_devices is not None and found != num_devices:
    raise UsageError(
      f"--devices={num_devices}: this process has {found}"
      f" {jax.default_backend()} device(s); ask for at most {found}"
    )
  _check_equal_counts()


def _join(spec: ProcessSpec, coordinator: str) -> None:
  bind = messages.bind_address(coordinator)
  try:
    jax.distributed.initialize(
      coordinator,
      spec.num_processes,
      spec.process_id,
      coordinator_bind_address=bind and _join_address(*bind),
      cluster_detection_method="deactivate",
      initialization_timeout=_JOIN_SECS,
      heartbeat_timeout_seconds=_HEARTBEAT_SECS,
    )
  except RuntimeError as error:
    raise RunError(
      f"--coordinator={coordinator}: JAX could not join process"
      f" {spec.process_id} to the job ({error}); look at the errors of the"
      " others"
    ) from error


def _check_equal_counts() -> None:
  counts = collections.Counter(d.process_index for d in jax.devices())
  for process_id in range(jax.process_count()):
    if counts[process_id] != counts[0]:
      raise UsageError(
        f"--devices: process {process_id} has {counts[process_id]} device(s),"
        f" process 0 has {counts[0]}; give all processes the same number"
      )


def _set_device_count(
  num_devices: int | None, num_fake_devices: int, spec: ProcessSpec
) -> None:
  num_cpu_devices = num_devices or num_fake_devices
  if threads := cluster.pool_threads(num_cpu_devices, spec.num_processes):
    os.environ.setdefault("NPROC", str(threads))
  if num_cpu_devices > 1:
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
  # All below are ignored by a backend that is not there.
  num_gpus = cluster.count_visible_gpus(os.environ)
  gpus = cluster.local_gpu_ids(spec, num_gpus, num_devices, os.environ)
  if gpus is not None:
    visible = ",".join(map(str, gpus))
    jax.config.update("jax_cuda_visible_devices", visible)
    jax.config.update("jax_rocm_visible_devices", visible)
  if num_devices is not None:
    first = ",".join(map(str, range(num_devices)))
    os.environ.setdefault("TPU_VISIBLE_CHIPS", first)


def _join_address(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def process_index() -> int:
  """Returns the number of this process, from 0."""
  return jax.process_index()


def process_count() -> int:
  """Returns the number of processes."""
  return jax.process_count()


def local_device_count() -> int:
  """Returns R, the number of devices of this process."""
  return len(_devices())


def _devices() -> list[jax.Device]:
  return jax.local_devices()[:_limit]


@contextlib.contextmanager
def first_devices(num_devices: int) -> Iterator[None]:
  """Makes the functions of this module use only the first devices.

  It is for a job of one process, and does not reach what JAXline pmaps.
  """
  global _limit
  previous, _limit = _limit, num_devices
  try:
    yield
  finally:
    _limit = previous


def name_of_device(index: int) -> str:
  """Returns what to call a device, by its number in pmaps of all processes."""
  device = jax.devices()[index]
  of_process = jax.local_devices(process_index=device.process_index)
  return f"device {of_process.index(device)} of process {device.process_index}"


def device_kind() -> str:
  """Returns what the devices are, such as "cpu"."""
  return jax.local_devices()[0].device_kind


def platform() -> str:
  """Returns "cpu", "gpu" or "tpu"."""
  return jax.local_devices()[0].platform


def compute_capability() -> str:
  """Returns that of an NVIDIA GPU, such as "9.0", and "" of other devices."""
  return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def should_stop(step: int, stop_requested: bool) -> bool:
  """Returns whether all processes stop after `step` completed steps.

  With several processes the answer comes from JAX's preemption service, which
  makes them agree on one step after a SIGTERM to any of them.
  """
  if jax.process_count() > 1:
    return multihost_utils.reached_preemption_sync_point(step)
  return stop_requested


def end_on_sigterm() -> None:
  """Has SIGTERM end this process, as long as it trains nothing.

  JAX's preemption service, by which `should_stop` works, swallows it.
  """
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def agree(number: int) -> int:
  """Returns the number that process 0 has; all processes must call it."""
  if jax.process_count() == 1:
    return number
  return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def pmap(
  fn: Callable[..., Any], donate_argnums: int | Sequence[int] = ()
) -> Callable[..., Any]:
  """Runs `fn` on each device, over the leading axis R of its arguments."""
  return jax.pmap(
    fn,
    axis_name=AXIS,
    donate_argnums=donate_argnums,
    devices=None if _limit is None else _devices(),
  )


def broadcast(tree: T, source: int) -> T:
  """Replaces every replica by that of one device, bit for bit.

  Args:
    tree: [R, ...] arrays, which are donated.
    source: the number of the device among those of all processes, in their
      order.
  """

  def of_source(leaf: jax.Array) -> jax.Array:
    # Sums of integers with zeros keep the bits; those of floats lose -0.
    words = bits.as_words(leaf)
    is_source = collectives.axis_index() == source
    words = collectives.psum(jnp.where(is_source, words, jnp.zeros_like(words)))
    return bits.from_words(words, leaf)

  return pmap(lambda tree: jax.tree.map(of_source, tree), 0)(tree)


def _local_sharding() -> NamedSharding:
  return _sharding(local_device_count())


@functools.cache
def _sharding(num_devices: int) -> NamedSharding:
  mesh = Mesh(np.array(jax.local_devices()[:num_devices]), (AXIS,))
  return NamedSharding(mesh, PartitionSpec(AXIS))


def replicate(tree: T) -> T:
  """Puts each array on each device: [...] to [R, ...].

  CPU devices may share the memory of a NumPy array, which must not be written
  to afterwards.
  """
  devices = _devices()

  def put(x: Any) -> jax.Array:
    row = (x if isinstance(x, jax.Array) else np.asarray(x))[None]
    copies = [jax.device_put(row, device) for device in devices]
    return jax.make_array_from_single_device_arrays(
      (len(devices), *row.shape[1:]), _local_sharding(), copies
    )

  return jax.tree.map(put, tree)


def shard(tree: T) -> T:
  """Puts row r of each host array on device r: [R, ...] stays [R, ...].

  As with `replicate`, the array must not be written to afterwards.
  """
  return jax.device_put(tree, _local_sharding())


def first_replica(tree: T) -> T:
  """Returns the first device's row of a replicated tree, without waiting.

  Indexing with [0] would gather over all devices; this only takes a handle.

  Args:
    tree: [R, ...] arrays.

  Returns:
    [1, ...] arrays on the first device.
  """

  def take(x: Any) -> Any:
    # Under chex.fake_pmap an array is one shard that holds all rows.
    row = x.addressable_data(0)
    return row if row.shape[0] == 1 else row[:1]

  return jax.tree.map(take, tree)


def fetch(tree: T) -> T:
  """Copies the first replica to the host: [R, ...] to NumPy [...].

  A copy, never a view: a view that lives on would silently keep the buffer from
  being donated to the next update.
  """

  def get(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array):
      x = np.asarray(x.addressable_data(0))
    return np.array(x[0])

  return jax.tree.map(get, tree)


def rows(tree: T) -> list[T]:
  """Copies the rows of all devices of this process to the host: [R, ...].

  Returns:
    R trees of NumPy arrays [...].
  """
  host = jax.tree.map(np.asarray, tree)
  return [
    jax.tree.map(lambda x, r=r: x[r], host) for r in range(local_device_count())
  ]


def repair_jaxline() -> None:
  """Replaces the two helpers of JAXline that today's JAX has outgrown.

  JAXline 0.0.8 replicates by `jax.device_put_sharded`, which is gone, and its
  `get_first` gathers over devices and gives arrays that the next update's
  donation deletes. JAXline looks both up by attribute, so that one assignment
  repairs its train, evaluate, snapshot and restore.
  """
  jaxline.utils.bcast_local_devices = replicate
  jaxline.utils.get_first = fetch
