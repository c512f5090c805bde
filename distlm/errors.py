"""The errors that a user sees as one line instead of a traceback."""

from __future__ import annotations


class UsageError(ValueError):
  """A setting or input that cannot work; the command exits with code 2.

  The message names the setting, the value got, the rule and a way out, in one
  line.
  """


class RunError(RuntimeError):
  """A failure of the run with a known cause; the command exits with code 1.

  The message is one line that names what failed and what to look at.
  """


class SaveError(RunError):
  """A checkpoint that could not be written; a later one may be."""
