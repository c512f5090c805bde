"""The table of what `distlm doctor` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from distlm.disk import reason
from distlm.errors import RunError, UsageError

OK, WARNING, PROBLEM = "ok", "warning", "PROBLEM"
_NAME_WIDTH, _VERDICT_WIDTH = 24, 7


class Row(NamedTuple):
  """A finding; `advice` says what to do about it."""

  name: str
  value: str
  verdict: str = OK
  advice: str = ""

  def __str__(self) -> str:
    """Returns all but the verdict, in one line."""
    advice = f"; {self.advice}" if self.advice else ""
    return f"{self.name}: {self.value}{advice}"


class Report:
  """Shows rows as they come, in one process, and keeps them in all.

  Attributes:
    rows: all so far.
  """

  def __init__(self, print_line: Callable[[str], None], is_shown: bool) -> None:
    """Starts without a row.

    Args:
      print_line: shows a line.
      is_shown: whether this process shows what it finds.
    """
    self.rows: list[Row] = []
    self._print_line = print_line
    self._is_shown = is_shown

  def show(self, line: str) -> None:
    """Shows a line that is no finding."""
    if self._is_shown:
      self._print_line(line)

  def add(self, rows: Iterable[Row]) -> None:
    """Shows rows and keeps them."""
    for row in rows:
      row = Row(*(" ".join(cell.split()) for cell in row))
      self.rows.append(row)
      self.show(_line(row.name, row.verdict, row.value))
      if row.advice:
        self.show(_line("", "", f"-> {row.advice}"))

  def try_check(
    self, name: str, check: Callable[..., Iterable[Row]], *args: Any
  ) -> None:
    """Adds what a check finds, and the error that it ends with.

    Args:
      name: of the row of the error.
      check: called with `args`, returns rows.
      *args: what it is called with.
    """
    try:
      for row in check(*args):
        self.add([row])
    except (UsageError, RunError) as error:
      self.add([Row(name, str(error), PROBLEM)])
    except OSError as error:
      place = f"{error.filename}: " if error.filename else ""
      what = error.strerror or reason(error)
      self.add([Row(name, place + what, PROBLEM)])

  def problems(self) -> list[Row]:
    """Returns the rows that training would fail by."""
    return [row for row in self.rows if row.verdict == PROBLEM]

  def conclusion(self) -> str:
    """Returns whether training would work, in a line."""
    problems = self.problems()
    if problems:
      return f"training would fail: {problems[0]}{_more(problems[1:])}"
    num_warnings = sum(row.verdict == WARNING for row in self.rows)
    warnings = f", with {num_warnings} warning(s)" if num_warnings else ""
    return f"training would work{warnings}"


def _line(name: str, verdict: str, value: str) -> str:
  return f"{name:<{_NAME_WIDTH}} {verdict:<{_VERDICT_WIDTH}} {value}".rstrip()


def _more(rows: Sequence[Row]) -> str:
  names = ", ".join(row.name for row in rows)
  return f" (and {len(rows)} more: {names})" if rows else ""
