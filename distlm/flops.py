"""What training costs in arithmetic, and how much of that devices can do.

The ratio is the model FLOPs utilization, MFU: the share of the hardware's peak
that goes into the arithmetic of the model (Chowdhery et al., 2022, "PaLM",
arXiv:2204.02311, appendix B). It compares runs across models and machines.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

from distlm.settings import ModelConfig

_TERA = 1e12
# Forward once; backward once for the gradient of each factor of a product.
_PASSES = 3
_FLOPS_PER_MULTIPLY_ADD = 2
# Large enough for all cores of a machine to take part, and small enough for
# several products within the time.
_MEASURED_SIZE = 1536
_MEASURED_SECS = 0.5


class _Peaks(NamedTuple):
  """TFLOP/s of a device by precision; None: the chip has no such arithmetic.

  XLA computes in another one then (openxla/xla issue 12429), slower, and a
  share of a peak that does not exist would say nothing.
  """

  f32: float
  bf16: float | None
  fp16: float | None


# By `jax.Device.device_kind`; dense, for products accumulated in f32. What an
# f32 product costs depends on how JAX computes it unless told otherwise
# (docs.jax.dev, "Matmul precision"): in one bf16 pass on TPUs, and in TF32 on
# GPUs that have it, from Ampere on. NVIDIA's datasheets give figures for
# sparse matrices from then on, which are halved here.
_CHIPS: tuple[tuple[tuple[str, ...], _Peaks], ...] = (
  # Jouppi et al., 2020, "A Domain-Specific Supercomputer for Training Deep
  # Neural Networks": 46 a chip, which is two devices.
  (("TPU v2",), _Peaks(23, 23, None)),
  # Google Cloud documentation, "TPU v3": 123 a chip, which is two devices.
  (("TPU v3",), _Peaks(61.5, 61.5, None)),
  # Google Cloud documentation, "TPU v4". A chip is one device.
  (("TPU v4",), _Peaks(275, 275, None)),
  # Google Cloud documentation, "TPU v5e".
  (("TPU v5 lite", "TPU v5e"), _Peaks(197, 197, None)),
  # Google Cloud documentation, "TPU v5p". A chip is one device.
  (("TPU v5", "TPU v5p"), _Peaks(459, 459, None)),
  # Google Cloud documentation, "TPU v6e".
  (("TPU v6 lite", "TPU v6e"), _Peaks(918, 918, None)),
  # Google Cloud documentation, "TPU7x": 2307 a chip, which is two devices.
  (("TPU7x",), _Peaks(1153.5, 1153.5, None)),
  # NVIDIA V100 datasheet (2020), the columns SXM2, PCIe and V100S.
  (
    ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
    _Peaks(15.7, None, 125),
  ),
  (("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), _Peaks(14, None, 112)),
  (("Tesla V100S-PCIE-32GB",), _Peaks(16.4, None, 130)),
  # NVIDIA T4 datasheet.
  (("Tesla T4",), _Peaks(8.1, None, 65)),
  # NVIDIA A100 datasheet, both memories and both form factors.
  (
    (
      "NVIDIA A100-SXM4-40GB",
      "NVIDIA A100-SXM4-80GB",
      "NVIDIA A100-PCIE-40GB",
      "NVIDIA A100 80GB PCIe",
    ),
    _Peaks(156, 312, 312),
  ),
  # NVIDIA A10 datasheet.
  (("NVIDIA A10",), _Peaks(62.5, 125, 125)),
  # NVIDIA L4 datasheet.
  (("NVIDIA L4",), _Peaks(60, 121, 121)),
  # NVIDIA L40S datasheet: the figures beside the sparse ones.
  (("NVIDIA L40S",), _Peaks(183, 362.05, 362.05)),
  # NVIDIA H100 datasheet, the column H100 SXM.
  (("NVIDIA H100 80GB HBM3",), _Peaks(494.5, 989.5, 989.5)),
  # NVIDIA H100 datasheet (2022), the column H100 PCIe.
  (("NVIDIA H100 PCIe",), _Peaks(378, 756.5, 756.5)),
  # NVIDIA H100 datasheet, the column H100 NVL.
  (("NVIDIA H100 NVL",), _Peaks(417.5, 835.5, 835.5)),
  # NVIDIA H200 datasheet, the columns H200 SXM and H200 NVL.
  (("NVIDIA H200",), _Peaks(494.5, 989.5, 989.5)),
  (("NVIDIA H200 NVL",), _Peaks(417.5, 835.5, 835.5)),
  # NVIDIA GH200 datasheet, of either memory.
  (
    ("NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"),
    _Peaks(494.5, 989.5, 989.5),
  ),
  # NVIDIA Blackwell datasheet, a GPU of HGX B200 and one of GB200 NVL72.
  (("NVIDIA B200",), _Peaks(1100, 2250, 2250)),
  (("NVIDIA GB200",), _Peaks(1250, 2500, 2500)),
)
_PEAKS = {kind: peaks for kinds, peaks in _CHIPS for kind in kinds}


def training_flops_per_token(
  model: ModelConfig, vocab_size: int, sequence_length: int
) -> float:
  """Returns the FLOPs of one update for each token of its batch.

  Counted are the multiplications of matrices, at 2 FLOPs a multiply-add: query,
  key and value, the output of attention, the two of the dense block and the
  unembedding, and in attention scores and mixing. A position attends to itself
  and to those before it, to (T + 1) / 2 of T on average; what is computed of
  the others and masked is not counted. Backward is twice forward. What
  `model.remat` computes a second time is not counted, by the definition of MFU
  (Chowdhery et al., 2022, "PaLM", arXiv:2204.02311, appendix B), nor is what is
  small: normalization, activations, softmax, the optimizer.

  With N the weights that multiply, (4 + 2 `widening_factor`) D^2 a layer and
  D V, it is 6 N + 6 `num_layers` D (T + 1). The usual 6 N, with N all
  parameters, leaves attention out, and counts position embeddings, and token
  embeddings that are not tied, which are only looked up. PaLM adds
  12 `num_layers` D T, all pairs of positions, twice what a causal model needs.

  Args:
    model: the sizes of the model.
    vocab_size: V, the rows of the unembedding.
    sequence_length: T, in tokens.

  >>> gpt2 = ModelConfig(num_layers=12, num_heads=12, model_size=768)
  >>> training_flops_per_token(gpt2, vocab_size=50257, sequence_length=1024)
  797870592.0
  """
  width = model.num_heads * model.key_size
  hidden = model.widening_factor * model.model_size
  projections = 4 * model.model_size * width
  dense = 2 * model.model_size * hidden
  mean_keys = (sequence_length + 1) / 2
  attention = 2 * mean_keys * width  # scores, then mixing
  layers = model.num_layers * (projections + dense + attention)
  unembedding = model.model_size * vocab_size
  return _PASSES * _FLOPS_PER_MULTIPLY_ADD * (layers + unembedding)


def peak_flops(device_kind: str, precision: str) -> float | None:
  """Returns the most FLOP/s that a device can do in products of matrices.

  Names must match to the letter: of two that begin alike one may be a slice of
  a chip, or another chip.

  Args:
    device_kind: `jax.Device.device_kind`.
    precision: as in `RunConfig.precision`, of the factors.

  Returns:
    Dense FLOP/s of one JAX device, which may be half a chip, or None for a
    device that is not known or has no such arithmetic.

  >>> peak_flops("NVIDIA H200", "bf16")
  989500000000000.0
  """
  peaks = _PEAKS.get(device_kind)
  tflops: float | None = getattr(peaks, precision) if peaks else None
  return None if tflops is None else tflops * _TERA


@functools.cache
def measured_peak_flops() -> float:
  """Returns the FLOP/s that the cores of this process reach in f32.

  It times products of large matrices by XLA on the default device, for about
  0.5 s at the first call, and keeps the best. All CPU devices of a process
  share its cores, so one that computes alone has them all.
  """
  import jax
  import jax.numpy as jnp

  factor = jnp.ones((_MEASURED_SIZE, _MEASURED_SIZE), jnp.float32)
  multiply = jax.jit(jnp.matmul)
  multiply(factor, factor).block_until_ready()  # Compiles.
  secs: list[float] = []
  end = time.perf_counter() + _MEASURED_SECS
  while not secs or time.perf_counter() < end:
    start = time.perf_counter()
    multiply(factor, factor).block_until_ready()
    secs.append(time.perf_counter() - start)
  return _FLOPS_PER_MULTIPLY_ADD * _MEASURED_SIZE**3 / min(secs)


def device_peak_flops(
  device_kind: str, platform: str, num_local_devices: int, precision: str
) -> float | None:
  """Returns the most FLOP/s of each device of a run, measured on CPUs.

  CPUs have no figure but for f32: the rate of the others is either that of
  f32 or that of instructions that only some have.

  Args:
    device_kind: `jax.Device.device_kind`.
    platform: `jax.Device.platform`.
    num_local_devices: of this process, which share its cores if they are CPUs.
    precision: as in `RunConfig.precision`.
  """
  if platform != "cpu":
    return peak_flops(device_kind, precision)
  if precision != "f32":
    return None
  return measured_peak_flops() / num_local_devices
