"""How long a save keeps the training from its next step.

  python benchmarks/checkpoint.py [--quick]

It runs `distlm train` on a medium model with frequent saves, and notes when
each step is called and each save begins and ends. A save waits for the update
under way, which is training; so what it costs is how much longer the steps
around it take than as many others, the writing in the background included. The
first save starts Orbax and stands by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs

NUM_SAVES, NUM_QUICK_SAVES = 4, 3
INTERVAL_STEPS = 5
# The step before a save, which it waits for, and one that finds none under way.
WINDOW_STEPS = 3
MAX_STEPS_LOST = 1


def measure(quick: bool = False) -> dict[str, Any]:
  """Returns the seconds of a step, and of what saves cost.

  Args:
    quick: takes the small model, and fewer saves.
  """
  num_saves = NUM_QUICK_SAVES if quick else NUM_SAVES
  size = "small" if quick else "medium"
  with jobs.corpus() as text:
    settings = jobs.of_size(size, text)
    times = jobs.call(measure_run, settings=settings, num_saves=num_saves)
  return {"size": size, **_summarize(times)}


def _summarize(times: dict[str, list[Any]]) -> dict[str, Any]:
  """Returns the figures of one run from its times."""
  steps, saves = times["steps"], times["saves"]
  # After so many completed steps; the call before it has the index one less.
  is_near = {step - 1 + i for step, _, _ in saves for i in range(WINDOW_STEPS)}
  lengths = [after - before for before, after in itertools.pairwise(steps)]
  step_secs = statistics.median(
    length for i, length in enumerate(lengths) if i > 1 and i not in is_near
  )
  columns = {
    "call": [end - start for _, start, end in saves],
    "lost": [
      sum(lengths[step - 1 : step - 1 + WINDOW_STEPS])
      - WINDOW_STEPS * step_secs
      for step, _, _ in saves
    ],
  }
  return {
    "step": step_secs,
    "num_bytes": times["num_bytes"],
    **{f"first_{name}": column[0] for name, column in columns.items()},
    **{
      f"later_{name}": statistics.median(column[1:])
      for name, column in columns.items()
    },
    "saves": columns,
  }


def table(result: dict[str, Any]) -> str:
  """Returns the figures as Markdown."""
  step = result["step"]
  rows = [
    (
      save,
      f"{1e3 * result[f'{save}_call']:,.0f}",
      f"{1e3 * result[f'{save}_lost']:,.0f}",
      f"{result[f'{save}_lost'] / step:.2f}",
    )
    for save in ("first", "later")
  ]
  header = ("save", "call, ms", "training lost, ms", "in steps")
  return (
    f"{jobs.markdown(header, rows)}\n\nOf {result['num_bytes'] / 2**20:,.0f}"
    f" MiB, the {result['size']} model; a step takes {1e3 * step:,.0f} ms."
    f" Later saves: the median of {len(result['saves']['lost']) - 1}."
  )


def targets(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met)."""
  value = result["later_lost"] / result["step"]
  what = f"training lost by a save, in steps, {result['size']}"
  return [(what, value, f"<= {MAX_STEPS_LOST}", value <= MAX_STEPS_LOST)]


def measure_run(
  settings: jobs.Settings, num_saves: int
) -> dict[str, list[Any] | int]:
  """Trains in this process; returns when steps and saves were."""
  from distlm import checkpoint, cli, experiment

  steps: list[float] = []
  saves: list[tuple[int, float, float]] = []
  make_step = experiment.LanguageModelExperiment.step
  save = checkpoint.DiskCheckpointer.save

  def timed_step(*args: Any, **kwargs: Any) -> Any:
    steps.append(time.perf_counter())
    return make_step(*args, **kwargs)

  def timed_save(self: Any, series: str) -> None:
    start = time.perf_counter()
    save(self, series)
    saves.append((len(steps), start, time.perf_counter()))

  experiment.LanguageModelExperiment.step = timed_step
  checkpoint.DiskCheckpointer.save = timed_save
  # JAXline saves at the end too, when no step follows.
  num_steps = num_saves * INTERVAL_STEPS + INTERVAL_STEPS - 1
  settings = {
    **settings,
    "training_steps": num_steps,
    "checkpoint.interval": INTERVAL_STEPS,
    "checkpoint.keep": 1,
    "log_train_data_interval": 1,
  }
  with tempfile.TemporaryDirectory() as name:
    workdir = Path(name) / "run"
    arguments = jobs.train_arguments(workdir, settings, num_devices=1)
    with (
      contextlib.redirect_stdout(sys.stderr),
      contextlib.suppress(SystemExit),
    ):
      cli.main(arguments)
    newest = max((workdir / "checkpoints" / "latest").iterdir())
    num_bytes = sum(path.stat().st_size for path in newest.rglob("*"))
  saves = [timed for timed in saves if timed[0] < num_steps]
  return {"steps": steps, "saves": saves, "num_bytes": num_bytes}


if __name__ == "__main__":
  jobs.print_results(sys.modules[__name__])
