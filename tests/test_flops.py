"""Tests of distlm.flops."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distlm
from distlm import flops
from distlm.data.token_store import TokenStore
from distlm.data.tokenizers import make_tokenizer
from distlm.experiment import LanguageModelExperiment
from distlm.model.transformer import build_forward_fn
from distlm.settings import ModelConfig

B, T, V = 2, 6, 11
CONFIG = ModelConfig(
  num_layers=3,
  num_heads=2,
  model_size=8,
  key_size=4,
  widening_factor=3,
  dropout_rate=0.0,
)


def _subprograms(values: Any) -> Iterator[Any]:
  for value in values:
    if isinstance(value, (tuple, list)):
      yield from _subprograms(value)
    elif hasattr(value, "eqns"):
      yield value
    elif hasattr(value, "jaxpr"):
      yield value.jaxpr


def _product_flops(program: Any) -> float:
  """Returns the FLOPs of all dot products that a program computes.

  Those with batch axes are attention's, whose full square of T queries and T
  keys counts for its lower triangle: T (T + 1) / 2 of T^2 pairs. Those of a
  vector are sums, by a vector of ones, of the gradient of a bias.
  """
  total = 0.0
  for equation in program.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), (batch_axes, _) = equation.params["dimension_numbers"]
      left = equation.invars[0].aval.shape
      if len(left) == 1:
        continue
      size = math.prod(left[axis] for axis in contracted)
      flops_of_all = 2 * size * math.prod(equation.outvars[0].aval.shape)
      total += flops_of_all * ((T + 1) / (2 * T) if batch_axes else 1)
    repeats = equation.params.get("length", 1)  # of a scan
    for inner in _subprograms(equation.params.values()):
      total += repeats * _product_flops(inner)
  return total


def _program_flops(config: ModelConfig, is_backward: bool) -> float:
  """Returns what the model itself computes for each token."""
  forward = build_forward_fn(config, V, T)
  tokens, mask = jnp.zeros((B, T), jnp.int32), jnp.ones((B, T), bool)
  params = jax.eval_shape(
    lambda: forward.init(jax.random.key(0), tokens, mask, False)
  )

  def total(params: Any) -> jax.Array:
    return forward.apply(params, None, tokens, mask, False).sum()

  function = jax.value_and_grad(total) if is_backward else total
  return _product_flops(jax.make_jaxpr(function)(params).jaxpr) / (B * T)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"num_layers": 1},
    {"num_heads": 4, "key_size": 2},
    {"model_size": 16, "num_heads": 4},
    {"widening_factor": 5},
    {"tie_embeddings": False},
  ],
)
def test_the_count_is_that_of_the_models_own_program(
  changes: dict[str, Any],
) -> None:
  config = dataclasses.replace(CONFIG, **changes)
  counted = flops.training_flops_per_token(config, V, T)
  assert counted == pytest.approx(_program_flops(config, True), rel=1e-12)
  assert counted == pytest.approx(3 * _program_flops(config, False), rel=1e-12)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_what_is_computed_again_is_not_counted(remat: str) -> None:
  config = dataclasses.replace(CONFIG, remat=remat)
  counted = flops.training_flops_per_token(config, V, T)
  assert counted == flops.training_flops_per_token(CONFIG, V, T)
  assert _program_flops(config, True) > 1.01 * counted


def test_the_count_of_the_program_sees_scans_and_calls() -> None:
  x = jnp.ones((4, 4))

  @jax.jit
  def inner(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
    return jax.checkpoint(jnp.matmul)(x, x), None

  program = jax.make_jaxpr(lambda x: jax.lax.scan(inner, x, length=5)[0])(x)
  assert _product_flops(program.jaxpr) == 5 * 2 * 4**3


def test_gpt2_124m_by_hand() -> None:
  # 12 layers of query, key, value and output (4 x 768 x 768) and of the dense
  # block (2 x 768 x 3072), and 50257 logits: 123,532,032 weights.
  # 1025 / 2 keys for each query, 768 multiply-adds each for scores and mixing.
  gpt2 = ModelConfig(
    num_layers=12, num_heads=12, model_size=768, widening_factor=4
  )
  weights = 84_934_656 + 38_597_376
  attention = 12 * 1025 * 768
  by_hand = 6 * (weights + attention)
  counted = flops.training_flops_per_token(gpt2, 50257, 1024)
  assert counted == by_hand == 797_870_592
  # The usual rule, of the 124,439,808 parameters, is short by attention.
  assert counted / (6 * 124_439_808) == pytest.approx(1.0686, abs=1e-4)


@pytest.mark.parametrize(
  ("kind", "f32", "bf16", "fp16"),
  [
    ("TPU v2", 23, 23, None),
    ("TPU v3", 61.5, 61.5, None),
    ("TPU v4", 275, 275, None),
    ("TPU v5 lite", 197, 197, None),
    ("TPU v5", 459, 459, None),
    ("TPU v5p", 459, 459, None),
    ("TPU v6 lite", 918, 918, None),
    ("TPU7x", 1153.5, 1153.5, None),
    ("Tesla V100-SXM2-16GB", 15.7, None, 125),
    ("Tesla T4", 8.1, None, 65),
    ("NVIDIA A100-SXM4-80GB", 156, 312, 312),
    ("NVIDIA A100 80GB PCIe", 156, 312, 312),
    ("NVIDIA A10", 62.5, 125, 125),
    ("NVIDIA L4", 60, 121, 121),
    ("NVIDIA L40S", 183, 362.05, 362.05),
    ("NVIDIA H100 80GB HBM3", 494.5, 989.5, 989.5),
    ("NVIDIA H100 PCIe", 378, 756.5, 756.5),
    ("NVIDIA H200", 494.5, 989.5, 989.5),
    ("NVIDIA GH200 480GB", 494.5, 989.5, 989.5),
    ("NVIDIA B200", 1100, 2250, 2250),
  ],
)
def test_peaks_of_chips(
  kind: str, f32: float, bf16: float | None, fp16: float | None
) -> None:
  wanted = {"f32": f32, "bf16": bf16, "fp16": fp16}
  for precision, tflops in wanted.items():
    peak = None if tflops is None else pytest.approx(tflops * 1e12)
    assert flops.peak_flops(kind, precision) == peak


@pytest.mark.parametrize(
  "kind",
  [
    "",
    "cpu",
    "NVIDIA",
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "TPU v4 lite",
    "TPU v9",
  ],
)
def test_a_chip_that_is_not_known_has_no_peak(kind: str) -> None:
  for precision in ("f32", "bf16", "fp16"):
    assert flops.peak_flops(kind, precision) is None
    assert flops.device_peak_flops(kind, "gpu", 8, precision) is None


def test_the_devices_of_an_accelerator_do_not_share_its_peak() -> None:
  peak = flops.device_peak_flops("NVIDIA H200", "gpu", 8, "bf16")
  assert peak == flops.peak_flops("NVIDIA H200", "bf16")


def test_the_measured_peak_is_plausible_and_measured_once() -> None:
  flops.measured_peak_flops.cache_clear()
  peak = flops.measured_peak_flops()
  assert 1e9 < peak < 1e14  # a slow core, and more than CPUs of a host have
  assert flops.measured_peak_flops() == peak
  assert flops.measured_peak_flops.cache_info().misses == 1


@pytest.mark.parametrize(
  ("readings", "best_secs"),
  [
    ([0.0, 0.0, 0.25, 0.25, 0.25, 0.3125, 0.375, 0.375, 0.475, 0.5], 0.0625),
    ([0.0, 9.0, 9.5, 9.5], 0.5),  # the process was stopped in between
  ],
)
def test_the_fastest_product_within_the_time_counts(
  readings: list[float], best_secs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
  clock = iter(readings)
  fake = types.SimpleNamespace(perf_counter=lambda: next(clock))
  monkeypatch.setattr(flops, "time", fake)
  peak = flops.measured_peak_flops.__wrapped__()
  assert peak == pytest.approx(2 * 1536**3 / best_secs)
  assert not list(clock)


def test_no_product_is_timed_while_the_first_is_computed(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  events = []

  class Product:
    def block_until_ready(self) -> None:
      events.append("computed")

  def read_clock() -> float:
    events.append("read")
    return float(len(events))

  monkeypatch.setattr(jax, "jit", lambda _: lambda *_: Product())
  fake = types.SimpleNamespace(perf_counter=read_clock)
  monkeypatch.setattr(flops, "time", fake)
  flops.measured_peak_flops.__wrapped__()
  assert events[:2] == ["computed", "read"]


def test_the_peak_is_measured_when_the_parameters_are_there(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  waited_for: list[Any] = []
  monkeypatch.setattr(jax, "block_until_ready", waited_for.append)

  def measure(*_: Any) -> float:
    assert "params" in waited_for[-1]._fields
    return 1.0

  monkeypatch.setattr(flops, "device_peak_flops", measure)
  tokenizer = make_tokenizer("byte", [])
  tokens = np.zeros(10_000, tokenizer.dtype)
  store = TokenStore(tokens, tokenizer, "fingerprint", 1, tokens.size)
  config = distlm.parse_config(distlm.get_base_config())
  LanguageModelExperiment("train", jax.random.PRNGKey(0), config, store)
  assert waited_for


def test_cpu_devices_share_what_is_measured(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(flops, "measured_peak_flops", lambda: 8e11)
  assert flops.device_peak_flops("cpu", "cpu", 1, "f32") == 8e11
  assert flops.device_peak_flops("cpu", "cpu", 8, "f32") == 1e11
  assert flops.device_peak_flops("cpu", "cpu", 8, "bf16") is None


def test_importing_it_imports_no_jax() -> None:
  code = "import sys, distlm.flops; print('jax' in sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True
  )
  assert result.stdout == "False\n"
