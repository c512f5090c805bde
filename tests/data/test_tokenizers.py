"""Tests of tokenizers: round trips, sizes, files, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlm.data.corpora import Document
from distlm.data.tokenizers import (
  ByteTokenizer,
  CharTokenizer,
  Tokenizer,
  load_tokenizer,
  make_tokenizer,
  save_tokenizer,
  tokenizer_from_json,
)
from distlm.errors import UsageError

# One character of each UTF-8 length, a BOM and both line ends.
MIXED = "\ufeffa\r\n\u00e9\u20ac\U0001f600"


def _check(tokenizer: Tokenizer, text: bytes) -> None:
  ids = tokenizer.encode(text, where="text")
  assert ids.dtype == tokenizer.dtype
  assert tokenizer.decode(ids) == text
  assert tokenizer.bytes_per_token()[ids].sum() == len(text)
  specials = [tokenizer.end_of_document, tokenizer.padding]
  assert not np.isin(ids, specials).any()
  assert tokenizer.decode([*specials, *ids, *specials]) == text


@given(st.binary())
def test_byte_round_trip(text: bytes) -> None:
  _check(ByteTokenizer(), text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_char_round_trip(text: str) -> None:
  documents = [Document("a", text.encode()), Document("b", b"more")]
  tokenizer = CharTokenizer.from_documents(documents)
  assert tokenizer.characters == "".join(sorted(set(text + "more")))
  _check(tokenizer, text.encode())
  assert tokenizer_from_json(tokenizer.to_json()) == tokenizer


def test_special_ids_come_last() -> None:
  byte = ByteTokenizer()
  assert (byte.end_of_document, byte.padding, byte.vocab_size) == (
    256,
    257,
    258,
  )
  char = CharTokenizer("abc")
  assert (char.end_of_document, char.padding, char.vocab_size) == (3, 4, 5)
  assert ByteTokenizer().encode(b"\xff", "text").tolist() == [255]
  assert char.encode(b"cab", "text").tolist() == [2, 0, 1]


def test_bytes_per_token_counts_utf8() -> None:
  edges = "\x00\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff"
  tokenizer = CharTokenizer(edges)
  expected = [len(character.encode()) for character in edges]
  assert tokenizer.bytes_per_token().tolist() == [*expected, 0, 0]
  assert ByteTokenizer().bytes_per_token().tolist() == [1] * 256 + [0, 0]


def test_ids_are_as_wide_as_the_vocabulary_needs() -> None:
  assert ByteTokenizer().dtype == np.uint16
  fits = "".join(map(chr, range(0x20000, 0x20000 + 2**16 - 2)))
  assert CharTokenizer(fits).dtype == np.uint16
  tokenizer = CharTokenizer(fits + "\U0003fffe")
  assert tokenizer.dtype == np.uint32
  _check(tokenizer, fits[-1].encode())


@pytest.mark.parametrize("name", ["byte", "char"])
def test_saved_tokenizer_is_the_same(name: str, tmp_path: Path) -> None:
  tokenizer = make_tokenizer(name, [Document("a", MIXED.encode())])
  assert tokenizer.name == name
  _check(tokenizer, MIXED.encode())
  save_tokenizer(tmp_path / "tokenizer.json", tokenizer)
  assert load_tokenizer(tmp_path / "tokenizer.json") == tokenizer
  assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_failed_save_keeps_the_old_file(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def fail(descriptor: int) -> None:
    raise OSError(28, "No space left on device")

  path = tmp_path / "tokenizer.json"
  save_tokenizer(path, ByteTokenizer())
  monkeypatch.setattr("os.fsync", fail)
  with pytest.raises(OSError, match="No space"):
    save_tokenizer(path, CharTokenizer("abc"))
  assert load_tokenizer(path) == ByteTokenizer()
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
  "content", ["", "[]", "{}", '{"name": "char"}', '{"name": "bpe"}', None]
)
def test_unusable_tokenizer_file(content: str | None, tmp_path: Path) -> None:
  path = tmp_path / "tokenizer.json"
  if content is not None:
    path.write_text(content)
  with pytest.raises(UsageError, match=f"tokenizer file {path}: "):
    load_tokenizer(path)


def test_not_utf8_names_document_and_byte() -> None:
  documents = [Document("good", b"abc"), Document("bad.txt", b"ab\xff")]
  with pytest.raises(UsageError, match=r"tokenizer=char: bad\.txt .*byte 2 "):
    make_tokenizer("char", documents)
  with pytest.raises(UsageError, match=r"bad\.txt must be UTF-8"):
    CharTokenizer("ab").encode(b"ab\xff", where="bad.txt")


def test_missing_character_names_it_document_and_byte() -> None:
  tokenizer = CharTokenizer("ab\u20ac")
  with pytest.raises(UsageError, match=r"'c' at byte 5 of other\.txt .* 3 of"):
    tokenizer.encode("a\u20acbcd".encode(), where="other.txt")


def test_unknown_name_lists_known_and_nearest() -> None:
  with pytest.raises(
    UsageError, match=r"=chra: .* byte, char; did you mean ch"
  ):
    make_tokenizer("chra", [])
  with pytest.raises(UsageError, match=r"=wordpiece: .* byte, char$"):
    make_tokenizer("wordpiece", [])
