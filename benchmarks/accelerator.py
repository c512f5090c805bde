"""What the 124M model does on this machine's accelerators; one command.

  python benchmarks/accelerator.py [--minutes=10] [--devices=N]

It prints tokens/s and MFU as a Markdown table: for growing batches until memory
runs out, then at the best batch for attention by XLA, recomputed activations
and the loss by chunks, and for the whole of `distlm train` beside the compiled
update alone. Each row is a process of its own, so that running out of memory
ends that row only. `--tiny` shows on a CPU that all of it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "experiments" / "gpt2_small.py"
BATCH_SIZES = (8, 16, 32, 64, 128, 256)  # sequences of a device
MAX_ROW_SECS = 600
# Waiting for each step would leave the devices idle between them.
NUM_ROUNDS, STEPS_PER_ROUND = 5, 5

_SETTINGS = {
  "precision": "bf16",
  "accumulation_steps": "1",
  "log_train_data_interval": "5",
  "training_steps": "60",
  "optimizer.warmup_steps": "1",
  "evaluation.interval": "0",
  "evaluation.batches": "1",
  "checkpoint.interval": "1000",
}
_TINY_SETTINGS = {
  **_SETTINGS,
  "precision": "f32",
  "model.num_layers": "2",
  "model.num_heads": "2",
  "model.model_size": "32",
  "model.vocab_size": "512",
  "data.sequence_length": "32",
  "log_train_data_interval": "1",
  "training_steps": "8",
}
_TINY_BATCH_SIZES = (2, 4)
_VARIANTS = (
  {"model.attention": "xla"},
  {"model.remat": "dots"},
  {"loss_chunk": "128"},
  {"model.remat": "dots", "loss_chunk": "128"},
)
_TINY_VARIANTS = ({"model.remat": "dots", "loss_chunk": "16"},)
_COLUMNS = (
  *("settings", "sequences a device", "tokens/s", "MFU", "step, ms"),
  *("peak memory, GiB", "compile, s"),
)


@dataclasses.dataclass(frozen=True)
class Row:
  """What is measured in one process.

  Attributes:
    batch_size: sequences of a device.
    settings: what differs from `_SETTINGS`.
    is_train: whether `distlm train` runs, instead of its update alone.
  """

  batch_size: int
  settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
  is_train: bool = False

  @property
  def name(self) -> str:
    """What the row says of its settings."""
    program = ("`distlm train`",) if self.is_train else ()
    changes = (f"{key}={value}" for key, value in self.settings.items())
    return ", ".join((*program, *changes)) or "update alone"


def main() -> None:
  """Prints the table, or measures a row for the process that does."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--minutes", type=float, default=10.0)
  parser.add_argument("--devices", type=int)
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--row", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.row:
    print(json.dumps(_measure(args, Row(**json.loads(args.row)))))
    return
  end = time.monotonic() + 60 * args.minutes
  sequence = _rows(args.tiny)
  row, has_header, bare, train = next(sequence), False, None, None
  while row is not None:
    if time.monotonic() > end:
      print(f"\nStopped after {args.minutes:g} minutes, before: {row.name}")
      break
    result = _run(row, args)
    if not has_header:
      chip, rule = result.get("chip", "unknown chip"), ["---"] * len(_COLUMNS)
      print(f"{chip}\n\n{_line(_COLUMNS)}\n{_line(rule)}")
      has_header = True
    print(_line(_cells(row, result)), flush=True)
    rate = result.get("tokens_per_sec")
    train = rate if row.is_train else train
    bare = rate if not row.settings and not row.is_train and rate else bare
    try:
      row = sequence.send(rate)
    except StopIteration:
      row = None
  if bare and train:
    print(f"\n`distlm train` makes {train / bare:.3f} of the tokens/s.")


def _rows(tiny: bool) -> Any:
  """Yields rows; is sent the tokens/s of each, or None if it failed."""
  rates: dict[int, float] = {}
  for batch_size in _TINY_BATCH_SIZES if tiny else BATCH_SIZES:
    rate = yield Row(batch_size)
    if rate is None:  # Larger ones need more memory still.
      break
    rates[batch_size] = rate
  if not rates:
    return
  best = max(rates, key=lambda size: rates[size])
  yield Row(best, is_train=True)
  for settings in _TINY_VARIANTS if tiny else _VARIANTS:
    yield Row(best, settings)
  # What they save in memory may pay as a larger batch.
  if not tiny:
    yield Row(2 * best, _VARIANTS[-1])


def _run(row: Row, args: argparse.Namespace) -> dict[str, Any]:
  """Returns what a new process measures, or why it does not, as "error"."""
  command = [sys.executable, __file__]
  command.append(f"--row={json.dumps(dataclasses.asdict(row))}")
  command += ["--tiny"] if args.tiny else []
  command += [f"--devices={args.devices}"] if args.devices else []
  try:
    process = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, timeout=MAX_ROW_SECS
    )
  except subprocess.TimeoutExpired:
    return {"error": f"no result after {MAX_ROW_SECS} s"}
  lines = process.stdout.splitlines()
  if process.returncode == 0 and lines:
    return json.loads(lines[-1])
  if "RESOURCE_EXHAUSTED" in process.stderr or process.returncode == -9:
    return {"error": "out of memory"}
  last = (process.stderr.strip() or "no error message").splitlines()[-1]
  return {"error": f"exit code {process.returncode}: {last[:200]}"}


def _cells(row: Row, result: Mapping[str, Any]) -> Iterator[str]:
  yield from (row.name, str(row.batch_size))
  if "error" in result:
    yield from (result["error"], *["-"] * 4)
    return
  yield f"{result['tokens_per_sec']:,.0f}"
  for key, form in (
    *(("mfu", "{:.1%}"), ("step_ms", "{:.1f}")),
    *(("peak_gib", "{:.1f}"), ("compile_secs", "{:.1f}")),
  ):
    yield "-" if result.get(key) is None else form.format(result[key])


def _line(cells: Any) -> str:
  return f"| {' | '.join(cells)} |"


def _measure(args: argparse.Namespace, row: Row) -> dict[str, Any]:
  settings = dict(_TINY_SETTINGS if args.tiny else _SETTINGS, **row.settings)
  if row.is_train:
    return _measure_train(args.devices, row.batch_size, settings)
  return _measure_update(args.devices, row.batch_size, settings)


def _measure_update(
  devices: int | None, batch_size: int, settings: Mapping[str, str]
) -> dict[str, Any]:
  """Measures the pmapped update alone, on one batch again and again."""
  from distlm import parallel

  parallel.start(devices)
  import jax
  import numpy as np

  from distlm import language_model
  from distlm.types import Batch

  num_devices = jax.device_count()
  config = _config(settings, batch_size * num_devices)
  model = language_model.make_model(config, config.model.vocab_size)
  updater = language_model.make_updater(config, model)
  update = parallel.pmap(updater.update, donate_argnums=0)
  keys = parallel.replicate(jax.random.PRNGKey(0))
  state = parallel.pmap(updater.init)(keys)
  length = config.data.sequence_length
  tokens = np.random.default_rng(0).integers(
    config.model.vocab_size,
    size=(parallel.local_device_count(), 1, batch_size, length + 1),
    dtype=np.int32,
  )  # [R, 1, B, T + 1]
  inputs, targets = tokens[..., :-1], tokens[..., 1:]
  batch = parallel.shard(Batch(inputs, targets, np.ones_like(inputs, bool)))
  start = time.perf_counter()
  state, scalars = jax.block_until_ready(update(state, batch, keys))
  compile_secs = time.perf_counter() - start
  secs = []
  for _ in range(NUM_ROUNDS):
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
      state, scalars = update(state, batch, keys)
    jax.block_until_ready(scalars)
    secs.append((time.perf_counter() - start) / STEPS_PER_ROUND)
  num_tokens = batch_size * num_devices * length
  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  return {
    **_rates(config, num_tokens / statistics.median(secs)),
    "compile_secs": compile_secs,
    "peak_gib": peak and peak / 2**30,
  }


def _measure_train(
  devices: int | None, batch_size: int, settings: Mapping[str, str]
) -> dict[str, Any]:
  """Measures `distlm train`, on its own text, as its metrics say."""
  num_devices = devices or _count_devices()
  settings = {
    **settings,
    "data.global_batch_size": str(batch_size * num_devices),
  }
  with tempfile.TemporaryDirectory() as workdir:
    code = subprocess.call(
      [
        *(sys.executable, "-m", "distlm", "train", f"--config={CONFIG}"),
        *("--jaxline_mode=train", f"--workdir={workdir}"),
        *([f"--devices={devices}"] if devices else []),
        *(f"--config.{key}={value}" for key, value in settings.items()),
      ],
      stdout=subprocess.DEVNULL,
    )
    if code:  # Its last line of error says why.
      sys.exit(code)
    metrics = Path(workdir, "metrics.jsonl").read_text().splitlines()
  rates = [json.loads(line).get("tokens_per_sec") for line in metrics]
  rates = [rate for rate in rates if rate][len(metrics) // 3 :]
  from distlm import parallel

  parallel.start(devices)
  config = _config(settings, batch_size * num_devices)
  return _rates(config, statistics.median(rates))


def _count_devices() -> int:
  """Counts them in another process, which leaves them free for the training."""
  return int(
    subprocess.run(
      [sys.executable, "-c", "import jax; print(jax.device_count())"],
      check=True,
      stdout=subprocess.PIPE,
      text=True,
    ).stdout
  )


def _config(settings: Mapping[str, str], global_batch_size: int) -> Any:
  from distlm import config as configs

  tree = configs.load_config_file(str(CONFIG))
  size = ("data.global_batch_size", str(global_batch_size))
  configs.apply_overrides(tree, [*settings.items(), size])
  return configs.parse_config(tree)


def _rates(config: Any, tokens_per_sec: float) -> dict[str, Any]:
  """Returns what a rate means on the devices of this process."""
  import jax

  from distlm import flops

  device, data = jax.local_devices()[0], config.data
  flops_per_token = flops.training_flops_per_token(
    config.model, config.model.vocab_size, data.sequence_length
  )
  peak = flops.device_peak_flops(
    device.device_kind,
    device.platform,
    jax.local_device_count(),
    config.precision,
  )
  num_devices = jax.device_count()
  return {
    "chip": (
      f"{num_devices} x {device.device_kind} ({device.client.platform_version}"
      f"), jax {jax.__version__}, {config.precision},"
      f" {data.sequence_length} positions, XLA_FLAGS="
      f"{os.environ.get('XLA_FLAGS', '')}"
    ).replace("\n", " "),
    "tokens_per_sec": tokens_per_sec,
    "mfu": peak and tokens_per_sec * flops_per_token / (peak * num_devices),
    "step_ms": 1e3
    * data.global_batch_size
    * data.sequence_length
    / tokens_per_sec,
  }


if __name__ == "__main__":
  main()
