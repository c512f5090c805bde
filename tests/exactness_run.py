"""Fifty small updates on the same global batches, however they are spread out.

Started as a script, it is one process of a job; see `process_job`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import process_job
import reference

from distlm import parallel
from distlm.losses import lm_loss_fn
from distlm.model.transformer import build_forward_fn
from distlm.optimizer import make_optimizer, make_schedule
from distlm.settings import ModelConfig, OptimizerConfig
from distlm.types import Batch, TrainState
from distlm.updater import GradientUpdater

# N sequences are divided by all layouts of up to 8 devices and 4 parts.
N, T, V, NUM_STEPS = 32, 8, 11, 50
KEY = np.array([0, 0], np.uint32)
PADDINGS = ("none", "ragged", "empty device", "empty accumulation step")
MODEL = ModelConfig(2, 2, 16, widening_factor=2, dropout_rate=0.0)
# The key biases have no gradient but by rounding, which Adam would blow up
# were its eps not larger. And 1 - b2 is inexact in float32 near b2 = 1.
OPTIMIZER = OptimizerConfig(
  learning_rate=0.01,
  warmup_steps=5,
  clip_norm=0.75,
  b1=0.875,
  b2=0.75,
  eps=1e-3,
  weight_decay=0.1,
)


def hyper(optimizer: OptimizerConfig, num_steps: int) -> reference.Hyper:
  """Returns what the reference must be told of `MODEL` and an optimizer."""
  return reference.Hyper(
    num_heads=MODEL.num_heads,
    tie_embeddings=MODEL.tie_embeddings,
    training_steps=num_steps,
    **{
      name: getattr(optimizer, name)
      for name in reference.Hyper._fields
      if hasattr(optimizer, name)
    },
  )


HYPER = hyper(OPTIMIZER, NUM_STEPS)


class Run(NamedTuple):
  """What a run of all steps logged, and where it ended."""

  losses: np.ndarray  # [NUM_STEPS]
  grad_norms: np.ndarray  # [NUM_STEPS]
  num_tokens: np.ndarray  # [NUM_STEPS]
  params: list[np.ndarray]  # in the order of jax.tree.leaves
  replicas: list[str]  # a hash of the whole state of each device


@functools.cache
def make_updater(model: ModelConfig = MODEL) -> GradientUpdater:
  forward = build_forward_fn(model, V, T)
  schedule = make_schedule(OPTIMIZER, NUM_STEPS)
  tokens = np.zeros((1, T), np.int32)
  return GradientUpdater(
    init_fn=lambda key: forward.init(key, tokens, tokens == 0, False),
    loss_fn=functools.partial(lm_loss_fn, forward.apply),
    optimizer=make_optimizer(OPTIMIZER, schedule),
    schedule=schedule,
    clip_norm=OPTIMIZER.clip_norm,
  )


@functools.cache
def update_fn(updater: GradientUpdater) -> Callable[..., Any]:
  # One function for all runs, so that each layout is compiled once.
  return parallel.pmap(updater.update, donate_argnums=0)


@functools.cache
def start_params(updater: GradientUpdater) -> Any:
  """Returns parameters by NumPy alone, the same in each process.

  They are large enough for every part of the model to matter from the start.
  """
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(updater.init_fn, KEY)

  def draw(path: Any, x: Any) -> np.ndarray:
    mean = 1.0 if path[-1].key == "scale" else 0.0
    return rng.normal(mean, 0.2, x.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def start_state(updater: GradientUpdater) -> TrainState:
  """Returns the state of one device before the first step, on the host."""
  params = start_params(updater)
  opt_state = jax.jit(updater.optimizer.init)(params)
  state = jax.jit(updater.init)(KEY)
  state = state._replace(params=params, opt_state=opt_state)
  return jax.tree.map(np.asarray, state)


def shard(tree: Any) -> Any:
  """Puts host arrays [R, ...] on the first R devices of this process.

  Where `parallel.pmap` puts its results too: else the second step would be
  compiled anew, for its other placement.
  """
  devices = jax.local_devices()[: len(jax.tree.leaves(tree)[0])]
  mesh = jax.sharding.Mesh(np.array(devices), (parallel.AXIS,))
  spec = jax.sharding.PartitionSpec(parallel.AXIS)
  return jax.device_put(tree, jax.sharding.NamedSharding(mesh, spec))


def replicate(tree: Any, num_devices: int) -> Any:
  return shard(jax.tree.map(lambda x: np.stack([x] * num_devices), tree))


def global_batch(
  step: int, padding: str, num_devices: int, num_parts: int
) -> Batch:
  """Returns all sequences of a step, [N, T].

  Args:
    step: from 0.
    padding: one of `PADDINGS`; for the first two the layout plays no role.
    num_devices: which rows are a device's.
    num_parts: which rows of a device are an accumulation step's.
  """
  rng = np.random.default_rng([7, step])
  inputs, noise = rng.integers(V, size=(2, N, T), dtype=np.int32)
  # Something to learn, and something that keeps the gradient from vanishing.
  learnable = rng.random((N, T)) < 0.8
  targets = np.where(learnable, (3 * inputs + 1) % V, noise).astype(np.int32)
  mask = np.ones((N, T), bool)
  if padding == "ragged":
    # Sequences of 0 to T tokens, some padded left, some with holes.
    mask = np.arange(T) < rng.integers(T + 1, size=(N, 1))
    mask[1::3] = mask[1::3, ::-1]
    mask &= rng.random(mask.shape) < 0.9
  # Each in its turn. Where there is only one, it is half of the rows.
  if padding == "empty device":
    num_devices = max(num_devices, 2)
    mask.reshape(num_devices, -1)[step % num_devices] = False
  if padding == "empty accumulation step":
    num_parts = max(num_parts, 2)
    parts = mask.reshape(num_devices, num_parts, -1)
    parts[:, step % num_parts] = False
  return Batch(inputs, targets, mask)


def split(batch: Batch, num_devices: int, num_parts: int) -> Batch:
  """Cuts [N, T] into [R, A, B, T], with R the devices of all processes."""
  return jax.tree.map(lambda x: x.reshape(num_devices, num_parts, -1, T), batch)


def run(
  padding: str,
  num_devices: int,
  num_parts: int,
  batches_for: tuple[int, int] | None = None,
) -> Run:
  """Trains on the global batches, in this process or as a part of its job.

  Args:
    padding: see `global_batch`.
    num_devices: of all processes.
    num_parts: accumulation steps.
    batches_for: the layout whose global batches these are; None: this one's.
  """
  updater = make_updater()
  num_local = num_devices // jax.process_count()
  first = num_local * jax.process_index()
  state = replicate(start_state(updater), num_local)
  keys = replicate(KEY, num_local)
  rows: list[Any] = []
  for step in range(NUM_STEPS):
    batch = global_batch(
      step, padding, *(batches_for or (num_devices, num_parts))
    )
    parts = split(batch, num_devices, num_parts)
    local = jax.tree.map(lambda x: x[first : first + num_local], parts)
    state, scalars = update_fn(updater)(state, shard(local), keys)
    names = ("loss", "grad_norm", "tokens")
    rows.append([parallel.fetch(scalars[name]) for name in names])
  losses, grad_norms, num_tokens = np.array(rows, np.float64).T
  params = jax.tree.leaves(reference.as_float64(parallel.fetch(state.params)))
  return Run(losses, grad_norms, num_tokens, params, hash_replicas(state))


def hash_replicas(tree: Any) -> list[str]:
  """Returns a hash of all bits that each device of this process holds."""
  leaves = jax.tree.leaves(tree)
  hashes = []
  for device in jax.local_devices():
    digest, num_arrays = hashlib.sha256(), 0
    for x in leaves:
      for piece in x.addressable_shards:
        if piece.device == device:
          assert piece.data.shape == (1, *x.shape[1:])
          digest.update(np.asarray(piece.data).tobytes())
          num_arrays += 1
    if num_arrays:
      assert num_arrays == len(leaves)
      hashes.append(digest.hexdigest())
  return hashes


def reference_run(padding: str, num_devices: int, num_parts: int) -> Run:
  """Returns the same by NumPy in float64, without any layout."""
  params = reference.as_float64(start_params(make_updater()))
  state, rows = reference.adamw_init(params), []
  for step in range(NUM_STEPS):
    batch = global_batch(step, padding, num_devices, num_parts)
    params, state, scalars = reference.train_step(
      params, state, step, batch, HYPER
    )
    names = ("loss", "grad_norm", "num_tokens")
    rows.append([scalars[name] for name in names])
  losses, grad_norms, num_tokens = np.array(rows, np.float64).T
  return Run(losses, grad_norms, num_tokens, jax.tree.leaves(params), [])


def _compute(num_local_devices: int) -> dict[str, np.ndarray]:
  result = run("ragged", num_local_devices * jax.process_count(), num_parts=2)
  arrays = result._asdict()
  for index, param in enumerate(arrays.pop("params")):
    arrays[f"param_{index:03}"] = param  # Sorted by name as they were.
  return {name: np.asarray(x) for name, x in arrays.items()}


if __name__ == "__main__":
  process_job.join(_compute)
