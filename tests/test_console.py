"""Tests of distlm.console."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import subprocess
import sys
import termios

from distlm.console import Console


def test_console_prints_plain_lines_without_a_terminal() -> None:
  stream = io.StringIO()
  console = Console(stream)
  console.print_summary("tiny", [("devices", "8"), ("parameters", "1,234")])
  console.start_progress(100, 1000)
  console.log_scalars(
    "train",
    120,
    {"loss": 3.2139, "tokens_per_sec": 1234.4, "steps_per_sec": 10.0},
  )
  console.log_scalars("train", 130, {"loss": 3.0, "steps_per_sec": math.inf})
  console.log_scalars("eval", 200, {"loss": 2.9, "perplexity": 18.1741})
  console.finish("finished", [("loss", "2.9")])
  assert stream.getvalue().splitlines() == [
    "tiny",
    "  devices     8",
    "  parameters  1,234",
    "step 120/1000  loss 3.214  1,234 tokens/s  eta 01:28",
    "step 130/1000  loss 3.000",
    "eval step 200  loss 2.9  perplexity 18.17",
    "finished",
    "  loss  2.9",
  ]


_TERMINAL_CHILD = """
from distlm.console import Console
console = Console()
console.start_progress(400, 1000)
for step in (500, 600, 700):
  scalars = {"loss": 3.2, "tokens_per_sec": 1234.0, "steps_per_sec": 1.0}
  console.log_scalars("train", step, scalars)
  console.print_line(f"a line at {step}")
console.log_scalars("eval", 700, {"loss": 2.9})
console.finish("finished", [("loss", "2.9")])
"""


def _output_on_terminal(num_columns: int) -> str:
  """Returns what the child writes on a terminal of this width."""
  master, slave = pty.openpty()
  termios.tcsetwinsize(slave, (24, num_columns))
  with subprocess.Popen(
    [sys.executable, "-c", _TERMINAL_CHILD], stdout=slave, stderr=slave
  ) as child:
    os.close(slave)
    output = b""
    # Linux ends a terminal whose other side has closed by an error.
    with contextlib.suppress(OSError):
      while block := os.read(master, 4096):
        output += block
    os.close(master)
  assert child.returncode == 0
  return output.decode()


def test_console_shows_a_bar_on_a_terminal() -> None:
  text = _output_on_terminal(num_columns=100)
  assert re.search(r"train:\s+40%.* 400/1000 ", text)
  assert re.search(r"700/1000 .*<.*loss 3\.200  1,234 tokens/s", text)
  # What stays on the screen: of each line, what follows the last return.
  screen = [line.split("\r")[-1].strip() for line in text.split("\r\n")]
  for line in ("a line at 500", "a line at 700", "eval step 700  loss 2.9"):
    assert line in screen
  assert screen.count("finished") == 1


def test_terminal_without_width_gets_plain_lines() -> None:
  lines = _output_on_terminal(num_columns=0).split("\r\n")
  assert lines[0].startswith("step 500/1000  loss 3.200  1,234 tokens/s")
  assert "a line at 500" in lines
