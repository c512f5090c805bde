"""`distlm doctor`: its command, and what it has shown, taken apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import process_job
import pytest
import tiny_run

from distlm import arguments, doctor
from distlm.doctor import collectives

SIZES = (4 * 2**10, 64 * 2**10)
# The command, on small arrays.
PROGRAM = f"""
import sys
from distlm import cli
from distlm.doctor import collectives

collectives.SIZES_BYTES = {SIZES}
cli.main(["doctor", *sys.argv[1:]])
"""


class Found(NamedTuple):
  """What was shown: exit code, (verdict, value) by name, advices, last line."""

  code: int
  rows: dict[str, tuple[str, str]]
  advices: list[str]
  conclusion: str

  def faults(self) -> dict[str, str]:
    """Returns the verdicts of all rows that are not ok."""
    verdicts = {name: verdict for name, (verdict, _) in self.rows.items()}
    return {
      name: verdict for name, verdict in verdicts.items() if verdict != "ok"
    }


def read(code: int, output: str) -> Found:
  rows, advices = {}, []
  [*lines, conclusion] = output.splitlines()
  for line in lines:
    match = re.match(r"(\S.*?) +(ok|warning|PROBLEM) +(.*)$", line)
    if match:
      rows[match[1]] = (match[2], match[3])
    elif line.startswith(" "):
      advices.append(line.strip().removeprefix("-> "))
  return Found(code, rows, advices, conclusion)


def run_here(*argv: str) -> int:
  others, overrides = arguments.split_overrides(argv)
  parser = arguments.Parser()
  doctor.add_arguments(parser)
  return doctor.run(parser.parse_args(others), overrides)


@pytest.fixture
def examine(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Found]:
  """Returns a function that runs the command on this process's 8 devices."""
  monkeypatch.setattr(collectives, "SIZES_BYTES", SIZES)

  def examine(*argv: str) -> Found:
    capsys.readouterr()
    code = run_here(*argv)
    return read(code, capsys.readouterr().out)

  return examine


def run_job(
  args: Sequence[str], of_second: Sequence[str] = ()
) -> tuple[list[int], Found, list[int]]:
  """Runs the command in 2 processes of 2 devices.

  Returns:
    Process ids, what process 0 showed, and the exit codes.
  """
  job = [
    *("--devices=2", "--num-processes=2"),
    f"--coordinator={process_job.free_address()}",
  ]
  env = tiny_run.environment(None)
  processes = [
    tiny_run.start(
      [*args, *job, f"--process-id={index}", *more], env, ("-c", PROGRAM)
    )
    for index, more in enumerate(((), of_second))
  ]
  try:
    ended = [tiny_run.finish(process) for process in processes]
  finally:
    for process in processes:
      process.kill()
  codes = [code for code, _, _ in ended]
  outputs = [
    "".join(
      line
      for line in output.splitlines(keepends=True)
      # Its threads write into each other's lines.
      if not ("[Gloo]" in line or "peer ranks" in line)
    )
    for _, output, _ in ended
  ]
  assert outputs[1].strip() == ""
  assert outputs[0], ended
  pids = [process.pid for process in processes]
  return pids, read(codes[0], outputs[0]), codes
