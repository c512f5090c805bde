"""`distlm doctor`: says whether training would work here, and what to mend.

Everything is tried for real: files are written, names resolved, processes
joined, sums computed. What needs no JAX comes first, and each row is shown as
soon as it is known, so that a hang shows what it is in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distlm import arguments
from distlm.errors import RunError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of the job, the config and the workdir, all optional."""
  arguments.add_job_arguments(parser, config_required=False)
  parser.add_argument(
    "--workdir", help="the directory of the run (default: the present one)"
  )


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
  """Shows a table of what was found, in process 0; all processes must call it.

  Args:
    args: with the flags of `add_arguments`.
    overrides: (key, value) pairs of settings.

  Returns:
    0 if training would work, 1 if not; the same in all processes.

  Raises:
    UsageError: if the flags of the job cannot work.
    RunError: if the processes cannot be joined.
  """
  from distlm.console import Console
  from distlm.doctor import machine, training
  from distlm.doctor.report import PROBLEM, Report, Row

  meeting = arguments.find_meeting(args)
  report = Report(Console().print_line, meeting.is_first)
  workdir = None if args.workdir is None else Path(args.workdir)
  with meeting.attended():
    machine.examine(report, meeting.spec, workdir or Path())
    plan = training.read(
      report, args.config, overrides, workdir, meeting.is_first
    )
  try:
    # Without facts: they are compared below, as one finding among others.
    meeting.compare({})
    from distlm import parallel

    parallel.start(args.devices, meeting.spec)
    parallel.end_on_sigterm()
  except Exception as error:  # Whatever it is, it would end a training too.
    is_foreseen = isinstance(error, UsageError | RunError)
    value = str(error) if is_foreseen else repr(error)
    report.add([Row("processes", value, PROBLEM)])
    raise RunError(report.conclusion()) from error

  from distlm.doctor import together

  together.examine(report, meeting.spec, args.devices, plan)
  report.show(report.conclusion())
  if report.problems():
    # Each process: the launcher shows that of the first which ends.
    print(f"error: {report.conclusion()}", file=sys.stderr)
    return 1
  return 0
