"""The same model in PyTorch, as fast as plain PyTorch goes.

  python benchmarks/peer_torch.py SHARED --size=small --steps=80 [--compile]

It takes distlm's initial parameters and batches, which benchmarks/throughput.py
writes, and prints the seconds and the losses of its steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from sizes import (
  ADAM_B1,
  ADAM_B2,
  ADAM_EPS,
  CLIP_NORM,
  LEARNING_RATE,
  SIZES,
  WEIGHT_DECAY,
  WIDENING_FACTOR,
  Shared,
  Size,
)
from torch import nn
from torch.nn import functional

_WEIGHT_STDDEV = 0.02

# (inputs [B, T], targets [B, T]) -> loss
StepFn = Callable[[torch.Tensor, torch.Tensor], float]


class Layer(nn.Module):
  """Attention and a dense block, each after a layer norm."""

  def __init__(self, size: Size) -> None:
    super().__init__()
    width = size.model_size
    self.num_heads = size.num_heads
    self.norm_1 = nn.LayerNorm(width)
    self.qkv = nn.Linear(width, 3 * width)
    self.attention_output = nn.Linear(width, width)
    self.norm_2 = nn.LayerNorm(width)
    self.widen = nn.Linear(width, WIDENING_FACTOR * width)
    self.dense_output = nn.Linear(WIDENING_FACTOR * width, width)

  def forward(self, h: torch.Tensor) -> torch.Tensor:  # [B, T, D]
    batch_size, length, width = h.shape
    heads = (batch_size, length, 3, self.num_heads, -1)
    query, key, value = (
      self.qkv(self.norm_1(h)).view(heads).permute(2, 0, 3, 1, 4)
    )  # 3 x [B, H, T, K]
    mixed = functional.scaled_dot_product_attention(
      query, key, value, is_causal=True
    )
    mixed = mixed.transpose(1, 2).reshape(batch_size, length, width)
    h = h + self.attention_output(mixed)
    widened = functional.gelu(self.widen(self.norm_2(h)), approximate="tanh")
    return h + self.dense_output(widened)


class Model(nn.Module):
  """Tokens and targets to the mean loss."""

  def __init__(self, size: Size, vocab_size: int) -> None:
    super().__init__()
    width = size.model_size
    self.tokens = nn.Parameter(torch.empty(vocab_size, width))
    self.positions = nn.Parameter(torch.empty(size.sequence_length, width))
    self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_layers))
    self.final_norm = nn.LayerNorm(width)

  def forward(
    self, inputs: torch.Tensor, targets: torch.Tensor
  ) -> torch.Tensor:
    h = functional.embedding(inputs, self.tokens) + self.positions  # [B, T, D]
    for layer in self.layers:
      h = layer(h)
    logits = functional.linear(self.final_norm(h), self.tokens)  # [B, T, V]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def copy_parameters(model: Model, shared: Shared) -> None:
  """Copies distlm's initial parameters."""

  def put(target: nn.Parameter, array: Any) -> None:
    target.data.copy_(torch.from_numpy(array))

  def put_linear(linear: nn.Linear, name: str, i: int) -> None:
    put(linear.weight, shared.parameter(f"{name}/w", i).T)
    put(linear.bias, shared.parameter(f"{name}/b", i))

  def put_norm(norm: nn.LayerNorm, name: str, i: int | None) -> None:
    put(norm.weight, shared.parameter(f"{name}/scale", i))
    put(norm.bias, shared.parameter(f"{name}/offset", i))

  put(model.tokens, shared.parameter("tokens/embeddings"))
  put(model.positions, shared.parameter("positions"))
  for i, layer in enumerate(model.layers):
    put_norm(layer.norm_1, "norm_1", i)
    put_linear(layer.qkv, "attention/qkv", i)
    put_linear(layer.attention_output, "attention/output", i)
    put_norm(layer.norm_2, "norm_2", i)
    put_linear(layer.widen, "dense/widen", i)
    put_linear(layer.dense_output, "dense/output", i)
  put_norm(model.final_norm, "final_norm", None)


def make_optimizer(
  model: Model, b2: float = ADAM_B2, weight_decay: float = WEIGHT_DECAY
) -> torch.optim.AdamW:
  """Returns AdamW that decays matrices alone, fused where that exists."""
  matrices = [p for p in model.parameters() if p.ndim >= 2]
  others = [p for p in model.parameters() if p.ndim < 2]
  groups = [
    {"params": matrices, "weight_decay": weight_decay},
    {"params": others, "weight_decay": 0.0},
  ]
  settings = {"lr": LEARNING_RATE, "betas": (ADAM_B1, b2), "eps": ADAM_EPS}
  try:
    return torch.optim.AdamW(groups, fused=True, **settings)
  except RuntimeError:  # Not on this device in older versions.
    return torch.optim.AdamW(groups, **settings)


def make_step(
  model: Model, optimizer: torch.optim.Optimizer, is_compiled: bool = False
) -> StepFn:
  """Returns one update, which gives the loss before it."""
  compute_loss = torch.compile(model) if is_compiled else model

  def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
    loss = compute_loss(inputs, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, foreach=True)
    optimizer.step()
    return loss.item()

  return step


def use_all_cores() -> None:
  """Has PyTorch compute with as many threads as there are cores."""
  torch.set_num_threads(os.cpu_count() or 1)


def main() -> None:
  """Prints {"step_secs": [...], "losses": [...], "version": "..."}."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("shared")
  parser.add_argument("--size", choices=SIZES, required=True)
  parser.add_argument("--steps", type=int, required=True)
  parser.add_argument("--compile", action="store_true")
  args = parser.parse_args()
  use_all_cores()
  shared, size = Shared(args.shared), SIZES[args.size]
  model = Model(size, shared.vocab_size)
  copy_parameters(model, shared)
  step = make_step(model, make_optimizer(model), args.compile)
  step_secs, losses = [], []
  batches = [
    (torch.from_numpy(inputs).long(), torch.from_numpy(targets).long())
    for inputs, targets in shared.batches(args.steps)
  ]
  for batch in batches:
    start = time.perf_counter()
    losses.append(step(*batch))
    step_secs.append(time.perf_counter() - start)
  print(
    json.dumps(
      {"step_secs": step_secs, "losses": losses, "version": torch.__version__}
    )
  )


if __name__ == "__main__":
  main()
