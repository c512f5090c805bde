"""How much memory a training step takes, and what makes it less.

  python benchmarks/memory.py [--layers=6,24] [--large] [--quick]

For models of some depths it compiles the pmapped update with and without
donation, remat, accumulation, and the loss in chunks, each in a process of its
own, and asks XLA for the memory that the program takes on a device: arguments,
outputs that are no arguments donated, and temporary buffers. Then that process
trains 3 steps; how much higher its peak resident memory is than that of a
process which only imports the same and starts its devices, is measured memory:
of the compiler, before the first step, and of all. Last, what a device holds of
parameters and optimizer state, with the latter whole and in shards.
"""

from __future__ import annotations

import argparse
import resource
import sys
from typing import Any

import jobs

NUM_STEPS = 3
DEPTHS = (6, 24)
NUM_SHARDS = 4
MAX_REMAT_RATIO = 0.5
WIDTH_256: jobs.Settings = {
  "model.num_heads": 4,
  "model.model_size": 256,
  "model.dropout_rate": 0.0,
  "data.sequence_length": 256,
  "data.global_batch_size": 8,
}
LARGE: jobs.Settings = {
  **WIDTH_256,
  "model.num_layers": 12,
  "model.num_heads": 12,
  "model.model_size": 768,
  "data.sequence_length": 512,
}
NOT_DONATED = "without donation"
PLAIN, REMAT = "plain", "remat=full"
VARIANTS: dict[str, jobs.Settings] = {
  PLAIN: {},
  NOT_DONATED: {},
  "remat=dots": {"model.remat": "dots"},
  REMAT: {"model.remat": "full"},
  "accumulation_steps=4": {"accumulation_steps": 4},
  "loss_chunk=64": {"loss_chunk": 64},
  "all of these": {
    "model.remat": "full",
    "accumulation_steps": 4,
    "loss_chunk": 64,
  },
}
_QUICK_VARIANTS = (PLAIN, REMAT)
_MIB = 2**20


def measure(
  depths: tuple[int, ...] = DEPTHS, large: bool = False, quick: bool = False
) -> dict[str, Any]:
  """Returns the memory of each model and variant, in bytes.

  Args:
    depths: numbers of layers of the models of width 256.
    large: whether to measure one of 12 layers of width 768 and 512 positions.
    quick: measures fewer variants.
  """
  models = {
    f"{depth} x 256": {**WIDTH_256, "model.num_layers": depth}
    for depth in depths
  }
  if large:
    models["12 x 768"] = LARGE
  names = _QUICK_VARIANTS if quick else tuple(VARIANTS)
  updates = []
  with jobs.corpus() as text:
    baseline = jobs.call(measure_start)
    for model, settings in models.items():
      for name in names:
        found = jobs.call(
          measure_update,
          settings={**settings, **text, **VARIANTS[name]},
          is_donated=name != NOT_DONATED,
        )
        found["rss"] -= baseline
        found["compiler_rss"] -= baseline
        updates.append({"model": model, "variant": name, **found})
    states = [
      {
        "model": model,
        "is_sharded": is_sharded,
        **jobs.call(
          measure_state,
          settings={
            **settings,
            **text,
            "optimizer.shard_state": is_sharded,
          },
        ),
      }
      for model, settings in models.items()
      for is_sharded in (False, True)
    ]
  return {"baseline": baseline, "updates": updates, "states": states}


def table(result: dict[str, Any]) -> str:
  """Returns the figures as Markdown."""
  plain = {
    row["model"]: row for row in result["updates"] if row["variant"] == PLAIN
  }
  updates = [
    (
      row["model"],
      row["variant"],
      *(f"{row[key] / _MIB:,.0f}" for key in ("argument", "temporary")),
      f"{row['needed'] / _MIB:,.0f}",
      f"{row['needed'] / plain[row['model']]['needed']:.2f}",
      # XLA's peak on CPUs leaves out what is temporary.
      f"{row['peak'] / _MIB:,.0f}" if row["peak"] > row["temporary"] else "",
      *(f"{row[key] / _MIB:,.0f}" for key in ("compiler_rss", "rss")),
    )
    for row in result["updates"]
  ]
  states = [
    (
      row["model"],
      "in shards" if row["is_sharded"] else "whole",
      f"{row['params'] / _MIB:.1f}",
      f"{row['opt_state'] / _MIB:.1f}",
    )
    for row in result["states"]
  ]
  of_updates = (
    *("layers x width", "update", "arguments, MiB", "temporary, MiB"),
    *("sum, MiB", "of plain", "peak by XLA, MiB"),
    *("measured before steps, MiB", "measured, MiB"),
  )
  of_states = (
    *("layers x width", f"optimizer state on {NUM_SHARDS} devices"),
    *("parameters a device, MiB", "optimizer state a device, MiB"),
  )
  return (
    f"{jobs.markdown(of_updates, updates)}\n\nThe sum is of arguments, outputs"
    " that are not donated arguments, and temporary buffers, by XLA; measured"
    " is the peak resident memory of the process above"
    f" {result['baseline'] / _MIB:,.0f} MiB, those of one that does nothing."
    f"\n\n{jobs.markdown(of_states, states)}"
  )


def targets(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met)."""
  found = []
  for key, name in (("needed", "by XLA"), ("rss", "measured")):
    of = {(row["model"], row["variant"]): row[key] for row in result["updates"]}
    for model in {row["model"] for row in result["updates"]}:
      if model.startswith("24 "):
        ratio = of[model, REMAT] / of[model, PLAIN]
        what = f"memory with {REMAT} over that without, 24 layers, {name}"
        text = f"<= {MAX_REMAT_RATIO}"
        found.append((what, ratio, text, ratio <= MAX_REMAT_RATIO))
  return found


def measure_start() -> int:
  """Returns the peak memory of a process that only starts, in bytes."""
  from distlm import experiment, parallel

  parallel.start(1)
  del experiment
  return _peak_rss()


def measure_update(
  settings: jobs.Settings, is_donated: bool
) -> dict[str, float]:
  """Compiles the update and makes some steps, in this process."""
  from distlm import parallel

  parallel.start(1)
  import jax

  if not is_donated:  # The experiment always does.
    pmap = parallel.pmap
    parallel.pmap = lambda fn, donate_argnums=(): pmap(fn)
  experiment, batch, keys = jobs.make_experiment(settings)
  state, experiment._train_state = experiment._train_state, None
  update = experiment._update.lower(state, batch, keys).compile()
  stats, compiler_rss = update.memory_analysis(), _peak_rss()
  for _ in range(NUM_STEPS):
    state, scalars = update(state, batch, keys)
    jax.block_until_ready(scalars)
  return {
    "argument": stats.argument_size_in_bytes,
    "temporary": stats.temp_size_in_bytes,
    "needed": stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    + stats.temp_size_in_bytes
    - stats.alias_size_in_bytes,
    "peak": stats.peak_memory_in_bytes,
    "compiler_rss": compiler_rss,
    "rss": _peak_rss(),
  }


def measure_state(settings: jobs.Settings) -> dict[str, float]:
  """Returns the bytes that a device holds of a state."""
  from distlm import parallel

  parallel.start(NUM_SHARDS)
  import jax

  experiment, _, _ = jobs.make_experiment(settings)
  state = experiment._train_state
  if experiment._config.optimizer.shard_state:  # Split by the first step.
    state = state._replace(opt_state=experiment._split(state.opt_state))
  return {
    name: sum(
      leaf.addressable_data(0).nbytes
      for leaf in jax.tree.leaves(getattr(state, name))
    )
    for name in ("params", "opt_state")
  }


def _peak_rss() -> int:
  """Returns the peak memory of this process, in bytes."""
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--layers", default=",".join(map(str, DEPTHS)))
  parser.add_argument("--large", action="store_true")
  parser.add_argument("--quick", action="store_true")
  args = parser.parse_args()
  depths = tuple(map(int, args.layers.split(",")))
  result = measure(depths, args.large, args.quick)
  print(table(result))
  print(*targets(result), sep="\n")


if __name__ == "__main__":
  main()
