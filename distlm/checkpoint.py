"""JAXline's `Checkpointer` on disk, by Orbax.

A series ("latest", "best") is a directory with one directory per saved step.
Orbax makes a step visible only when it is whole, so that a killed save leaves
nothing that could be taken for a checkpoint. Arrays are stored by Orbax without
the replica axis, so that any number of devices can restore them; the rest is
JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import operator
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from distlm import parallel, snapshot
from distlm.errors import RunError, UsageError

# Orbax writes it last: without it, a directory is what a crash left, of a save
# or of a deletion.
_COMMIT_FILE = "commit_success.txt"
# Counts the best models: the last is the best, whatever its step.
_SERIAL = "serial"


class ExperimentState(types.SimpleNamespace):
  """What JAXline reads and sets between saves.

  `global_step`, `experiment_module`, `train_step_rng` and, of the best model,
  `best_eval_metric_value` and `best_model_eval_metric`.
  """


class DiskCheckpointer:
  """Saves and restores any JAXline experiment, by its checkpoint attributes.

  An attribute of `NON_BROADCAST_CHECKPOINT_ATTRS` may hold arrays and numbers,
  in any containers, or be of JSON types if it has a string in it.
  """

  def __init__(
    self, directory: Path, keep: int, settings: Mapping[str, Any]
  ) -> None:
    """Opens the checkpoints of a run; makes no directory yet.

    Args:
      directory: holds one directory for each series.
      keep: how many of the newest checkpoints of "latest" stay.
      settings: of the run, of JSON types, stored with each checkpoint.
    """
    self._directory = directory
    self._keep = keep
    self._settings = settings
    self._states: dict[str, ExperimentState] = {}
    self._managers: dict[str, ocp.CheckpointManager] = {}

  def get_experiment_state(self, ckpt_series: str) -> ExperimentState:
    """Returns the state that `save` writes and `restore` sets."""
    return self._states.setdefault(ckpt_series, ExperimentState())

  def save(self, ckpt_series: str) -> None:
    """Starts to write the state of a series; a step on disk stays as it is.

    It returns when the state has been copied to the host.
    """
    state = self.get_experiment_state(ckpt_series)
    manager = self._manager(ckpt_series, create=True)
    step = int(state.global_step)
    # Before the next copy, so that only one is in memory; also raises the
    # error of a save that failed.
    manager.wait_until_finished()
    if step in self._whole_steps(ckpt_series):
      return
    self._make_room(ckpt_series, step)
    arrays, attributes = snapshot.take(state.experiment_module)
    if getattr(state, "train_step_rng", None) is not None:
      arrays["train_step_rng"] = parallel.fetch(state.train_step_rng)
    scalars = {
      key: jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value)
      for key, value in vars(state).items()
      if key not in ("experiment_module", "train_step_rng")
    }
    metrics = None
    if ckpt_series == "best":
      newest = self.latest_step("best")
      metrics = {
        _SERIAL: 0 if newest is None else 1 + self._best_serial(newest)
      }
    manager.save(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays),
        metadata=ocp.args.JsonSave(
          {
            "state": scalars,
            "attributes": attributes,
            "config": self._settings,
          }
        ),
      ),
      metrics=metrics,
      force=True,  # A better model may be of an earlier step.
    )

  def restore(self, ckpt_series: str) -> None:
    """Sets the state of a series from its newest checkpoint.

    Raises:
      UsageError: if arrays of the checkpoint have other names or shapes than
        those of the experiment.
      RunError: if it cannot be read.
    """
    step = self.latest_step(ckpt_series)
    try:
      with self._reading(ckpt_series, step):
        self._restore_step(ckpt_series, step)
    except RunError:
      if self.latest_step(ckpt_series) == step:
        raise
      # The process that trains has replaced it meanwhile.
      self.restore(ckpt_series)

  @contextlib.contextmanager
  def _reading(self, ckpt_series: str, step: int | None) -> Iterator[None]:
    try:
      yield
    except UsageError:
      raise
    except (OSError, ValueError, KeyError) as error:
      raise RunError(
        f"checkpoint {self._directory / ckpt_series / f'{step}'}: it cannot be"
        f" read ({type(error).__name__}: {str(error)[:200]}); move it away to"
        " go on from the one before"
      ) from error

  def _restore_step(self, ckpt_series: str, step: int | None) -> None:
    state = self.get_experiment_state(ckpt_series)
    manager = self._manager(ckpt_series)
    template = snapshot.make_template(
      manager.item_metadata(step)["arrays"].tree,
      state.experiment_module,
      f"checkpoint {self.restore_path(ckpt_series)}",
    )
    restored = manager.restore(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardRestore(template),
        metadata=ocp.args.JsonRestore(),
      ),
    )
    rng = restored["arrays"].pop("train_step_rng", None)
    if rng is not None and getattr(state, "train_step_rng", None) is not None:
      state.train_step_rng = parallel.replicate(rng)
    state.experiment_module.restore_from_snapshot(
      {
        **restored["arrays"],
        **snapshot.with_tuples(
          restored["metadata"]["attributes"], state.experiment_module
        ),
      }
    )
    for key, value in restored["metadata"]["state"].items():
      setattr(state, key, value)

  def latest_step(self, ckpt_series: str) -> int | None:
    """Returns the step of the newest whole checkpoint, or None."""
    steps = self._whole_steps(ckpt_series)
    if ckpt_series == "best":
      return max(steps, key=self._best_serial, default=None)
    return max(steps, default=None)

  def read_scalars(self, ckpt_series: str) -> dict[str, Any]:
    """Returns `global_step` and the like of the newest whole checkpoint."""
    step = self.latest_step(ckpt_series)
    with self._reading(ckpt_series, step):
      restored = self._manager(ckpt_series).restore(
        step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())
      )
      return dict(restored["metadata"]["state"])

  def restore_path(self, ckpt_series: str) -> str | None:
    """Returns where the newest whole checkpoint is, or None."""
    step = self.latest_step(ckpt_series)
    return (
      None if step is None else str(self._directory / ckpt_series / f"{step}")
    )

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series has a whole checkpoint."""
    return self.latest_step(ckpt_series) is not None

  def wait_for_checkpointing_to_finish(self) -> None:
    """Waits until all saves are on disk, and raises the error of a save."""
    for manager in self._managers.values():
      manager.wait_until_finished()

  def close(self) -> None:
    """Waits as above and releases the threads of Orbax."""
    while self._managers:
      self._managers.popitem()[1].close()

  def _whole_steps(self, ckpt_series: str) -> list[int]:
    manager = self._manager(ckpt_series)
    manager.reload()  # Another process may have written since.
    return [
      step
      for step in manager.all_steps()
      if (self._directory / ckpt_series / f"{step}" / _COMMIT_FILE).exists()
    ]

  def _best_serial(self, step: int) -> int:
    return int(self._manager("best").metrics(step)[_SERIAL])

  def _make_room(self, ckpt_series: str, step: int) -> None:
    """Renames what a crash left in the place of a new checkpoint."""
    path = self._directory / ckpt_series / f"{step}"
    if path.exists():
      path.rename(path.with_name(f"{step}.incomplete-{time.time_ns()}"))
      self._manager(ckpt_series).reload()

  def _manager(
    self, ckpt_series: str, create: bool = False
  ) -> ocp.CheckpointManager:
    directory = self._directory / ckpt_series
    if create:
      directory.mkdir(parents=True, exist_ok=True)
    if ckpt_series not in self._managers:
      # Each process works alone: process 0 writes, all read. By default Orbax
      # would wait in a barrier for saves that the others never make.
      process = parallel.process_index()
      options = ocp.CheckpointManagerOptions(
        create=False,
        max_to_keep=1 if ckpt_series == "best" else self._keep,
        best_fn=operator.itemgetter(_SERIAL) if ckpt_series == "best" else None,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
          primary_host=process,
          active_processes={process},
          barrier_sync_key_prefix=f"{ckpt_series}-{process}",
        ),
      )
      self._managers[ckpt_series] = ocp.CheckpointManager(
        directory.absolute(),
        options=options,
        item_handlers={
          "arrays": ocp.StandardCheckpointHandler(),
          "metadata": ocp.JsonCheckpointHandler(),
          "metrics": ocp.JsonCheckpointHandler(),
        },
      )
    return self._managers[ckpt_series]
