"""Tests of distlm.model.kernels.

No GPU or TPU is at hand: splash runs interpreted, and what cuDNN is asked for
is computed by XLA instead. Both kernels are also lowered for their platforms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from numpy.typing import NDArray

from distlm.data.loader import SequenceView
from distlm.errors import UsageError
from distlm.model import blocks, kernels
from distlm.model.kernels import attend, choose, make_mask

B, T, H, K = 4, 256, 2, 16
# What distlm pads: nothing, the end of a sequence, or all of it.
NONE, RAGGED, WHOLE = [T] * B, [T, 200, 128, 3], [T, 77, 0, 0]
Arrays = tuple[jax.Array, jax.Array, jax.Array]


def _padding_at_the_end(lengths: list[int]) -> NDArray[np.bool_]:
  return np.arange(T) < np.array(lengths)[:, None]


def _padding_anywhere() -> NDArray[np.bool_]:
  return np.random.default_rng(1).random((B, T)) < 0.7


def _inputs(*shape: int, dtype: Any = jnp.float32) -> Arrays:
  keys = jax.random.split(jax.random.PRNGKey(0), 3)
  query, key, value = (jax.random.normal(k, shape, dtype) for k in keys)
  # Sharp scores: a softmax that is nearly even would hide many mistakes.
  return 3 * query, key, value


def _value_and_grads(
  inputs: Arrays, padding: NDArray[np.bool_], implementation: str
) -> tuple[jax.Array, Arrays]:
  """Returns what `attend` gives, and the gradients of its unpadded part."""
  mask = make_mask(jnp.asarray(padding), implementation)
  weights = jax.random.normal(jax.random.PRNGKey(9), inputs[0].shape)
  weights *= padding[..., None, None]

  def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    mixed = attend(*inputs, mask, implementation, interpret=True)
    return jnp.sum(mixed * weights), mixed

  grads, mixed = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
  return mixed, grads


def _assert_equal_to_xla(
  inputs: Arrays, padding: NDArray[np.bool_], implementation: str
) -> None:
  expected, expected_grads = _value_and_grads(inputs, padding, "xla")
  actual, actual_grads = _value_and_grads(inputs, padding, implementation)
  assert np.isfinite(actual).all()
  np.testing.assert_allclose(
    actual[padding], expected[padding], rtol=1e-5, atol=1e-5
  )
  for name, grad, expected_grad in zip(
    "qkv", actual_grads, expected_grads, strict=True
  ):
    assert np.abs(expected_grad).max() > 0.1
    np.testing.assert_allclose(
      grad, expected_grad, rtol=1e-5, atol=1e-5, err_msg=name
    )


@pytest.mark.parametrize(
  ("setting", "platform", "dtype", "length", "key_size", "expected"),
  [
    ("auto", "cpu", "float32", 256, 64, "blocks"),
    ("auto", "cpu", "bfloat16", 256, 64, "blocks"),
    ("auto", "gpu", "bfloat16", 256, 64, "cudnn"),
    ("auto", "cuda", "float16", 256, 128, "cudnn"),
    ("auto", "gpu", "bfloat16", 101, 8, "cudnn"),
    ("auto", "gpu", "float32", 256, 64, "xla"),
    ("auto", "gpu", "bfloat16", 256, 36, "xla"),
    ("auto", "gpu", "bfloat16", 256, 136, "xla"),
    ("auto", "tpu", "bfloat16", 256, 64, "splash"),
    ("auto", "tpu", "float32", 128, 256, "splash"),
    ("auto", "tpu", "bfloat16", 640, 36, "splash"),
    ("auto", "tpu", "float16", 256, 64, "xla"),
    ("auto", "tpu", "bfloat16", 192, 64, "xla"),
    ("auto", "tpu", "bfloat16", 256, 257, "xla"),
    ("auto", "rocm", "bfloat16", 256, 64, "xla"),
    ("xla", "cpu", "float16", 101, 3, "xla"),
    ("blocks", "gpu", "bfloat16", 256, 64, "blocks"),
    ("xla", "gpu", "bfloat16", 256, 64, "xla"),
    ("xla", "tpu", "bfloat16", 256, 64, "xla"),
    ("cudnn", "gpu", "float16", 256, 64, "cudnn"),
    ("splash", "tpu", "bfloat16", 256, 64, "splash"),
  ],
)
def test_what_is_chosen(
  setting: str,
  platform: str,
  dtype: str,
  length: int,
  key_size: int,
  expected: str,
) -> None:
  actual = choose(setting, platform, jnp.dtype(dtype), length, key_size)
  assert actual == expected


@pytest.mark.parametrize(
  ("capability", "key_size", "expected"),
  [
    ("7.5", 64, "xla"),
    ("8.0", 128, "cudnn"),
    ("8.9", 256, "xla"),
    ("9.0", 256, "cudnn"),
    ("9.0", 264, "xla"),
    ("12.0", 256, "cudnn"),
    ("gfx942", 64, "xla"),
    ("", 64, "xla"),
  ],
)
def test_choice_by_the_kind_of_gpu(
  capability: str, key_size: int, expected: str
) -> None:
  actual = choose("auto", "gpu", jnp.bfloat16, 256, key_size, capability)
  assert actual == expected


@pytest.mark.parametrize(
  ("line", "where"),
  [
    ("cudnn: it needs an NVIDIA GPU, and this is a cpu", {"platform": "cpu"}),
    ("cudnn: it needs an NVIDIA GPU, and this is a tpu", {"platform": "tpu"}),
    (
      "cudnn: it needs an NVIDIA GPU, and this is gfx942",
      {"compute_capability": "gfx942"},
    ),
    (
      "cudnn: it needs a GPU of compute capability 8.0 or more, and this has"
      " 7.5",
      {"compute_capability": "7.5"},
    ),
    (
      "cudnn: it needs precision=bf16 or fp16, not f32",
      {"dtype": jnp.float32},
    ),
    (
      "cudnn: model.key_size=136 must be a multiple of 8, at most 128 on a GPU"
      " of compute capability 8.0",
      {"key_size": 136},
    ),
    (
      "cudnn: model.key_size=12 must be a multiple of 8, at most 256 on a GPU"
      " of compute capability 9.0",
      {"key_size": 12, "compute_capability": "9.0"},
    ),
    ("splash: it needs a TPU, and this is a gpu", {}),
    ("splash: it needs a TPU, and this is a cpu", {"platform": "cpu"}),
    (
      "splash: it needs precision=bf16 or f32, not fp16",
      {"platform": "tpu", "dtype": jnp.float16},
    ),
    (
      "splash: data.sequence_length=192 must be a multiple of 128",
      {"platform": "tpu", "num_positions": 192},
    ),
    (
      "splash: model.key_size=264 must be at most 256",
      {"platform": "tpu", "key_size": 264},
    ),
  ],
)
def test_what_cannot_work_is_one_line(line: str, where: dict[str, Any]) -> None:
  usual = {
    "platform": "gpu",
    "dtype": jnp.bfloat16,
    "num_positions": 256,
    "key_size": 64,
  }
  with pytest.raises(UsageError) as raised:
    choose(line.partition(":")[0], **{**usual, **where})
  expected = f"model.attention={line}; set model.attention=auto"
  assert str(raised.value) == expected


def test_mask_of_xla_is_the_unpadded_past_and_the_position_itself() -> None:
  padding = _padding_anywhere()[:, :9]
  padding[0] = False
  mask = make_mask(jnp.asarray(padding), "xla")
  assert mask is not None
  assert mask.shape == (B, 1, 9, 9) and mask.dtype == bool
  for b, t, s in np.ndindex(B, 9, 9):
    assert mask[b, 0, t, s] == (s == t or (s < t and padding[b, s])), (b, t, s)


@pytest.mark.parametrize(
  ("padding", "max_block"),
  [
    pytest.param(_padding_at_the_end(NONE), 128, id="none"),
    pytest.param(_padding_at_the_end(RAGGED), 128, id="ragged"),
    pytest.param(_padding_at_the_end(WHOLE), 128, id="whole"),
    pytest.param(_padding_anywhere(), 128, id="anywhere"),
    pytest.param(_padding_at_the_end(RAGGED), 512, id="one block"),
  ],
)
def test_splash_equals_xla(
  padding: NDArray[np.bool_],
  max_block: int,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(kernels, "_MAX_BLOCK", max_block)
  _assert_equal_to_xla(_inputs(B, T, H, K), padding, "splash")


@pytest.mark.parametrize(
  "padding",
  [
    pytest.param(_padding_at_the_end(NONE), id="none"),
    pytest.param(_padding_at_the_end(RAGGED), id="ragged"),
    pytest.param(_padding_at_the_end(WHOLE), id="whole"),
    pytest.param(_padding_anywhere(), id="anywhere"),
  ],
)
@pytest.mark.parametrize(
  ("length", "max_bytes", "block"),
  [(T, 1, 128), (T - 19, 2**30, 128), (T - 19, 2**30, 16)],
)
def test_blocks_equal_xla(
  padding: NDArray[np.bool_],
  length: int,
  max_bytes: int,
  block: int,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(blocks, "_BLOCK_BYTES", max_bytes)
  monkeypatch.setattr(blocks, "_BLOCK", block)
  inputs = _inputs(B, length, H, K)
  _assert_equal_to_xla(inputs, padding[:, :length], "blocks")


def test_padded_positions_of_blocks_are_those_of_xla() -> None:
  inputs, padding = _inputs(B, T, H, K), _padding_anywhere()
  actual, expected = (
    _value_and_grads(inputs, padding, name)[0] for name in ("blocks", "xla")
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [NONE, RAGGED, WHOLE])
def test_what_cudnn_is_asked_for_equals_xla(
  lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
  # Else cuDNN would have to be told where the padding is.
  assert make_mask(jnp.ones((B, T), bool), "cudnn") is None
  inputs, padding = _inputs(B, T, H, K), _padding_at_the_end(lengths)
  original, asked = jax.nn.dot_product_attention, []

  def by_xla(*args: Any, implementation: str, **options: Any) -> jax.Array:
    asked.append(implementation)
    return original(*args, implementation="xla", **options)

  monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
  _assert_equal_to_xla(inputs, padding, "cudnn")
  assert asked == ["xla", "cudnn"]


def test_the_loader_pads_only_at_the_end() -> None:
  # What cudnn, which gets no padding mask, rests on.
  view = SequenceView(np.arange(1, 72, dtype=np.uint8), 16, padding=0)
  mask = view.rows(np.array([*range(view.num_sequences), -1])).mask
  assert {0, 6, 16} == set(mask.sum(1).tolist())
  assert (mask[:, 1:] <= mask[:, :-1]).all()


@pytest.mark.parametrize(
  ("implementation", "dtype"),
  [
    ("xla", jnp.bfloat16),
    ("xla", jnp.float16),
    ("splash", jnp.bfloat16),
  ],
)
def test_low_precision_rounds_weights_and_result_alone(
  implementation: str, dtype: Any
) -> None:
  # 1/sqrt(64) is a power of two, so that scaling does not round.
  inputs = _inputs(B, T, H, 64, dtype=dtype)
  padding = jnp.asarray(_padding_at_the_end(RAGGED))

  def attended(inputs: Any, implementation: str) -> NDArray[np.float32]:
    mask = make_mask(padding, implementation)
    mixed = attend(*inputs, mask, implementation, interpret=True)
    assert mixed.dtype == inputs[0].dtype
    return np.asarray(mixed.astype(jnp.float32))[np.asarray(padding)]

  query, key, value = (x.astype(jnp.float32) for x in inputs)
  exact = attended((query, key, value), "xla")
  # Rounding each weight of the mean moves it by at most one unit of roundoff of
  # the mean of |value|, and rounding the mean by one more. Scores and softmax
  # must add nothing: in bf16, scores of 16 would be off by 0.06.
  scale = attended((query, key, jnp.abs(value)), "xla")
  roundoff = float(jnp.finfo(dtype).eps) / 2
  error = np.abs(attended(inputs, implementation) - exact)
  assert 0.1 * roundoff < (error / scale).max() <= 2 * roundoff


def _layers(
  implementation: str, interpret: bool
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the gradient of layers scanned and rematerialized, as in training.

  Its arguments are [B, T, H, K] and [B, T] of one device.
  """

  def loss(h: jax.Array, padding: jax.Array) -> jax.Array:
    mask = make_mask(padding, implementation)

    @jax.checkpoint
    def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
      # Bounded queries: sharper scores would enlarge the rounding of layer one.
      query = jnp.sin(h)
      return h + attend(query, h, h, mask, implementation, interpret), None

    h, _ = jax.lax.scan(layer, h, length=2)
    return jnp.sum(jnp.sin(h) * padding[..., None, None])

  return jax.grad(loss)


@pytest.mark.parametrize("implementation", ["splash", "blocks"])
def test_in_pmap_scan_and_checkpoint_they_equal_xla(
  implementation: str,
) -> None:
  h = jax.random.normal(jax.random.PRNGKey(0), (2, 1, 128, 1, 8))
  padding = jnp.arange(128) < jnp.array([[[128]], [[50]]])  # [R, B, T]
  actual = jax.pmap(_layers(implementation, interpret=True))(h, padding)
  expected = jax.vmap(_layers("xla", interpret=False))(h, padding)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def _lowered(implementation: str, platform: str, key_size: int) -> str:
  """Returns what a platform that is not at hand would compile."""
  h = jax.ShapeDtypeStruct((2, 1, T, H, key_size), jnp.bfloat16)
  padding = jax.ShapeDtypeStruct((2, 1, T), jnp.bool_)
  layers = _layers(implementation, interpret=False)
  traced = jax.jit(jax.pmap(layers)).trace(h, padding)
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("key_size", [64, 128])
def test_splash_lowers_for_a_tpu(key_size: int) -> None:
  text = _lowered("splash", "tpu", key_size)
  for phase in ("fwd", "dq", "dkv"):
    assert f'kernel_name = "splash_mha_{phase}_segmented' in text
  assert "@tpu_custom_call" in text
  assert f"{T}x{T}x" not in text


@pytest.mark.parametrize("key_size", [64, 128])
def test_cudnn_lowers_for_a_gpu(
  key_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  # JAX asks the cuDNN that is installed here, and there is none.
  monkeypatch.setattr(
    fused_attention_stablehlo, "check_cudnn_version", lambda: 91100
  )
  text = _lowered("cudnn", "cuda", key_size)
  assert "@__cudnn$fmhaSoftmax(" in text
  assert "@__cudnn$fmhaSoftmaxBackward(" in text
  assert f"{T}x{T}x" not in text


def test_blocks_hold_few_scores() -> None:
  assert f"{T}x{T}x" not in _lowered("blocks", "cpu", 64)


def test_xla_holds_all_scores() -> None:
  # That the tests above can fail.
  assert f"{T}x{T}x" in _lowered("xla", "cpu", 64)
