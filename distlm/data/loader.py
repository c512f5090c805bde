"""Which tokens each step trains on, as a pure function of (seed, step).

There is no iterator state and no shuffle buffer: to resume is to ask for the
next step, on any number of devices and processes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlm.data.token_store import TokenStore, num_training_tokens, split
from distlm.data.tokenizers import TokenArray
from distlm.errors import UsageError
from distlm.types import Batch

if TYPE_CHECKING:
  from distlm.settings import DataConfig

_SUM_CHUNK_TOKENS = 2**20


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a global batch is spread out, and which part is this process's."""

  process_index: int = 0
  process_count: int = 1
  devices_per_process: int = 1
  accumulation_steps: int = 1


def check_layout(config: DataConfig, layout: Layout) -> None:
  """Checks that a global batch divides evenly; reads no data.

  Raises:
    UsageError: if it does not.
  """
  size = config.global_batch_size
  unit = (
    layout.process_count
    * layout.devices_per_process
    * layout.accumulation_steps
  )
  if size % unit:
    below = size // unit * unit
    nearest = f"{below} or {below + unit}" if below else str(unit)
    raise UsageError(
      f"data.global_batch_size={size}: it must be divisible by"
      f" {layout.process_count} processes x {layout.devices_per_process}"
      f" devices x accumulation_steps={layout.accumulation_steps}, which is"
      f" {unit}; use {nearest}"
    )


def check_corpus(num_tokens: int, config: DataConfig) -> None:
  """Checks that a corpus has enough tokens for its settings.

  Raises:
    UsageError: if a split is shorter than one sequence, or the training split
      than one global batch.
  """
  length = config.sequence_length
  num_training = num_training_tokens(num_tokens, config.validation_fraction)
  for name, size in (
    ("training", num_training),
    ("validation", num_tokens - num_training),
  ):
    if size < length + 1:
      raise UsageError(
        f"data.source={', '.join(config.source)}: its {name} split has {size}"
        f" of {num_tokens} tokens, too few for one sequence, which takes"
        f" data.sequence_length + 1 = {length + 1}; give more text, shorten"
        " the sequences, or change"
        f" data.validation_fraction={config.validation_fraction}"
      )
  num_sequences = _num_sequences(num_training, length)
  if num_sequences < config.global_batch_size:
    raise UsageError(
      f"data.global_batch_size={config.global_batch_size}: the training split"
      f" of data.source={', '.join(config.source)} has {num_sequences}"
      f" sequences of data.sequence_length={length}, too few for one batch;"
      f" use {num_sequences} or less, shorter sequences, or more text"
    )


def _num_sequences(num_tokens: int, length: int) -> int:
  """Returns how many sequences hold `num_tokens - 1` targets."""
  return -(-(num_tokens - 1) // length)


class SequenceView:
  """A split cut into sequences of T targets.

  The last token of a sequence is the first input of the next one, so that each
  token but the very first is a target exactly once. The last sequence may be
  shorter: the rest of it is masked.
  """

  def __init__(
    self, tokens: TokenArray, sequence_length: int, padding: int
  ) -> None:
    """Wraps `tokens`, without a copy.

    Args:
      tokens: the split, `[num_tokens]`, at least 2.
      sequence_length: T.
      padding: the id that fills masked positions.
    """
    # Indexing a plain array is faster than a memmap; the file stays mapped.
    self._tokens = np.asarray(tokens)
    self._length = sequence_length
    self._padding = np.int32(padding)

  @property
  def num_targets(self) -> int:
    """The number of tokens to predict."""
    return len(self._tokens) - 1

  @property
  def num_sequences(self) -> int:
    """The number of sequences, the ragged last one included."""
    return _num_sequences(len(self._tokens), self._length)

  def rows(self, indices: NDArray[np.int64]) -> Batch:
    """Returns the sequences of some indices.

    Args:
      indices: `[N]`, below `num_sequences`; -1 gives a fully masked row.

    Returns:
      Arrays `[N, T]`.
    """
    if indices.max(initial=-1) >= self.num_sequences:
      raise IndexError(f"there are only {self.num_sequences} sequences")
    starts = indices[:, None] * self._length  # [N, 1]
    positions = starts + np.arange(self._length + 1)  # [N, T+1]
    mask = (starts >= 0) & (positions[:, 1:] <= self.num_targets)  # [N, T]
    # What is clipped is masked; it only has to be a place that can be read.
    tokens = self._tokens[np.clip(positions, 0, self.num_targets)]
    tokens = tokens.astype(np.int32)  # [N, T+1]
    return Batch(
      inputs=np.where(mask, tokens[:, :-1], self._padding),
      targets=np.where(mask, tokens[:, 1:], self._padding),
      mask=mask,
    )


class Ledger(NamedTuple):
  """What a run has read of the training split.

  `tokens_seen` counts targets, those of `tokens_repeated` not for the first
  time; `tokens_padded` counts masked places; `epoch` is how many times the
  split was read.
  """

  tokens_seen: int
  tokens_padded: int
  tokens_repeated: int
  epoch: float


def shuffled(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
  """Returns the order of the sequences in one epoch.

  It sorts raw random bits: NumPy keeps their stream the same in all versions,
  as it does not for `Generator.permutation` (NEP 19).
  """
  bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
  order = np.argsort(bits.random_raw(num_sequences), kind="stable")
  order.flags.writeable = False
  return order


class Loader:
  """Gives the batch of any step, whole or this process's part of it.

  Every sequence of the training split is in exactly one batch position per
  epoch; a batch may hold the end of one epoch and the start of the next. The
  validation split is read in order.
  """

  def __init__(
    self,
    store: TokenStore,
    config: DataConfig,
    evaluation_batches: int,
    seed: int,
    layout: Layout,
  ) -> None:
    """Checks the sizes; reads nothing yet.

    Args:
      store: the corpus.
      config: how it is cut.
      evaluation_batches: how many batches an evaluation takes at most; 0 for
        the whole validation split.
      seed: 0 or more; decides the order of training.
      layout: of the devices, and this process's place among them.

    Raises:
      UsageError: if the batch does not divide evenly or the text is too short.
    """
    check_layout(config, layout)
    check_corpus(len(store.tokens), config)
    self._tokenizer = store.tokenizer
    self._batch_size = config.global_batch_size
    self._length = config.sequence_length
    self._layout = layout
    train, self._validation_tokens = split(store, config.validation_fraction)
    padding = store.tokenizer.padding
    self._train = SequenceView(train, self._length, padding)
    self._validation = SequenceView(
      self._validation_tokens, self._length, padding
    )
    self._evaluation_batches = evaluation_batches
    # Two, as a batch may span the boundary of two epochs.
    self._order: Callable[[int], NDArray[np.int64]] = functools.lru_cache(2)(
      functools.partial(shuffled, self._train.num_sequences, seed)
    )
    self._ragged_place = functools.lru_cache(2)(self._find_ragged)

  def global_batch(self, step: int) -> Batch:
    """Returns the whole batch, `[global B, T]`, that update `step` takes."""
    return self._train.rows(self.sequences(step))

  def process_batch(self, step: int) -> Batch:
    """Returns this process's part, `[R, A, B, T]`, of `global_batch`."""
    return self._process_rows(self._train, self.sequences(step))

  def evaluation_batch(self, index: int) -> Batch:
    """Returns a whole batch, `[global B, T]`, of the validation split.

    Args:
      index: in [0, num_evaluation_batches).
    """
    return self._validation.rows(self._evaluation_indices(index))

  def training_rows(self, indices: NDArray[np.int64]) -> Batch:
    """Returns sequences of the training split; see `SequenceView.rows`."""
    return self._train.rows(indices)

  def process_evaluation_batch(self, index: int) -> Batch:
    """Returns this process's part, `[R, A, B, T]`, of `evaluation_batch`."""
    return self._process_rows(self._validation, self._evaluation_indices(index))

  @property
  def tokens_per_epoch(self) -> int:
    """The number of targets of the training split."""
    return self._train.num_targets

  @property
  def num_validation_tokens(self) -> int:
    """The number of targets of the whole validation split."""
    return self._validation.num_targets

  @property
  def num_evaluation_batches(self) -> int:
    """The number of batches of one evaluation."""
    whole = -(-self._validation.num_sequences // self._batch_size)
    return min(self._evaluation_batches or whole, whole)

  @property
  def evaluation_tokens(self) -> int:
    """The number of targets that one evaluation scores."""
    places = self.num_evaluation_batches * self._batch_size * self._length
    return min(places, self._validation.num_targets)

  @functools.cached_property
  def evaluation_bytes(self) -> int:
    """The bytes of text of the targets that one evaluation scores."""
    targets = self._validation_tokens[1 : 1 + self.evaluation_tokens]
    sizes = self._tokenizer.bytes_per_token()
    # In chunks: the sizes take 4 times the memory of the tokens.
    return sum(
      int(sizes[targets[start : start + _SUM_CHUNK_TOKENS]].sum())
      for start in range(0, len(targets), _SUM_CHUNK_TOKENS)
    )

  def ledger(self, step: int) -> Ledger:
    """Returns what the first `step` updates have read."""
    num_sequences = self._train.num_sequences
    epoch, position = divmod(step * self._batch_size, num_sequences)
    missing = num_sequences * self._length - self._train.num_targets
    # Of the epoch under way, only once its ragged sequence has come.
    padded = missing * (epoch + (self._ragged_place(epoch) < position))
    seen = step * self._batch_size * self._length - padded
    return Ledger(
      tokens_seen=seen,
      tokens_padded=padded,
      tokens_repeated=max(0, seen - self._train.num_targets),
      epoch=step * self._batch_size / num_sequences,
    )

  def _find_ragged(self, epoch: int) -> int:
    """Returns the place of the last, perhaps shorter sequence in an epoch."""
    return int(np.argmax(self._order(epoch)))

  def sequences(self, step: int) -> NDArray[np.int64]:
    """Returns which sequences, `[global B]`, update `step` takes."""
    first = step * self._batch_size
    epochs, positions = np.divmod(
      np.arange(first, first + self._batch_size), self._train.num_sequences
    )
    # A batch is no larger than an epoch, so these are all that it touches.
    if epochs[0] == epochs[-1]:
      return self._order(int(epochs[0]))[positions]
    return np.where(
      epochs == epochs[0],
      self._order(int(epochs[0]))[positions],
      self._order(int(epochs[-1]))[positions],
    )

  def _evaluation_indices(self, index: int) -> NDArray[np.int64]:
    if not 0 <= index < self.num_evaluation_batches:
      raise IndexError(f"there are only {self.num_evaluation_batches} batches")
    return self._validation_indices(index)

  def _validation_indices(self, index: int) -> NDArray[np.int64]:
    indices = np.arange(self._batch_size) + index * self._batch_size
    return np.where(indices < self._validation.num_sequences, indices, -1)

  def _process_rows(
    self, view: SequenceView, indices: NDArray[np.int64]
  ) -> Batch:
    layout = self._layout
    of_process = np.split(indices, layout.process_count)[layout.process_index]
    rows = view.rows(of_process)
    shape = (
      layout.devices_per_process,
      layout.accumulation_steps,
      -1,
      self._length,
    )
    return Batch(*(np.reshape(array, shape) for array in rows))
