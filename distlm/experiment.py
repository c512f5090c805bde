"""The language-model experiment that JAXline runs: wiring, no maths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxline.experiment import AbstractExperiment

from distlm import flops, metrics, nonfinite, parallel, replicas, summary
from distlm.console import warn
from distlm.data.loader import Layout, Loader
from distlm.data.prefetch import Prefetcher
from distlm.data.token_store import TokenStore, open_token_store
from distlm.errors import UsageError
from distlm.language_model import make_model, make_updater, max_skips_in_row
from distlm.settings import RunConfig
from distlm.types import Batch, LossSums, OptState, TrainState


def current_layout(config: RunConfig) -> Layout:
  """Returns how batches are spread over the devices that JAX sees."""
  return Layout(
    process_index=parallel.process_index(),
    process_count=parallel.process_count(),
    devices_per_process=parallel.local_device_count(),
    accumulation_steps=config.accumulation_steps,
  )


class LanguageModelExperiment(AbstractExperiment):
  """Trains and evaluates a Transformer language model on all devices."""

  CHECKPOINT_ATTRS: ClassVar = {"_train_state": "train_state"}
  NON_BROADCAST_CHECKPOINT_ATTRS: ClassVar = {"_data_position": "data_position"}

  CHECKPOINTS_ARE_FINITE: ClassVar = True
  loader_class: ClassVar[type[Loader]] = Loader

  def __init__(
    self,
    mode: str,
    init_rng: jax.Array,
    config: RunConfig,
    store: TokenStore | None = None,
  ) -> None:
    """Sets the experiment up; see JAXline's `AbstractExperiment`.

    Args:
      mode: "train" makes the parameters now, other modes when they are needed,
        since a checkpoint usually brings them.
      init_rng: the key of the parameters.
      config: the checked settings.
      store: the corpus, where the caller has opened it already.

    Raises:
      UsageError: if the settings do not suit the corpus or the devices.
    """
    super().__init__(mode, init_rng)
    self._config = config
    self._store = store or open_token_store(config.data)
    self._loader = self.loader_class(
      self._store,
      config.data,
      config.evaluation.batches,
      config.random_seed,
      current_layout(config),
    )
    self._forward = make_model(config, self._store.tokenizer.vocab_size)
    updater = make_updater(config, self._forward)
    self._replicated_state = updater.replicated_state
    self._update = parallel.pmap(updater.update, donate_argnums=0)
    self._split = parallel.pmap(updater.split_state)
    self._gather = parallel.pmap(updater.gather_state)
    # All but an update sees a state that is whole on each device.
    updater = dataclasses.replace(updater, shard_state=False)
    self._gradient = updater.gradient
    self._evaluate = parallel.pmap(updater.evaluate)
    self._init = functools.partial(
      parallel.pmap(updater.init), parallel.replicate(init_rng)
    )
    self._is_split = False
    self._train_state: TrainState = (
      self._init() if mode == "train" else jax.eval_shape(self._init)
    )
    self._set_position(0)
    self._batches: Prefetcher[Batch] | None = None
    self._in_flight: _InFlight | None = None
    self._rate = self._make_rate(measures_peak=mode == "train")

  def step(
    self, *, global_step: jax.Array, rng: jax.Array, writer: Any
  ) -> dict[str, Any]:
    """Dispatches one update and returns its scalars, not yet computed.

    Args:
      global_step: [R] completed updates.
      rng: [R, 2] keys, of this step and each device.
      writer: ignored; JAXline writes what is returned.
    """
    del writer
    if self._batches is None:
      self._batches = self._start_batches(int(parallel.fetch(global_step)))
    if self._is_split != self._config.optimizer.shard_state:
      self._set_opt_state(self._split(self._train_state.opt_state), True)
    batch = next(self._batches)  # [R, A, B, T]
    self._train_state, scalars = self._update(self._train_state, batch, rng)
    step = self._data_position["step"] + 1
    self._set_position(step)
    self._settle()
    scalars = parallel.first_replica(scalars)
    self._in_flight = _InFlight(step, batch, rng, scalars)
    return {
      **{name: scalars[name] for name in scalars if name != "skipped_in_row"},
      **self._rate.scalars(),
      **self._loader.ledger(step)._asdict(),
    }

  def evaluate(
    self, *, global_step: jax.Array, rng: jax.Array, writer: Any
  ) -> dict[str, float]:
    """Returns the figures of the validation split; see `metrics`."""
    del global_step, rng, writer
    if isinstance(self._train_state.step, jax.ShapeDtypeStruct):
      self._train_state = self._init()
    sums = [0.0, 0, 0]

    def add(batch_sums: LossSums) -> None:
      for i, value in enumerate(parallel.fetch(batch_sums)):
        sums[i] += value.item()

    pending: LossSums | None = None
    with Prefetcher(self._evaluation_batches(), self._depth) as batches:
      for batch in batches:
        # One batch late, so that the devices never wait for the host.
        computing = self._evaluate(self._train_state.params, batch)
        if pending is not None:
          add(pending)
        pending = computing
    if pending is not None:
      add(pending)
    return metrics.evaluation_scalars(
      LossSums(*sums), self._loader.evaluation_bytes
    )

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint.

    Raises:
      UsageError: if the checkpoint was trained on another text.
    """
    trained_on = snapshot_state["data_position"]["fingerprint"]
    if trained_on != self._store.fingerprint:
      raise UsageError(
        f"data.source={', '.join(self._config.data.source)}: its text differs"
        f" from what the checkpoint was trained on (fingerprint"
        f" {self._store.fingerprint}, then {trained_on}); restore the text, or"
        " use another --workdir"
      )
    super().restore_from_snapshot(snapshot_state)
    self._is_split = False
    self.close()
    # Fewer skips in a row may be allowed now; the next update is a new one.
    self._limit_skips_in_row(max_skips_in_row(self._config))

  def summary_rows(self) -> list[tuple[str, str]]:
    """Returns (name, value) rows that describe the experiment to its user."""
    state = self._train_state
    opt_state = state.opt_state
    if self._is_split != self._config.optimizer.shard_state:
      opt_state = jax.eval_shape(self._split, opt_state)
    return summary.rows(
      self._config,
      self._store,
      self._loader,
      state._replace(opt_state=opt_state),
      self._data_position["step"],
    )

  def before_save(self) -> None:
    """Gathers a split optimizer state; to be called by all processes.

    It is whole on each device until the next step, which splits it again: no
    gradient and no activation takes room meanwhile.
    """
    if self._is_split:
      state = self._train_state
      self._set_opt_state(self._gather(state.opt_state, state.params), False)

  def without_parts(self, state: TrainState) -> TrainState:
    """Returns a state with None in place of what devices have parts of."""
    if not self._is_split:
      return state
    return state._replace(opt_state=self._replicated_state(state.opt_state))

  def close(self) -> None:
    """Ends the thread that loads batches; `step` starts it anew."""
    if self._batches is not None:
      self._batches.close()
    self._batches = self._in_flight = None

  def on_repair(self) -> None:
    """Forgets the update that a wrong replica may have spoilt."""
    self._in_flight = None
    self._limit_skips_in_row(0)

  def pause(self) -> None:
    """Waits for the last step; what follows it is not training time.

    Raises:
      RunError: if that step went wrong.
    """
    self._settle()
    self._rate.pause()

  def closing_rows(self) -> list[tuple[str, str]]:
    """Returns (name, value) rows about what the run has trained on."""
    return summary.closing_rows(self._loader, self._data_position["step"])

  def _limit_skips_in_row(self, limit: int) -> None:
    in_row = parallel.fetch(self._train_state.num_skipped_in_row)
    self._train_state = self._train_state._replace(
      num_skipped_in_row=parallel.replicate(np.minimum(in_row, limit))
    )

  def _make_rate(self, measures_peak: bool) -> metrics.TokenRate:
    # A measurement must have the cores alone: the first parameters are there,
    # and no thread loads batches yet.
    if measures_peak:
      jax.block_until_ready(self._train_state)
    num_devices = parallel.local_device_count()
    config, tokenizer = self._config, self._store.tokenizer
    return metrics.TokenRate(
      parallel.process_count() * num_devices,
      flops.training_flops_per_token(
        config.model,
        config.model.vocab_size or tokenizer.vocab_size,
        config.data.sequence_length,
      ),
      flops.device_peak_flops(
        *(parallel.device_kind(), parallel.platform()),
        *(num_devices, config.precision),
      )
      if measures_peak
      else None,
    )

  def _set_opt_state(self, opt_state: OptState, is_split: bool) -> None:
    self._train_state = self._train_state._replace(opt_state=opt_state)
    self._is_split = is_split

  @property
  def _depth(self) -> int:
    return self._config.data.prefetch_batches

  def _set_position(self, step: int) -> None:
    """Notes how much data was used; it is part of the checkpoint."""
    self._data_position: dict[str, Any] = {
      "step": step,
      "sequences": step * self._config.data.global_batch_size,
      "fingerprint": self._store.fingerprint,
    }

  def _start_batches(self, first_step: int) -> Prefetcher[Batch]:
    steps = range(first_step, self._config.training_steps)
    return Prefetcher(
      (parallel.shard(self._loader.process_batch(step)) for step in steps),
      self._depth,
    )

  def _evaluation_batches(self) -> Iterator[Batch]:
    for index in range(self._loader.num_evaluation_batches):
      yield parallel.shard(self._loader.process_evaluation_batch(index))

  def _settle(self) -> None:
    """Waits for the update in flight, and looks at how it went.

    One update is in flight while the host prepares the next. Without a bound
    the host would run ahead by hundreds of steps, holding the batch of each;
    with fake CPU devices that can even exhaust XLA's threads.

    Raises:
      RunError: if the update was not finite and may not be skipped.
    """
    update, self._in_flight = self._in_flight, None
    if update is None:
      return
    self._rate.update(update.scalars["tokens"].item())
    in_row = update.scalars["skipped_in_row"].item()  # On all processes alike.
    if not in_row:
      return
    if in_row <= max_skips_in_row(self._config):
      if parallel.process_index() == 0:
        warn(
          f"step {update.step}: the loss or gradient is not finite, so the"
          f" update is skipped ({in_row} in a row)"
        )
      return
    # A replica with a wrong value may be what spoilt it for all.
    state = self.without_parts(self._train_state)
    replicas.check(update.step, {"train_state": state})
    cause = nonfinite.find_cause(
      self._forward,
      self._gradient,
      self._train_state.params,
      update.batch,
      update.keys,
    )
    raise nonfinite.error(
      update.step, cause, in_row, self._config.nonfinite == "skip"
    )


class _InFlight(NamedTuple):
  """An update that may still be computed, and what it was given."""

  step: int  # completed updates after it
  batch: Batch  # [R, A, B, T]
  keys: jax.Array  # [R, 2]
  scalars: dict[str, jax.Array]
