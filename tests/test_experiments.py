"""The configurations in experiments/ build, and the large one can be traced."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from distlm import config, parallel
from distlm.language_model import make_model, make_updater
from distlm.settings import RunConfig
from distlm.types import Batch

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def _load(name: str) -> RunConfig:
  return config.parse_config(config.load_config_file(str(EXPERIMENTS / name)))


@pytest.mark.parametrize(
  "path", sorted(EXPERIMENTS.glob("*.py")), ids=lambda p: p.stem
)
def test_configuration_is_valid_and_explained(path: Path) -> None:
  run = _load(path.name)
  assert run.training_steps > 0
  assert f"--config=experiments/{path.name}" in path.read_text()


def test_shakespeare_char_has_the_published_sizes() -> None:
  run = _load("shakespeare_char.py")
  model, data = run.model, run.data
  assert (model.num_layers, model.num_heads, model.model_size) == (4, 4, 128)
  assert (data.sequence_length, data.global_batch_size) == (64, 12)
  assert (run.training_steps, model.dropout_rate) == (2000, 0.0)


def test_gpt2_small_has_124m_parameters_and_traces_on_8_devices() -> None:
  run = _load("gpt2_small.py")
  updater = make_updater(run, make_model(run, num_tokens=258))
  num_devices = jax.local_device_count()
  keys = jax.ShapeDtypeStruct((num_devices, 2), jnp.uint32)
  state = jax.eval_shape(parallel.pmap(updater.init), keys)
  num_params = sum(x.size for x in jax.tree.leaves(state.params))
  assert num_params // num_devices == 124_439_808
  rows = run.data.global_batch_size // num_devices // run.accumulation_steps
  shape = (num_devices, run.accumulation_steps, rows, 1024)
  tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
  batch = Batch(tokens, tokens, jax.ShapeDtypeStruct(shape, jnp.bool_))
  lowered = parallel.pmap(updater.update, donate_argnums=0).lower(
    state, batch, keys
  )
  new_state, scalars = lowered.out_info
  assert jax.tree.structure(new_state) == jax.tree.structure(state)
  assert scalars["loss"].shape == (num_devices,)
