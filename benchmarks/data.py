"""How much faster batches are made than training takes them.

  python benchmarks/data.py [--small-rate=TOKENS_PER_SEC]
    [--medium-rate=TOKENS_PER_SEC] [--quick]

For a small and a medium model it makes batches of a text as long as
tinyshakespeare, as they are asked for and in the thread that loads ahead, and
counts their tokens. Without the rates of training it measures some steps of the
compiled update.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jobs

SIZES = ("small", "medium")
MIN_RATIO = 20
NUM_ROUNDS = 5
ROUND_SECS = 0.5
NUM_STEPS = {"small": 40, "medium": 5}


def measure(
  rates: dict[str, float] | None = None, quick: bool = False
) -> dict[str, Any]:
  """Returns tokens/s of both ways, and of training, by the model's size.

  Args:
    rates: tokens/s of training by size; measured where there is none.
    quick: leaves out the medium size.
  """
  rows = []
  with jobs.corpus() as text:
    for size in SIZES[: 1 if quick else None]:
      settings = jobs.of_size(size, text)
      row = jobs.call(measure_loading, settings=settings)
      row["training"] = (rates or {}).get(size) or jobs.call(
        measure_training, settings=settings, num_steps=NUM_STEPS[size]
      )
      rows.append({"size": size, **row})
  return {"rows": rows}


def table(result: dict[str, Any]) -> str:
  """Returns the figures as Markdown."""
  return jobs.markdown(
    (
      *("size", "loader, tokens/s", "loaded ahead, tokens/s"),
      *("training, tokens/s", "loader over training"),
    ),
    [
      (
        row["size"],
        *(f"{row[key]:,.0f}" for key in ("alone", "ahead", "training")),
        f"{_ratio(row):,.0f}",
      )
      for row in result["rows"]
    ],
  )


def targets(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met)."""
  return [
    (
      f"tokens/s of the loader over those of training, {row['size']}",
      _ratio(row),
      f">= {MIN_RATIO}",
      _ratio(row) >= MIN_RATIO,
    )
    for row in result["rows"]
  ]


def _ratio(row: dict[str, float]) -> float:
  """Returns that of the slower way."""
  return min(row["alone"], row["ahead"]) / row["training"]


def measure_loading(settings: jobs.Settings) -> dict[str, float]:
  """Returns tokens/s of the loader alone and in a thread, in turns."""
  from distlm.data import loader, prefetch, token_store

  config = jobs.make_config(settings)
  store = token_store.open_token_store(config.data)
  batches = loader.Loader(store, config.data, 0, 0, loader.Layout())

  def load() -> Iterator[Any]:
    step = 0
    while True:
      yield batches.process_batch(step)
      step += 1

  next(load())  # Draws the order of the first epoch.
  rates: dict[str, list[float]] = {"alone": [], "ahead": []}
  for _ in range(NUM_ROUNDS):
    rates["alone"].append(_rate(load()))
    with prefetch.Prefetcher(load(), config.data.prefetch_batches) as ahead:
      rates["ahead"].append(_rate(ahead))
  return {key: statistics.median(values) for key, values in rates.items()}


def _rate(batches: Iterator[Any]) -> float:
  start, num_tokens = time.perf_counter(), 0
  while (elapsed := time.perf_counter() - start) < ROUND_SECS:
    num_tokens += next(batches).mask.size
  return num_tokens / elapsed


def measure_training(settings: jobs.Settings, num_steps: int) -> float:
  """Returns tokens/s of the compiled update on one device."""
  from distlm import parallel

  parallel.start(1)
  import jax

  experiment, batch, keys = jobs.make_experiment(settings)

  def step() -> None:
    experiment._train_state, scalars = experiment._update(
      experiment._train_state, batch, keys
    )
    jax.block_until_ready(scalars)

  step()  # Compiles.
  times = [jobs.secs(step) for _ in range(num_steps)]
  return batch.mask.size / statistics.median(times)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  for size in SIZES:
    parser.add_argument(f"--{size}-rate", type=float)
  parser.add_argument("--quick", action="store_true")
  args = parser.parse_args()
  rates = {size: getattr(args, f"{size}_rate") for size in SIZES}
  result = measure(rates, args.quick)
  print(table(result))
  print(*targets(result), sep="\n")


if __name__ == "__main__":
  main()
