"""Tests of distlm.settings: every setting, its rule and what it excludes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from ml_collections import config_dict

import distlm
from distlm import config as configs
from distlm.errors import UsageError
from distlm.settings import OPTIMIZER_SETTINGS, RunConfig


def _leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Yields (dotted key, value) of nested dataclasses."""
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    if dataclasses.is_dataclass(value):
      yield from _leaves(value, f"{prefix}{field.name}.")
    else:
      yield prefix + field.name, value


KEYS = [key for key, _ in _leaves(RunConfig())]
# A value other than the default, as a text and parsed; where a setting alone
# would have no effect, what else it takes.
OTHER_VALUES: dict[str, tuple[str, Any]] = {
  "model.num_layers": ("6", 6),
  "model.num_heads": ("8", 8),
  "model.model_size": ("64", 64),
  "model.key_size": ("32", 32),
  "model.widening_factor": ("2", 2),
  "model.dropout_rate": ("0.25", 0.25),
  "model.tie_embeddings": ("false", False),
  "model.vocab_size": ("300", 300),
  "model.remat": ("dots", "dots"),
  "model.attention": ("xla", "xla"),
  "data.source": ("a.txt", ("a.txt",)),
  "data.tokenizer": ("char", "char"),
  "data.sequence_length": ("32", 32),
  "data.global_batch_size": ("4", 4),
  "data.validation_fraction": ("0.5", 0.5),
  "data.prefetch_batches": ("3", 3),
  "data.cache_dir": ("/somewhere", "/somewhere"),
  "optimizer.name": ("adam", "adam"),
  "optimizer.learning_rate": ("3e-4", 3e-4),
  "optimizer.schedule": ("linear", "linear"),
  "optimizer.warmup_steps": ("0", 0),
  "optimizer.end_learning_rate": ("1e-5", 1e-5),
  "optimizer.clip_norm": ("0", 0.0),
  "optimizer.b1": ("0.8", 0.8),
  "optimizer.b2": ("0.99", 0.99),
  "optimizer.eps": ("1e-6", 1e-6),
  "optimizer.momentum": ("0.9", 0.9),
  "optimizer.shard_state": ("true", True),
  "optimizer.reduce_dtype": ("bf16", "bf16"),
  "optimizer.weight_decay": ("0", 0.0),
  "evaluation.interval": ("0", 0),
  "evaluation.batches": ("7", 7),
  "checkpoint.interval": ("9", 9),
  "checkpoint.keep": ("1", 1),
  "checkpoint.on_error": ("continue", "continue"),
  "replica_check.interval": ("7", 7),
  "replica_check.policy": ("repair", "repair"),
  "profile.start_step": ("5", 5),
  "watchdog.seconds": ("60", 60.0),
  "profile.num_steps": ("2", 2),
  "profile.device_memory": ("True", True),
  "accumulation_steps": ("2", 2),
  "precision": ("bf16", "bf16"),
  "loss_chunk": ("32", 32),
  "nonfinite": ("skip", "skip"),
  "nonfinite_limit": ("3", 3),
  "training_steps": ("500", 500),
  "random_seed": ("0", 0),
  "random_mode_train": ("same_host_same_device", "same_host_same_device"),
  "random_mode_eval": ("unique_host_same_device", "unique_host_same_device"),
  "legacy_random_seed_behavior": ("1", True),
  "interval_type": ("secs", "secs"),
  "log_train_data_interval": ("1", 1),
  "log_async": ("0", False),
  "save_initial_train_checkpoint": ("TRUE", True),
  "eval_initial_weights": ("true", True),
}
NEEDED = {
  "optimizer.momentum": [("optimizer.name", "sgd")],
  "profile.start_step": [("profile.num_steps", "1")],
  "nonfinite_limit": [("nonfinite", "skip")],
}
MUTABLE = {
  *("model.remat", "model.attention", "loss_chunk"),
  *("optimizer.shard_state", "optimizer.reduce_dtype"),
  *("data.prefetch_batches", "data.cache_dir"),
  "evaluation.interval",
  *("checkpoint.interval", "checkpoint.keep", "checkpoint.on_error"),
  *("replica_check.interval", "replica_check.policy"),
  *("nonfinite", "nonfinite_limit"),
  "watchdog.seconds",
  *("profile.start_step", "profile.num_steps", "profile.device_memory"),
  *("training_steps", "interval_type", "log_train_data_interval", "log_async"),
  *("save_initial_train_checkpoint", "eval_initial_weights"),
}


def _parse(*overrides: tuple[str, str]) -> RunConfig:
  config = distlm.get_base_config()
  configs.apply_overrides(config, overrides)
  return configs.parse_config(config)


def _error_of(*overrides: tuple[str, str]) -> str:
  with pytest.raises(UsageError) as error:
    _parse(*overrides)
  message = str(error.value)
  assert "\n" not in message
  return message


def test_settings_are_json_and_back() -> None:
  overrides = [(key, text) for key, (text, _) in OTHER_VALUES.items()]
  overrides += [("optimizer.name", "sgd")]
  overrides = [
    (key, text)
    for key, text in overrides
    if key.rpartition(".")[2] not in ("b1", "b2", "eps", "key_size")
  ]
  config = _parse(*overrides)
  settings = json.loads(json.dumps(config.to_dict(), allow_nan=False))
  assert settings == config.to_dict()
  assert configs.parse_config(config_dict.ConfigDict(settings)) == config


def test_the_table_names_every_setting() -> None:
  assert set(OTHER_VALUES) == set(KEYS)


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_every_setting_can_be_overridden(key: str) -> None:
  text, value = OTHER_VALUES[key]
  before = dict(_leaves(_parse(*NEEDED.get(key, []))))
  after = dict(_leaves(_parse(*NEEDED.get(key, []), (key, text))))
  assert after[key] == value
  assert type(after[key]) is type(value)
  changed = {name for name in after if after[name] != before[name]}
  if key in ("model.num_heads", "model.model_size"):
    changed -= {"model.key_size"}  # It follows from them.
  assert changed == ({key} if key != "model.key_size" else set())


NUMBERS = [
  key
  for key, value in _leaves(RunConfig())
  if type(value) in (int, float)
  or key.rpartition(".")[2] in sum(OPTIMIZER_SETTINGS.values(), ())
  or key == "nonfinite_limit"
]


@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_may_be_negative(key: str) -> None:
  message = _error_of((key, "-1"))
  assert re.match(rf"config\.{re.escape(key)}=-1(\.0)?: it must be", message)


@pytest.mark.parametrize(
  "key",
  [
    "model.num_layers",
    "model.num_heads",
    "model.model_size",
    "model.widening_factor",
    "data.sequence_length",
    "data.global_batch_size",
    "data.prefetch_batches",
    "optimizer.learning_rate",
    "checkpoint.interval",
    "checkpoint.keep",
    "accumulation_steps",
    "training_steps",
    "log_train_data_interval",
  ],
)
def test_what_must_be_positive_may_not_be_zero(key: str) -> None:
  assert "it must be positive" in _error_of((key, "0"))


@pytest.mark.parametrize("name", OPTIMIZER_SETTINGS)
@pytest.mark.parametrize(
  "key", sorted(set(sum(OPTIMIZER_SETTINGS.values(), ())))
)
def test_a_setting_that_the_optimizer_does_not_read(
  name: str, key: str
) -> None:
  overrides = [("optimizer.name", name), (f"optimizer.{key}", "0.5")]
  if key in OPTIMIZER_SETTINGS[name]:
    assert getattr(_parse(*overrides).optimizer, key) == 0.5
  else:
    message = _error_of(*overrides)
    assert message.startswith(f"optimizer.{key}=0.5: it has no effect")
    assert f"optimizer.name={name}" in message


@pytest.mark.parametrize(
  ("overrides", "says"),
  [
    (
      {"optimizer.schedule": "constant", "optimizer.end_learning_rate": "1"},
      "optimizer.end_learning_rate=1.0: it has no effect",
    ),
    (
      {"replica_check.policy": "repair", "replica_check.interval": "0"},
      "replica_check.policy=repair: it has no effect",
    ),
    (
      {"optimizer.name": "muon", "optimizer.shard_state": "true"},
      "optimizer.shard_state=True: optimizer.name=muon needs whole matrices",
    ),
    ({"nonfinite_limit": "3"}, "nonfinite_limit=3: it has no effect"),
    ({"profile.start_step": "3"}, "profile.start_step=3: it has no effect"),
    (
      {"profile.start_step": "990", "profile.num_steps": "11"},
      "must end by training_steps=1000",
    ),
    (
      {"profile.start_step": "1001", "profile.device_memory": "1"},
      "must end by training_steps=1000",
    ),
    (
      {"training_steps": "99"},
      "optimizer.warmup_steps=100: it must not exceed training_steps=99",
    ),
    ({"model.num_heads": "3"}, "42 x 3 is not 128"),
    ({"model.key_size": "31"}, "31 x 4 is not 128"),
    ({"model.model_size": "2"}, "0 x 4 is not 2"),
  ],
)
def test_settings_that_do_not_go_together(
  overrides: dict[str, str], says: str
) -> None:
  assert says in _error_of(*overrides.items())


def test_the_ends_of_ranges_are_accepted() -> None:
  _parse(("profile.start_step", "990"), ("profile.num_steps", "10"))
  _parse(("training_steps", "100"))
  _parse(("model.dropout_rate", "0"))


def test_only_what_decides_the_result_must_not_differ() -> None:
  ours = RunConfig().to_dict()
  for key, (_, value) in OTHER_VALUES.items():
    theirs = json.loads(json.dumps(ours))
    *sections, last = key.split(".")
    target = theirs[sections[0]] if sections else theirs
    # Its default is filled in with the value of the table.
    target[last] = 99 if key == "model.key_size" else value
    expected = [] if key in MUTABLE else [f"{key}: "]
    found = configs.differing_keys(ours, theirs)
    assert [line[: len(key) + 2] for line in found] == expected, key
