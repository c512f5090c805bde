"""What `throughput.measure` found, as a table and beside its targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sizes import SIZES

TORCH, TORCH_COMPILED, HAIKU = "PyTorch, eager", "PyTorch, compiled", "Haiku"
HAIKU_AS_IT_IS = "Haiku, malloc as it is"
PEERS = (TORCH, TORCH_COMPILED, HAIKU, HAIKU_AS_IT_IS)
NUM_COMPARED_LOSSES = 5
MAX_LOOP_OVER_STEP, MIN_PEAK_SHARE = 1.02, 0.7
MIN_OVER_TORCH, MIN_OVER_HAIKU = 1.0, 1.5


def table(figures: dict[str, Any]) -> str:
  """Returns the figures of `measure` as Markdown."""
  return "\n\n".join(_size_table(*item) for item in figures.items())


def targets(figures: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
  """Returns (what, value, target, whether it is met), of the fastest loop."""
  return [row for item in figures.items() for row in _size_targets(*item)]


def _size_targets(
  name: str, section: dict[str, Any]
) -> Iterator[tuple[str, float, str, bool]]:
  rows = section["rows"]
  loops = [row for row in rows if row.endswith("whole loop")]
  for loop in loops:
    step = rows[loop.replace("whole loop", "bare step")]
    ratio = step["tokens_per_sec"] / rows[loop]["tokens_per_sec"]
    yield (
      f"{name}: {loop}, time over that of the bare step",
      ratio,
      f"<= {MAX_LOOP_OVER_STEP}",
      ratio <= MAX_LOOP_OVER_STEP,
    )
  best = max((rows[loop] for loop in loops), key=lambda r: r["tokens_per_sec"])
  torch = [best["ratios"][x] for x in (TORCH, TORCH_COMPILED) if x in rows]
  minima = [
    (f"tokens/s over {peer}", best["ratios"][peer], MIN_OVER_HAIKU)
    for peer in (HAIKU, HAIKU_AS_IT_IS)
  ]
  if torch:
    what = "tokens/s over PyTorch's best"
    minima.append((what, min(torch), MIN_OVER_TORCH))
  if name == "medium":
    minima.append(("share of peak", best["share_of_peak"], MIN_PEAK_SHARE))
  for what, value, minimum in minima:
    yield f"{name}: {what}", value, f">= {minimum}", value >= minimum


def _size_table(name: str, section: dict[str, Any]) -> str:
  size, rows = SIZES[name], section["rows"]
  peers = [peer for peer in PEERS if peer in rows]
  lines = [
    f"{name}: {size.num_layers} layers of width {size.model_size},"
    f" {size.batch_size} sequences of {size.sequence_length} tokens\n",
    "| | tokens/s | least to largest |"
    + "".join(f" / {peer} |" for peer in peers)
    + " of peak |",
    "|---|---|---|" + "---|" * len(peers) + "---|",
  ]
  for contender, row in rows.items():
    lines.append(
      f"| {contender} | {row['tokens_per_sec']:,.0f} |"
      f" {row['least']:,.0f} to {row['largest']:,.0f} |"
      + "".join(f" {row['ratios'][peer]:.2f} |" for peer in peers)
      + f" {100 * row['share_of_peak']:.0f} % |"
    )
  peaks = section["peak_flops_per_sec"]
  shape = max(peaks, key=lambda shape: peaks[shape])
  lines += [
    f"\nPeak: {peaks[shape] / 1e9:,.0f} GFLOP/s ({shape}); a step needs"
    f" {section['flops_per_step'] / 1e9:.1f} GFLOP. The first"
    f" {NUM_COMPARED_LOSSES} losses of all differ by at most"
    f" {section['largest_loss_difference']:.0e}, relative."
  ]
  if TORCH not in rows:
    lines += ["\nPyTorch is not installed: its rows are left out."]
  return "\n".join(lines)
