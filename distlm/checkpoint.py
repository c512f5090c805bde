"""JAXline's `Checkpointer` on disk, by Orbax.

A series ("latest", "best") is a directory with one directory per saved step.
Orbax makes a step visible only when it is whole, so that a killed save leaves
nothing that could be taken for a checkpoint; checksums show what happened to it
later. Arrays are stored by Orbax without the replica axis, so that any number
of devices can restore them; the rest is JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import shutil
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from distlm import checksums, disk, parallel, snapshot
from distlm.errors import RunError, SaveError, UsageError
from distlm.series import SERIAL, Series

# What Orbax calls a save under way.
_UNFINISHED = "*.orbax-checkpoint-tmp*"


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
    self._series: dict[str, Series] = {}
    self._agreed: dict[str, int] = {}  # Steps; see `restore_path`.
    disk.hide_late_writes()

  def get_experiment_state(self, ckpt_series: str) -> ExperimentState:
    """Returns the state that `save` writes and `restore` sets."""
    return self._states.setdefault(ckpt_series, ExperimentState())

  def save(self, ckpt_series: str) -> None:
    """Starts to write the state of a series; a step on disk stays as it is.

    It returns when the state has been copied to the host.

    Raises:
      RunError: if the state has a value that is not finite, or this save or
        the one before could not be written.
    """
    state = self.get_experiment_state(ckpt_series)
    step = int(state.global_step)
    with self._writing(ckpt_series):
      manager = self._manager(ckpt_series, create=True)
      # Before the next copy, so that only one is in memory; also raises the
      # error of a save that failed.
      manager.wait_until_finished()
      series = self.series(ckpt_series)
      steps = series.steps()
      if step in steps:
        return
      series.set_aside(step, "incomplete")
      manager.reload()
      arrays, metadata = self._take(state)
      sizes = [np.asarray(leaf).nbytes for leaf in jax.tree.leaves(arrays)]
      disk.check_room(self._directory / ckpt_series, sum(sizes))
      metrics = None
      if ckpt_series == "best":
        metrics = {SERIAL: 1 + max(map(series.serial, steps), default=-1)}
      manager.save(
        step,
        args=ocp.args.Composite(
          arrays=ocp.args.StandardSave(arrays),
          metadata=ocp.args.JsonSave(metadata),
        ),
        metrics=metrics,
        force=True,  # A better model may be of an earlier step.
      )

  def _take(
    self, state: ExperimentState
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what Orbax and what JSON stores of a state."""
    module = state.experiment_module
    arrays, attributes = snapshot.take(module)
    name = snapshot.find_nonfinite(
      {name: arrays.get(name) for name in module.CHECKPOINT_ATTRS.values()},
      # Other experiments may hold infinities on purpose, such as a best loss.
      may_be_infinite=not getattr(module, "CHECKPOINTS_ARE_FINITE", False),
    )
    if name:
      raise RunError(
        f"checkpoint of step {state.global_step}: {name} is not finite, so it"
        " is not saved; the checkpoints before it stay as they are"
      )
    if getattr(state, "train_step_rng", None) is not None:
      arrays["train_step_rng"] = parallel.fetch(state.train_step_rng)
    scalars = {
      key: jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value)
      for key, value in vars(state).items()
      if key not in ("experiment_module", "train_step_rng")
    }
    return arrays, {
      "state": scalars,
      "attributes": attributes,
      "config": self._settings,
    }

  @contextlib.contextmanager
  def _writing(self, ckpt_series: str) -> Iterator[None]:
    """Makes one line of what a full or failing disk raises."""
    try:
      yield
    except (OSError, ValueError) as error:  # ValueError is TensorStore's.
      if isinstance(error, UsageError):
        raise
      # What is in flight in it has failed; the next save begins anew.
      if manager := self._managers.pop(ckpt_series, None):
        with contextlib.suppress(OSError, ValueError):
          manager.close()
      # Its room is what the rows of the run may need.
      for path in (self._directory / ckpt_series).glob(_UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)
      raise SaveError(
        f"{self._directory / ckpt_series}: a checkpoint could not be written"
        f" ({disk.reason(error)}); those before it are whole: mend what is"
        " named, such as a full disk, then the same command goes on from the"
        " newest"
      ) from error

  def restore(self, ckpt_series: str) -> None:
    """Sets the state of a series from its newest intact checkpoint.

    It is the one that `restore_path` has named, if it did.

    Raises:
      UsageError: if arrays of the checkpoint have other names or shapes than
        those of the experiment.
      RunError: if none can be read.
    """
    step: int | None = self._agreed.get(ckpt_series)
    if step is None:
      step = self.series(ckpt_series).newest_intact()
    try:
      with _reading(self.series(ckpt_series).path(step)):
        arrays, metadata = self._read(ckpt_series, step)
    except RunError:
      is_newest = self.series(ckpt_series).newest() == step
      if is_newest or parallel.process_count() > 1:
        raise
      # The process that trains has replaced it meanwhile.
      self._agreed.clear()
      self.restore(ckpt_series)
      return
    state = self.get_experiment_state(ckpt_series)
    rng = arrays.pop("train_step_rng", None)
    if rng is not None and getattr(state, "train_step_rng", None) is not None:
      state.train_step_rng = parallel.replicate(rng)
    attributes = snapshot.with_tuples(
      metadata["attributes"], state.experiment_module
    )
    state.experiment_module.restore_from_snapshot({**arrays, **attributes})
    for key, value in metadata["state"].items():
      setattr(state, key, value)

  def _read(
    self, ckpt_series: str, step: int | None
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns arrays, in the structure of the experiment's, and JSON."""
    manager = self._manager(ckpt_series)
    template = snapshot.make_template(
      manager.item_metadata(step)["arrays"].tree,
      self.get_experiment_state(ckpt_series).experiment_module,
      f"checkpoint {self.series(ckpt_series).path(step)}",
    )
    restored = manager.restore(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardRestore(template),
        metadata=ocp.args.JsonRestore(),
      ),
    )
    return restored["arrays"], dict(restored["metadata"])

  def series(self, ckpt_series: str) -> Series:
    """Returns the directories of "latest" or "best"."""
    return self._series.setdefault(
      ckpt_series, Series(self._directory / ckpt_series)
    )

  def read_scalars(self, ckpt_series: str) -> dict[str, Any]:
    """Returns `global_step` and the like of the newest whole checkpoint."""
    step = self.series(ckpt_series).newest()
    with _reading(self.series(ckpt_series).path(step)):
      restored = self._manager(ckpt_series).restore(
        step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())
      )
      return dict(restored["metadata"]["state"])

  def restore_path(self, ckpt_series: str) -> str | None:
    """Returns where the newest intact checkpoint is, or None.

    To be called by all processes: they go by what process 0 finds, and restore
    that one, however soon another is there.
    """
    series = self.series(ckpt_series)
    found = series.newest_intact() if parallel.process_index() == 0 else None
    step = parallel.agree(-1 if found is None else found)
    self._agreed.clear()
    if step < 0:
      return None
    self._agreed[ckpt_series] = step
    return str(series.path(step))

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series has a whole checkpoint."""
    is_there = self.series(ckpt_series).newest() is not None
    return is_there or ckpt_series in self._agreed

  def wait_for_checkpointing_to_finish(self) -> None:
    """Waits until all saves are on disk, and raises the error of a save."""
    for ckpt_series, manager in [*self._managers.items()]:
      with self._writing(ckpt_series):
        manager.wait_until_finished()

  def close(self) -> None:
    """Waits as above and releases the threads of Orbax."""
    self.wait_for_checkpointing_to_finish()
    while self._managers:
      self._managers.popitem()[1].close()

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
        best_fn=operator.itemgetter(SERIAL) if ckpt_series == "best" else None,
        async_options=ocp.options.AsyncOptions(
          post_finalization_callback=functools.partial(
            _write_checksums_of_saves, directory
          )
        ),
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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
  """Makes one line of what an unreadable checkpoint raises."""
  try:
    yield
  except UsageError:
    raise
  except Exception as error:  # Odd files make Orbax raise anything.
    raise RunError(
      f"checkpoint {path}: it cannot be read ({type(error).__name__}:"
      f" {str(error)[:200]}); move it away to go on from the one before"
    ) from error


def _write_checksums_of_saves(directory: Path) -> None:
  """Is called by Orbax when a save is complete, before it gets its name."""
  for path in directory.glob(_UNFINISHED):
    checksums.write_checksums(path)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads one checkpoint, without the experiment that it is of.

  Args:
    path: the directory of a step.

  Returns:
    The arrays, without the replica axis, as nested dictionaries and lists of
    NumPy arrays (tuples have become lists); and `state`, `attributes` and
    `config`, of JSON types.

  Raises:
    RunError: if it cannot be read.
  """
  with (
    _reading(path),
    ocp.Checkpointer(
      ocp.CompositeCheckpointHandler(
        arrays=ocp.StandardCheckpointHandler(),
        metadata=ocp.JsonCheckpointHandler(),
      )
    ) as checkpointer,
  ):
    restored = checkpointer.restore(
      path.absolute(),
      args=ocp.args.Composite(
        arrays=ocp.args.StandardRestore(), metadata=ocp.args.JsonRestore()
      ),
    )
    return restored["arrays"], restored["metadata"]
