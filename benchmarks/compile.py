"""How long compiling an update takes, by the depth of the model.

  python benchmarks/compile.py [--quick]

It traces, lowers and compiles the pmapped update of small models, each in a
process of its own, in turns, without JAX's cache of compiled programs. Layers
are scanned, so that depth should cost nothing.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jobs

DEPTHS = (6, 12, 24)
NUM_ROUNDS = 3
MAX_RATIO = 1.3
SIZES: jobs.Settings = {
  "model.num_heads": 2,
  "model.model_size": 64,
  "data.sequence_length": 64,
  "data.global_batch_size": 8,
}


def measure(
  quick: bool = False, settings: jobs.Settings | None = None
) -> dict[str, Any]:
  """Returns the median seconds by depth.

  Args:
    quick: makes one round instead of three.
    settings: further ones, such as `model.remat`.
  """
  with jobs.corpus() as text:
    calls = [
      functools.partial(
        jobs.call,
        measure_compile,
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        settings={
          **SIZES,
          **text,
          **(settings or {}),
          "model.num_layers": depth,
        },
      )
      for depth in DEPTHS
    ]
    columns = jobs.call_in_turns(1 if quick else NUM_ROUNDS, calls)
  return {
    "rows": [
      {"num_layers": depth, **jobs.medians(column)}
      for depth, column in zip(DEPTHS, columns, strict=True)
    ]
  }


def table(result: dict[str, Any]) -> str:
  """Returns the figures as Markdown."""
  first = result["rows"][0]
  return jobs.markdown(
    (
      *("layers", "trace and lower, s", "compile, s", "both, s"),
      f"over {first['num_layers']} layers",
    ),
    [
      (
        row["num_layers"],
        f"{row['lower']:.2f}",
        f"{row['compile']:.2f}",
        f"{_total(row):.2f}",
        f"{_total(row) / _total(first):.2f}",
      )
      for row in result["rows"]
    ],
  )


def targets(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met)."""
  first, last = result["rows"][0], result["rows"][-1]
  ratio = _total(last) / _total(first)
  what = (
    f"time to compile {last['num_layers']} layers over that of"
    f" {first['num_layers']}"
  )
  return [(what, ratio, f"<= {MAX_RATIO}", ratio <= MAX_RATIO)]


def _total(row: dict[str, float]) -> float:
  return row["lower"] + row["compile"]


def measure_compile(settings: jobs.Settings) -> dict[str, float]:
  """Times it in this process."""
  from distlm import parallel

  parallel.start(1)
  experiment, batch, keys = jobs.make_experiment(settings)
  found: dict[str, Any] = {}

  def lower() -> None:
    state = experiment._train_state
    found["lowered"] = experiment._update.lower(state, batch, keys)

  lower_secs = jobs.secs(lower)
  return {
    "lower": lower_secs,
    "compile": jobs.secs(lambda: found["lowered"].compile()),
  }


if __name__ == "__main__":
  jobs.print_results(sys.modules[__name__])
