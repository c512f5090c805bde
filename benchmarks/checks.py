"""What the checks of a run cost: of replicas, of values, and checksums.

  python benchmarks/checks.py [--config=experiments/tiny.py] [--devices=4]

In one process and in turns it times the pmapped update alone, and with a
comparison of all replicas after it; then, once each, the parts of a save: the
look for values that are not finite, the save itself, its checksums when it is
written (in a thread) and when it is read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_ROUNDS, NUM_STEPS = 5, 30


def main() -> None:
  """Prints the figures."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--config", default="experiments/tiny.py")
  parser.add_argument("--devices", type=int, default=4)
  args = parser.parse_args()
  from distlm import parallel

  parallel.start(args.devices)
  parallel.repair_jaxline()
  import jax

  from distlm import checksums, replicas, snapshot
  from distlm import config as configs
  from distlm.checkpoint import DiskCheckpointer
  from distlm.experiment import LanguageModelExperiment

  config = configs.parse_config(configs.load_config_file(args.config))
  key = jax.random.PRNGKey(0)
  experiment = LanguageModelExperiment("train", key, config)
  keys = parallel.replicate(key)
  compare = parallel.pmap(replicas.compare)
  batch = parallel.shard(experiment._loader.process_batch(0))

  def step(is_compared: bool) -> None:
    state, scalars = experiment._update(experiment._train_state, batch, keys)
    experiment._train_state = state
    jax.block_until_ready(compare(state) if is_compared else scalars)

  plain, compared = _time_in_turns(step)
  interval = config.replica_check.interval
  print(f"update {plain:.1f} ms, with a comparison {compared:.1f} ms")
  print(
    f"comparison {compared - plain:.2f} ms: every {interval} steps"
    f" {100 * (compared - plain) / plain / interval:.3f} % of training"
  )

  state: Any
  with tempfile.TemporaryDirectory() as directory:
    checkpointer = DiskCheckpointer(Path(directory), 1, {})
    state = checkpointer.get_experiment_state("latest")
    state.experiment_module = experiment
    state.train_step_rng = keys
    for number in (1, 2):  # The first one starts Orbax.
      state.global_step = number
      save = _secs(lambda: checkpointer.save("latest"))
      durable = _secs(checkpointer.wait_for_checkpointing_to_finish)
    arrays, _ = snapshot.take(experiment)
    look = _secs(lambda: snapshot.find_nonfinite(arrays))
    path = checkpointer.series("latest").path(2)
    sums = _secs(lambda: checksums.write_checksums(path))
    check = _secs(lambda: checksums.find_damage(path))
    size = sum(file.stat().st_size for file in path.rglob("*"))
    checkpointer.close()
  per_save = config.checkpoint.interval * plain
  print(
    f"save of {size / 2**20:.1f} MiB: blocks {1e3 * save:.0f} ms, of which the"
    f" look for what is not finite {1e3 * look:.1f} ms; on disk after"
    f" {1e3 * durable:.0f} ms more"
  )
  print(
    f"checksums: written in {1e3 * sums:.1f} ms (in the thread,"
    f" {100 * 1e3 * sums / per_save:.3f} % of the {config.checkpoint.interval}"
    f" steps between saves), checked in {1e3 * check:.1f} ms"
  )


def _time_in_turns(step: Callable[[bool], None]) -> tuple[float, float]:
  """Returns the medians, in ms, without and with a comparison."""
  times: dict[bool, list[float]] = {False: [], True: []}
  for is_compared in times:
    step(is_compared)  # Compiles.
  for _ in range(NUM_ROUNDS):
    for is_compared, column in times.items():
      column += [_secs(lambda c=is_compared: step(c)) for _ in range(NUM_STEPS)]
  plain, compared = (1e3 * statistics.median(times[c]) for c in (False, True))
  return plain, compared


def _secs(function: Callable[[], Any]) -> float:
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


if __name__ == "__main__":
  main()
