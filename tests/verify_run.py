"""What `distlm verify` shows of a small run, taken apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_run

from distlm import config as configs
from distlm import errors
from distlm.data import token_store
from distlm.settings import RunConfig
from distlm.verify import checks, report
from distlm.verify.report import Layout

SETTINGS = (
  ("model.num_layers", "1"),
  ("model.model_size", "16"),
  ("data.sequence_length", "8"),
)
FLAGS = tuple(f"--config.{key}={value}" for key, value in SETTINGS)
# The fewest that part faults of devices from those of accumulation steps.
FEW = (Layout(1, 1), Layout(8, 1), Layout(1, 2))
ALONE, DEVICES, PARTS = (f"{layout}" for layout in FEW)
ALL = [
  *(f"{count} device(s) x 1" for count in (1, 2, 4, 8)),
  *(f"{count} device(s) x {parts}" for count in (1, 8) for parts in (2, 4)),
]
PARAMETER = "transformer.positions"
# A program whose processes all take the same rows, on one layout.
FAULTY = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import planted_faults
import pytest
from distlm import cli
from distlm.verify import report

planted_faults.same_rows_in_every_process(pytest.MonkeyPatch())
report._layouts = lambda: [report.Layout(2, 1)]
cli.main(sys.argv[1:])
"""


class Report(NamedTuple):
  """What verify has shown."""

  verdicts: dict[str, str]  # by layout
  findings: dict[str, str]  # of dropout and data
  error: str
  output: str


def read(output: str, error: str = "") -> Report:
  """Takes the printed table apart."""
  row = re.compile(
    r"^((?:\d+ x )?\d+ device\(s\) x \d+) +"  # layout
    r"\d+\.\d{6} +\d+\.\d{6} +[0-9a-f]{8} +"  # loss, gradient norm, checksum
    r"\d\.\de[-+]\d\d +(equal|DIFFERS)$",  # difference, verdict
    re.MULTILINE,
  )
  finding = re.compile(r"^(dropout|data): (.*)$", re.MULTILINE)
  return Report(
    dict(row.findall(output)), dict(finding.findall(output)), error, output
  )


def open_config(
  path: Path, *more: tuple[str, str]
) -> tuple[RunConfig, token_store.TokenStore]:
  config_dict = configs.load_config_file(str(path))
  configs.apply_overrides(config_dict, [*SETTINGS, *more])
  settings = configs.parse_config(config_dict)
  return settings, token_store.open_token_store(settings.data)


def compare_few(
  path: Path,
  patch: pytest.MonkeyPatch,
  *more: tuple[str, str],
  steps: int = 2,
) -> Report:
  """Compares a few layouts, and nothing else, in this process."""
  patch.setattr(report, "_layouts", lambda: list(FEW))
  for name in ("check_masks", "check_data"):
    patch.setattr(checks, name, lambda *_: ("not looked at", ""))
  settings, store = open_config(path, *more)
  lines: list[str] = []
  error = ""
  try:
    report.verify(settings, store, steps, lines.append)
  except errors.RunError as problem:
    error = str(problem)
  return read("\n".join(lines), error)


def differing(found: Report) -> tuple[str, ...]:
  """Returns those of the few layouts that differ; the others are equal."""
  assert list(found.verdicts) == [f"{layout}" for layout in FEW]
  return tuple(
    layout for layout, verdict in found.verdicts.items() if verdict == "DIFFERS"
  )


def run_job(config: Path, *program: str) -> list[tuple[int, str, str]]:
  """Runs verify in 2 processes of 2 devices; returns code, output, errors."""
  args = [
    *("verify", f"--config={config}", *FLAGS, "--devices=2"),
    "--steps=2",
  ]
  env = tiny_run.environment(
    config.parent / "compiled", JAX_DISABLE_MOST_OPTIMIZATIONS="1"
  )
  processes = tiny_run.start_job(args, 2, env, program)
  try:
    return [tiny_run.finish(process) for process in processes]
  finally:
    for process in processes:
      process.kill()
