"""Tests of where text comes from: sources, order, refusals."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from distlm.data.corpora import Document, read_documents
from distlm.errors import UsageError


def test_sources_are_read_in_order_and_globs_sorted(tmp_path: Path) -> None:
  for name in ("b.txt", "a.txt", "sub/deep/c.txt", "d.txt/inside.md"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  (tmp_path / "first").write_text("first")
  documents = read_documents(
    [str(tmp_path / "first"), str(tmp_path / "**/*.txt")]
  )
  assert [document.content for document in documents] == [
    b"first",
    b"a.txt",
    b"b.txt",
    b"sub/deep/c.txt",  # d.txt is a directory, and skipped.
  ]
  assert documents[1].name == str(tmp_path / "a.txt")


def test_bytes_are_kept_and_empty_documents_skipped(tmp_path: Path) -> None:
  content = b"\xef\xbb\xbfone\r\ntwo\xff\x00"
  (tmp_path / "a").write_bytes(content)
  (tmp_path / "b").touch()
  assert read_documents([str(tmp_path / "[ab]")]) == [
    Document(str(tmp_path / "a"), content)
  ]


def test_a_name_that_looks_like_a_glob_is_read(tmp_path: Path) -> None:
  (tmp_path / "a[1].txt").write_text("found")
  (document,) = read_documents([str(tmp_path / "a[1].txt")])
  assert document.content == b"found"


def test_home_is_expanded(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "a.txt").write_text("home")
  assert read_documents(["~/a.txt"])[0].content == b"home"
  assert read_documents(["~/*.txt"])[0].content == b"home"


def test_stdlib_is_sorted_utf8_and_without_tests() -> None:
  documents = read_documents(["python-stdlib"])
  names = [document.name for document in documents]
  assert names == sorted(names)
  assert "python-stdlib/json/decoder.py" in names
  assert sum(len(document.content) for document in documents) > 5_000_000
  assert not [
    name
    for name in names
    if re.search("/(site-packages|dist-packages|tests?|idlelib)/", name)
  ]
  for document in documents:
    document.content.decode()  # Else the char tokenizer would refuse it.
  assert read_documents(["python-stdlib"]) == documents


def test_stdlib_without_sources(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
  with pytest.raises(
    UsageError, match=r"data\.source=python-stdlib: .*no source"
  ):
    read_documents(["python-stdlib"])


@pytest.mark.parametrize(
  ("source", "rule"),
  [
    ("missing.txt", "there is no such file"),
    ("*.nothing", "no file matches this glob"),
    ("folder", r"it is a directory.*folder/\*\*/\*\.txt"),
    ("folder/", r"it is a directory.*folder/\*\*/\*\.txt"),
    ("pipe", "it must be a regular file"),
    ("empty*", "all its files are empty"),
  ],
)
def test_unusable_sources(tmp_path: Path, source: str, rule: str) -> None:
  (tmp_path / "folder").mkdir()
  (tmp_path / "empty1").touch()
  (tmp_path / "empty2").touch()
  os.mkfifo(tmp_path / "pipe")
  source = f"{tmp_path}/{source}"
  with pytest.raises(UsageError, match=rule) as caught:
    read_documents([source])
  assert str(caught.value).startswith(f"data.source={source}: ")
  assert "\n" not in str(caught.value)


def test_unreadable_file(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def refuse(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))

  (tmp_path / "a.txt").write_text("secret")
  monkeypatch.setattr(Path, "read_bytes", refuse)  # Root may read everything.
  with pytest.raises(UsageError, match=r"a\.txt cannot be read \(Permission"):
    read_documents([str(tmp_path / "*.txt")])
