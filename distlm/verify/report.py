"""Compares all layouts with one device, in a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from distlm import parallel, snapshot
from distlm.data.loader import check_corpus
from distlm.data.token_store import TokenStore
from distlm.errors import RunError, UsageError
from distlm.settings import (
  EvaluationConfig,
  OptimizerConfig,
  ProfileConfig,
  RunConfig,
)
from distlm.verify import checks, runs
from distlm.verify.runs import Outcome, Step

# What rounding may make of a value, relative to it.
TOLERANCE = 1e-5
_EVALUATION_BATCHES = 4
# So large, and clipped so much, that a wrong gradient shows at once. Without
# clipping it would blow up rounding.
_CLIP_NORM = 0.1
_LEARNING_RATE, _UNCLIPPED_LEARNING_RATE = 1.0, 0.03
_HEADER = ("layout", "loss", "grad norm", "params", "difference", "verdict")
_WIDTHS = (24, 11, 11, 10, 12, 8)


class Layout(NamedTuple):
  """Devices of each process, and accumulation steps of each device."""

  num_devices: int
  accumulation_steps: int

  def __str__(self) -> str:
    """Returns, for example, "2 x 4 devices x 1"."""
    count = parallel.process_count()
    processes = f"{count} x " if count > 1 else ""
    return (
      f"{processes}{self.num_devices} device(s) x {self.accumulation_steps}"
    )


def verify(
  config: RunConfig,
  store: TokenStore,
  num_steps: int,
  print_line: Callable[[str], None],
) -> None:
  """Runs the same updates on all layouts and on one device, and compares.

  The reference is jitted, has no collective and takes whole batches. A layout
  is the experiment that trains: its loader, its thread, its pmapped update.
  Some batches are padded, so that devices and accumulation steps count
  unequally. Dropout is off, since its masks differ between layouts; they are
  compared by themselves. The optimizer is SGD after clipping: Adam divides by
  the size of the gradient, which makes much of the rounding of what is zero.

  Args:
    config: the user's; batch and optimizer are replaced.
    store: its corpus.
    num_steps: updates on each layout.
    print_line: shows a row.

  Raises:
    RunError: naming the first layout that differs, the step and the parameter.
    UsageError: if the corpus is too small.
  """
  parallel.repair_jaxline()
  layouts = _layouts()
  config = _plain(config, layouts, num_steps)
  try:
    check_corpus(len(store.tokens), config.data)
  except UsageError as error:
    raise UsageError(
      f"data.source: the batches of verify have"
      f" {config.data.global_batch_size} sequences, so that all layouts divide"
      f" them ({error}); give more text or fewer --devices"
    ) from error
  print_line(
    f"{num_steps} steps of {config.data.global_batch_size} sequences of"
    f" {config.data.sequence_length} tokens, some padded; a layout is devices x"
    " accumulation steps"
  )
  print_line(_row(*_HEADER))
  problems = []
  with jax.default_matmul_precision("highest"):
    reference = runs.run_reference(config, store)
    print_line(_row("reference, no pmap", *_figures(reference)))
    for layout in layouts:
      outcome = runs.run_layout(
        dataclasses.replace(
          config, accumulation_steps=layout.accumulation_steps
        ),
        store,
        layout.num_devices,
      )
      worst, problem = compare(outcome, reference)
      verdict = "DIFFERS" if problem else "equal"
      print_line(_row(f"{layout}", *_figures(outcome), f"{worst:.1e}", verdict))
      problems += [f"layout {layout}: {problem}"] if problem else []
    for name, check in (
      ("dropout", checks.check_masks),
      ("data", checks.check_data),
    ):
      finding, problem = check(config, store)
      print_line(f"{name}: {problem or finding}")
      problems += [f"{name}: {problem}"] if problem else []
  if problems:
    raise RunError(problems[0])
  print_line(f"all layouts are equal, within {TOLERANCE:.0e} relative")


def _row(*cells: str) -> str:
  widths = _WIDTHS[: len(cells)]
  return "".join(
    f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)
  ).rstrip()


def _figures(outcome: Outcome) -> tuple[str, str, str]:
  last = outcome.steps[-1]
  return f"{last.loss:.6f}", f"{last.grad_norm:.6f}", outcome.checksum


def _layouts() -> list[Layout]:
  """Returns the layouts to compare; each costs some compilations.

  All devices, and all numbers that are powers of two and divide theirs, so that
  batches stay small; other accumulation steps than 1 with the fewest and the
  most devices alone.
  """
  most = parallel.local_device_count()
  counts = {most}
  if parallel.process_count() == 1:  # Several must have the same number.
    counts |= {1 << i for i in range(most.bit_length()) if most % (1 << i) == 0}
  return [
    *(Layout(count, 1) for count in sorted(counts)),
    *(
      Layout(count, steps)
      for count in sorted({min(counts), most})
      for steps in (2, runs.MOST_ACCUMULATION_STEPS)
    ),
  ]


def _plain(
  config: RunConfig, layouts: list[Layout], num_steps: int
) -> RunConfig:
  """Returns settings with which all layouts must compute the same."""
  # At least two, so that one of them can be empty.
  counts = [2, *(layout.num_devices for layout in layouts)]
  size = runs.MOST_ACCUMULATION_STEPS * math.lcm(*counts)
  is_clipped = config.optimizer.clip_norm > 0
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, dropout_rate=0.0),
    data=dataclasses.replace(
      config.data, global_batch_size=parallel.process_count() * size
    ),
    optimizer=OptimizerConfig(
      name="sgd",
      learning_rate=_LEARNING_RATE if is_clipped else _UNCLIPPED_LEARNING_RATE,
      schedule="constant",
      warmup_steps=0,
      clip_norm=_CLIP_NORM if is_clipped else 0.0,
    ),
    evaluation=EvaluationConfig(batches=_EVALUATION_BATCHES),
    profile=ProfileConfig(),
    training_steps=num_steps,
  )


def compare(outcome: Outcome, reference: Outcome) -> tuple[float, str]:
  """Compares what a layout computed with what it must compute.

  Returns:
    The largest relative difference, and the first that is too large, or "".
  """
  worst, problems = 0.0, []
  for number, (step, wanted) in enumerate(
    zip(outcome.steps, reference.steps, strict=True), start=1
  ):
    errors = _errors(step, wanted)
    worst = max(worst, *errors.values())
    wrong = [name for name in errors if not errors[name] <= TOLERANCE]
    if wrong:
      parameters = [name for name in wrong if name not in Step._fields]
      first = (
        f"the first parameter that differs is {parameters[0]}"
        if parameters
        else ("no parameter differs yet, which clipping may hide")
      )
      problems.append(
        f"step {number} differs by {errors[wrong[0]]:.1e} in {wrong[0]};"
        f" {first}"
      )
    if outcome.unequal_at == number:
      problems.append(f"replicas differ from each other after step {number}")
  error = _error(outcome.evaluation_loss, reference.evaluation_loss)
  worst = max(worst, error)
  counts = outcome.evaluation_tokens, reference.evaluation_tokens
  if not error <= TOLERANCE or counts[0] != counts[1]:
    problems.append(
      f"an evaluation of {counts[0]} tokens, of {counts[1]}, differs by"
      f" {error:.1e} in its loss"
    )
  return worst, problems[0] if problems else ""


def _errors(step: Step, wanted: Step) -> dict[str, float]:
  """Returns relative differences by name, those of parameters by norm."""
  errors = {
    name: _error(getattr(step, name), getattr(wanted, name))
    for name in ("loss", "grad_norm", "tokens")
  }
  for (path, leaf), of_wanted in zip(
    jax.tree_util.tree_leaves_with_path(step.params),
    jax.tree.leaves(wanted.params),
    strict=True,
  ):
    size = np.linalg.norm(np.ravel(of_wanted)) or 1.0
    distance = np.linalg.norm(np.ravel(leaf - of_wanted))
    errors[snapshot.dotted(path)] = float(distance / size)
  return errors


def _error(value: float, wanted: float) -> float:
  return 0.0 if value == wanted else abs(value - wanted) / (abs(wanted) or 1.0)
