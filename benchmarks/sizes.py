"""The model sizes, the text and the batches that all benchmarks share."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import string
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distlm import switches
from distlm.data import corpora

# The base of all runs; `Size.settings` says what differs.
CONFIG = Path(__file__).parent.parent / "experiments" / "tiny.py"
NUM_BATCHES = 8  # The bare steps take them in turns.

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
# Optax's defaults, which are distlm's.
ADAM_B1, ADAM_B2, ADAM_EPS, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 1e-4
WIDENING_FACTOR = 4

# Of all contenders alike; the command of distlm sets it by itself.
ENVIRONMENT = {"GLIBC_TUNABLES": switches.MALLOC}

_CHARACTERS = frozenset(
  string.ascii_lowercase + string.digits + " \n_()[]{}.,:;=+-*/<>!\"'#%&|@\\"
)  # 65
_NUM_PEAK_TRIES = 10
_NUM_CHARACTERS = 1_115_394  # As many as tinyshakespeare has.


@dataclasses.dataclass(frozen=True)
class Size:
  """A GPT in float32, with tied embeddings, biases and no dropout."""

  name: str
  num_layers: int
  num_heads: int
  model_size: int  # D
  sequence_length: int  # T
  batch_size: int  # of all devices
  num_steps: int  # of one measurement
  device_counts: tuple[int, ...]  # measured unless the user says otherwise

  @property
  def tokens_per_step(self) -> int:
    """The targets of a batch."""
    return self.batch_size * self.sequence_length

  def settings(self, text: Path, cache_dir: Path) -> list[tuple[str, str]]:
    """Returns distlm's settings, beside those of `CONFIG`, by dotted key."""
    return [
      ("model.num_layers", f"{self.num_layers}"),
      ("model.num_heads", f"{self.num_heads}"),
      ("model.model_size", f"{self.model_size}"),
      ("model.widening_factor", f"{WIDENING_FACTOR}"),
      ("model.dropout_rate", "0.0"),
      ("data.source", f"{text}"),
      ("data.cache_dir", f"{cache_dir}"),
      ("data.tokenizer", "char"),
      ("data.sequence_length", f"{self.sequence_length}"),
      ("data.global_batch_size", f"{self.batch_size}"),
      ("data.validation_fraction", "0.1"),
      ("optimizer.learning_rate", f"{LEARNING_RATE}"),
      ("optimizer.schedule", "constant"),
      ("optimizer.warmup_steps", "0"),
      ("optimizer.clip_norm", f"{CLIP_NORM}"),
    ]

  def step_flops(self, vocab_size: int) -> int:
    """Returns the floating-point operations that the model needs for a step.

    6 for each token and parameter of a matrix multiplication (Kaplan et al.,
    2020, arXiv:2001.08361, section 2.1): embeddings that are looked up, biases
    and norms do not count, and the tied matrix counts once, as the output.
    Attention adds the two products of queries, keys and values (Chowdhery et
    al., 2022, arXiv:2204.02311, appendix B), but of these only the lower
    triangle, which is all that a causal model needs (as Dao, 2023,
    arXiv:2307.08691, section 4.1). What is computed beyond that, and element by
    element, does not count.

    Args:
      vocab_size: V.
    """
    width, length = self.model_size, self.sequence_length
    weights = self.num_layers * (4 + 2 * WIDENING_FACTOR) * width**2
    weights += vocab_size * width
    pairs = length * (length + 1) // 2
    # Two products, forward and twice backward, a multiply and an add each.
    attention = self.num_layers * self.batch_size * pairs * width * 2 * 3 * 2
    return 6 * weights * self.tokens_per_step + attention


SIZES = {
  size.name: size
  for size in (
    Size("small", 4, 4, 128, 64, 12, num_steps=80, device_counts=(1, 2)),
    Size("medium", 6, 6, 384, 256, 16, num_steps=12, device_counts=(1,)),
  )
}


def write_text(path: Path) -> Path:
  """Writes a text of 65 different characters, and returns its path.

  It is source code of the running Python's standard library in lower case, the
  same for each version of Python.
  """
  text = ""
  for document in corpora.read_documents([corpora.STDLIB]):
    source = document.content.decode(errors="ignore").lower()
    text += "".join(filter(_CHARACTERS.__contains__, source))
    if len(text) >= _NUM_CHARACTERS:
      break
  path.write_text(text[:_NUM_CHARACTERS])
  return path


def prepare(settings: list[tuple[str, str]], path: Path) -> None:
  """Writes distlm's initial parameters and first batches, for its peers.

  Args:
    settings: what `Size.settings` gave.
    path: of a new file; see `Shared`.
  """
  import jax
  import numpy as np

  from distlm import language_model
  from distlm.data import loader, token_store

  config = parse(settings)
  store = token_store.open_token_store(config.data)
  model = language_model.make_model(config, store.tokenizer.vocab_size)
  updater = language_model.make_updater(config, model)
  params = updater.init_fn(jax.random.PRNGKey(config.random_seed))
  batches = loader.Loader(store, config.data, 0, 0, loader.Layout())
  # The peers know no padding, which one sequence of an epoch has.
  steps = list(
    itertools.islice(
      (
        batch
        for batch in map(batches.global_batch, itertools.count())
        if batch.mask.all()
      ),
      NUM_BATCHES,
    )
  )
  arrays = {
    f"{module}/{name}": np.asarray(value)
    for module, values in params.items()
    for name, value in values.items()
  }
  arrays["inputs"] = np.stack([batch.inputs for batch in steps])
  arrays["targets"] = np.stack([batch.targets for batch in steps])
  index = {name: (x.dtype.str, x.shape) for name, x in arrays.items()}
  with open(path, "wb") as file:
    file.write(json.dumps(index).encode() + b"\n")
    file.writelines(x.tobytes() for x in arrays.values())


def parse(settings: list[tuple[str, str]]) -> Any:
  """Returns the checked `RunConfig` of `CONFIG` and some settings."""
  from distlm import config as configs

  config = configs.load_config_file(str(CONFIG))
  configs.apply_overrides(config, settings)
  return configs.parse_config(config)


class Shared:
  """What `prepare` wrote: a line of JSON, then the arrays that it names.

  Attributes:
    inputs: [NUM_BATCHES, B, T] int32.
    targets: [NUM_BATCHES, B, T] int32.
    vocab_size: V, the characters and distlm's two special tokens.
  """

  def __init__(self, path: str) -> None:
    import numpy as np

    with open(path, "rb") as file:
      self._arrays = {
        name: np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
        for name, (dtype, shape) in json.loads(file.readline()).items()
      }
    self.inputs = self._arrays["inputs"]
    self.targets = self._arrays["targets"]
    self.vocab_size = len(self.parameter("tokens/embeddings"))

  def parameter(self, name: str, layer: int | None = None) -> Any:
    """Returns a parameter of the model, or of one of its layers."""
    if layer is None:
      return self._arrays[f"transformer/{name}"]
    (stacked,) = (  # [L, ...]
      array
      for path, array in self._arrays.items()
      if path.startswith("transformer/layers/") and path.endswith(f"/{name}")
    )
    return stacked[layer]

  def batches(self, num_steps: int) -> Any:
    """Yields the (inputs, targets) of each step, round and round."""
    pairs = zip(self.inputs, self.targets, strict=True)
    return itertools.islice(itertools.cycle(pairs), num_steps)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
  """Returns what a command prints, or raises RuntimeError with all of it.

  Args:
    command: of a child process.
    env: variables that it gets beside those of this process.
  """
  done = subprocess.run(
    command, env={**os.environ, **(env or {})}, capture_output=True, text=True
  )
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
  return done.stdout


def run_json(
  command: Sequence[str], env: Mapping[str, str] | None = None
) -> dict[str, Any]:
  """Returns the JSON object that a command prints as its last line."""
  result: dict[str, Any] = json.loads(run(command, env).splitlines()[-1])
  return result


def measure_peak(size: Size) -> dict[str, float]:
  """Returns operations/s of float32 matrix products, by library and shape."""
  import jax
  import numpy as np

  rows, width = size.tokens_per_step, size.model_size
  wide = WIDENING_FACTOR * width
  product = jax.jit(jax.numpy.matmul)
  peaks = {}
  for m, k, n in (
    (rows, width, 3 * width),
    (rows, width, wide),
    (rows, wide, width),
    (width, rows, wide),
    (2048, 2048, 2048),
  ):
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    for name, function, x, y in (
      ("NumPy", np.matmul, a, b),
      ("XLA", product, jax.device_put(a), jax.device_put(b)),
    ):
      secs = []
      for _ in range(_NUM_PEAK_TRIES):
        start = time.perf_counter()
        jax.block_until_ready(function(x, y))
        secs.append(time.perf_counter() - start)
      peaks[f"{name} {m}x{k}x{n}"] = 2 * m * k * n / min(secs)
  return peaks
