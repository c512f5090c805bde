"""The configuration that users write: defaults, config files, overrides.

`get_base_config` gives a `ConfigDict` with JAXline's settings and distlm's,
which config files change and `apply_overrides` overrides. `parse_config` checks
it once and gives frozen dataclasses; nothing after it sees a `ConfigDict`,
except JAXline, which gets the one that `jaxline_config` makes.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import math
import runpy
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxline import base_config
from ml_collections import config_dict

from distlm.errors import UsageError
from distlm.settings import RUNNER_SETTINGS, Rule, RunConfig, flatten

# Settings of JAXline that are not distlm's, and what decides them.
_REPLACED = {
  "save_checkpoint_interval": "checkpoint.interval",
  "max_checkpoints_to_keep": "checkpoint.keep",
  "logging_interval_type": "interval_type",
  "checkpoint_interval_type": "interval_type",
  "log_tensors_interval": "log_train_data_interval",
  "log_all_train_data": "log_train_data_interval=1",
  "periodic_action_growth_ratios": "log_train_data_interval",
  "one_off_evaluate": "the flag --once",
  "experiment_kwargs": "the sections, such as model",
  "train_checkpoint_all_hosts": "nothing: process 0 alone writes",
  "best_checkpoint_all_hosts": "nothing: process 0 alone writes",
  "log_all_hosts": "nothing: process 0 alone writes",
  "best_model_eval_metric": "nothing: the best model has the least loss",
  "best_model_eval_metric_higher_is_better": "nothing: less loss is better",
}

_ONE_OR_MORE = "one text, or several as \"['one', 'two']\""


@dataclasses.dataclass(frozen=True)
class _Setting:
  """One line of the schema."""

  key: str  # dotted
  default: Any
  kind: type  # tuple stands for one or several strings
  is_optional: bool  # None is a value too
  rule: Rule
  is_mutable: bool


@functools.cache
def _schema() -> dict[str, _Setting]:
  """Returns all settings by their dotted keys."""
  return {setting.key: setting for setting in _settings_of(RunConfig, "")}


def _settings_of(config_class: Any, prefix: str) -> Iterator[_Setting]:
  hints = typing.get_type_hints(config_class)
  for field in dataclasses.fields(config_class):
    hint, key = hints[field.name], prefix + field.name
    if dataclasses.is_dataclass(hint):
      yield from _settings_of(hint, f"{key}.")
      continue
    options = (
      typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    )
    kind = typing.get_origin(options[0]) or options[0]
    yield _Setting(
      key, field.default, kind, types.NoneType in options, **field.metadata
    )


def get_base_config() -> config_dict.ConfigDict:
  """Returns the default settings, a runnable configuration.

  >>> get_base_config().model.num_layers
  4
  """
  config = base_config.get_base_config()
  for key in _REPLACED:
    del config[key]
  for setting in _schema().values():
    *sections, last = setting.key.split(".")
    target = config
    for section in sections:
      if section not in target:
        target[section] = config_dict.ConfigDict()
      target = target[section]
    default = setting.default
    if setting.is_optional:
      default = config_dict.placeholder(setting.kind)
    elif setting.kind is tuple:  # Or one text, or a list.
      default = config_dict.FieldReference(default, field_type=object)
    if last in target:
      del target[last]  # And with it the type that JAXline gave it.
    target[last] = default
  return config


def load_config_file(path: str) -> config_dict.ConfigDict:
  """Returns what `get_config()` of a Python file returns.

  Raises:
    UsageError: if there is no such file, it fails, or it has no `get_config`.
  """
  if not Path(path).is_file():
    raise UsageError(
      f"--config={path}: there is no such file; give the path of a Python file"
      " with a get_config(), such as experiments/tiny.py"
    )
  try:
    get_config = runpy.run_path(path).get("get_config")
    config = get_config() if callable(get_config) else None
  except (Exception, SystemExit) as error:  # It is the user's own code.
    where = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in where if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
      lines.append(error.lineno)
    line = lines[-1] if lines else "?"
    raise UsageError(
      f"--config={path}: {type(error).__name__} at line {line}: {error};"
      " mend the file"
    ) from error
  if not isinstance(config, config_dict.ConfigDict):
    raise UsageError(
      f"--config={path}: it must define get_config(), returning a ConfigDict"
      " made by distlm.get_base_config()"
    )
  return config


def apply_overrides(
  config: config_dict.ConfigDict, overrides: Sequence[tuple[str, str]]
) -> None:
  """Sets keys of `config`, of distlm's or any other experiment, from texts.

  Args:
    config: the configuration to change.
    overrides: pairs of a dotted key and the text of its new value.

  Raises:
    UsageError: for an unknown key or a text that is not of the key's type.
  """
  for key, text in overrides:
    *sections, last = key.split(".")
    target = config
    for section in sections:
      target = target.get(section) if section in target else None
      if not isinstance(target, config_dict.ConfigDict):
        raise _unknown_key(key, config)
    if last not in target:
      raise _unknown_key(key, config)
    if isinstance(target[last], config_dict.ConfigDict):
      raise UsageError(
        f"--config.{key}={text}: {key} is a section; set one of its keys: "
        + ", ".join(f"{key}.{name}" for name in sorted(target[last]))
      )
    with target.ignore_type():
      target[last] = _parse_text(key, text, target.get_type(last))


def _unknown_key(key: str, config: config_dict.ConfigDict) -> UsageError:
  known = [name for name, _ in flatten(config.to_dict())]
  if key in _REPLACED:
    return UsageError(
      f"config.{key}: distlm does not use this setting of JAXline; what decides"
      f" it is {_REPLACED[key]}"
    )
  # First the whole key, then its last part in any section.
  by_last = {name.rpartition(".")[2]: name for name in known}
  near = [
    *difflib.get_close_matches(key, known, n=1),
    *(
      by_last[name]
      for name in difflib.get_close_matches(
        key.rpartition(".")[2], by_last, n=1
      )
    ),
  ]
  way_out = (
    f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
  )
  return UsageError(f"config.{key}: there is no such setting; {way_out}")


def _parse_text(key: str, text: str, kind: type) -> Any:
  """Returns `text` as a value of type `kind`."""
  setting = _schema().get(key)
  if text.lower() == "none" and not (setting and text in setting.rule.choices):
    return None
  try:
    if kind is bool:
      return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind in (int, float, str):
      return kind(text)
    if kind is object and not text.startswith(("[", "(")):
      return text
    return ast.literal_eval(text)
  except (
    KeyError,
    ValueError,
    SyntaxError,
    TypeError,
    MemoryError,
    RecursionError,
  ):
    raise UsageError(
      f"--config.{key}={text}: it must be {_describe(kind)}"
    ) from None


def _describe(kind: type) -> str:
  return {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: _ONE_OR_MORE,
    object: _ONE_OR_MORE,
  }.get(kind, f"a Python value of type {kind.__name__}")


def parse_config(config: config_dict.ConfigDict) -> RunConfig:
  """Checks a configuration and returns it as frozen dataclasses.

  Args:
    config: made by `get_base_config` and changed.

  Returns:
    The settings, with `model.key_size` filled in and `data.source` a tuple.

  Raises:
    UsageError: naming the first setting that cannot work.
  """
  values = dict(flatten(config.to_dict()))
  for key in values:
    if key not in _schema():
      raise _unknown_key(key, get_base_config())
  for key, setting in _schema().items():
    if key not in values:
      raise UsageError(
        f"config.{key}: it is missing; start from distlm.get_base_config(),"
        f" where it is {setting.default!r}"
      )
    values[key] = _checked(setting, values[key])
  return _build(RunConfig, values, "")


def _checked(setting: _Setting, value: Any) -> Any:
  """Returns the value in its type, or raises UsageError."""
  if value is None and setting.is_optional:
    return None
  kind: Any = setting.kind
  if kind is float and type(value) is int:
    value = float(value)
  if kind is tuple:
    value = (value,) if isinstance(value, str) else value
    if isinstance(value, list):
      value = tuple(value)
  wrong_items = kind is tuple and (
    not isinstance(value, tuple)
    or not all(isinstance(item, str) and item for item in value)
  )
  # Not isinstance: True is an int.
  if type(value) is not kind or wrong_items:
    raise UsageError(
      f"config.{setting.key}={value!r}: it must be {_describe(kind)}"
    )
  is_finite = not isinstance(value, float) or math.isfinite(value)
  if not is_finite or not setting.rule.accepts(value):
    near = difflib.get_close_matches(str(value), setting.rule.choices, n=1)
    raise UsageError(
      f"config.{setting.key}={value!r}: it must be"
      f" {setting.rule.text if is_finite else 'finite'}"
      + (f"; did you mean {near[0]}?" if near else "")
    )
  return value


def _build(config_class: Any, values: Mapping[str, Any], prefix: str) -> Any:
  hints = typing.get_type_hints(config_class)
  return config_class(
    **{
      field.name: _build(hints[field.name], values, f"{prefix}{field.name}.")
      if dataclasses.is_dataclass(hints[field.name])
      else values[prefix + field.name]
      for field in dataclasses.fields(config_class)
    }
  )


def differing_keys(
  ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[str]:
  """Returns `key: theirs -> ours` for settings that must not differ, but do.

  Args:
    ours: nested settings, as `RunConfig.to_dict` gives them.
    theirs: the settings that a run was started with.
  """
  flat_ours, flat_theirs = dict(flatten(ours)), dict(flatten(theirs))
  return [
    f"{key}: {flat_theirs.get(key)!r} -> {flat_ours.get(key)!r}"
    for key in sorted(flat_ours | flat_theirs)
    if flat_ours.get(key) != flat_theirs.get(key)
    and not (key in _schema() and _schema()[key].is_mutable)
    # Of other experiments: JAXline's intervals and the runner's.
    and key not in (*_REPLACED, *RUNNER_SETTINGS)
  ]


def jaxline_config(run: RunConfig, once: bool) -> config_dict.ConfigDict:
  """Returns the configuration that `jaxline.train` runs.

  Args:
    run: the checked settings.
    once: whether evaluation ends after one checkpoint.
  """
  config = base_config.get_base_config()
  for field in dataclasses.fields(run):
    if field.name in config:
      config[field.name] = getattr(run, field.name)
  config.save_checkpoint_interval = run.checkpoint.interval
  config.max_checkpoints_to_keep = run.checkpoint.keep
  config.one_off_evaluate = once
  config.best_model_eval_metric = "loss"
  config.best_model_eval_metric_higher_is_better = False
  config.experiment_kwargs = config_dict.ConfigDict({"config": run})
  return config
