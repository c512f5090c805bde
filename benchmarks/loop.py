"""What the whole loop costs beside the bare compiled step.

  python benchmarks/loop.py --text=PATH/tinyshakespeare.txt

For 1, 2 and 4 devices it runs, each in a process of its own and in turns,
(a) the pmapped update of experiments/shakespeare_char.py on one batch, again
and again, and (b) `distlm train` on that config: JAXline's loop, data, metrics
and checkpoints. It prints tokens/s of both, and of (b) the peak memory and the
time from the command to the first finished step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = "experiments/shakespeare_char.py"
DEVICE_COUNTS = (1, 2, 4)
NUM_ROUNDS = 3
NUM_STEPS = 120


def main() -> None:
  """Prints the table, or measures the bare step in a child process."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--text", required=True, help="the text to train on")
  parser.add_argument("--bare-step-devices", type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.bare_step_devices:
    print(_measure_bare_step(args.text, args.bare_step_devices))
    return
  print(
    "| devices | bare step, tokens/s | distlm train, tokens/s | ratio |"
    " peak memory, MiB | first step after, s |\n|---|---|---|---|---|---|"
  )
  for num_devices in DEVICE_COUNTS:
    rounds = [
      (
        _run_bare_step(args.text, num_devices),
        _run_train(args.text, num_devices),
      )
      for _ in range(NUM_ROUNDS)
    ]
    bare = statistics.median(rate for rate, _ in rounds)
    train, mib, secs = (
      statistics.median(column)
      for column in zip(*(run for _, run in rounds), strict=True)
    )
    print(
      f"| {num_devices} | {bare:,.0f} | {train:,.0f} | {train / bare:.2f} |"
      f" {mib:,.0f} | {secs:.1f} |",
      flush=True,
    )


def _run_bare_step(text: str, num_devices: int) -> float:
  output = subprocess.run(
    [
      sys.executable,
      __file__,
      f"--text={text}",
      f"--bare-step-devices={num_devices}",
    ],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  return float(output.splitlines()[-1])


def _measure_bare_step(text: str, num_devices: int) -> float:
  """Returns tokens/s of the compiled update alone."""
  from distlm import parallel

  parallel.start(num_devices)
  import jax

  from distlm import config as configs
  from distlm import experiment, language_model
  from distlm.data import loader, token_store

  config_dict = configs.load_config_file(CONFIG)
  configs.apply_overrides(config_dict, [("data.source", text)])
  config = configs.parse_config(config_dict)
  store = token_store.open_token_store(config.data)
  batches = loader.Loader(
    store, config.data, 0, 0, experiment.current_layout(config)
  )
  model = language_model.make_model(config, store.tokenizer.vocab_size)
  updater = language_model.make_updater(config, model)
  update = parallel.pmap(updater.update, donate_argnums=0)
  keys = parallel.replicate(jax.random.PRNGKey(0))
  state = parallel.pmap(updater.init)(keys)
  batch = parallel.shard(batches.process_batch(0))
  times = []
  for _ in range(NUM_STEPS):
    state, scalars = update(state, batch, keys)
    jax.block_until_ready(scalars)
    times.append(time.perf_counter())
  step_secs = statistics.median(
    after - before for before, after in itertools.pairwise(times)
  )
  return batch.mask.size / step_secs


def _run_train(text: str, num_devices: int) -> tuple[float, float, float]:
  """Returns tokens/s, peak memory in MiB and seconds to the first step."""
  with tempfile.TemporaryDirectory() as workdir:
    metrics = Path(workdir) / "metrics.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "distlm", "train", f"--config={CONFIG}"),
        *("--jaxline_mode=train", f"--devices={num_devices}"),
        *(f"--workdir={workdir}", f"--config.data.source={text}"),
        f"--config.training_steps={NUM_STEPS}",
        "--config.log_train_data_interval=1",
      ],
      stdout=subprocess.DEVNULL,
    )
    while not (metrics.exists() and metrics.stat().st_size):
      if process.poll() is not None:
        sys.exit(f"distlm train ended with code {process.returncode}")
      time.sleep(0.01)
    first_step_secs = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status:
      sys.exit(f"distlm train ended with status {status}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
  rate = statistics.median(row["tokens_per_sec"] for row in rows[20:])
  return rate, usage.ru_maxrss / 1024, first_step_secs


if __name__ == "__main__":
  main()
