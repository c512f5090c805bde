"""How soon `import distlm` and the first training step are there.

  python benchmarks/startup.py [--quick]

It times `import distlm` beside a Python that imports nothing, and `distlm
train` of experiments/tiny.py on 4 fake devices from the command to the first
finished step: cold, with an empty cache of compiled programs, and warm, with
what the cold run left there. The text is tokenized before.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs

NUM_DEVICES = 4
NUM_IMPORTS, NUM_ROUNDS = 5, 3
MAX_IMPORT_SECS, MAX_FIRST_STEP_SECS = 0.1, 5.0
COLD, WARM = "cold", "warm"


def measure(quick: bool = False) -> dict[str, Any]:
  """Returns the median seconds.

  Args:
    quick: makes one round of the starts instead of three.
  """
  imports = [
    functools.partial(_run_python, code) for code in ("import distlm", "pass")
  ]
  imported, bare = map(
    statistics.median, jobs.call_in_turns(NUM_IMPORTS, imports)
  )
  with tempfile.TemporaryDirectory() as text_cache:
    jobs.call(jobs.prepare_text, settings={"data.cache_dir": text_cache})
    rounds = [
      _start_each_way(text_cache) for _ in range(1 if quick else NUM_ROUNDS)
    ]
  return {
    "import": imported - bare,
    "bare": bare,
    "first_step": jobs.medians(rounds),
    "num_rounds": len(rounds),
  }


def _run_python(code: str) -> float:
  command = [sys.executable, "-c", code]
  return jobs.secs(lambda: subprocess.run(command, check=True, cwd=jobs.ROOT))


def _start_each_way(text_cache: str) -> dict[str, float]:
  """Returns the seconds of one round."""
  with tempfile.TemporaryDirectory() as name:
    # Of the user's own settings of caches, none may be there.
    env = {
      key: value for key, value in os.environ.items() if "CACHE" not in key
    }
    env["XDG_CACHE_HOME"] = name
    return {key: _first_step(env, text_cache) for key in (COLD, WARM)}


def _first_step(env: dict[str, str], text_cache: str) -> float:
  """Returns the seconds from the command to the end of the first step."""
  with tempfile.TemporaryDirectory() as name:
    workdir = Path(name) / "run"
    settings = {"data.cache_dir": text_cache, "log_train_data_interval": 1}
    arguments = jobs.train_arguments(workdir, settings, NUM_DEVICES)
    command = [sys.executable, "-m", "distlm", *arguments]
    start = time.perf_counter()
    process = subprocess.Popen(
      command, cwd=jobs.ROOT, env=env, stdout=subprocess.DEVNULL
    )
    try:
      end = jobs.wait_for_rows(process, workdir / "metrics.jsonl")
    finally:
      process.kill()
      process.wait()
  return end - start


def table(result: dict[str, Any]) -> str:
  """Returns the figures as Markdown."""
  first = result["first_step"]
  rows = [
    ("`import distlm`, without Python's own start", result["import"]),
    ("first step, cold", first[COLD]),
    ("first step, warm", first[WARM]),
  ]
  return jobs.markdown(
    ("what", "after, s"), [(what, f"{secs:.3f}") for what, secs in rows]
  )


def targets(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met)."""
  first, imported = result["first_step"], result["import"]
  limit = MAX_FIRST_STEP_SECS
  return [
    (
      "`import distlm`, s",
      imported,
      f"<= {MAX_IMPORT_SECS}",
      imported <= MAX_IMPORT_SECS,
    ),
    (
      f"command to first step on {NUM_DEVICES} devices, warm, s",
      first[WARM],
      f"<= {limit}",
      first[WARM] <= limit,
    ),
  ]


if __name__ == "__main__":
  jobs.print_results(sys.modules[__name__])
