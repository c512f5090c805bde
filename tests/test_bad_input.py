"""Tests that bad input is answered by one line that names the way out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
import tiny_run

from distlm import cli, parallel, workdir

# This process has eight devices.
FITS = "--config.accumulation_steps=1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def trained(config: Path) -> Path:
  """Returns the workdir of a run of 2 steps, on characters."""
  directory = config.parent / "trained"
  args = (FITS, "--config.data.tokenizer=char", *SHORT, ENDS_AT_2)
  assert (
    tiny_run.run_here(tiny_run.arguments("train", config, directory, *args))
    == 0
  )
  return directory


SHORT = ("--config.optimizer.warmup_steps=1", "--config.model.num_layers=1")
ENDS_AT_2 = "--config.training_steps=2"
ENDS_AT_3 = "--config.training_steps=3"


@pytest.fixture
def refused(
  config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
  """Returns a function that runs the command and returns its one line."""

  def refused(*more: str, command: str = "train", at: Path = tmp_path) -> str:
    args = tiny_run.arguments(command, config, at, FITS, *more)
    return one_line(args, capsys)

  return refused


def one_line(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
  capsys.readouterr()
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  output, errors = capsys.readouterr()
  assert end.value.code == 2, errors
  assert output == ""
  return tiny_run.check_one_line(errors)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes any use of a device fail."""

  def refuse(*_: object, **__: object) -> None:
    raise AssertionError("used a device")

  monkeypatch.setattr(parallel, "start", refuse)
  monkeypatch.setattr(jax, "local_devices", refuse)


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize(
  ("flags", "says"),
  [
    # The text.
    (["data.source=/none.txt"], r"data.source=/none.txt: .*give a path"),
    (["data.source=/none/*.txt"], r"data.source=/none/\*.txt: no file matches"),
    (["data.source=/tmp"], r"data.source=/tmp: it is a directory.*use a glob"),
    (
      ["data.source=python-stdlob"],
      r"data.source=python-stdlob: .*give a path",
    ),
    (
      ["data.sequence_length=20000"],
      r"too few for one sequence.* = 20001; give more text, shorten",
    ),
    (
      ["data.sequence_length=1000"],
      r"its validation split has 1000 of 20000 tokens.*validation_fraction",
    ),
    (
      ["data.global_batch_size=1200"],
      r"data.global_batch_size=1200: .* 1188 sequences .*use 1188 or less",
    ),
    (["data.tokenizer=chars"], r"data.tokenizer=chars: .*did you mean char\?"),
    (
      ["data.tokenizer=gpt"],
      r"data.tokenizer=gpt: it must be one of byte, char",
    ),
    # The settings.
    (
      ["model.num_layer=2"],
      r"model.num_layer: .*did you mean model.num_layers",
    ),
    (["model.num_layers=two"], r"model.num_layers=two: .*a whole number"),
    (["model.num_layers=-1"], r"model.num_layers=-1: it must be positive"),
    (["data.sequence_length=0"], r"data.sequence_length=0: .*positive"),
    (["optimizer.name=adan"], r"optimizer.name='adan': .*did you mean adam"),
    (["model.num_heads=3"], r"10 x 3 is not 32; set key_size=0"),
    (["model.key_size=5"], r"model.key_size=5: .*5 x 2 is not 32; set"),
    (["save_checkpoint_interval=5"], r"what decides it is checkpoint.interval"),
    (["training_steps=4"], r"optimizer.warmup_steps=5: .*training_steps=4"),
  ],
)
def test_settings_are_refused_before_any_device_is_used(
  refused: Callable[..., str], flags: list[str], says: str
) -> None:
  line = refused(*(f"--config.{flag}" for flag in flags))
  assert re.search(says, line), line


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize(
  ("args", "says"),
  [
    ([], "required: command; see distlm --help"),
    (["trian"], "invalid choice: 'trian'"),
    (["train"], "required: --config, --workdir; see distlm train --help"),
    (["train", "--config=x.py"], "required: --workdir"),
    (
      ["train", "--config=/x.py", "--workdir=w"],
      "/x.py: there is no such file",
    ),
    (
      ["train", "--config=x", "--workdir=w", "--step=3"],
      "unrecognized .*--step",
    ),
    (["train", "--config=x", "--workdir=w", "--device=3"], "--device=3"),
    (["train", "--config=x", "--workdir=w", "--devices=two"], "'two'"),
    (["train", "--config.model.num_layers"], "needs a value"),
    (["train", "--config.model.num_layers", "--workdir=w"], "needs a value"),
    (["eval", "--jaxline_mode=train"], "required: |unrecognized "),
  ],
)
def test_a_command_line_that_is_wrong(
  args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
  line = one_line(args, capsys)
  assert re.search(says, line), line


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize(
  ("command", "flags", "says"),
  [
    ("train", ["--jaxline_mode=test"], "one of train, eval, train_eval"),
    ("train", ["--once"], "--once: it has no effect"),
    ("eval", [], "there is no such directory; name that of a run"),
    ("eval", ["--once"], "there is no such directory"),
  ],
)
def test_a_mode_that_cannot_work(
  refused: Callable[..., str],
  tmp_path: Path,
  command: str,
  flags: list[str],
  says: str,
) -> None:
  line = refused(*flags, command=command, at=tmp_path / "none")
  assert says in line
  assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
  ("content", "tokenizer", "says"),
  [
    (b"", "byte", "all its files are empty; give another path"),
    (b"a", "byte", "its training split has 0 of 1 tokens"),
    (b"ab\xffc" * 5000, "char", "not at byte 2 .*use data.tokenizer=byte"),
    ("é".encode()[:1] * 5000, "char", "must be UTF-8, but is not at byte 0"),
  ],
)
def test_a_text_that_cannot_be_used(
  refused: Callable[..., str],
  tmp_path: Path,
  content: bytes,
  tokenizer: str,
  says: str,
) -> None:
  path = tmp_path / "text"
  path.write_bytes(content)
  flags = (
    f"--config.data.{name}"
    for name in (f"source={path}", f"tokenizer={tokenizer}")
  )
  line = refused(*flags)
  assert re.search(says, line), line
  assert str(path) in line


def test_bytes_need_not_be_utf8(
  refused: Callable[..., str], tmp_path: Path
) -> None:
  (tmp_path / "text").write_bytes(b"ab\xffc" * 5000)
  source = f"--config.data.source={tmp_path / 'text'}"
  # It comes as far as the devices, of which there are more than sequences.
  line = refused(source, "--config.data.global_batch_size=4")
  assert "global_batch_size=4: it must be divisible by" in line


def test_a_batch_that_does_not_divide(refused: Callable[..., str]) -> None:
  line = refused("--config.data.global_batch_size=12")
  assert line == (
    "data.global_batch_size=12: it must be divisible by 1 processes x 8"
    " devices x accumulation_steps=1, which is 8; use 8 or 16"
  )


def test_a_vocabulary_that_is_too_small(refused: Callable[..., str]) -> None:
  assert "model.vocab_size=10: " in refused("--config.model.vocab_size=10")


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("in the way", "cannot be read|cannot be written"),
    ("in the way/below", "cannot be read|cannot be written"),
    ("/proc/none/run", r"cannot be written .*; use a directory that can"),
  ],
)
def test_a_workdir_that_cannot_be_written(
  refused: Callable[..., str], tmp_path: Path, name: str, says: str
) -> None:
  (tmp_path / "in the way").write_text("")
  path = tmp_path / name
  line = refused(at=path)
  assert f"--workdir={path}: " in line
  assert re.search(says, line), line


def test_a_workdir_of_another_run(
  refused: Callable[..., str], trained: Path
) -> None:
  for command in ("train", "eval"):
    line = refused("--config.random_seed=1", command=command, at=trained)
    assert f"--workdir={trained}: " in line
    assert "random_seed: 42 -> 1" in line
    assert "data.tokenizer: 'char' -> 'byte'" in line
    assert "model.num_layers: 1 -> 2" in line
    assert "use another directory" in line


def test_a_workdir_in_use(refused: Callable[..., str], tmp_path: Path) -> None:
  with workdir.claim(tmp_path, {}, "train_eval", False):
    line = refused()
    assert f"in use by process {os.getpid()} on " in line
    (tmp_path / "checkpoints").mkdir()
    assert "in use by" in refused(command="eval")


@pytest.mark.parametrize("flags", [(), ("--config.interval_type=secs",)])
def test_nothing_to_evaluate(
  refused: Callable[..., str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
  line = refused("--once", *flags, command="eval")
  assert line == (
    f"--workdir={tmp_path}: there is no checkpoint in"
    f" {tmp_path / 'checkpoints'}; train first, or name the workdir of a run"
  )


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
  "change",
  [
    lambda text: text + "☃",
    lambda text: text[:-1] + "a",
    lambda text: text[:-9],
  ],
)
def test_a_text_that_changed_since(
  config: Path,
  trained: Path,
  capsys: pytest.CaptureFixture[str],
  command: str,
  change: Callable[[str], str],
) -> None:
  path = config.parent / "text.txt"
  before = path.read_text()
  once = "--once" if command == "eval" else FITS
  args = tiny_run.arguments(
    command, config, trained, FITS, "--config.data.tokenizer=char", *SHORT
  )
  path.write_text(change(before))
  try:
    line = one_line([*args, ENDS_AT_3, once], capsys)
  finally:
    path.write_text(before)
  assert f"{path} is changed since the run in" in line
  assert "restore the text" in line


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_checkpoint_of_other_shapes(
  refused: Callable[..., str], trained: Path, command: str
) -> None:
  path = trained / "config.json"
  before = path.read_bytes()
  settings = json.loads(before)
  settings["model"]["model_size"], settings["model"]["key_size"] = 64, 32
  path.write_text(json.dumps(settings))
  once = ("--once",) if command == "eval" else ()
  try:
    line = refused(
      *("--config.data.tokenizer=char", *SHORT, ENDS_AT_3, *once),
      "--config.model.model_size=64",
      command=command,
      at=trained,
    )
  finally:
    path.write_bytes(before)
  assert str(trained / "checkpoints") in line
  assert re.search(r"train_state\.\S+ is of shape \(.*32.*has \(.*64", line), (
    line
  )
  assert "use another --workdir" in line
