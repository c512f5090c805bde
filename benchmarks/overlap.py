"""Whether XLA overlaps the gradient's collectives with the backward pass.

  python benchmarks/overlap.py --platform=tpu
  python benchmarks/overlap.py --platform=gpu --topology=1x8x8
  python benchmarks/overlap.py --platform=tpu --sums=after  # to compare

It needs no accelerator: it compiles the update of distlm for one, reads the
schedule that the compiler has fixed, and prints what runs between the start and
the end of each collective. That is a fact of the program, not a time. Settings
are given as to `distlm train`, such as --config.optimizer.shard_state=true;
attention is XLA's.

It does need the compilers, each in an environment of its own with distlm:

  pip install "jax[tpu]==0.10.2"
  pip install --no-deps jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scheduled_hlo import Collective, Program

TOPOLOGIES = {"tpu": "v5e:4x4", "gpu": "1x1x8"}  # GPU: slices, hosts, GPUs.
PACKAGES = {
  "tpu": ("libtpu", 'pip install "jax[tpu]==0.10.2"'),
  "gpu": (
    "jax_plugins.xla_cuda13",
    "pip install --no-deps jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2",
  ),
}
# Of an H100 SXM5, from NVIDIA's H100 white paper and CUDA's device properties.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# So that a compilation takes seconds; the command line changes them.
SETTINGS = (
  ("model.num_layers", "4"),
  ("model.num_heads", "8"),
  ("model.model_size", "512"),
  ("model.vocab_size", "4096"),
  ("model.dropout_rate", "0.0"),
  ("data.sequence_length", "256"),
  ("precision", "bf16"),
)
_SEQUENCES_PER_DEVICE = 4


def main() -> None:
  """Compiles the updates and prints their collectives."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--platform", choices=TOPOLOGIES, required=True)
  parser.add_argument("--topology", help="by default 16 TPU v5e, or 8 GPUs")
  parser.add_argument(
    "--flags",
    choices=("distlm", "none"),
    default="distlm",
    help="those that distlm sets, or XLA's defaults",
  )
  parser.add_argument(
    "--sums",
    choices=("backward", "after"),
    default="backward",
    help="of the gradients of layers: in the backward loop, or after it",
  )
  parser.add_argument(
    "--option",
    action="append",
    default=[],
    help="of the compiler: xla_NAME=VALUE; may be given again",
  )
  args, rest = parser.parse_known_args()
  if missing := what_is_missing(args.platform):
    sys.exit(missing)
  overrides = [*SETTINGS, *parse_settings(rest)]
  options = compiler_options(args.platform, args.flags, args.option)
  start = time.perf_counter()
  program, memory_bytes, num_param_bytes = compile_update(
    args.platform,
    args.topology or TOPOLOGIES[args.platform],
    overrides,
    options,
    args.sums,
  )
  print(
    f"{args.platform} {args.topology or TOPOLOGIES[args.platform]}, flags:"
    f" {' '.join([args.flags, *args.option])}, sums: {args.sums}: compiled in"
    f" {time.perf_counter() - start:.0f} s, {memory_bytes / 2**20:,.0f} MiB of"
    f" temporary buffers, {num_param_bytes / 1e6:.1f} MB of parameters\n"
  )
  print(report(Program(program).collectives()))


def what_is_missing(platform: str) -> str:
  """Returns what to install to compile for a platform, or ""."""
  module, command = PACKAGES[platform]
  try:
    found = importlib.util.find_spec(module)
  except ImportError:  # Its package is missing.
    found = None
  return "" if found else f"{module} is not installed: {command}"


def parse_settings(args: Sequence[str]) -> list[tuple[str, str]]:
  """Returns pairs of key and text of --config.KEY=TEXT."""
  pairs = []
  for arg in args:
    found = re.fullmatch(r"--config\.([\w.]+)=(.*)", arg)
    if not found:
      sys.exit(f"{arg}: it must be --config.KEY=VALUE")
    pairs.append((found[1], found[2]))
  return pairs


def compiler_options(
  platform: str, flags: str, more: Sequence[str] = ()
) -> dict[str, Any]:
  """Returns the options that XLA takes for one compilation.

  Args:
    platform: "gpu" or "tpu".
    flags: "distlm", for those that it sets, or "none".
    more: further ones, as NAME=VALUE.
  """
  from distlm import xla_flags

  texts = [
    flag.lstrip("-")
    for group in xla_flags.recommended(platform).values()
    for flag in group
    if flags == "distlm"
  ]
  options = dict(text.split("=", 1) for text in [*texts, *more])
  # As options XLA's GPU compiler takes no texts for booleans.
  booleans = {"true": True, "false": False}
  return {key: booleans.get(text, text) for key, text in options.items()}


def compile_update(
  platform: str,
  topology: str,
  overrides: Sequence[tuple[str, str]],
  options: Mapping[str, Any],
  sums: str = "backward",
) -> tuple[str, int, int]:
  """Compiles the pmapped update of distlm for devices that are not there.

  Args:
    platform: "gpu" or "tpu".
    topology: as `jax.experimental.topologies` names it.
    overrides: of the default settings.
    options: of the compiler.
    sums: "backward", for what distlm does on the platform: gradients of layers
      are summed in the backward loop; or "after" it.

  Returns:
    The text of the compiled program, the bytes of its temporary buffers on one
    device, and those of the parameters.
  """
  # For libtpu: no metadata server to ask, and other processes may compile too.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  os.environ["JAX_PLATFORMS"] = "cpu"
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies

  from distlm import config as configs
  from distlm import get_base_config, language_model, parallel
  from distlm.model import transformer
  from distlm.types import Batch

  tree = get_base_config()
  tree.model.attention = "xla"
  configs.apply_overrides(tree, overrides)
  config = configs.parse_config(tree)
  devices = _topology_devices(topologies, platform, topology)

  def of_all(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(devices), *shape), dtype)

  model = language_model.make_model(config, config.model.vocab_size)
  updater = dataclasses.replace(
    language_model.make_updater(config, model),
    # Not as `make_updater` says, which sees CPUs.
    is_marked=transformer.is_of_layers if sums == "backward" else None,
  )
  pmap = functools.partial(jax.pmap, axis_name=parallel.AXIS, devices=devices)
  keys = of_all((2,), jnp.uint32)
  state = jax.eval_shape(pmap(updater.init), keys)
  shape = (
    config.accumulation_steps,
    _SEQUENCES_PER_DEVICE,
    config.data.sequence_length,
  )
  batch = Batch(
    *(of_all(shape, dtype) for dtype in (jnp.int32, jnp.int32, jnp.bool_))
  )
  compiled = (
    pmap(updater.update, donate_argnums=0)
    .lower(state, batch, keys)
    .compile(compiler_options=dict(options))
  )
  num_bytes = sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params)
  )
  memory = compiled.memory_analysis()
  return (
    compiled.as_text(),
    memory.temp_size_in_bytes,
    num_bytes // len(devices),
  )


def _topology_devices(
  topologies: Any, platform: str, topology: str
) -> Sequence[Any]:
  if platform == "tpu":
    return topologies.get_topology_desc(
      platform="tpu", topology_name=topology
    ).devices
  return topologies.get_topology_desc(
    platform="cuda", target_config=H100, topology=topology
  ).devices


def report(found: Sequence[Collective]) -> str:
  """Returns a table of collectives, alike ones in one row, and the totals."""
  lines = [
    "| number | collective | type | MB | times | asynchronous | operations"
    " between | matrix products between |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row, number in collections.Counter(found).items():
    lines.append(
      f"| {number} | {row.kind} | {row.dtypes} | {row.num_bytes / 1e6:.3f} |"
      f" {row.times} | {'yes' if row.is_async else 'no'} | {row.num_compute} |"
      f" {row.num_matmuls} |"
    )
  lines.append("")
  for kind in dict.fromkeys(row.kind for row in found):
    rows = [row for row in found if row.kind == kind]
    total, hidden = (
      sum(row.num_bytes * row.times for row in some) / 1e6
      for some in (rows, [row for row in rows if row.num_matmuls])
    )
    lines.append(
      f"{kind}: {total:.1f} MB an update, {hidden:.1f} MB of them with matrix"
      " products between start and end"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  main()
