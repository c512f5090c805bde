"""Settings and stores that the tests of `distlm.data` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlm.data.token_store import TokenStore
from distlm.data.tokenizers import ByteTokenizer, Tokenizer
from distlm.settings import DataConfig

MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
  """Returns a maker of settings that cache inside the test's directory."""

  def make(**changes: Any) -> DataConfig:
    values: dict[str, Any] = {
      "source": ("unread",),
      "tokenizer": "byte",
      "sequence_length": 8,
      "global_batch_size": 12,
      "validation_fraction": 0.1,
      "prefetch_batches": 2,
      "cache_dir": str(tmp_path / "cache"),
    }
    return DataConfig(**{**values, **changes})

  return make


@pytest.fixture
def make_store() -> Callable[..., TokenStore]:
  """Returns a maker of stores in memory."""

  def make(tokens: Any, tokenizer: Tokenizer | None = None) -> TokenStore:
    return TokenStore(
      tokens=np.asarray(tokens, np.uint16),
      tokenizer=tokenizer or ByteTokenizer(),
      fingerprint="00",
      num_documents=1,
      num_bytes=len(tokens),
    )

  return make
