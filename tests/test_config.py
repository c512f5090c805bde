"""Tests of distlm.config and distlm.settings."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from jaxline import base_config

import distlm
from distlm import config as configs
from distlm.errors import UsageError
from distlm.settings import RunConfig


def _parse(*overrides: tuple[str, str]) -> RunConfig:
  config = distlm.get_base_config()
  configs.apply_overrides(config, overrides)
  return configs.parse_config(config)


def _get(config: RunConfig, key: str) -> Any:
  return functools.reduce(getattr, key.split("."), config)


def _error_of(*overrides: tuple[str, str]) -> str:
  with pytest.raises(UsageError) as error:
    _parse(*overrides)
  message = str(error.value)
  assert "\n" not in message
  return message


def test_defaults_are_a_runnable_configuration() -> None:
  config = configs.parse_config(distlm.get_base_config())
  filled = dataclasses.replace(RunConfig().model, key_size=32)
  assert config == dataclasses.replace(RunConfig(), model=filled)


@pytest.mark.parametrize(
  ("key", "text", "value"),
  [
    ("data.source", "['a.txt', 'b*.txt']", ("a.txt", "b*.txt")),
    ("data.source", "('a.txt', 'b.txt')", ("a.txt", "b.txt")),
    ("data.source", "a,b.txt", ("a,b.txt",)),
    ("optimizer.b1", "None", None),
    ("optimizer.clip_norm", "2", 2.0),
    ("training_steps", "1_000_000", 1_000_000),
  ],
)
def test_kinds_of_override(key: str, text: str, value: Any) -> None:
  assert _get(_parse((key, text)), key) == value


def test_the_last_override_counts() -> None:
  config = _parse(("model.num_layers", "2"), ("model.num_layers", "3"))
  assert config.model.num_layers == 3


@pytest.mark.parametrize(
  "source", ["a.txt", ["a.txt"], ("a.txt",)], ids=lambda x: type(x).__name__
)
def test_a_config_file_may_give_one_or_several_sources(
  tmp_path: Path, source: Any
) -> None:
  path = tmp_path / "config.py"
  path.write_text(
    "import distlm\n"
    "def get_config():\n"
    "  config = distlm.get_base_config()\n"
    f"  config.data.source = {source!r}\n"
    "  return config\n"
  )
  config = configs.load_config_file(str(path))
  assert configs.parse_config(config).data.source == ("a.txt",)
  configs.apply_overrides(config, [("data.source", "['b', 'c']")])
  assert configs.parse_config(config).data.source == ("b", "c")


@pytest.mark.parametrize(
  ("text", "says"),
  [
    (None, "there is no such file"),
    ("def get_config(:\n", "SyntaxError at line 1"),
    ("\n\n1 / 0\n", "ZeroDivisionError at line 3: division by zero"),
    ("def get_config():\n  return [][0]\n", "IndexError at line 2"),
    ("import no_such_module\n", "ModuleNotFoundError at line 1"),
    ("x = 1\n", "must define get_config()"),
    ("get_config = 1\n", "must define get_config()"),
    ("def get_config():\n  pass\n", "returning a ConfigDict"),
    ("def get_config():\n  return {}\n", "returning a ConfigDict"),
    ("x = '\0'\n", "at line"),
  ],
)
def test_a_config_file_that_cannot_be_used(
  tmp_path: Path, text: str | None, says: str
) -> None:
  path = tmp_path / "config.py"
  if text is not None:
    path.write_text(text)
  with pytest.raises(UsageError) as error:
    configs.load_config_file(str(path))
  assert str(error.value).startswith(f"--config={path}: ")
  assert says in str(error.value)


def test_a_directory_is_not_a_config_file(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match="there is no such file"):
    configs.load_config_file(str(tmp_path))


@pytest.mark.parametrize(
  ("key", "says"),
  [
    ("model.num_layer", "did you mean model.num_layers?"),
    ("learning_rate", "did you mean optimizer.learning_rate?"),
    ("optimiser.learning_rate", "did you mean optimizer.learning_rate?"),
    ("optimizer.optimizer.name", "did you mean optimizer.name?"),
    ("training_step", "did you mean training_steps?"),
    ("training_steps.x", "did you mean training_steps?"),
    ("xyzzy", "known are "),
    ("", "known are "),
    ("save_checkpoint_interval", "checkpoint.interval"),
    ("one_off_evaluate", "--once"),
    ("best_model_eval_metric", "least loss"),
  ],
)
def test_an_unknown_key_is_answered_with_the_nearest(
  key: str, says: str
) -> None:
  message = _error_of((key, "1"))
  assert message.startswith(f"config.{key}: ")
  assert says in message


@pytest.mark.parametrize(
  ("section", "key", "says"),
  [
    ("model", "num_layer", "did you mean model.num_layers?"),
    ("", "log_all_hosts", "process 0 alone writes"),
    ("", "sequence_lenght", "did you mean data.sequence_length?"),
  ],
)
def test_a_key_that_a_config_file_adds_is_unknown(
  section: str, key: str, says: str
) -> None:
  config = distlm.get_base_config()
  (config[section] if section else config)[key] = 1
  with pytest.raises(UsageError, match=re.escape(says)):
    configs.parse_config(config)


def test_a_key_that_a_config_file_lacks() -> None:
  config = distlm.get_base_config()
  del config.model.num_layers
  with pytest.raises(UsageError, match=r"config\.model\.num_layers: .*missing"):
    configs.parse_config(config)


@pytest.mark.parametrize(
  ("key", "value", "says"),
  [
    ("num_layers", True, "config.model.num_layers=True: .*a whole number"),
    ("num_layers", 2.0, r"config.model.num_layers=2.0: .*a whole number"),
    ("tie_embeddings", 1, "config.model.tie_embeddings=1: .*true or false"),
    ("num_heads", None, "config.model.num_heads=None: .*a whole number"),
  ],
)
def test_a_config_file_that_gives_another_type(
  key: str, value: Any, says: str
) -> None:
  config = distlm.get_base_config()
  with config.model.ignore_type():
    config.model[key] = value
  with pytest.raises(UsageError, match=says):
    configs.parse_config(config)


def test_a_section_is_not_a_setting() -> None:
  message = _error_of(("checkpoint", "3"))
  assert message == (
    "--config.checkpoint=3: checkpoint is a section; set one of its keys:"
    " checkpoint.interval, checkpoint.keep, checkpoint.on_error"
  )


def test_none_is_a_value_where_a_setting_has_it() -> None:
  config = _parse(("model.remat", "full"), ("model.remat", "none"))
  assert config.model.remat == "none"
  assert _parse(("optimizer.b1", "none")).optimizer.b1 is None


@pytest.mark.parametrize(
  ("key", "text", "says"),
  [
    ("model.num_layers", "six", "a whole number"),
    ("model.num_layers", "2.5", "a whole number"),
    ("model.num_layers", "", "a whole number"),
    ("model.num_layers", "None", "a whole number"),
    ("optimizer.learning_rate", "fast", "a number"),
    ("optimizer.learning_rate", "None", "a number"),
    ("model.tie_embeddings", "yes", "true or false"),
    ("model.tie_embeddings", "None", "true or false"),
    ("data.tokenizer", "None", "a text"),
    ("data.source", "None", "one text, or several"),
    ("data.source", "['a", "one text, or several"),
    ("data.source", "[1, 2]", "one text, or several"),
    ("data.source", "['']", "one text, or several"),
    ("data.source", "", "one text, or several"),
    ("data.source", "(1)", "one text, or several"),
    ("data.source", "({[]: 1})", "one text, or several"),
    ("data.source", "[]", "at least one text"),
    ("optimizer.name", "adamx", "did you mean adam"),
    ("optimizer.name", "rmsprop", "one of adamw, adam, sgd, lion, muon"),
    ("optimizer.schedule", "cosin", "did you mean cosine?"),
    ("interval_type", "hours", "one of steps, secs"),
    ("random_mode_train", "unique", "one of unique_host_unique_device"),
    ("precision", "bf17", "did you mean bf16"),
    ("optimizer.learning_rate", "nan", "finite"),
    ("optimizer.learning_rate", "inf", "finite"),
    ("optimizer.clip_norm", "1e999", "finite"),
    ("optimizer.eps", "-inf", "finite"),
    ("model.dropout_rate", "1", "below 1"),
    ("data.validation_fraction", "0", "above 0"),
    ("data.validation_fraction", "1.0", "below 1"),
  ],
)
def test_a_wrong_value_is_named_with_its_rule(
  key: str, text: str, says: str
) -> None:
  message = _error_of((key, text))
  assert re.match(rf"(--)?config\.{re.escape(key)}=", message)
  assert says in message


def test_a_single_text_in_brackets_is_not_split_into_characters() -> None:
  assert _parse(("data.source", "('ab')")).data.source == ("ab",)


def test_key_size_is_filled_in() -> None:
  assert _parse(("model.num_heads", "8")).model.key_size == 16
  assert _parse(("model.key_size", "32")).model.key_size == 32


def test_a_difference_tells_both_values_also_of_keys_of_one_side() -> None:
  theirs = RunConfig().to_dict()
  theirs["model"]["num_layers"] = 9
  theirs["model"]["gone"] = 1
  assert configs.differing_keys(RunConfig().to_dict(), theirs) == [
    "model.gone: 1 -> None",
    "model.num_layers: 9 -> 4",
  ]


@pytest.mark.parametrize("once", [False, True])
def test_jaxline_gets_all_that_it_needs(once: bool) -> None:
  run = _parse(
    ("accumulation_steps", "2"),
    ("training_steps", "500"),
    ("random_seed", "3"),
    ("random_mode_train", "same_host_same_device"),
    ("random_mode_eval", "unique_host_same_device"),
    ("legacy_random_seed_behavior", "true"),
    ("interval_type", "secs"),
    ("log_train_data_interval", "1"),
    ("log_async", "false"),
    ("save_initial_train_checkpoint", "true"),
    ("eval_initial_weights", "true"),
    ("checkpoint.interval", "7"),
    ("checkpoint.keep", "2"),
  )
  config = configs.jaxline_config(run, once)
  base_config.validate_config(config)
  for field in dataclasses.fields(run):
    if field.name in config:
      assert config[field.name] == getattr(run, field.name), field.name
  assert config.save_checkpoint_interval == 7
  assert config.max_checkpoints_to_keep == 2
  assert config.one_off_evaluate is once
  assert config.best_model_eval_metric == "loss"
  assert not config.best_model_eval_metric_higher_is_better
  assert config.experiment_kwargs.config is run


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
  config = distlm.get_base_config()
  config.optimizer.update(learning_rate=1, b1=0)
  optimizer = configs.parse_config(config).optimizer
  assert type(optimizer.learning_rate) is type(optimizer.b1) is float
  assert math.isclose(optimizer.learning_rate, 1.0)
