"""Tests of benchmarks/accelerator.py, on the CPU."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import accelerator  # noqa: E402 - it is no package.

ARGS = argparse.Namespace(tiny=False, devices=None)


def _run(*args: str) -> list[list[str]]:
  """Returns the cells of the table, and the lines outside as single ones."""
  output = subprocess.run(
    [sys.executable, BENCHMARKS / "accelerator.py", "--tiny", *args],
    env=tiny_run.environment(None),
    check=True,
    capture_output=True,
    text=True,
    timeout=tiny_run.TIMEOUT_SECS,
  ).stdout
  return [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in output.splitlines()
    if line
  ]


def _number(cell: str) -> float:
  return float(cell.replace(",", "").removesuffix("%"))


def test_tiny_fills_every_kind_of_row() -> None:
  (chip,), header, _, *rows, (last,) = _run("--devices=2")
  assert chip.startswith("2 x cpu (")
  assert "jax 0." in chip
  assert [row[:2] for row in rows] == [
    ["update alone", "2"],
    ["update alone", "4"],
    ["`distlm train`", rows[2][1]],
    ["model.remat=dots, loss_chunk=16", rows[2][1]],
  ]
  for row in rows:
    assert len(row) == len(header)
    cells = dict(zip(header, row, strict=True))
    rate, step_ms = _number(cells["tokens/s"]), _number(cells["step, ms"])
    # On 2 devices, 32 positions each.
    num_tokens = 2 * int(cells["sequences a device"]) * 32
    assert rate == pytest.approx(1e3 * num_tokens / step_ms, rel=0.05)
    assert 0 < _number(cells["MFU"]) < 100
  best = max(rows[:2], key=lambda row: _number(row[2]))
  ratio = _number(rows[2][2]) / _number(best[2])
  assert rows[2][1] == best[1]
  assert float(last.split()[3]) == pytest.approx(ratio, abs=2e-3)


def test_no_row_is_started_when_the_time_is_used_up() -> None:
  assert _run("--minutes=0") == [
    ["Stopped after 0 minutes, before: update alone"]
  ]


def _failing(monkeypatch: pytest.MonkeyPatch, code: int, errors: str) -> Any:
  def run(command: Any, **_: Any) -> Any:
    return subprocess.CompletedProcess(command, code, "", errors)

  monkeypatch.setattr(subprocess, "run", run)
  row = accelerator.Row(64)
  return list(accelerator._cells(row, accelerator._run(row, ARGS)))


@pytest.mark.parametrize(
  ("code", "errors"),
  [(1, "Traceback\nRESOURCE_EXHAUSTED: Out of memory\nmore"), (-9, "")],
)
def test_running_out_of_memory_is_a_row(
  monkeypatch: pytest.MonkeyPatch, code: int, errors: str
) -> None:
  cells = _failing(monkeypatch, code, errors)
  assert cells == ["update alone", "64", "out of memory", *["-"] * 4]


def test_another_failure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
  cells = _failing(monkeypatch, 2, "warning\nerror: no such thing\n")
  assert cells[2] == "exit code 2: error: no such thing"


def test_larger_batches_end_where_memory_does() -> None:
  rows = accelerator._rows(tiny=False)
  found = [next(rows)]
  for rate in (100.0, 300.0, 200.0, None, *[None] * len(accelerator._VARIANTS)):
    found.append(rows.send(rate))
  sizes = [row.batch_size for row in found]
  # 64 ran out of memory; 16 was the fastest.
  assert sizes == [8, 16, 32, 64, 16, 16, 16, 16, 16]
  assert found[4].is_train
  assert [row.settings for row in found[5:]] == list(accelerator._VARIANTS)
  assert rows.send(None).batch_size == 32
  with pytest.raises(StopIteration):
    rows.send(None)


def test_nothing_more_is_tried_if_the_smallest_batch_does_not_fit() -> None:
  rows = accelerator._rows(tiny=False)
  next(rows)
  with pytest.raises(StopIteration):
    rows.send(None)
