"""What `distlm doctor` finds out about one training, by its config."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlm import config as configs
from distlm import disk
from distlm import workdir as workdirs
from distlm.data import corpora, loader, token_store
from distlm.doctor import machine
from distlm.doctor.report import PROBLEM, WARNING, Report, Row
from distlm.settings import DataConfig, RunConfig

if TYPE_CHECKING:
  from distlm.data.token_store import TokenStore

_MIB = 2**20
# Beside those that stay: the best one, and the one that is being written.
_MORE_CHECKPOINTS = 2
# Activations come on top of what is estimated.
_MUCH_OF_MEMORY = 0.8


@dataclasses.dataclass
class Plan:
  """What is to be trained, as far as it could be read.

  Attributes:
    workdir: of the run, if one was named.
    config: the checked settings.
    store: the text.
  """

  workdir: Path | None
  config: RunConfig | None = None
  store: TokenStore | None = None


def read(
  report: Report,
  config_file: str | None,
  overrides: Sequence[tuple[str, str]],
  workdir: Path | None,
  is_first: bool,
) -> Plan:
  """Reports on config, text and workdir, without JAX.

  Args:
    report: gets the rows.
    config_file: the user's, or None.
    overrides: (key, value) pairs of settings.
    workdir: of the run, or None.
    is_first: whether this is process 0, which alone holds the workdir.
  """
  plan = Plan(workdir)
  if config_file is not None:
    report.try_check("config", _read_config, plan, config_file, overrides)
  data = plan.config.data if plan.config else DataConfig()
  report.try_check("data cache", _check_cache, data)
  if plan.config is not None:
    report.try_check("text", _read_text, plan, plan.config)
    if workdir is not None and is_first:
      settings = plan.config.to_dict()
      report.try_check("run", _check_workdir, workdir, settings)
  return plan


def _check_cache(data: DataConfig) -> list[Row]:
  directory = token_store.cache_directory(data)
  return machine.check_directory("data cache", directory)


def _read_config(
  plan: Plan, config_file: str, overrides: Sequence[tuple[str, str]]
) -> Iterator[Row]:
  config_dict = configs.load_config_file(config_file)
  configs.apply_overrides(config_dict, overrides)
  plan.config = config = configs.parse_config(config_dict)
  yield Row(
    "config",
    f"{config_file}, {config.training_steps:,} steps of"
    f" {config.data.global_batch_size} sequences of"
    f" {config.data.sequence_length} tokens",
  )


def _read_text(plan: Plan, config: RunConfig) -> Iterator[Row]:
  documents = corpora.read_documents(config.data.source)
  if plan.workdir is not None:
    workdirs.check_corpus(plan.workdir, config.data.source, documents)
  store = token_store.open_token_store(config.data, documents=documents)
  loader.check_corpus(len(store.tokens), config.data)
  plan.store = store
  yield Row(
    "text",
    f"{len(store.tokens):,} tokens in {store.num_documents:,} document(s)",
  )


def _check_workdir(workdir: Path, settings: dict[str, Any]) -> Iterator[Row]:
  workdirs.check_settings(workdir, settings)
  # Only where there has been a run: the claim leaves the files of its locks.
  if any(workdir.glob(".*.lock")):
    with workdirs.claim(workdir, settings, "train_eval", once=False):
      pass
  is_resumed = workdirs.has_checkpoint(workdir)
  yield Row("run", "one that goes on" if is_resumed else "a new one")


def check_on_devices(plan: Plan, memory: int | None) -> Iterator[Row]:
  """Yields whether batch, model and checkpoints fit.

  Args:
    plan: with config and text.
    memory: bytes that a device has, or None if it is not known.
  """
  # What trains; importing it is a check in itself.
  from distlm import experiment, parallel

  config, store = plan.config, plan.store
  if config is None or store is None:
    return
  layout = experiment.current_layout(config)
  loader.check_layout(config.data, layout)
  count = layout.process_count * layout.devices_per_process
  size = config.data.global_batch_size // (count * layout.accumulation_steps)
  yield Row(
    "batch",
    f"{count} device(s) x {layout.accumulation_steps} accumulation step(s) x"
    f" {size} sequence(s)",
  )
  num_params, params_bytes, state_bytes = _sizes(
    config, store.tokenizer.vocab_size
  )
  yield Row("model", f"{num_params:,} parameters")
  yield _check_memory(state_bytes + params_bytes, memory)
  if parallel.process_index() == 0:
    directory = plan.workdir or Path()
    yield _check_room(directory, state_bytes, config.checkpoint.keep)


def _sizes(config: RunConfig, vocab_size: int) -> tuple[int, int, int]:
  """Returns the number and bytes of parameters, and the bytes of the state."""
  import jax

  from distlm import language_model

  model = language_model.make_model(config, vocab_size)
  # A sharded optimizer state too is whole at the start, and in a save.
  updater = dataclasses.replace(
    language_model.make_updater(config, model), shard_state=False
  )
  state = jax.eval_shape(updater.init, jax.random.PRNGKey(0))

  def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  num_params = sum(x.size for x in jax.tree.leaves(state.params))
  return num_params, num_bytes(state.params), num_bytes(state)


def _check_memory(num_bytes: int, memory: int | None) -> Row:
  value = (
    f"{num_bytes / _MIB:,.0f} MiB of model, optimizer and gradient on each"
    " device, and activations"
  )
  if memory is None:
    return Row("memory", value)
  value += f"; it has {memory / _MIB:,.0f} MiB"
  if num_bytes > memory:
    advice = "take a smaller model, or larger devices"
    return Row("memory", value, PROBLEM, advice)
  if num_bytes > _MUCH_OF_MEMORY * memory:
    advice = "if it does not suffice, take more accumulation_steps"
    return Row("memory", value, WARNING, advice)
  return Row("memory", value)


def _check_room(directory: Path, num_bytes: int, keep: int) -> Row:
  """Returns whether the disk has room for the checkpoints of a run."""
  place = machine.existing_parent(directory)
  most = (keep + _MORE_CHECKPOINTS) * num_bytes
  value = (
    f"up to {most / _MIB:,.0f} MiB: checkpoint.keep={keep}, the best one and"
    f" the next one, of {num_bytes / _MIB:,.0f} MiB each"
  )
  advice = f"make room on the disk of {directory.absolute()}"
  try:
    disk.check_room(place, num_bytes)
  except OSError as error:
    value = f"{num_bytes / _MIB:,.0f} MiB each ({error.strerror})"
    return Row("checkpoints", value, PROBLEM, advice)
  usage = shutil.disk_usage(place)
  if usage.total and usage.free < most:
    return Row("checkpoints", value, WARNING, advice)
  return Row("checkpoints", value)
