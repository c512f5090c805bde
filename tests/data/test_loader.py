"""Tests of the batches of a step: order, layouts, evaluation, sizes."""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlm.data import loader as loader_module
from distlm.data.loader import (
  Layout,
  Loader,
  SequenceView,
  check_corpus,
  check_layout,
  shuffled,
)
from distlm.data.token_store import TokenStore
from distlm.data.tokenizers import CharTokenizer
from distlm.errors import UsageError
from distlm.settings import DataConfig
from distlm.types import Batch

MakeConfig = Callable[..., DataConfig]
MakeLoader = Callable[..., Loader]
PADDING = 60_000


@pytest.fixture
def make_loader(
  make_config: MakeConfig, make_store: Callable[..., TokenStore]
) -> MakeLoader:
  """Returns a maker of loaders of the tokens 0, 1, 2, ...

  With the defaults, training has 225 tokens: 28 sequences of 8, all full, and
  2 1/3 batches per epoch. Validation has 25 tokens: 3 sequences.
  """

  def make(
    num_tokens: int = 250,
    tokenizer: Any = None,
    evaluation_batches: int = 0,
    seed: int = 7,
    layout: Layout = Layout(),  # noqa: B008 - it is frozen.
    **changes: Any,
  ) -> Loader:
    store = make_store(np.arange(num_tokens) % 251, tokenizer)
    config = make_config(**changes)
    return Loader(store, config, evaluation_batches, seed, layout)

  return make


def _rows(batches: Iterator[Batch]) -> list[tuple[int, ...]]:
  """Returns the unmasked targets of each row."""
  return [
    tuple(targets[mask].tolist())
    for batch in batches
    for targets, mask in zip(batch.targets, batch.mask, strict=True)
  ]


def _assert_equal(actual: Batch, expected: Batch) -> None:
  for name in Batch._fields:
    np.testing.assert_array_equal(
      getattr(actual, name), getattr(expected, name)
    )


@given(st.integers(2, 60), st.integers(1, 20))
def test_view_has_each_target_once(num_tokens: int, length: int) -> None:
  view = SequenceView(np.arange(num_tokens, dtype=np.uint16), length, PADDING)
  batch = view.rows(np.arange(view.num_sequences))
  assert batch.inputs.shape == batch.mask.shape == (view.num_sequences, length)
  assert batch.inputs.dtype == batch.targets.dtype == np.int32
  assert batch.mask.dtype == np.bool_
  targets = batch.targets[batch.mask]
  assert targets.tolist() == list(range(1, num_tokens))
  np.testing.assert_array_equal(batch.inputs[batch.mask], targets - 1)
  assert (batch.inputs[~batch.mask] == PADDING).all()
  assert (batch.targets[~batch.mask] == PADDING).all()
  assert view.num_targets == num_tokens - 1


def test_view_overlaps_by_one_and_pads() -> None:
  view = SequenceView(np.arange(6, dtype=np.uint16), 4, padding=99)
  batch = view.rows(np.array([1, -1, 0]))
  assert batch.inputs.tolist() == [[4, 99, 99, 99], [99] * 4, [0, 1, 2, 3]]
  assert batch.targets.tolist() == [[5, 99, 99, 99], [99] * 4, [1, 2, 3, 4]]
  assert batch.mask.tolist() == [[True] + [False] * 3, [False] * 4, [True] * 4]
  with pytest.raises(IndexError, match="only 2 sequences"):
    view.rows(np.array([0, 2]))


# 250: all sequences are full; 253: training ends with a ragged one.
@pytest.mark.parametrize("num_tokens", [250, 253])
def test_epochs_have_each_sequence_once(
  make_loader: MakeLoader, num_tokens: int
) -> None:
  loader = make_loader(num_tokens)
  num_train = num_tokens * 9 // 10
  size = -(-(num_train - 1) // 8)
  num_steps = -(-3 * size // 12)
  rows = _rows(loader.global_batch(step) for step in range(num_steps))
  epochs = [rows[start : start + size] for start in range(0, 3 * size, size)]
  expected = [
    tuple(range(start + 1, min(start + 9, num_train)))
    for start in range(0, num_train - 1, 8)
  ]
  for epoch in epochs:
    assert sorted(epoch) == expected
  assert len({tuple(epoch) for epoch in [*epochs, expected]}) == 4  # Shuffled.


def test_a_batch_spans_the_boundary_of_epochs(make_loader: MakeLoader) -> None:
  loader = make_loader()
  starts = loader.global_batch(2).inputs[:, 0] // 8
  first, second = shuffled(28, 7, 0), shuffled(28, 7, 1)
  assert starts.tolist() == [*first[24:], *second[:8]]


def test_a_batch_as_large_as_an_epoch(make_loader: MakeLoader) -> None:
  loader = make_loader(global_batch_size=28)
  for step in range(3):
    starts = loader.global_batch(step).inputs[:, 0] // 8
    assert starts.tolist() == shuffled(28, 7, step).tolist()


def test_order_depends_on_seed_and_epoch_alone(
  make_loader: MakeLoader,
) -> None:
  straight = make_loader()
  expected = [straight.global_batch(step) for step in range(12)]
  random_access = make_loader()
  for step in np.random.default_rng(0).permutation(np.repeat(range(12), 2)):
    _assert_equal(random_access.global_batch(step), expected[step])
  other_seed = make_loader(seed=8).global_batch(0)
  assert (other_seed.targets != expected[0].targets).any()


def test_order_is_that_of_all_versions() -> None:
  # Runs that began on another version of NumPy or distlm must go on as before.
  assert shuffled(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
  assert shuffled(8, 0, 1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_order_is_made_once_per_epoch(
  make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
  made: list[int] = []

  def spy(num_sequences: int, seed: int, epoch: int) -> Any:
    made.append(epoch)
    return shuffled(num_sequences, seed, epoch)

  monkeypatch.setattr(loader_module, "shuffled", spy)
  loader = make_loader()
  for step in range(7):
    loader.global_batch(step)
  assert made == [0, 1, 2]


LAYOUTS = [
  (processes, devices, accumulation)
  for processes, devices, accumulation in itertools.product(
    (1, 2, 3, 4, 6, 12), repeat=3
  )
  if 12 % (processes * devices * accumulation) == 0
]


@pytest.mark.parametrize(("processes", "devices", "accumulation"), LAYOUTS)
def test_all_layouts_share_one_global_batch(
  make_loader: MakeLoader, processes: int, devices: int, accumulation: int
) -> None:
  def reassemble(method: str, index: int) -> Batch:
    parts = [
      getattr(
        make_loader(253, layout=Layout(p, processes, devices, accumulation)),
        method,
      )(index)
      for p in range(processes)
    ]
    size = 12 // (processes * devices * accumulation)
    for array in itertools.chain(*parts):
      assert array.shape == (devices, accumulation, size, 8)
    return Batch(
      *(
        np.concatenate(arrays).reshape(12, 8)
        for arrays in zip(*parts, strict=True)
      )
    )

  whole = make_loader(253)
  for step in range(4):
    _assert_equal(reassemble("process_batch", step), whole.global_batch(step))
  _assert_equal(
    reassemble("process_evaluation_batch", 0), whole.evaluation_batch(0)
  )


@pytest.mark.parametrize(
  ("num_tokens", "num_batches"), [(1000, 2), (971, 2), (970, 1), (960, 1)]
)
def test_evaluation_has_each_token_once(
  make_loader: MakeLoader, num_tokens: int, num_batches: int
) -> None:
  # One batch has 96 targets; validation has 99, 97, 96 or 95.
  loader = make_loader(num_tokens)
  first = num_tokens * 9 // 10
  assert loader.num_evaluation_batches == num_batches
  batches = [loader.evaluation_batch(i) for i in range(num_batches)]
  assert all(batch.mask.shape == (12, 8) for batch in batches)
  targets = list(itertools.chain(*_rows(iter(batches))))
  expected = (np.arange(first + 1, num_tokens) % 251).tolist()
  assert targets == expected
  assert loader.evaluation_tokens == loader.evaluation_bytes == len(expected)
  with pytest.raises(IndexError):
    loader.evaluation_batch(num_batches)


def test_evaluation_of_the_first_batches(make_loader: MakeLoader) -> None:
  loader = make_loader(3000, evaluation_batches=2)
  assert loader.num_evaluation_batches == 2
  assert loader.evaluation_tokens == loader.evaluation_bytes == 2 * 96
  assert make_loader(3000).num_evaluation_batches == 4
  many = make_loader(3000, evaluation_batches=9)
  assert many.num_evaluation_batches == 4
  assert many.evaluation_tokens == 299


def test_evaluation_bytes_of_long_characters(
  make_config: MakeConfig,
  make_store: Callable[..., TokenStore],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  tokenizer = CharTokenizer("a\u00e9\u20ac\U0001f600")
  # The first token of a split is no target; the special one is no text.
  validation = [3, 0, 1, 2, 3, tokenizer.end_of_document, 0, 1, 2]
  store = make_store([0] * 81 + validation, tokenizer)
  config = make_config(global_batch_size=1)
  for chunk in (2**20, 3):
    monkeypatch.setattr(loader_module, "_SUM_CHUNK_TOKENS", chunk)
    loader = Loader(store, config, 0, 0, Layout())
    assert loader.evaluation_tokens == 8
    assert loader.evaluation_bytes == (1 + 2 + 3 + 4) + 0 + (1 + 2 + 3)


@pytest.mark.parametrize("num_tokens", [250, 253, 258])
@pytest.mark.parametrize("size", [1, 12])
def test_the_ledger_counts_what_the_batches_hold(
  make_loader: MakeLoader, num_tokens: int, size: int
) -> None:
  loader = make_loader(num_tokens, global_batch_size=size)
  seen: collections.Counter[tuple[int, ...]] = collections.Counter()
  places = 0
  for step in range(70):
    tokens = sum(len(row) * count for row, count in seen.items())
    repeated = sum(len(row) * (count - 1) for row, count in seen.items())
    assert loader.ledger(step)[:3] == (tokens, places - tokens, repeated)
    batch = loader.global_batch(step)
    places += batch.mask.size
    seen.update(_rows(iter([batch])))


def test_the_epoch_of_the_ledger(make_loader: MakeLoader) -> None:
  loader = make_loader()
  assert [loader.ledger(step).epoch for step in (0, 7, 14)] == [0.0, 3.0, 6.0]
  assert loader.ledger(1).epoch == 12 / 28


@pytest.mark.parametrize("num_tokens", [250, 253])
@pytest.mark.parametrize(
  ("processes", "devices", "parts"),
  [
    *((1, devices, parts) for devices in (1, 2, 4) for parts in (1, 3)),
    *((2, 2, 1), (2, 1, 3), (4, 1, 1), (3, 2, 2)),
  ],
)
def test_three_epochs_have_each_sequence_three_times_on_every_layout(
  make_loader: MakeLoader,
  num_tokens: int,
  processes: int,
  devices: int,
  parts: int,
) -> None:
  loaders = [
    make_loader(num_tokens, layout=Layout(i, processes, devices, parts))
    for i in range(processes)
  ]
  num_sequences = -(-loaders[0].tokens_per_epoch // 8)
  rows: list[tuple[int, ...]] = []
  for step in range(-(-3 * num_sequences // 12)):
    for loader in loaders:
      batch = loader.process_batch(step)
      assert batch.mask.shape[:2] == (devices, parts)
      flat = Batch(*(np.reshape(x, (-1, x.shape[-1])) for x in batch))
      rows += _rows(iter([flat]))
  for epoch in range(3):
    of_epoch = rows[epoch * num_sequences : (epoch + 1) * num_sequences]
    assert len(set(of_epoch)) == num_sequences
    assert sum(map(len, of_epoch)) == loaders[0].tokens_per_epoch


@pytest.mark.parametrize(
  ("size", "way_out"), [(12, "use 8 or 16$"), (3, "use 8$"), (20, "16 or 24$")]
)
def test_batch_that_does_not_divide(
  make_config: MakeConfig, size: int, way_out: str
) -> None:
  layout = Layout(process_count=2, devices_per_process=2, accumulation_steps=2)
  with pytest.raises(UsageError, match=way_out) as caught:
    check_layout(make_config(global_batch_size=size), layout)
  assert str(caught.value).startswith(f"data.global_batch_size={size}: ")
  assert "2 processes x 2 devices x accumulation_steps=2" in str(caught.value)


def test_smallest_corpus(make_config: MakeConfig) -> None:
  config = make_config(global_batch_size=1, validation_fraction=0.5)
  check_corpus(18, config)
  with pytest.raises(UsageError, match=r"^data\.source=unread: .*training"):
    check_corpus(17, config)
  config = make_config(global_batch_size=1)
  check_corpus(90, config)
  with pytest.raises(UsageError, match="validation split has 8 of 80") as error:
    check_corpus(80, config)
  assert "data.sequence_length + 1 = 9" in str(error.value)
  assert "data.validation_fraction=0.1" in str(error.value)


def test_too_few_sequences_for_a_batch(make_config: MakeConfig) -> None:
  check_corpus(108, make_config())  # 97 to train on: 12 full sequences.
  with pytest.raises(
    UsageError, match=r"global_batch_size=12: .*has 11 .* too few .*use 11 or"
  ):
    check_corpus(98, make_config())


def test_loader_checks_its_settings(make_loader: MakeLoader) -> None:
  with pytest.raises(UsageError, match="too few"):
    make_loader(90)
  with pytest.raises(UsageError, match="must be divisible"):
    make_loader(layout=Layout(devices_per_process=5))


def test_data_does_not_import_jax() -> None:
  code = (
    "import sys, distlm.data.loader, distlm.data.prefetch;"
    "sys.exit(bool({'jax', 'haiku', 'optax', 'jaxline'} & set(sys.modules)))"
  )
  assert subprocess.call([sys.executable, "-c", code]) == 0
