"""A batch as large as runs have them: its gradient is that of its parts.

XLA computes large sums by other means than small ones, which were wrong once;
see the flags of CPUs in distlm/xla_flags.py.
"""

from __future__ import annotations

import subprocess
import sys

import tiny_run

CODE = """
import jax
import numpy as np
import distlm
from distlm import language_model, parallel
from distlm.types import Batch

parallel.start(1)
config = distlm.get_base_config()
config.model.update(num_layers=2, num_heads=6, model_size=384, dropout_rate=0.0)
config.data.sequence_length = 256
settings = distlm.parse_config(config)
forward = language_model.make_model(settings, 67)
updater = language_model.make_updater(settings, forward)
params = parallel.pmap(updater.init_fn)(parallel.replicate(jax.random.key(0)))
gradient = parallel.pmap(updater.gradient)
tokens = np.random.default_rng(0).integers(67, size=(2, 1, 16, 256))
results = []
for num_parts in (1, 4):
  inputs, targets = tokens.astype(np.int32).reshape(2, 1, num_parts, -1, 256)
  batch = parallel.shard(Batch(inputs, targets, np.ones(inputs.shape, bool)))
  keys = parallel.replicate(jax.random.PRNGKey(0))
  results.append(parallel.fetch(gradient(params, batch, keys)[0]))
print(max(jax.tree.leaves(jax.tree.map(
  lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), *results))))
"""


def _largest_difference(**variables: str) -> float:
  env = {**tiny_run.environment(None), **variables}
  result = subprocess.run(
    [sys.executable, "-c", CODE],
    env=env,
    check=True,
    capture_output=True,
    text=True,
  )
  return float(result.stdout)


def test_the_gradient_of_a_large_batch_is_that_of_its_parts() -> None:
  assert _largest_difference() < 1e-5
