"""What the user sees of a run: tables, and a progress bar or plain lines."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from tqdm import tqdm


def warn(line: str) -> None:
  """Shows what the user should know although the command goes on."""
  print(f"warning: {line}", file=sys.stderr, flush=True)


class Console:
  """Shows a run on a stream: a live bar on a terminal, plain lines elsewhere.

  A log file gets one line per log interval, with no control characters. One
  thread at a time may call `log_scalars`; `RunWriter` sees to that.
  """

  def __init__(self, stream: TextIO | None = None) -> None:
    """Makes a console on `stream`, or on the standard output."""
    # None where the process was started with it closed.
    self._stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    self._total_steps = 0
    self._bar: tqdm[None] | None = None

  def print_line(self, line: str) -> None:
    """Prints a line, above the bar where there is one."""
    if self._bar is None:
      try:
        # One write, so that lines of several threads do not mix.
        self._stream.write(line + "\n")
        self._stream.flush()
      except BrokenPipeError:
        # Whoever read it, such as `head`, has seen enough: the run goes on.
        self._stream = open(os.devnull, "w")  # noqa: SIM115
    else:
      self._bar.write(line, file=self._stream)

  def print_summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Prints a title and aligned (name, value) rows."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    self.print_line("\n".join([title, *lines]))

  def start_progress(self, step: int, total_steps: int) -> None:
    """Begins the progress at `step` updates of `total_steps`."""
    self._total_steps = total_steps
    if self._has_width():
      self._bar = tqdm(
        desc="train",
        initial=step,
        total=total_steps,
        unit="step",
        file=self._stream,
        dynamic_ncols=True,
      )

  def log_scalars(
    self, split: str, step: int, scalars: Mapping[str, float]
  ) -> None:
    """Shows the scalars of a step.

    Args:
      split: "train" or "eval".
      step: completed updates.
      scalars: of an evaluation all are shown; of training `loss`,
        `tokens_per_sec`, `mfu` and, from JAXline's `steps_per_sec`, the time
        left.
    """
    if split == "eval":
      values = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in scalars.items()
      ]
      self.print_line("  ".join([f"eval step {step}", *values]))
    elif self._bar is None:
      progress = f"step {step}/{self._total_steps}"
      values = _training_values(scalars) + self._time_left(step, scalars)
      self.print_line("  ".join([progress, *values]))
    else:
      self._bar.set_postfix_str(
        "  ".join(_training_values(scalars)), refresh=False
      )
      self._bar.update(step - self._bar.n)
      self._bar.refresh()

  def finish(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Ends the progress and prints the closing summary."""
    self.close()
    self.print_summary(title, rows)

  def close(self) -> None:
    """Leaves the bar as it is, so that what follows does not tear it."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None

  def _has_width(self) -> bool:
    # Terminals of some containers and CI jobs are 0 columns wide: no bar fits.
    return (
      self._stream.isatty()
      and os.get_terminal_size(self._stream.fileno()).columns > 0
    )

  def _time_left(self, step: int, scalars: Mapping[str, float]) -> list[str]:
    steps_per_sec = scalars.get("steps_per_sec", 0.0)
    if scalars.get("tokens") and "tokens_per_sec" in scalars:
      # JAXline's rate takes evaluations for training.
      steps_per_sec = scalars["tokens_per_sec"] / scalars["tokens"]
    if not (steps_per_sec > 0 and math.isfinite(steps_per_sec)):
      return []
    secs = (self._total_steps - step) / steps_per_sec
    return [f"eta {tqdm.format_interval(secs)}"]


def _training_values(scalars: Mapping[str, float]) -> list[str]:
  values = []
  if "loss" in scalars:
    values.append(f"loss {scalars['loss']:.3f}")
  if "tokens_per_sec" in scalars:
    values.append(f"{scalars['tokens_per_sec']:,.0f} tokens/s")
  if "mfu" in scalars:
    values.append(f"mfu {scalars['mfu']:.1%}")
  return values
