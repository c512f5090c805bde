"""A GPT training step in plain NumPy and float64: the oracle of parity tests.

It shares no code with distlm and imports neither JAX nor Optax: the backward
pass is by hand, and `test_reference.py` checks it by finite differences.

The model is GPT-2 (Radford et al., 2019) without dropout; the optimizer AdamW
(Loshchilov and Hutter, 2019) after clipping by the global norm.

Each function of the model returns its value and its `backward`, which takes the
gradient of the value (`d_y`) and returns those of its input and parameters.
Shape letters are those of `distlm.types`, with B all sequences of an update,
and I and O the widths of a linear layer's input and output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Where each parameter is: (module, array), or the module of a norm or linear
# layer. `{}` is the index of the layer.
TOKEN_EMBEDDINGS = ("transformer/tokens", "embeddings")
POSITION_EMBEDDINGS = ("transformer", "positions")
ATTENTION = (
  "transformer/layer_{}_norm_1",
  "transformer/layer_{}_attention/qkv",
  "transformer/layer_{}_attention/output",
)
DENSE = (
  "transformer/layer_{}_norm_2",
  "transformer/layer_{}_dense/widen",
  "transformer/layer_{}_dense/output",
)
FINAL_NORM = "transformer/final_norm"
UNEMBED = "transformer/unembed"  # absent when embeddings are tied
STACKED = "/layers/"  # of modules whose arrays are of all layers
LAYER_NORM_EPS = 1e-5

Array: TypeAlias = NDArray[Any]
ModuleParams: TypeAlias = Mapping[str, Array]
Params: TypeAlias = Mapping[str, ModuleParams]
Grads: TypeAlias = dict[str, dict[str, Array]]
Backward: TypeAlias = Callable[[Array], Array]
Middle: TypeAlias = Callable[[Array], tuple[Array, Backward]]
ModuleBackward: TypeAlias = Callable[[Array], tuple[Array, dict[str, Array]]]


class Hyper(NamedTuple):
  """Settings of `train_step`, named as in `distlm.config`."""

  num_heads: int
  tie_embeddings: bool
  learning_rate: float
  warmup_steps: int
  training_steps: int
  end_learning_rate: float
  clip_norm: float  # 0: no clipping
  b1: float
  b2: float
  eps: float
  weight_decay: float


class AdamWState(NamedTuple):
  """Updates done, and the moments of the gradients (shaped as parameters)."""

  count: int  # type: ignore[assignment]  # Optax's name; hides tuple.count
  mu: Grads
  nu: Grads


def tree_map(function: Callable[..., Any], *trees: Params) -> Grads:
  """Applies `function` to the corresponding arrays of `trees`."""
  return {
    module: {key: function(*(t[module][key] for t in trees)) for key in arrays}
    for module, arrays in trees[0].items()
  }


def as_float64(params: Params) -> Grads:
  """Returns a float64 copy of `params`, whose arrays may be JAX's.

  Arrays that distlm stacks, [L, ...], become those of the layers, and its
  unembedding [V, D] the weights of a linear layer.
  """
  copy = tree_map(lambda array: np.array(array, np.float64), params)
  for module in [name for name in copy if STACKED in name]:
    arrays = copy.pop(module)
    for layer in range(len(next(iter(arrays.values())))):
      copy[module.replace(STACKED, f"/layer_{layer}_")] = {
        key: array[layer] for key, array in arrays.items()
      }
  if "unembedding" in copy.get(POSITION_EMBEDDINGS[0], {}):
    unembedding = copy[POSITION_EMBEDDINGS[0]].pop("unembedding")
    copy[UNEMBED] = {"w": unembedding.T}
  return copy


def layer_norm(x: Array, params: ModuleParams) -> tuple[Array, ModuleBackward]:
  """Normalizes the last axis of `x` [B, T, D] (Ba et al., 2016)."""
  inverse = 1 / np.sqrt(x.var(-1, keepdims=True) + LAYER_NORM_EPS)  # [B, T, 1]
  normal = (x - x.mean(-1, keepdims=True)) * inverse  # [B, T, D]

  def backward(d_y: Array) -> tuple[Array, dict[str, Array]]:
    d_normal = d_y * params["scale"]  # [B, T, D]
    along_normal = (d_normal * normal).mean(-1, keepdims=True)  # [B, T, 1]
    mean = d_normal.mean(-1, keepdims=True)  # [B, T, 1]
    d_x = inverse * (d_normal - mean - normal * along_normal)  # [B, T, D]
    return d_x, {"scale": (d_y * normal).sum((0, 1)), "offset": d_y.sum((0, 1))}

  return normal * params["scale"] + params["offset"], backward


def linear(x: Array, params: ModuleParams) -> tuple[Array, ModuleBackward]:
  """Maps `x` [B, T, I] to [B, T, O], with a bias if `params` has one."""

  def backward(d_y: Array) -> tuple[Array, dict[str, Array]]:
    d_params = {"w": np.einsum("bti,bto->io", x, d_y)}
    if "b" in params:
      d_params["b"] = d_y.sum((0, 1))
    return d_y @ params["w"].T, d_params

  return x @ params["w"] + params.get("b", 0.0), backward


def gelu(x: Array) -> tuple[Array, Backward]:
  """The GELU by its tanh approximation (Hendrycks and Gimpel, 2016)."""
  tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))

  def backward(d_y: Array) -> Array:
    d_inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return np.array(d_y * 0.5 * (1 + tanh + x * (1 - tanh**2) * d_inner))

  return 0.5 * x * (1 + tanh), backward


def masked_softmax(scores: Array, allowed: Array) -> Array:
  """The softmax over the allowed keys; zeros where none is allowed."""
  top = scores.max(-1, keepdims=True, where=allowed, initial=-np.inf)
  unnormalized = np.exp(np.where(allowed, scores - top, -np.inf))
  total = unnormalized.sum(-1, keepdims=True)  # [B, H, T, 1]
  return unnormalized / np.where(total > 0, total, 1)  # [B, H, T, T]


def attend(qkv: Array, mask: Array, num_heads: int) -> tuple[Array, Backward]:
  """Mixes values of earlier, unmasked positions: [B, T, 3HK] to [B, T, HK].

  `qkv` holds queries, keys and values side by side. A query without any key,
  as all in a fully masked sequence, gets zeros.
  """
  num_sequences, length, width = qkv.shape
  split = qkv.reshape(num_sequences, length, 3, num_heads, -1)
  q, k, v = np.moveaxis(split, (2, 3), (0, 2))  # each [B, H, T, K]
  allowed = np.tri(length, dtype=bool) & mask[:, None, None]  # [B, 1, T, T]
  scale = 1 / math.sqrt(q.shape[-1])
  weights = masked_softmax(q @ k.swapaxes(2, 3) * scale, allowed)
  mixed = np.moveaxis(weights @ v, 1, 2)  # [B, T, H, K]

  def backward(d_y: Array) -> Array:
    d_mixed = d_y.reshape(mixed.shape).swapaxes(1, 2)  # [B, H, T, K]
    d_weights = d_mixed @ v.swapaxes(2, 3)  # [B, H, T, T]
    mean = (weights * d_weights).sum(-1, keepdims=True)  # [B, H, T, 1]
    d_scores = weights * (d_weights - mean) * scale  # [B, H, T, T]
    d_q = d_scores @ k  # [B, H, T, K]
    d_k = d_scores.swapaxes(2, 3) @ q  # [B, H, T, K]
    d_v = weights.swapaxes(2, 3) @ d_mixed  # [B, H, T, K]
    d_split = np.moveaxis(np.stack([d_q, d_k, d_v]), (0, 2), (2, 3))
    return d_split.reshape(qkv.shape)

  return mixed.reshape(num_sequences, length, width // 3), backward


def residual(
  h: Array, params: Params, modules: list[str], middle: Middle
) -> tuple[Array, Callable[[Array, Grads], Array]]:
  """Returns h + linear(middle(linear(layer_norm(h)))), all [B, T, D].

  Its backward puts the gradients of `modules` (norm and both linear layers)
  into the `Grads` that it is given.
  """
  norm, first, last = modules
  x, backward_norm = layer_norm(h, params[norm])
  x, backward_first = linear(x, params[first])
  x, backward_middle = middle(x)
  x, backward_last = linear(x, params[last])

  def backward(d_y: Array, grads: Grads) -> Array:
    d_x, grads[last] = backward_last(d_y)
    d_x, grads[first] = backward_first(backward_middle(d_x))
    d_x, grads[norm] = backward_norm(d_x)
    return d_y + d_x

  return h + x, backward


def forward(
  params: Params, inputs: Array, mask: Array, num_heads: int, tied: bool
) -> tuple[Array, Callable[[Array], Grads]]:
  """Returns logits [B, T, V] and the backward from them to all parameters."""
  tokens = params[TOKEN_EMBEDDINGS[0]][TOKEN_EMBEDDINGS[1]]  # [V, D]
  positions = params[POSITION_EMBEDDINGS[0]][POSITION_EMBEDDINGS[1]]
  num_layers = sum(ATTENTION[1].format(i) in params for i in range(len(params)))
  h = tokens[inputs] + positions[: inputs.shape[1]]  # [B, T, D]
  backwards = []
  mix = functools.partial(attend, mask=mask, num_heads=num_heads)
  for layer in range(num_layers):
    for templates, middle in ((ATTENTION, mix), (DENSE, gelu)):
      modules = [template.format(layer) for template in templates]
      h, backward_residual = residual(h, params, modules, middle)  # [B, T, D]
      backwards.append(backward_residual)
  h, backward_norm = layer_norm(h, params[FINAL_NORM])
  output = {"w": tokens.T} if tied else params[UNEMBED]
  logits, backward_logits = linear(h, output)

  def backward(d_logits: Array) -> Grads:
    grads: Grads = {}
    d_h, d_output = backward_logits(d_logits)
    d_h, grads[FINAL_NORM] = backward_norm(d_h)
    for backward_residual in reversed(backwards):
      d_h = backward_residual(d_h, grads)
    d_tokens, d_positions = np.zeros_like(tokens), np.zeros_like(positions)
    np.add.at(d_tokens, inputs, d_h)
    d_positions[: inputs.shape[1]] = d_h.sum(0)
    if tied:
      d_tokens += d_output["w"].T
    else:
      grads[UNEMBED] = d_output
    grads[TOKEN_EMBEDDINGS[0]] = {TOKEN_EMBEDDINGS[1]: d_tokens}
    grads[POSITION_EMBEDDINGS[0]] = {POSITION_EMBEDDINGS[1]: d_positions}
    return grads

  return logits, backward


def loss_and_grads(
  params: Params,
  inputs: Array,
  targets: Array,
  mask: Array,
  num_heads: int,
  tied: bool,
) -> tuple[float, int, int, Grads]:
  """Sums the loss over unmasked targets, and differentiates the sum.

  Args:
    params: parameters of any float type; computation is in float64.
    inputs: [..., B, T] integers; leading axes are flattened into B.
    targets: [..., B, T] integers.
    mask: [..., B, T] False at padding, which is neither attended to nor scored.
    num_heads: H.
    tied: whether the logits are products with the token embeddings.

  Returns:
    The loss in nats, the number of tokens, how many of them the model ranks
    first, and the gradients, laid out as `as_float64(params)`.

  Raises:
    ValueError: if the model has no use for some of `params`.
  """
  length = np.shape(inputs)[-1]
  inputs = np.asarray(inputs).reshape(-1, length)  # [B, T]
  targets = np.asarray(targets).reshape(-1, length)  # [B, T]
  mask = np.asarray(mask, bool).reshape(-1, length)  # [B, T]
  params = as_float64(params)
  logits, backward = forward(params, inputs, mask, num_heads, tied)
  shifted = logits - logits.max(-1, keepdims=True)  # [B, T, V]
  log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  one_hot = np.arange(logits.shape[-1]) == targets[..., None]  # [B, T, V]
  losses = -np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
  grads = backward((np.exp(log_probs) - one_hot) * mask[..., None])
  for module, arrays in params.items():
    if unused := set(arrays) - set(grads.get(module, {})):
      raise ValueError(f"params[{module!r}]: {sorted(unused)} is not used")
  num_correct = int(((logits.argmax(-1) == targets) & mask).sum())
  return float(losses[mask].sum()), int(mask.sum()), num_correct, grads


def global_norm(tree: Params) -> float:
  """Returns the Euclidean norm of all numbers in `tree`."""
  arrays = (a for module in tree.values() for a in module.values())
  return math.sqrt(sum(float((array**2).sum()) for array in arrays))


def clip_by_global_norm(grads: Params, max_norm: float) -> Grads:
  """Scales `grads` down to `max_norm` if their global norm exceeds it."""
  norm = global_norm(grads)
  scale = max_norm / norm if norm > max_norm else 1.0
  return tree_map(lambda grad: grad * scale, grads)


def learning_rate(
  step: int, peak: float, warmup_steps: int, total_steps: int, end: float
) -> float:
  """Rises linearly from 0 at step 0, then falls by a cosine to `end`."""
  if step < warmup_steps:
    return peak * step / warmup_steps
  if step >= total_steps:
    return end
  progress = (step - warmup_steps) / (total_steps - warmup_steps)
  return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2


def adamw_init(params: Params) -> AdamWState:
  """Returns the state before the first update."""
  zeros = tree_map(lambda array: np.zeros(np.shape(array)), params)
  return AdamWState(0, zeros, zeros)


def adamw_update(
  params: Params, grads: Params, state: AdamWState, rate: float, hyper: Hyper
) -> tuple[Grads, AdamWState]:
  """Returns parameters and state after one update at learning rate `rate`.

  As in Optax: `eps` is outside the square root, `rate` multiplies the decay
  too, and only arrays of two or more axes decay.
  """
  b1, b2, count = hyper.b1, hyper.b2, state.count + 1
  mu = tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
  nu = tree_map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, grads)

  def updated(param: Array, m: Array, v: Array) -> Array:
    m_hat, v_hat = m / (1 - b1**count), v / (1 - b2**count)
    decay = hyper.weight_decay * param if param.ndim >= 2 else 0.0
    return param - rate * (m_hat / (np.sqrt(v_hat) + hyper.eps) + decay)

  return tree_map(updated, params, mu, nu), AdamWState(count, mu, nu)


def train_step(
  params: Params,
  opt_state: AdamWState,
  step: int,
  batch: tuple[Array, Array, Array],
  hyper: Hyper,
) -> tuple[Grads, AdamWState, dict[str, float]]:
  """Does update number `step` + 1, on a whole global batch.

  `batch` is (inputs, targets, mask), as `loss_and_grads` takes them. Returns
  new parameters and state, and the loss (mean over tokens, so there must be
  one), num_tokens, num_correct, grad_norm (before clipping) and learning_rate.
  """
  params = as_float64(params)
  loss_sum, num_tokens, num_correct, grads = loss_and_grads(
    params, *batch, hyper.num_heads, hyper.tie_embeddings
  )
  grads = tree_map(lambda grad: grad / num_tokens, grads)
  peak, end = hyper.learning_rate, hyper.end_learning_rate
  rate = learning_rate(
    step, peak, hyper.warmup_steps, hyper.training_steps, end
  )
  metrics = {
    "loss": loss_sum / num_tokens,
    "num_tokens": num_tokens,
    "num_correct": num_correct,
    "grad_norm": global_norm(grads),
    "learning_rate": rate,
  }
  if hyper.clip_norm:
    grads = clip_by_global_norm(grads, hyper.clip_norm)
  params, opt_state = adamw_update(params, grads, opt_state, rate, hyper)
  return params, opt_state, metrics
