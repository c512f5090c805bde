"""Tests of the cache of tokens: hits, races, damage, splits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlm.data import token_store
from distlm.data.token_store import (
  TokenStore,
  num_training_tokens,
  open_token_store,
  split,
)
from distlm.data.tokenizers import ByteTokenizer, CharTokenizer
from distlm.errors import UsageError
from distlm.settings import DataConfig

MakeConfig = Callable[..., DataConfig]
EOD = ByteTokenizer().end_of_document


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> DataConfig:
  """Returns settings that read two documents, `ab` and `c`."""
  _write(tmp_path, "ab", "c")
  return make_config(source=(f"{tmp_path}/*.txt",))


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """Returns a list that grows by the name of each document tokenized."""
  names: list[str] = []
  encode = ByteTokenizer.encode

  def spy(self: ByteTokenizer, text: bytes, where: str) -> Any:
    names.append(where)
    return encode(self, text, where)

  monkeypatch.setattr(ByteTokenizer, "encode", spy)
  return names


def _write(directory: Path, *texts: str) -> None:
  for old in directory.glob("*.txt"):
    old.unlink()
  for index, text in enumerate(texts):
    (directory / f"{index}.txt").write_text(text)


def test_documents_are_joined_by_end_of_document(config: DataConfig) -> None:
  store = open_token_store(config)
  assert store.tokens.tolist() == [*b"ab", EOD, *b"c"]
  assert store.tokens.dtype == np.uint16
  assert (store.num_documents, store.num_bytes) == (2, 3)
  with pytest.raises(ValueError, match="read-only"):
    store.tokens[0] = 0


def test_second_open_does_not_tokenize(
  config: DataConfig, num_encoded: list[str]
) -> None:
  first = open_token_store(config)
  assert len(num_encoded) == 2
  second = open_token_store(config)
  assert len(num_encoded) == 2
  assert second.tokens.tolist() == first.tokens.tolist()
  assert second.fingerprint == first.fingerprint


def test_fingerprint_follows_content_alone(
  config: DataConfig, tmp_path: Path
) -> None:
  def fingerprint(*texts: str, tokenizer: Any = None) -> str:
    _write(tmp_path, *texts)
    return open_token_store(config, tokenizer).fingerprint

  base = fingerprint("ab", "c")
  others = [
    fingerprint("a", "bc"),
    fingerprint("abc"),
    fingerprint("c", "ab"),
    fingerprint("ab", "d"),
    fingerprint("ab", "c", tokenizer=CharTokenizer("abc")),
    fingerprint("ab", "c", tokenizer=CharTokenizer("abcd")),
  ]
  assert len({base, *others}) == 7
  assert fingerprint("ab", "", "c") == base  # Other names, too.


def test_given_tokenizer_is_used(config: DataConfig) -> None:
  tokenizer = CharTokenizer("abcxyz")
  store = open_token_store(config, tokenizer)
  assert store.tokenizer == tokenizer
  assert store.tokens.tolist() == [0, 1, tokenizer.end_of_document, 2]
  with pytest.raises(UsageError, match=r"'c' at byte 0 of .*1\.txt"):
    open_token_store(config, CharTokenizer("ab"))


def _truncate(entry: Path) -> None:
  tokens = entry / "tokens.bin"
  tokens.write_bytes(tokens.read_bytes()[:-2])


def _flip(entry: Path) -> None:
  tokens = entry / "tokens.bin"
  tokens.write_bytes(b"\x00" + tokens.read_bytes()[1:])


def _forge(entry: Path) -> None:
  meta = json.loads((entry / "meta.json").read_text())
  (entry / "meta.json").write_text(json.dumps({**meta, "dtype": "<u4"}))


@pytest.mark.parametrize(
  "damage",
  [
    _truncate,
    _flip,
    _forge,
    lambda entry: (entry / "tokens.bin").unlink(),
    lambda entry: (entry / "tokens.bin").write_bytes(b""),
    lambda entry: (entry / "meta.json").unlink(),
    lambda entry: (entry / "meta.json").write_text("{"),
    lambda entry: (entry / "meta.json").write_bytes(b"\xff[]"),
  ],
)
def test_damaged_entry_is_made_again(
  damage: Callable[[Path], Any], config: DataConfig, num_encoded: list[str]
) -> None:
  expected = open_token_store(config).tokens.tolist()
  (entry,) = Path(config.cache_dir).iterdir()
  damage(entry)
  assert open_token_store(config).tokens.tolist() == expected
  assert len(num_encoded) == 4
  open_token_store(config)
  assert len(num_encoded) == 4
  assert sorted(path.name for path in entry.iterdir()) == [
    "meta.json",
    "tokens.bin",
  ]


_RACER = """
import dataclasses, json, sys
from distlm.settings import DataConfig
from distlm.data.token_store import open_token_store
values = json.loads(sys.argv[1])
config = DataConfig(**{**values, "source": tuple(values["source"])})
print("ready", flush=True)
sys.stdin.readline()
store = open_token_store(config)
print(store.fingerprint, int(store.tokens.sum()), len(store.tokens))
"""


def test_racing_processes_share_one_entry(
  make_config: MakeConfig, tmp_path: Path
) -> None:
  (tmp_path / "long.txt").write_bytes(b"0123456789" * 300_000)
  config = make_config(source=(f"{tmp_path}/long.txt",))
  racers = [
    subprocess.Popen(
      [sys.executable, "-c", _RACER, json.dumps(vars(config))],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(4)
  ]
  for racer in racers:
    assert racer.stdout
    assert racer.stdout.readline() == "ready\n"
  for racer in racers:
    assert racer.stdin
    racer.stdin.write("\n")
    racer.stdin.flush()
  results = {racer.communicate(timeout=60)[0] for racer in racers}
  store = open_token_store(config)
  assert results == {
    f"{store.fingerprint} {sum(b'0123456789') * 300_000} 3000000\n"
  }
  (entry,) = Path(config.cache_dir).iterdir()
  assert len(list(entry.iterdir())) == 2


def test_directory_of_the_cache(
  config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def entries(cache_dir: str, directory: str) -> int:
    open_token_store(DataConfig(**{**vars(config), "cache_dir": cache_dir}))
    return len(list((tmp_path / directory).iterdir()))

  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
  assert entries(f"{tmp_path}/own", "own") == 1
  assert entries("~/own", "home/own") == 1
  assert entries("", "xdg/distlm") == 1
  monkeypatch.setenv("XDG_CACHE_HOME", "")
  assert entries("", "home/.cache/distlm") == 1


def test_unwritable_cache(make_config: MakeConfig, tmp_path: Path) -> None:
  (tmp_path / "a.txt").write_text("text")
  config = make_config(
    source=(f"{tmp_path}/a.txt",), cache_dir=f"{tmp_path}/a.txt/cache"
  )
  with pytest.raises(
    UsageError, match=rf"^data\.cache_dir={tmp_path}/a\.txt/cache: "
  ):
    open_token_store(config)


def test_no_home_directory(
  config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
  def fail(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")

  monkeypatch.setattr(Path, "expanduser", fail)
  with pytest.raises(UsageError, match=r"data\.cache_dir=.*no home directory"):
    open_token_store(config)


def test_no_temporary_file_stays_when_tokenizing_fails(
  config: DataConfig,
) -> None:
  with pytest.raises(UsageError, match="is not among"):
    open_token_store(config, CharTokenizer("ab"))
  (entry,) = Path(config.cache_dir).iterdir()
  assert list(entry.iterdir()) == []


def test_format_version_is_part_of_the_fingerprint(
  config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
  before = open_token_store(config).fingerprint
  monkeypatch.setattr(token_store, "_FORMAT_VERSION", 0)
  assert open_token_store(config).fingerprint != before


@given(st.integers(0, 2**40), st.integers(1, 999))
def test_split_sizes_are_exact(num_tokens: int, thousandths: int) -> None:
  size = num_training_tokens(num_tokens, thousandths / 1000)
  assert size == num_tokens * (1000 - thousandths) // 1000


def test_split_is_by_position(
  make_store: Callable[..., TokenStore],
) -> None:
  assert num_training_tokens(1115394, 0.1) == int(0.9 * 1115394) == 1003854
  train, validation = split(make_store(np.arange(25)), 0.1)
  assert train.tolist() == list(range(22))
  assert validation.tolist() == [22, 23, 24]
