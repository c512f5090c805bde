"""Runs the benchmarks and writes benchmarks/RESULTS.md; `make bench`.

  python benchmarks/run.py [--text=PATH/tinyshakespeare.txt]
    [--only=memory,compile] [--quick]

Without a text, the time to a published loss is left out, and the throughput is
that on Python's standard library. The figures are kept in
benchmarks/results.json, so that a section can be measured again without the
others. `--only=` measures none, and writes the report anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
# In the order of the report, with the arguments of `measure` for `--quick`;
# None: it cannot be quick.
SECTIONS: dict[str, dict[str, Any] | None] = {
  "throughput": {"names": ("small",), "num_rounds": 1},
  "time_to_loss": None,
  "memory": {"quick": True},
  "compile": {"quick": True},
  "startup": {"quick": True},
  "checkpoint": {"quick": True},
  "data": {"quick": True},
}
ON_TEXT = ("throughput", "time_to_loss")


def main() -> None:
  """Measures, one section after the other, and writes the report."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", default=",".join(SECTIONS))
  parser.add_argument("--text", help="the text to train on")
  parser.add_argument("--quick", action="store_true")
  args = parser.parse_args()
  names = [name for name in args.only.split(",") if name]
  if unknown := set(names) - set(SECTIONS):
    parser.error(f"--only={args.only}: {unknown} are not of {list(SECTIONS)}")
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  failed = []
  for name in names:
    arguments = _arguments(name, args)
    if arguments is None:
      print(f"{name}: left out; it needs --text, and no --quick")
      continue
    try:
      entry = _measure(name, arguments)
      results[name] = {"is_quick": args.quick, **entry}
    except Exception:  # The other sections may still be measured.
      traceback.print_exc()
      failed.append(name)
      continue
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
  sections = {
    name: (importlib.import_module(name), results[name])
    for name in SECTIONS
    if name in results
  }
  if sections:
    report.write(sections, HERE)
  if failed:
    sys.exit(f"these failed: {', '.join(failed)}; their last figures stay")


def _arguments(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
  """Returns those of `measure`; None: the section cannot be measured."""
  arguments = SECTIONS[name] if args.quick else {}
  if arguments is None or (name == "time_to_loss" and not args.text):
    return None
  if name in ON_TEXT and args.text:
    return {**arguments, "text": args.text}
  return arguments


def _measure(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
  """Returns the entry of a section."""
  module = importlib.import_module(name)
  print(f"{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
  conditions, start = report.find_conditions(), time.monotonic()
  result = module.measure(**arguments)
  print(f"{module.table(result)}\n{time.monotonic() - start:.0f} s", flush=True)
  return {"conditions": conditions, "result": result}


if __name__ == "__main__":
  main()
