"""The corpus as one flat array of tokens: made once, then mapped from disk.

An entry of the cache is a directory named after a hash of all that its tokens
follow from. Its files are therefore the same whichever process writes them, so
processes may race: each replaces a file by an equal one, atomically.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from distlm.atomic import write_atomically
from distlm.data.corpora import Document, read_documents
from distlm.data.tokenizers import TokenArray, Tokenizer, make_tokenizer
from distlm.errors import UsageError
from distlm.settings import DataConfig, default_cache_directory

_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
  """A tokenized corpus.

  Attributes:
    tokens: all documents, `[num_tokens]`, mapped from a file that is read-only;
      `end_of_document` stands between two, and not after the last.
    tokenizer: what the tokens mean.
    fingerprint: hex; equal only for the same documents and tokenizer.
    num_documents: those that are not empty.
    num_bytes: of all documents.
  """

  tokens: TokenArray
  tokenizer: Tokenizer
  fingerprint: str
  num_documents: int
  num_bytes: int


def open_token_store(
  config: DataConfig,
  tokenizer: Tokenizer | None = None,
  documents: Sequence[Document] | None = None,
) -> TokenStore:
  """Returns the tokens of `config.source`, tokenizing them if not yet cached.

  Args:
    config: names the text, the tokenizer and the directory of the cache.
    tokenizer: the one saved with a run; None makes `config.tokenizer` anew.
    documents: of `config.source`, where they have been read already.

  Raises:
    UsageError: if the text cannot be read, does not suit the tokenizer, or the
      cache cannot be written.
  """
  if documents is None:
    documents = read_documents(config.source)
  if tokenizer is None:
    tokenizer = make_tokenizer(config.tokenizer, documents)
  fingerprint = _fingerprint(documents, tokenizer)
  num_bytes = sum(len(document.content) for document in documents)
  description = {
    "format_version": _FORMAT_VERSION,
    "fingerprint": fingerprint,
    "tokenizer": tokenizer.to_json(),
    "dtype": tokenizer.dtype.str,
    "num_documents": len(documents),
    "num_bytes": num_bytes,
  }
  entry = cache_directory(config) / fingerprint
  if not _is_intact(entry, description):
    _write_entry(entry, documents, tokenizer, description)
  return TokenStore(
    tokens=np.memmap(entry / "tokens.bin", tokenizer.dtype, mode="r"),
    tokenizer=tokenizer,
    fingerprint=fingerprint,
    num_documents=len(documents),
    num_bytes=num_bytes,
  )


def num_training_tokens(num_tokens: int, validation_fraction: float) -> int:
  """Returns the size of the training split, rounded down.

  >>> num_training_tokens(10, 0.9)  # int(10 * (1 - 0.9)) would be 0.
  1
  """
  return int(num_tokens * (1 - Fraction(str(validation_fraction))))


def split(
  store: TokenStore, validation_fraction: float
) -> tuple[TokenArray, TokenArray]:
  """Returns the first tokens, to train on, and the rest, to validate on."""
  boundary = num_training_tokens(len(store.tokens), validation_fraction)
  return store.tokens[:boundary], store.tokens[boundary:]


def _fingerprint(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
  digest = hashlib.blake2b(digest_size=16)
  header = [_FORMAT_VERSION, tokenizer.to_json()]
  for part in (
    json.dumps(header, sort_keys=True).encode(),
    *(document.content for document in documents),
  ):
    # The length keeps documents apart: ("ab", "c") is not ("a", "bc").
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
  return digest.hexdigest()


def cache_directory(config: DataConfig) -> Path:
  """Returns where tokenized text is kept."""
  try:
    if config.cache_dir:
      return Path(config.cache_dir).expanduser()
    return default_cache_directory(os.environ)
  except RuntimeError as error:
    raise UsageError(
      f"data.cache_dir={config.cache_dir!r}: this user has no home directory;"
      " set it to a directory that can be written"
    ) from error


def _with_content(entry: Path, description: dict[str, Any]) -> dict[str, Any]:
  """Returns what meta.json must hold for the token file as it is now."""
  with open(entry / "tokens.bin", "rb") as file:
    checksum = hashlib.file_digest(file, "blake2b").hexdigest()
    num_tokens = file.tell() // np.dtype(description["dtype"]).itemsize
  return {**description, "num_tokens": num_tokens, "checksum": checksum}


def _is_intact(entry: Path, description: dict[str, Any]) -> bool:
  try:
    meta = json.loads((entry / "meta.json").read_bytes())
    return bool(meta == _with_content(entry, description))
  except (OSError, ValueError):
    return False


def _write_entry(
  entry: Path,
  documents: Sequence[Document],
  tokenizer: Tokenizer,
  description: dict[str, Any],
) -> None:
  try:
    entry.mkdir(parents=True, exist_ok=True)
    write_atomically(entry / "tokens.bin", _encode_all(documents, tokenizer))
    # Last, as it vouches for the tokens.
    meta = json.dumps(_with_content(entry, description), indent=2)
    write_atomically(entry / "meta.json", [meta.encode()])
  except OSError as error:
    raise UsageError(
      f"data.cache_dir={entry.parent}: tokens cannot be written there"
      f" ({error.strerror}); set it to a directory that can be written and has"
      " space"
    ) from error


def _encode_all(
  documents: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[bytes]:
  for index, document in enumerate(documents):
    if index:
      yield np.array(tokenizer.end_of_document, tokenizer.dtype).tobytes()
    yield tokenizer.encode(document.content, document.name).tobytes()
