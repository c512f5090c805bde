"""What a run tells of itself at its start and its end."""

from __future__ import annotations

from typing import Any

import jax

from distlm import parallel
from distlm.data.loader import Loader
from distlm.data.token_store import TokenStore
from distlm.settings import RunConfig
from distlm.types import TrainState

_MIB = 2**20


def rows(
  config: RunConfig,
  store: TokenStore,
  loader: Loader,
  state: TrainState,
  step: int,
) -> list[tuple[str, str]]:
  """Returns (name, value) rows that describe a run to its user.

  Args:
    config: its settings.
    store: its corpus.
    loader: of its batches.
    state: [R, ...] arrays, or their shapes.
    step: completed updates.
  """
  size = config.data.global_batch_size
  num_devices = parallel.process_count() * parallel.local_device_count()
  num_params = sum(x.size for x in jax.tree.leaves(state.params))
  num_params //= parallel.local_device_count()
  return [
    ("parameters", f"{num_params:,}"),
    (
      "batch",
      f"{size} sequences, {size // num_devices} a device in"
      f" {config.accumulation_steps} accumulation step(s)",
    ),
    ("tokens a step", f"{size * config.data.sequence_length:,}"),
    (
      "memory a device",
      f"parameters {_device_mib(state.params)}, gradients"
      f" {_device_mib(state.params)}, optimizer state"
      f" {_device_mib(state.opt_state)}",
    ),
    (
      "data",
      f"{', '.join(config.data.source)}: {store.num_documents:,}"
      f" document(s), {store.num_bytes:,} bytes",
    ),
    (
      "tokens",
      f"{len(store.tokens):,} by {store.tokenizer.name}:"
      f" {loader.tokens_per_epoch:,} to train on,"
      f" {loader.evaluation_tokens:,} of"
      f" {loader.num_validation_tokens:,} to validate on",
    ),
    (
      "epochs",
      f"{loader.ledger(config.training_steps).epoch:.2f} in"
      f" {config.training_steps:,} steps;"
      f" {loader.ledger(step).tokens_seen:,} tokens done",
    ),
  ]


def closing_rows(loader: Loader, step: int) -> list[tuple[str, str]]:
  """Returns (name, value) rows about the data of so many updates."""
  of_epoch = loader.tokens_per_epoch
  ledger = loader.ledger(step)
  epochs = int(ledger.epoch)
  rest = ledger.tokens_seen - epochs * of_epoch
  return [
    (
      "tokens",
      f"{ledger.tokens_seen:,} seen: {epochs} epoch(s) of {of_epoch:,}, then"
      f" {rest:,}; {ledger.tokens_repeated:,} repeated,"
      f" {ledger.tokens_padded:,} padded",
    )
  ]


def _device_mib(tree: Any) -> str:
  num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  return f"{num_bytes / parallel.local_device_count() / _MIB:.1f} MiB"
