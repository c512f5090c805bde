"""Checks what each module of distlm imports and uses, by reading its source."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distlm

PACKAGE = Path(distlm.__file__).parent
# A module imports only from rows above its own; siblings not each other. The
# modules of a package are one unit, free among themselves.
ROWS = (
  {"errors", "types", "atomic", "bits", "collectives"},
  {"settings", "schedulers", "xla_flags", "prefixed_output", "messages"},
  {"cluster", "supervision", "switches"},
  {"rendezvous"},
  {"config", "arguments", "facts"},
  {
    "parallel",
    "model",
    "data",
    "losses",
    "optimizer",
    "metrics",
    "writers",
    "console",
    "snapshot",
    "profiling",
    "checksums",
    "disk",
    "watchdog",
    "launcher",
    "flops",
  },
  {"sharding"},
  {
    *("updater", "workdir", "series", "replicas", "nonfinite", "summary"),
    *("stop", "logfile"),
  },
  {"checkpoint", "language_model"},
  {"experiment", "saving", "contents"},
  {"loop"},
  {"evaluation"},
  {"runner"},
  {"verify", "inspection", "doctor"},
  {"cli"},
  {"__main__"},
)
# What is used (a pattern of its full name) in which units alone.
COLLECTIVES = (
  "psum|pmean|pmax|pmin|psum_scatter|ppermute|pshuffle|pswapaxes|pbroadcast"
  "|pcast|pvary|all_gather|all_to_all|ragged_all_to_all|axis_index|axis_size"
)
FENCES = {
  r"jax\.(pmap|shard_map|process_\w+|distributed\b.*)": {"parallel"},
  r"jax\.(local_)?device(s|_count)": {"parallel", "profiling"},
  r"jax\.experimental\.(multihost_utils|shard_map)\b.*": {"parallel"},
  rf"jax\.lax\.(parallel\b.*|{COLLECTIVES})": {"collectives"},
  r"haiku\b.*": {"model"},
  r"optax\b.*": {"optimizer", "sharding", "updater"},
  r"tensorboardX\b.*": {"writers"},
  r"orbax\b.*": {"checkpoint"},
  r"absl\.flags\b.*": {"runner", "cli"},
  r"(pickle|marshal|shelve|dill|cloudpickle|joblib)\b.*": set(),
  r"(eval|exec|builtins\.(eval|exec))": set(),
  r"(tensorflow|tensorflow_datasets|jaxline\.platform)\b.*": set(),
}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 350, 50

every_module = pytest.mark.parametrize(
  "path",
  sorted(PACKAGE.rglob("*.py")),
  ids=lambda path: str(path.relative_to(PACKAGE)),
)


def _unit(module: str) -> str:
  """Returns "model" of "distlm.model.attention", and "" of "distlm"."""
  return [*module.split("."), ""][1]


def _module(path: Path) -> str:
  parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
  return ".".join(parts).removesuffix(".__init__")


@functools.cache
def _tree(path: Path) -> ast.Module:
  return ast.parse(path.read_text(), str(path))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
  """Yields (name in this file, full name of what it stands for)."""
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.Import):
      for alias in node.names:
        # `import a.b` binds a.
        yield (
          alias.asname or alias.name.partition(".")[0],
          (alias.name if alias.asname else alias.name.partition(".")[0]),
        )
        yield "", alias.name
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: a relative import"
      for alias in node.names:
        yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _imported_units(path: Path) -> set[str]:
  units = {
    _unit(full)
    for _, full in _imports(path)
    if full == "distlm" or full.startswith("distlm.")
  }
  # `import distlm` is for its version, which __init__ defines.
  return units - {"", "__version__"}


def _used_names(path: Path) -> Iterator[str]:
  """Yields the full names of all that a module imports, reads or calls."""
  names = dict(_imports(path))
  yield from (full for _, full in _imports(path))
  for node in ast.walk(_tree(path)):
    attributes = []
    while isinstance(node, ast.Attribute):
      attributes.append(node.attr)
      node = node.value
    if isinstance(node, ast.Name):
      root = names.get(node.id, node.id if not attributes else "")
      yield ".".join([root, *reversed(attributes)])


@every_module
def test_a_module_imports_from_rows_above_alone(path: Path) -> None:
  unit = _unit(_module(path))
  above: set[str] = set()
  if unit:  # The package itself imports nothing: its names are lazy.
    row = next((i for i, row in enumerate(ROWS) if unit in row), None)
    assert row is not None, f"{unit} has no row"
    above = set().union(*ROWS[:row])
  assert _imported_units(path) - {unit} <= above


@every_module
def test_libraries_and_collectives_stay_behind_their_fences(path: Path) -> None:
  unit = _unit(_module(path))
  found = {
    name
    for name in _used_names(path)
    for pattern, units in FENCES.items()
    if unit not in units and re.fullmatch(pattern, name)
  }
  assert not found


@every_module
def test_data_knows_nothing_of_jax(path: Path) -> None:
  used = {name.partition(".")[0] for name in _used_names(path)}
  if _unit(_module(path)) == "data":
    assert not used & {"jax", "jaxline", "chex", "haiku", "optax"}


@every_module
def test_modules_and_functions_are_short(path: Path) -> None:
  assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      lines = node.end_lineno - node.lineno + 1
      if ast.get_docstring(node):  # Which is for the reader's sake.
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
      assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"


def test_every_row_names_modules_that_exist() -> None:
  found = {_unit(_module(path)) for path in PACKAGE.rglob("*.py")} - {""}
  assert found == set().union(*ROWS)


@pytest.mark.parametrize(
  ("line", "names"),
  [
    ("import jax as j; j.lax.psum(1, 'i')", {"jax.lax.psum"}),
    ("from jax import lax as l; l.all_gather", {"jax.lax.all_gather"}),
    ("from jax.lax import pmean as p; p(1)", {"jax.lax.pmean"}),
    ("import jax.distributed", {"jax.distributed"}),
    ("import jax.numpy as jnp; import jax; jax.pmap", {"jax.pmap"}),
    ("def f():\n  import pickle", {"pickle"}),
    ("eval('1')", {"eval"}),
    ("model.eval(); self.pickle.load()", set()),
    ("jax = sys.modules.get('jax'); jax.distributed", set()),
  ],
)
def test_the_fences_see_through_aliases(
  line: str, names: set[str], tmp_path: Path
) -> None:
  path = tmp_path / "module.py"
  path.write_text(line)
  used = set(_used_names(path))
  assert names <= used
  forbidden = {
    name for name in used if any(re.fullmatch(f, name) for f in FENCES)
  }
  assert forbidden == names


def test_importing_distlm_imports_no_heavy_library() -> None:
  # In a process of its own, for this one has imported them all. Both the
  # package and the command's parser, so that --help is instant.
  for module in ("distlm", "distlm.cli"):
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
      [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    heavy = {"jax", "jaxlib", "numpy", "ml_collections", "absl", "haiku"}
    assert module in loaded and not heavy & set(loaded)


def test_public_names_can_be_imported() -> None:
  for name in distlm.__all__:
    assert getattr(distlm, name) is not None
  assert set(distlm.__all__) <= set(dir(distlm))
  with pytest.raises(AttributeError, match="no_such_name"):
    _ = distlm.no_such_name
