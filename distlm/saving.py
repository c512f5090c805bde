"""When and how a run saves: settled, in turn, and with a policy for errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jaxline.utils
from ml_collections import config_dict

from distlm import parallel
from distlm.checkpoint import DiskCheckpointer
from distlm.console import warn
from distlm.errors import SaveError
from distlm.watchdog import Watchdog


class Saver:
  """Saves what has been looked at: nothing that went wrong reaches the disk."""

  def __init__(
    self,
    checkpointer: DiskCheckpointer,
    checks: Sequence[Callable[[int], None]],
    prepare: Callable[[], Any],
    on_error: str,
    watchdog: Watchdog,
  ) -> None:
    """Saves nothing yet.

    Args:
      checkpointer: of the run.
      checks: called by all processes with the step, before a save; they raise
        what went wrong in the steps so far.
      prepare: called by all processes after them, right before a save: process
        0 saves alone, and cannot ask the others for what they hold.
      on_error: what a save that cannot be written does: "abort" raises it,
        "continue" warns, and the next save tries again.
      watchdog: of the run.
    """
    self._checkpointer = checkpointer
    self._checks = checks
    self._prepare = prepare
    self._on_error = on_error
    self._watchdog = watchdog

  def settle(self, step: int) -> None:
    """Raises what went wrong in the steps so far; on all processes."""
    for check in self._checks:
      check(step)

  def end_steps(self, step: int) -> None:
    """Settles, before JAXline's own last save; what follows is no step."""
    self._watchdog.begin("end", step)
    self.settle(step)
    self._prepare()

  def save(self, ckpt_series: str, step: int) -> bool:
    """Saves a series; to be called by all processes, process 0 writes.

    Returns:
      Whether it could be written.

    Raises:
      RunError: if something is wrong with the run, or the save is to end it.
    """
    error: SaveError | None = None
    with self._watchdog.doing("save", step):
      self.settle(step)
      self._prepare()
      if parallel.process_index() == 0:
        try:
          self._checkpointer.save(ckpt_series)
        except SaveError as reason:
          error = reason
      # The others wait here, where it may take long, and not in a step.
      if parallel.agree(error is None):
        return True
    error = error or SaveError("process 0 could not save; see its error")
    if self._on_error == "abort":
      raise error
    if parallel.process_index() == 0:
      warn(f"{error}; training goes on, and the next save tries again")
    return False


class PeriodicSaving(jaxline.utils.PeriodicAction):
  """Saves, in place of JAXline's own action, when all else of a step is done.

  JAXline saves before the thread that writes the step's scalars has ended. A
  run killed between the two would resume after a step whose row is missing.
  """

  def __init__(
    self,
    config: config_dict.ConfigDict,
    actions: Sequence[Any],
    saver: Saver,
    interval: float,
  ) -> None:
    self._writing = [
      action
      for action in actions
      if isinstance(action, jaxline.utils.PeriodicAction)
    ]

    def save(step: int, scalars: Mapping[str, Any]) -> None:
      del scalars
      self.wait_for_writes()
      saver.save("latest", step)

    super().__init__(
      save,
      interval_type=config.checkpoint_interval_type or config.interval_type,
      interval=interval or math.inf,  # 0 means, as in JAXline, at the end.
      logging_growth_ratios=config.periodic_action_growth_ratios,
      run_async=False,
    )

  def wait_for_writes(self) -> None:
    """Waits for the actions that run in threads."""
    for action in self._writing:
      action.wait_to_finish()
