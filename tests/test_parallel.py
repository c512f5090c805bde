"""Tests of distlm.parallel, with fake devices and with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import jaxline.experiment
import jaxline.utils
import numpy as np
import optax
import pytest

from distlm import collectives, parallel
from distlm.cluster import ONE_PROCESS, ProcessSpec
from distlm.losses import lm_loss_fn
from distlm.optimizer import make_optimizer
from distlm.settings import RANDOM_MODES, OptimizerConfig
from distlm.types import Batch, LossSums, TrainState
from distlm.updater import GradientUpdater

R = 8  # See conftest.py.
SECS_UNTIL_KILLED = 90


def _state() -> TrainState:
  params = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
  opt_state = (optax.EmptyState(), jnp.ones([3]))
  return TrainState(np.int32(7), params, opt_state, np.int32(0), np.int32(0))


def _python(code: str) -> subprocess.Popen[str]:
  """Starts Python, which finds this module, and makes its own devices."""
  environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
  environment.pop("XLA_FLAGS", None)  # With the 8 devices of this process.
  return subprocess.Popen(
    [sys.executable, "-c", code],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _outputs(*processes: subprocess.Popen[str]) -> list[str]:
  """Returns what they print before they end, in time and without error."""
  try:
    outputs = [p.communicate(timeout=SECS_UNTIL_KILLED)[0] for p in processes]
  finally:
    for process in processes:
      process.kill()  # Not terminate: JAX swallows SIGTERM.
      process.wait()
  assert [p.returncode for p in processes] == [0] * len(processes), outputs
  return outputs


def test_replicate_puts_a_copy_on_each_device() -> None:
  state = parallel.replicate(_state())
  assert isinstance(state, TrainState)
  assert isinstance(state.opt_state[0], optax.EmptyState)
  for x, expected in zip(
    jax.tree.leaves(state), jax.tree.leaves(_state()), strict=True
  ):
    assert x.shape == (R, *expected.shape) and x.dtype == expected.dtype
    devices = [shard.device for shard in x.addressable_shards]
    assert devices == jax.local_devices()
    for shard in x.addressable_shards:
      np.testing.assert_array_equal(shard.data[0], expected)


def test_shard_puts_a_row_on_each_device() -> None:
  rows = np.arange(R * 6).reshape(R, 2, 3)
  batch = parallel.shard(Batch(rows, -rows, rows > 3))
  assert isinstance(batch, Batch)
  for i, shard in enumerate(batch.targets.addressable_shards):
    assert shard.device == jax.local_devices()[i]
    np.testing.assert_array_equal(shard.data, -rows[i : i + 1])
  with pytest.raises(ValueError, match=str(R)):
    parallel.shard(rows[: R - 1])


def test_placed_arrays_are_where_pmap_puts_its_results() -> None:
  placed = [parallel.replicate(np.ones(3)), parallel.shard(np.ones((R, 3)))]
  for x in placed:
    assert parallel.pmap(lambda x: x + 1)(x).sharding == x.sharding


def test_fetch_copies_the_first_replica_to_the_host() -> None:
  fetched = parallel.fetch(parallel.replicate(_state()))
  assert isinstance(fetched, TrainState)
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(fetched))
  jax.tree.map(np.testing.assert_array_equal, fetched, _state())
  rows = np.arange(R * 2).reshape(R, 2)
  np.testing.assert_array_equal(parallel.fetch(parallel.shard(rows)), [0, 1])
  np.testing.assert_array_equal(parallel.fetch(rows), [0, 1])


def test_what_was_fetched_outlives_the_donation_of_its_buffers() -> None:
  negate = parallel.pmap(lambda x: -x, donate_argnums=0)
  # A result, because what comes from the host may stay in the host's memory,
  # which XLA cannot reuse.
  x = negate(np.arange(R * 1000, dtype=np.float32).reshape(R, -1))
  address = x.addressable_data(0).unsafe_buffer_pointer()
  fetched = parallel.fetch(x)
  y = negate(x)
  assert x.is_deleted()
  assert y.addressable_data(0).unsafe_buffer_pointer() == address
  np.testing.assert_array_equal(fetched, -np.arange(1000))


def test_first_replica_is_a_row_on_the_first_device() -> None:
  rows = np.arange(R * 2).reshape(R, 2)
  first = parallel.first_replica({"x": parallel.shard(rows)})["x"]
  assert first.devices() == {jax.local_devices()[0]}
  np.testing.assert_array_equal(first, rows[:1])
  with chex.fake_pmap():
    faked = parallel.pmap(lambda x: x + 1)(rows)
    np.testing.assert_array_equal(parallel.first_replica(faked), rows[:1] + 1)


def test_psum_sums_over_devices_and_is_nothing_without_an_axis() -> None:
  tree = {"x": np.arange(R * 2.0).reshape(R, 2), "n": np.arange(R)}
  assert collectives.psum(tree, None) is tree
  summed = parallel.pmap(lambda t: collectives.psum(t, parallel.AXIS))(tree)
  for name, rows in tree.items():
    for row in np.asarray(summed[name]):
      np.testing.assert_array_equal(row, rows.sum(0))


def test_the_only_process_stops_when_it_is_asked_to() -> None:
  assert (parallel.process_index(), parallel.process_count()) == (0, 1)
  assert (parallel.local_device_count(), parallel.device_kind()) == (R, "cpu")
  assert [parallel.should_stop(3, asked) for asked in (True, False)] == [1, 0]


class _Experiment(jaxline.experiment.AbstractExperiment):
  CHECKPOINT_ATTRS: ClassVar = {"_state": "state"}

  def __init__(self, state: Any) -> None:
    super().__init__("train", jax.random.PRNGKey(1))
    self._state = state

  def step(self, **unused: Any) -> Any:
    raise NotImplementedError

  def evaluate(self, **unused: Any) -> Any:
    raise NotImplementedError


def test_repaired_jaxline_saves_and_restores(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  for name in ("bcast_local_devices", "get_first"):  # To be restored after.
    monkeypatch.setattr(jaxline.utils, name, getattr(jaxline.utils, name))
  parallel.repair_jaxline()
  experiment = _Experiment(parallel.replicate(_state()))
  snapshot = experiment.snapshot_state()
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(snapshot))
  experiment._state = None
  experiment.restore_from_snapshot(snapshot)
  assert isinstance(experiment._state, TrainState)
  np.testing.assert_array_equal(experiment._state.step, [7] * R)
  keys = experiment.initialize_train_step_rng(jax.random.PRNGKey(2))
  np.testing.assert_array_equal(keys, [jax.random.PRNGKey(2)] * R)


@pytest.mark.parametrize("mode", RANDOM_MODES)
def test_keys_differ_over_parts_and_as_jaxline_promises(mode: str) -> None:
  num_parts = 3

  def loss_fn(params: Any, key: Any, part: Batch, is_training: bool) -> Any:
    # So that the gradient has in row i what part i of the batch draws.
    loss = jnp.sum(params[part.inputs[0, 0]] * jax.random.normal(key, [2]))
    return LossSums(loss, jnp.sum(part.mask, dtype=int), jnp.zeros([], int))

  updater = GradientUpdater(
    init_fn=lambda key: jnp.zeros([R * num_parts, 2]),
    loss_fn=loss_fn,
    optimizer=optax.identity(),
    schedule=lambda step: 0.0,
  )

  @parallel.pmap
  def update(key: Any, batch: Batch, host_id: Any) -> Any:
    state = updater.init(key)
    key = jaxline.utils.specialize_rng_host_device(
      key, host_id, parallel.AXIS, mode
    )
    return updater.update(state, batch, key)[0].params

  rows = np.arange(R * num_parts).reshape(-1, num_parts, 1, 1)
  batch = Batch(rows, rows, rows >= 0)
  key = parallel.replicate(jax.random.PRNGKey(0))
  of_hosts = [
    parallel.fetch(update(key, batch, np.full(R, host_id)))
    for host_id in (0, 1)
  ]
  for draws in of_hosts:  # each [R * A, 2]
    num_streams = R if mode.endswith("unique_device") else 1
    assert len(np.unique(draws, axis=0)) == num_streams * num_parts
  is_unique_host = mode.startswith("unique_host")
  assert (of_hosts[0] != of_hosts[1]).all() == is_unique_host


@pytest.mark.parametrize("num_devices", [3, None])
def test_start_makes_fake_devices(num_devices: int | None) -> None:
  code = f"""
import os
del os.environ["NPROC"]
from distlm import parallel
parallel.start({num_devices})
print(parallel.local_device_count(), int(os.environ.get("NPROC", 0)) >= 16)
"""
  [output] = _outputs(_python(code))
  # One device waits for no other: XLA's own pool is enough, and faster.
  assert output.split() == [str(num_devices or 1), str(num_devices is not None)]


def train(
  path: str, num_devices: int, port: int, num_processes: int, process_id: int
) -> None:
  """Trains on this process' devices of 4 and saves all its replicas."""
  job = ProcessSpec(f"127.0.0.1:{port}", num_processes, process_id)
  parallel.start(num_devices, job if num_processes > 1 else ONE_PROCESS)
  found = (parallel.process_count(), parallel.process_index())
  assert found == (num_processes, process_id)
  vocab_size = 5
  config = OptimizerConfig(learning_rate=0.1, eps=1e-3)
  updater = GradientUpdater(
    init_fn=lambda key: jax.random.normal(key, [vocab_size, vocab_size]),
    # A bigram model: its parameters are the logits by the token before.
    loss_fn=lambda *args: lm_loss_fn(
      lambda params, _, x, *__: params[x], *args
    ),
    optimizer=make_optimizer(config, lambda step: 0.1),
    schedule=lambda step: 0.1,
  )
  key = parallel.replicate(jax.random.PRNGKey(0))
  state = parallel.pmap(updater.init)(key)
  update = parallel.pmap(updater.update, donate_argnums=0)
  rng = np.random.default_rng(0)
  mine = slice(process_id * num_devices, (process_id + 1) * num_devices)
  for _ in range(3):
    tokens = rng.integers(vocab_size, size=(4, 2, 3, 7))  # [4, A, B, T]
    # Very different numbers of tokens on each device.
    mask = (
      rng.random(tokens.shape)
      < np.array([0.1, 0.4, 0.7, 1])[:, None, None, None]
    )
    batch = Batch(tokens, np.roll(tokens, -1, -1), mask)
    batch = parallel.shard(jax.tree.map(lambda x: x[mine], batch))
    state, scalars = update(state, batch, key)
  assert parallel.fetch(scalars)["tokens"] == mask.sum()
  rows = [shard.data for shard in state.params.addressable_shards]
  np.save(path, np.concatenate(rows))


def _run_job(directory: Path, num_processes: int) -> list[Any]:
  """Returns the parameters [R, V, V] of each process of a job on 4 devices."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  paths = [str(directory / f"{i}.npy") for i in range(num_processes)]
  sizes = f"{4 // num_processes}, {port}, {num_processes}"
  _outputs(
    *(
      _python(f"import test_parallel as t; t.train({path!r}, {sizes}, {i})")
      for i, path in enumerate(paths)
    )
  )
  return [np.load(path) for path in paths]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
  [expected] = _run_job(tmp_path, 1)
  replicas = np.concatenate(_run_job(tmp_path, 2))
  assert replicas.shape == expected.shape == (4, 5, 5)
  np.testing.assert_array_equal(expected, expected[:1].repeat(4, 0))
  np.testing.assert_array_equal(replicas, replicas[:1].repeat(4, 0))
  error = np.linalg.norm(replicas[0] - expected[0])
  assert error < 1e-6 * np.linalg.norm(expected[0])
