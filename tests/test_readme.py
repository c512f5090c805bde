"""README.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from distlm import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_setting_is_listed_with_its_default() -> None:
  listed = dict(
    re.findall(r"^\| `([\w.]+)`(?: \*)? \| `(.*?)` \|", README, re.M)
  )
  expected = {}
  for key, setting in config._schema().items():
    is_source = isinstance(setting.default, tuple)
    default = setting.default[0] if is_source else setting.default
    expected[key] = '""' if default == "" else str(default)
  assert listed == expected


def test_settings_that_a_resumed_run_may_change_are_marked() -> None:
  marked = set(re.findall(r"^\| `([\w.]+)` \* \|", README, re.M))
  assert marked == {
    key for key, setting in config._schema().items() if setting.is_mutable
  }


def test_the_two_commands_come_first_and_exist() -> None:
  first_block = README.split("```")[1]
  targets = re.findall(r"^make (\w+)", first_block, re.M)
  assert targets == ["train", "test"]
  makefile = (ROOT / "Makefile").read_text()
  for target in re.findall(r"\bmake (\w+)", README):
    assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_file_that_is_named_exists() -> None:
  names = set(re.findall(r"\b(?:experiments|tests|docs)/[\w./]+\w", README))
  assert names
  for name in names:
    assert (ROOT / name).exists(), name


def test_the_layering_that_is_shown_names_every_module() -> None:
  shown = README.partition("rows above it")[2].split("```")[1]
  modules = {path.stem for path in (ROOT / "distlm").glob("[a-z]*.py")} | {
    "model",
    "data",
  }
  assert modules <= set(re.findall(r"\w+", shown))
