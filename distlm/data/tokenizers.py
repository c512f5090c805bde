"""Text to token ids and back; each tokenizer is plain JSON on disk."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distlm.atomic import write_atomically
from distlm.data.corpora import Document
from distlm.errors import UsageError

# Unsigned, as small as the vocabulary allows, little-endian on every machine.
TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]

_NUM_CODE_POINTS = 0x110000  # Of Unicode.


class Tokenizer(abc.ABC):
  """A reversible map between text and ids in [0, vocab_size).

  The ids of text come first; the two special ids after them stand for no text.
  """

  name: ClassVar[str]

  @property
  @abc.abstractmethod
  def num_text_tokens(self) -> int:
    """The number of ids that stand for text."""

  @abc.abstractmethod
  def encode(self, text: bytes, where: str) -> TokenArray:
    """Returns the ids of a text.

    Args:
      text: the text, of which every byte is kept, BOM and CRLF included.
      where: what the text is called in messages.

    Raises:
      UsageError: if the tokenizer cannot express the text.
    """

  @abc.abstractmethod
  def decode(self, ids: ArrayLike) -> bytes:
    """Returns the text of ids in [0, vocab_size); special ones give none."""

  @abc.abstractmethod
  def bytes_per_token(self) -> NDArray[np.int64]:
    """Returns the bytes of text of each id, `[V]`; 0 for special ones."""

  @abc.abstractmethod
  def to_json(self) -> dict[str, Any]:
    """Returns what `tokenizer_from_json` needs to make it again."""

  @property
  def end_of_document(self) -> int:
    """The id between two documents."""
    return self.num_text_tokens

  @property
  def padding(self) -> int:
    """The id at masked positions, which are never trained on nor scored."""
    return self.num_text_tokens + 1

  @property
  def vocab_size(self) -> int:
    """The number of ids, special ones included."""
    return self.num_text_tokens + 2

  @property
  def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
    """The type in which ids are stored."""
    return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
  """Each byte is a token: any text, a vocabulary of 258.

  >>> ByteTokenizer().encode(b"abc", where="example").tolist()
  [97, 98, 99]
  """

  name: ClassVar[str] = "byte"

  @property
  def num_text_tokens(self) -> int:
    return 256

  def encode(self, text: bytes, where: str) -> TokenArray:
    del where
    return np.frombuffer(text, np.uint8).astype(self.dtype)

  def decode(self, ids: ArrayLike) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()

  def bytes_per_token(self) -> NDArray[np.int64]:
    return np.repeat([1, 0], [256, 2])

  def to_json(self) -> dict[str, Any]:
    return {"name": self.name}


@dataclasses.dataclass(frozen=True)
class CharTokenizer(Tokenizer):
  """Each Unicode character of a corpus is a token.

  >>> CharTokenizer("abc").encode(b"cab", where="example").tolist()
  [2, 0, 1]

  Attributes:
    characters: those of the vocabulary, sorted; the position is the id.
  """

  name: ClassVar[str] = "char"
  characters: str

  @classmethod
  def from_documents(cls, documents: Iterable[Document]) -> CharTokenizer:
    """Returns the tokenizer of all characters that occur.

    Raises:
      UsageError: if a document is not UTF-8.
    """
    occurs = np.zeros(_NUM_CODE_POINTS, bool)
    for document in documents:
      occurs[_code_points(document.content, document.name)] = True
    return cls("".join(map(chr, np.flatnonzero(occurs))))

  @property
  def num_text_tokens(self) -> int:
    return len(self.characters)

  @functools.cached_property
  def _codes(self) -> NDArray[np.uint32]:
    """The code point of each id."""
    return np.frombuffer(self.characters.encode("utf-32-le"), "<u4")

  @functools.cached_property
  def _ids(self) -> NDArray[np.int32]:
    """The id of each code point, or -1."""
    ids = np.full(_NUM_CODE_POINTS, -1, np.int32)
    ids[self._codes] = np.arange(self.num_text_tokens)
    return ids

  def encode(self, text: bytes, where: str) -> TokenArray:
    codes = _code_points(text, where)
    ids = self._ids[codes]
    if codes.size and ids.min() < 0:
      first = int(np.argmax(ids < 0))
      offset = len(_to_utf8(codes[:first]))
      raise UsageError(
        f"data.tokenizer={self.name}: the character {chr(codes[first])!r} at"
        f" byte {offset} of {where} is not among the"
        f" {self.num_text_tokens} of the vocabulary; use the text that the"
        " vocabulary was made from, or data.tokenizer=byte"
      )
    return ids.astype(self.dtype)

  def decode(self, ids: ArrayLike) -> bytes:
    ids = np.asarray(ids)
    codes = self._codes[ids[ids < self.num_text_tokens]]
    return _to_utf8(codes)

  def bytes_per_token(self) -> NDArray[np.int64]:
    # UTF-8 takes one more byte from each of these code points on.
    lengths = np.searchsorted([0x80, 0x800, 0x10000], self._codes, "right") + 1
    return np.append(lengths, [0, 0])

  def to_json(self) -> dict[str, Any]:
    return {"name": self.name, "characters": self.characters}


def _code_points(text: bytes, where: str) -> NDArray[np.uint32]:
  try:
    return np.frombuffer(text.decode().encode("utf-32-le"), "<u4")
  except UnicodeDecodeError as error:
    raise UsageError(
      f"data.tokenizer=char: {where} must be UTF-8, but is not at byte"
      f" {error.start} ({error.reason}); convert it, leave it out, or use"
      " data.tokenizer=byte"
    ) from error


def _to_utf8(codes: NDArray[np.uint32]) -> bytes:
  return codes.tobytes().decode("utf-32-le").encode()


def make_tokenizer(name: str, documents: Sequence[Document]) -> Tokenizer:
  """Returns the tokenizer that `data.tokenizer` names.

  Args:
    name: `byte` or `char`.
    documents: the corpus that a vocabulary is made from.

  Raises:
    UsageError: if there is no such tokenizer, or a document does not suit it.
  """
  if name == ByteTokenizer.name:
    return ByteTokenizer()
  if name == CharTokenizer.name:
    return CharTokenizer.from_documents(documents)
  known = (ByteTokenizer.name, CharTokenizer.name)
  near = difflib.get_close_matches(name, known, n=1)
  hint = f"; did you mean {near[0]}?" if near else ""
  raise UsageError(
    f"data.tokenizer={name}: it must be one of {', '.join(known)}{hint}"
  )


def tokenizer_from_json(values: Mapping[str, Any]) -> Tokenizer:
  """Returns the tokenizer whose `to_json` gave `values`.

  Raises:
    ValueError: if no tokenizer gives such values.
  """
  match values:
    case {"name": ByteTokenizer.name}:
      return ByteTokenizer()
    case {"name": CharTokenizer.name, "characters": str(characters)}:
      characters.encode()  # Half a surrogate pair is no character.
      if list(characters) != sorted(set(characters)):
        raise ValueError("its characters are not in order")
      return CharTokenizer(characters)
  raise ValueError("it is not a tokenizer of this version of distlm")


def save_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
  """Writes a tokenizer as JSON, atomically."""
  write_atomically(path, [json.dumps(tokenizer.to_json()).encode()])


def load_tokenizer(path: Path) -> Tokenizer:
  """Returns the tokenizer that `save_tokenizer` wrote.

  Raises:
    UsageError: if the file is not there or is not a tokenizer.
  """
  try:
    return tokenizer_from_json(json.loads(path.read_bytes()))
  except (OSError, ValueError) as error:
    raise UsageError(
      f"tokenizer file {path}: it cannot be read ({error}); give one that"
      " distlm wrote"
    ) from error
