"""Which kernel computes attention, and how each one is called.

| name   | where       | scores [T, T]               | padding            |
|--------|-------------|-----------------------------|--------------------|
| xla    | anywhere    | in device memory            | anywhere           |
| blocks | anywhere    | in a CPU's cache, by block  | anywhere           |
| cudnn  | NVIDIA GPUs | in on-chip memory, by block | at the end, if any |
| splash | TPUs        | in on-chip memory, by block | anywhere           |

At unpadded positions all compute the same, and a loss that leaves padded
positions out has the same gradients. What padded positions get differs, but is
finite.

What works by block is FlashAttention (Dao et al., 2022,
arXiv:2205.14135).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from distlm.errors import UsageError
from distlm.model import blocks

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "fp16"}
# Splash attention's blocks are multiples of a TPU's 128 lanes (NUM_LANES in
# jax.experimental.pallas.ops.tpu.splash_attention). Larger ones read keys and
# values less often; 512 leaves room in on-chip memory for heads of 256 in f32.
_LANES = 128
_MAX_BLOCK = 512
_MAX_SPLASH_KEY_SIZE = 256


def choose(
  setting: str,
  platform: str,
  dtype: np.typing.DTypeLike,
  num_positions: int,
  key_size: int,
  compute_capability: str = "8.0",
) -> str:
  """Returns the implementation that a run takes.

  Args:
    setting: `model.attention`, one of auto, xla, blocks, cudnn and splash; auto
      takes blocks on a CPU, else a kernel of the platform that can do it, else
      xla.
    platform: of the devices: cpu, gpu, tpu.
    dtype: of queries, keys and values.
    num_positions: T.
    key_size: K, the size of a head.
    compute_capability: of an NVIDIA GPU, what `Device.compute_capability` of
      JAX says. Another vendor's GPU says nothing or what is no number.

  Returns:
    xla, blocks, cudnn or splash.

  Raises:
    UsageError: if `setting` names one that cannot do it.

  >>> choose("auto", "gpu", "bfloat16", num_positions=1024, key_size=64)
  'cudnn'
  """
  if setting in ("xla", "blocks"):
    return setting
  if setting == "auto" and platform == "cpu":
    return "blocks"
  precision = _PRECISIONS[jnp.dtype(dtype).name]
  obstacles = {
    "cudnn": _cudnn_obstacle(platform, compute_capability, precision, key_size),
    "splash": _splash_obstacle(platform, precision, num_positions, key_size),
  }
  if setting == "auto":
    return next((name for name, why in obstacles.items() if not why), "xla")
  if obstacles[setting]:
    raise UsageError(
      f"model.attention={setting}: {obstacles[setting]}; set"
      " model.attention=auto"
    )
  return setting


def _cudnn_obstacle(
  platform: str, compute_capability: str, precision: str, key_size: int
) -> str:
  """Returns the rule that is broken, or "".

  The rules for head sizes and types are those of `check_is_flash_attention` and
  `check_layout` in jax/_src/cudnn/fused_attention_stablehlo.py (JAX 0.10.2);
  without a bias, there is none for lengths. That of compute capability is
  cuDNN's own.
  """
  if platform not in ("gpu", "cuda"):
    return f"it needs an NVIDIA GPU, and this is a {platform}"
  try:
    capability = tuple(int(part) for part in compute_capability.split("."))
  except ValueError:
    return f"it needs an NVIDIA GPU, and this is {compute_capability or 'none'}"
  if capability < (8, 0):
    return (
      "it needs a GPU of compute capability 8.0 or more, and this has"
      f" {compute_capability}"
    )
  if precision not in ("bf16", "fp16"):
    return f"it needs precision=bf16 or fp16, not {precision}"
  max_key_size = 256 if capability >= (9, 0) else 128
  if key_size > max_key_size or key_size % 8:
    return (
      f"model.key_size={key_size} must be a multiple of 8, at most"
      f" {max_key_size} on a GPU of compute capability {compute_capability}"
    )
  return ""


def _splash_obstacle(
  platform: str, precision: str, num_positions: int, key_size: int
) -> str:
  """Returns the rule that is broken, or "".

  The rules are what compiles for TPU v4, v5e and v6e (libtpu 0.0.42). TPU v3,
  which is not told apart here, takes f32 only.
  """
  if platform != "tpu":
    return f"it needs a TPU, and this is a {platform}"
  if precision not in ("bf16", "f32"):
    return f"it needs precision=bf16 or f32, not {precision}"
  if num_positions % _LANES:
    return (
      f"data.sequence_length={num_positions} must be a multiple of {_LANES}"
    )
  if key_size > _MAX_SPLASH_KEY_SIZE:
    return f"model.key_size={key_size} must be at most {_MAX_SPLASH_KEY_SIZE}"
  return ""


def make_mask(padding_mask: jax.Array, implementation: str) -> jax.Array | None:
  """Returns what `attend` needs to know of the padding, the same in all layers.

  With xla, a position attends to itself and to the unpadded positions before
  it. Itself always, padded or not: so no row is empty, softmax stays finite,
  and a padded position does not fall back to an average over all positions, the
  future ones included; so too with blocks. With splash, padded positions attend
  to each other; with cudnn, to all before them.

  Args:
    padding_mask: [B, T] bool, False at padding. For cudnn, padding must come
      last in a sequence, as `distlm.data` makes it: it is then behind all that
      an unpadded position sees, and needs no mask.
    implementation: as `choose` gives it.

  Returns:
    xla: [B, 1, T, T] bool, indexed by sequence, head, query and key. blocks:
    the padding mask. splash: [B, T] int32 segments, which do not attend to each
    other. cudnn: None.
  """
  if implementation == "cudnn":
    return None
  if implementation == "splash":
    return padding_mask.astype(jnp.int32)
  if implementation == "blocks":
    return padding_mask
  num_positions = padding_mask.shape[-1]
  causal = jnp.tri(num_positions, dtype=bool)  # [T, T]
  itself = jnp.eye(num_positions, dtype=bool)  # [T, T]
  mask = causal & (padding_mask[:, None, :] | itself)  # [B, T, T]
  return mask[:, None]


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array | None,
  implementation: str,
  interpret: bool = False,
) -> jax.Array:
  """Returns the mean of the values that each query attends to.

  Softmax is in f32 whatever the inputs are.

  Args:
    query: [B, T, H, K], not yet scaled by 1/sqrt(K).
    key: [B, T, H, K].
    value: [B, T, H, K].
    mask: what `make_mask` gave for the same implementation.
    implementation: as `choose` gives it.
    interpret: whether splash runs as plain JAX, on any platform, for tests.

  Returns:
    [B, T, H, K], of the type of the inputs.
  """
  if implementation == "splash":
    assert mask is not None
    return _splash(query, key, value, mask, interpret)
  if implementation == "blocks":
    assert mask is not None
    return _blocks(query, key, value, mask)
  if implementation == "cudnn":
    return jax.nn.dot_product_attention(
      query, key, value, is_causal=True, implementation="cudnn"
    )
  if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
    # JAX asks XLA for a product of float16 that CPUs do not have.
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    mixed = attend(query, key, value, mask, implementation)
    return mixed.astype(jnp.float16)
  return jax.nn.dot_product_attention(
    query, key, value, mask=mask, implementation="xla"
  )


def _blocks(
  query: jax.Array, key: jax.Array, value: jax.Array, padding_mask: jax.Array
) -> jax.Array:
  scaled = query.astype(jnp.float32) * (1 / math.sqrt(query.shape[-1]))
  heads_first = (
    x.astype(jnp.float32).swapaxes(1, 2) for x in (scaled, key, value)
  )  # [B, H, T, K]
  mixed = blocks.attend(*heads_first, padding_mask)
  return mixed.swapaxes(1, 2).astype(query.dtype)


def _splash(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segments: jax.Array,
  interpret: bool,
) -> jax.Array:
  # Takes a tenth of a second, which only TPUs need to spend.
  from jax.experimental.pallas.ops.tpu import splash_attention

  _, num_positions, num_heads, key_size = query.shape
  causal = splash_attention.CausalMask((num_positions, num_positions))
  block = _block_size(num_positions)
  kernel = splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([causal] * num_heads),
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=interpret,
  )
  mixed = jax.vmap(kernel)(
    # The kernel does not scale.
    (query * (1 / math.sqrt(key_size))).swapaxes(1, 2),
    key.swapaxes(1, 2),
    value.swapaxes(1, 2),
    splash_attention.SegmentIds(segments, segments),
  )  # [B, H, T, K]
  return mixed.swapaxes(1, 2)


def _block_size(num_positions: int) -> int:
  """Returns the largest block that divides a length, a multiple of 128."""
  return max(
    block
    for block in range(_LANES, _MAX_BLOCK + 1, _LANES)
    if num_positions % block == 0
  )
