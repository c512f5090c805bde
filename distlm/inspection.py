"""Looks at the checkpoints of a run: which there are, and what is in them.

Nothing on disk is changed. What imports JAX is imported by the commands that
read arrays, so that `list` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distlm import arguments, checksums
from distlm.console import Console, warn
from distlm.errors import RunError, UsageError
from distlm.series import COMMIT_FILE, Series

_SERIES = ("latest", "best")
_MIB = 2**20
_USE = (
  "name the workdir of a run, or one of its checkpoints, such as"
  " WORKDIR/checkpoints/latest/20"
)
_REPLACE = "move it away to go on from another one"


class _Entry(NamedTuple):
  """A directory in a series; `what` it is, or "" of a checkpoint."""

  path: Path
  series: str
  name: str
  what: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the commands on checkpoints, and their arguments."""
  commands = parser.add_subparsers(
    dest="action", required=True, parser_class=arguments.Parser
  )
  for name, text in (
    ("list", "the checkpoints, their sizes, times and health"),
    ("verify", "read each one: checksums, arrays, non-finite numbers"),
    ("inspect", "what is in one: step, parameters, arrays"),
    ("diff", "where two differ, bit for bit; code 1 if they do"),
  ):
    command = commands.add_parser(name, allow_abbrev=False, help=text)
    command.add_argument(
      "workdir",
      metavar="WORKDIR",
      help="the directory of a run, or of one of its checkpoints",
    )
    if name == "diff":
      command.add_argument(
        "other",
        metavar="OTHER",
        nargs="?",
        help="another one; without it, the two newest of WORKDIR are compared",
      )


def run(args: argparse.Namespace) -> None:
  """Runs the command that `args` names, and prints what it finds.

  Raises:
    UsageError: if a path is of no workdir or checkpoint.
    RunError: if a checkpoint is bad, or two differ.
  """
  commands = {
    "list": _list,
    "verify": _verify,
    "inspect": _inspect,
    "diff": _diff,
  }
  try:
    commands[args.action](args)
  except (UsageError, RunError) as error:
    raise type(error)(_one_line(str(error))) from error
  except RecursionError as error:
    raise RunError(
      f"path {args.workdir}: JSON in it is nested too deeply; {_REPLACE}"
    ) from error


def _list(args: argparse.Namespace) -> None:
  entries = _find_entries(args.workdir)
  rows = [
    (
      entry.series,
      entry.name,
      _mib(entry.path),
      _saved(entry.path),
    )
    for entry in entries
  ]
  for entry, start in zip(entries, _align(rows, right=(2,)), strict=True):
    _print(f"{start}  {entry.what or _find_damage(entry.path) or 'ok'}")


def _verify(args: argparse.Namespace) -> None:
  entries = [entry for entry in _find_entries(args.workdir) if not entry.what]
  if not entries:
    raise UsageError(f"path {args.workdir}: it holds no checkpoint; {_USE}")
  problems = []
  starts = _align([(entry.series, entry.name) for entry in entries])
  for entry, start in zip(entries, starts, strict=True):
    problem = _find_problem(entry.path)
    if problem and not entry.path.exists():
      _print(f"{start}  deleted meanwhile")  # By the process that trains.
      continue
    _print(f"{start}  {_one_line(problem) or 'ok'}")
    if problem:
      problems.append(f"checkpoint {entry.path}: {problem}")
  if problems:
    raise RunError(
      f"{problems[0]} ({len(problems)} of {len(entries)} bad); {_REPLACE}"
    )


def _inspect(args: argparse.Namespace) -> None:
  [path] = _select(args.workdir, 1)
  from distlm import contents, snapshot

  found = contents.read(path)
  entry = _entry_of(path)
  num_params = contents.count_params(found.arrays)
  rows = [
    ("series", entry.series),
    ("step", entry.name),
    ("size", _mib(path)),
    ("saved", _saved(path)),
    *([("parameters", f"{num_params:,}")] if num_params else []),
    *(
      (_escape(f"{section}.{name}"), contents.shorten(json.dumps(value)))
      for section, values in (
        ("state", found.state),
        ("attributes", found.attributes),
      )
      for name, value in values.items()
    ),
  ]
  Console().print_summary(_escape(f"checkpoint {path}"), rows)
  total = sum(array.nbytes for array in found.arrays.values())
  table = [
    ("array", "dtype", "shape", "bytes"),
    *(
      (snapshot.dotted(name), f"{a.dtype}", f"{[*a.shape]}", f"{a.nbytes:,}")
      for name, a in found.arrays.items()
    ),
    (f"total of {len(found.arrays)}", "", "", f"{total:,}"),
  ]
  for line in _align(table, right=(3,)):
    _print(line)


def _diff(args: argparse.Namespace) -> None:
  if args.other is None:
    paths = _select(args.workdir, 2)
  else:
    paths = [*_select(args.workdir, 1), *_select(args.other, 1)]
  from distlm import contents

  first, second = (contents.read(path) for path in paths)
  differences = [
    *contents.diff_arrays(first, second),
    *contents.diff_json("state", first.state, second.state),
    *contents.diff_json("attributes", first.attributes, second.attributes),
  ]
  _print(f"first: {paths[0]}")
  _print(f"second: {paths[1]}")
  for line in differences:
    _print(line)
  for line in contents.diff_json("config", first.config, second.config):
    _print(f"note: {line}")
  if differences:
    raise RunError(f"{paths[0]} and {paths[1]} differ: {differences[0]}")
  _print(f"equal: {len(first.arrays)} arrays, state and attributes")


def _find_entries(text: str) -> list[_Entry]:
  """Returns what is in the series of a workdir, or the one checkpoint."""
  path = _check_directory(text)
  if _is_checkpoint(path):
    return [_entry_of(path)._replace(what="")]
  entries = [
    _entry_of(directory)
    for series in _SERIES
    for directory in sorted(
      (path / "checkpoints" / series).glob("*"), key=_order
    )
    if directory.is_dir()
  ]
  if not entries:
    raise UsageError(f"path {text}: it holds no checkpoint; {_USE}")
  return entries


def _check_directory(text: str) -> Path:
  path = Path(text)
  try:
    if not text or not path.exists():
      raise UsageError(f"path {text}: there is no such directory; {_USE}")
    if not path.is_dir():
      raise UsageError(f"path {text}: it is not a directory; {_USE}")
  except OSError as error:
    raise UsageError(
      f"path {text}: it cannot be read ({error.strerror}); {_USE}"
    ) from error
  return path


def _is_checkpoint(path: Path) -> bool:
  return (path / COMMIT_FILE).exists() or (path / "arrays").is_dir()


def _order(path: Path) -> tuple[int, str]:
  step = re.match("[0-9]+", path.name)
  return int(step.group()) if step else -1, path.name


def _entry_of(path: Path) -> _Entry:
  # A path such as "." says nothing of the series and the step.
  series, name = path.absolute().parent.name, path.absolute().name
  what = ""
  if ".orbax-checkpoint-tmp" in name:
    what = "an unfinished save"
  elif re.match(r"[0-9]+\.(damaged|incomplete)-", name):
    what = "set aside"
  elif not re.fullmatch("[0-9]+", name):
    what = "no checkpoint"
  return _Entry(path, series if series in _SERIES else "-", name, what)


def _select(text: str, number: int) -> list[Path]:
  """Returns the newest intact checkpoints of "latest", or the one named.

  Raises:
    UsageError: if there are fewer.
    RunError: if they are fewer because of damage.
  """
  path = _check_directory(text)
  if _is_checkpoint(path):
    if number > 1:
      raise UsageError(f"OTHER: {text} is one checkpoint; name a second one")
    if damage := _find_damage(path):
      warn(_escape(f"checkpoint {path}: it is damaged ({damage})"))
    return [path]
  series = Series(path / "checkpoints" / _SERIES[0])
  intact, damaged = [], ""
  for step in reversed(series.steps()):
    if damage := _find_damage(series.path(step)):
      damaged = f"checkpoint {series.path(step)}: it is damaged ({damage})"
      warn(_escape(f"{damaged}, and is ignored"))
    else:
      intact.append(series.path(step))
    if len(intact) == number:
      return intact[::-1]
  if damaged:
    raise RunError(f"{damaged}, and there are too few others; {_USE}")
  raise UsageError(
    f"path {text}: {len(intact)} of the {number} checkpoints needed are in"
    f" {series.directory}; {_USE}"
  )


def _mib(path: Path) -> str:
  """Returns the size of all files below a directory."""
  size = 0
  for file in path.rglob("*"):
    # The process that trains may be deleting it.
    with contextlib.suppress(OSError):
      size += file.stat().st_size if file.is_file() else 0
  return f"{size / _MIB:.2f} MiB"


def _saved(path: Path) -> str:
  """Returns the local time at which a checkpoint was complete."""
  try:
    secs = (path / COMMIT_FILE).stat().st_mtime
  except OSError:
    return "-"
  return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(secs))


def _find_damage(path: Path) -> str:
  """Returns what is wrong with the files of a checkpoint, or ""."""
  if not (path / COMMIT_FILE).exists():
    return "incomplete"
  return checksums.find_damage(path)


def _find_problem(path: Path) -> str:
  """Returns what is wrong with a checkpoint or with what it holds, or ""."""
  if damage := _find_damage(path):
    return damage
  from distlm import contents, snapshot

  try:
    name = snapshot.find_nonfinite(contents.read(path).tree)
  except RunError as error:
    # Without the way out, which the caller adds.
    return f"{error}".removeprefix(f"checkpoint {path}: ").rpartition("; ")[0]
  return f"{name} is not finite" if name else ""


def _align(
  rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
  """Returns the rows as lines; the columns of `right` are for numbers."""
  escaped = [[_escape(cell) for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
  return [
    "  ".join(
      cell.rjust(width) if column in right else cell.ljust(width)
      for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    for row in escaped
  ]


def _print(line: str) -> None:
  Console().print_line(_escape(line))


def _one_line(text: str) -> str:
  return _escape(" ".join(text.split()))


def _escape(text: str) -> str:
  """Makes visible what a terminal would obey; names may hold anything."""
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
  )
