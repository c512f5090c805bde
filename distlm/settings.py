"""Every setting of a run, with its default, its type and its rule.

The dataclasses are the schema: `distlm.config` makes the configuration that
users change from them, and fills them in again when it has been checked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distlm.errors import UsageError

RANDOM_MODES = (
  "unique_host_unique_device",
  "unique_host_same_device",
  "same_host_unique_device",
  "same_host_same_device",
)
# What the config of any other experiment may set beside JAXline's settings, in
# steps and seconds, with the defaults.
RUNNER_SETTINGS = {
  "evaluation_interval": 0,
  "replica_check_interval": 0,
  "watchdog_seconds": 300.0,
}
# Settings that only some optimizers read.
OPTIMIZER_SETTINGS = {
  "adamw": ("b1", "b2", "eps", "weight_decay"),
  "adam": ("b1", "b2", "eps"),
  "sgd": ("momentum", "weight_decay"),
  "lion": ("b1", "b2", "weight_decay"),
  "muon": ("b1", "b2", "eps", "momentum", "weight_decay"),
}


def default_cache_directory(environ: Mapping[str, str]) -> Path:
  """Returns where a user's caches are, unless a setting says where.

  Raises:
    RuntimeError: if the user has no home directory.
  """
  base = environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(f"{base}/distlm").expanduser()


class Rule(NamedTuple):
  """What a setting must be: a test, and the words for it."""

  accepts: Callable[[Any], bool]
  text: str
  choices: tuple[str, ...] = ()


_ANY = Rule(lambda value: True, "")
_POSITIVE = Rule(lambda value: value > 0, "positive")
_NOT_NEGATIVE = Rule(lambda value: value >= 0, "0 or more")
_RATE = Rule(lambda value: 0 <= value < 1, "0 or more, and below 1")
_SHARE = Rule(lambda value: 0 < value < 1, "above 0 and below 1")
# JAX takes a seed modulo 2**32.
_SEED = Rule(lambda value: 0 <= value < 2**32, "0 or more, and below 2**32")
_NOT_EMPTY = Rule(lambda value: len(value) > 0, "at least one text")


def _one_of(*choices: str) -> Rule:
  return Rule(
    lambda value: value in choices, f"one of {', '.join(choices)}", choices
  )


def _setting(default: Any, rule: Rule = _ANY, is_mutable: bool = False) -> Any:
  """Declares a setting.

  Args:
    default: its value where the user gives none.
    rule: what values it may have.
    is_mutable: whether a resumed run may change it.
  """
  return dataclasses.field(
    default=default, metadata={"rule": rule, "is_mutable": is_mutable}
  )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes of the Transformer; see `distlm.model.transformer`."""

  num_layers: int = _setting(4, _POSITIVE)
  num_heads: int = _setting(4, _POSITIVE)
  model_size: int = _setting(128, _POSITIVE)
  key_size: int = _setting(0, _NOT_NEGATIVE)  # 0: model_size / num_heads
  widening_factor: int = _setting(4, _POSITIVE)
  vocab_size: int = _setting(0, _NOT_NEGATIVE)  # 0: the tokenizer's
  dropout_rate: float = _setting(0.1, _RATE)
  tie_embeddings: bool = _setting(True)
  # Which activations are computed again in the backward pass, to save memory.
  remat: str = _setting(
    "none", _one_of("none", "full", "dots"), is_mutable=True
  )
  # The attention kernel; see `distlm.model.kernels`.
  attention: str = _setting(
    "auto", _one_of("auto", "xla", "blocks", "cudnn", "splash"), is_mutable=True
  )

  def __post_init__(self) -> None:
    width = self.model_size
    key_size = self.key_size or width // self.num_heads
    if key_size * self.num_heads != width:
      raise UsageError(
        f"model.key_size={self.key_size}: key_size x num_heads must be"
        f" model_size, but {key_size} x {self.num_heads} is not {width}; set"
        " key_size=0 (model_size / num_heads) and a model_size that num_heads"
        " divides"
      )
    object.__setattr__(self, "key_size", key_size)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Which text is read and how it is cut; see `distlm.data`."""

  # The standard library of the running Python, a file, a glob or a list.
  source: tuple[str, ...] = _setting(("python-stdlib",), _NOT_EMPTY)
  tokenizer: str = _setting("byte")
  sequence_length: int = _setting(128, _POSITIVE)
  global_batch_size: int = _setting(16, _POSITIVE)  # sequences
  validation_fraction: float = _setting(0.05, _SHARE)
  prefetch_batches: int = _setting(2, _POSITIVE, is_mutable=True)
  # "": $XDG_CACHE_HOME/distlm, or ~/.cache/distlm
  cache_dir: str = _setting("", is_mutable=True)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The Optax chain; a setting that is None is the optimizer's default."""

  name: str = _setting("adamw", _one_of(*OPTIMIZER_SETTINGS))
  learning_rate: float = _setting(1e-3, _POSITIVE)
  schedule: str = _setting("cosine", _one_of("cosine", "linear", "constant"))
  warmup_steps: int = _setting(100, _NOT_NEGATIVE)
  end_learning_rate: float = _setting(0.0, _NOT_NEGATIVE)
  clip_norm: float = _setting(1.0, _NOT_NEGATIVE)  # 0: no clipping
  b1: float | None = _setting(None, _RATE)
  b2: float | None = _setting(None, _RATE)
  eps: float | None = _setting(None, _POSITIVE)
  momentum: float | None = _setting(None, _RATE)
  weight_decay: float | None = _setting(None, _NOT_NEGATIVE)
  # Each device keeps and updates one part of the optimizer state (ZeRO-1).
  shard_state: bool = _setting(False, is_mutable=True)
  # Of the gradients while they are summed over devices.
  reduce_dtype: str = _setting("f32", _one_of("f32", "bf16"), is_mutable=True)

  def __post_init__(self) -> None:
    if self.schedule == "constant" and self.end_learning_rate:
      raise UsageError(
        f"optimizer.end_learning_rate={self.end_learning_rate}: it has no"
        " effect with schedule=constant; set it to 0 or choose cosine or linear"
      )
    if self.name == "muon" and self.shard_state:
      raise UsageError(
        "optimizer.shard_state=True: optimizer.name=muon needs whole matrices;"
        " set it to False or choose another optimizer"
      )
    for key in ("b1", "b2", "eps", "momentum", "weight_decay"):
      value = getattr(self, key)
      if value is not None and key not in OPTIMIZER_SETTINGS[self.name]:
        raise UsageError(
          f"optimizer.{key}={value}: it has no effect with"
          f" optimizer.name={self.name}; set it to None or choose another"
          " optimizer"
        )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """When to evaluate during training, besides its end, and on how much."""

  interval: int = _setting(200, _NOT_NEGATIVE, is_mutable=True)  # 0: never
  # Batches of the validation split; 0: all of it.
  # Other batches would give a loss that cannot be compared with the best one.
  batches: int = _setting(0, _NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """How often to save, in units of `interval_type`, and how many to keep."""

  interval: int = _setting(200, _POSITIVE, is_mutable=True)
  keep: int = _setting(3, _POSITIVE, is_mutable=True)
  # What a save that cannot be written does to the run, before its end.
  on_error: str = _setting(
    "abort", _one_of("abort", "continue"), is_mutable=True
  )


@dataclasses.dataclass(frozen=True)
class ReplicaCheckConfig:
  """How often all replicas are compared, and what a difference leads to."""

  interval: int = _setting(100, _NOT_NEGATIVE, is_mutable=True)  # 0: never
  policy: str = _setting("abort", _one_of("abort", "repair"), is_mutable=True)

  def __post_init__(self) -> None:
    if self.policy == "repair" and not self.interval:
      raise UsageError(
        "replica_check.policy=repair: it has no effect with"
        " replica_check.interval=0; set an interval, in steps"
      )


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
  """When a run that does not get on is ended; see `distlm.watchdog`."""

  seconds: float = _setting(300.0, _NOT_NEGATIVE, is_mutable=True)  # 0: never


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """Which steps to trace, and whether to write the device memory profile."""

  start_step: int = _setting(0, _NOT_NEGATIVE, is_mutable=True)
  num_steps: int = _setting(0, _NOT_NEGATIVE, is_mutable=True)  # 0: no trace
  device_memory: bool = _setting(False, is_mutable=True)

  def __post_init__(self) -> None:
    if self.start_step and not (self.num_steps or self.device_memory):
      raise UsageError(
        f"profile.start_step={self.start_step}: it has no effect without"
        " profile.num_steps or profile.device_memory; set one of them"
      )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """A whole checked configuration.

  The settings after `precision` are JAXline's, under its names; see
  `jaxline.base_config`.
  """

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  replica_check: ReplicaCheckConfig = ReplicaCheckConfig()
  watchdog: WatchdogConfig = WatchdogConfig()
  profile: ProfileConfig = ProfileConfig()
  accumulation_steps: int = _setting(1, _POSITIVE)
  # What an update whose loss or gradient is not finite does to the run.
  nonfinite: str = _setting("abort", _one_of("abort", "skip"), is_mutable=True)
  # Skips in a row that are too many; None: 10.
  nonfinite_limit: int | None = _setting(None, _POSITIVE, is_mutable=True)
  # Of activations and matrix products; parameters are f32 always.
  precision: str = _setting("f32", _one_of("f32", "bf16", "fp16"))
  # Positions whose logits are in memory at once; 0: all of a sequence.
  loss_chunk: int = _setting(0, _NOT_NEGATIVE, is_mutable=True)

  training_steps: int = _setting(1000, _POSITIVE, is_mutable=True)
  random_seed: int = _setting(42, _SEED)
  random_mode_train: str = _setting(RANDOM_MODES[0], _one_of(*RANDOM_MODES))
  random_mode_eval: str = _setting(RANDOM_MODES[3], _one_of(*RANDOM_MODES))
  legacy_random_seed_behavior: bool = _setting(False)
  interval_type: str = _setting(
    "steps", _one_of("steps", "secs"), is_mutable=True
  )
  log_train_data_interval: int = _setting(10, _POSITIVE, is_mutable=True)
  log_async: bool = _setting(True, is_mutable=True)
  save_initial_train_checkpoint: bool = _setting(False, is_mutable=True)
  eval_initial_weights: bool = _setting(False, is_mutable=True)

  def __post_init__(self) -> None:
    warmup, steps = self.optimizer.warmup_steps, self.training_steps
    if warmup > steps:
      raise UsageError(
        f"optimizer.warmup_steps={warmup}: it must not exceed"
        f" training_steps={steps}"
      )
    if self.nonfinite_limit is not None and self.nonfinite != "skip":
      raise UsageError(
        f"nonfinite_limit={self.nonfinite_limit}: it has no effect with"
        f" nonfinite={self.nonfinite}; set it to None, or nonfinite=skip"
      )
    length = self.data.sequence_length
    if self.loss_chunk and length % self.loss_chunk:
      raise UsageError(
        f"loss_chunk={self.loss_chunk}: it must divide"
        f" data.sequence_length={length}; set it to 0 or to a divisor"
      )
    profile = self.profile
    is_profiling = profile.num_steps or profile.device_memory
    if is_profiling and profile.start_step + profile.num_steps > steps:
      raise UsageError(
        f"profile.start_step={profile.start_step}: tracing"
        f" {profile.num_steps} steps from it must end by"
        f" training_steps={steps}; choose an earlier step"
      )

  def to_dict(self) -> dict[str, Any]:
    """Returns the settings as nested dictionaries of JSON types."""
    nested: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
    return nested


def flatten(
  values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
  """Yields (dotted key, value) of nested settings."""
  for key, value in values.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value
