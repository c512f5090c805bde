"""Tests of distlm.inspection: what it says of checkpoints, whole and broken."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attribute_experiment import Toy, open_checkpoints, save_step
from checkpoint_commands import (
  call,
  delete,
  fails,
  flip,
  forget,
  save,
  scribble,
  show,
  truncate,
  uncommit,
)

from distlm import checksums, parallel
from distlm.errors import RunError, UsageError
from distlm.series import Series

Corrupt = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a workdir with steps 9 and 10, and a best model of step 9."""
  parallel.repair_jaxline()
  workdir = tmp_path_factory.mktemp("saved")
  toy = Toy(1)
  save(workdir, 9, toy)
  save(workdir, 10, toy)
  checkpointer = open_checkpoints(workdir / "checkpoints", toy, "best")
  state = checkpointer.get_experiment_state("best")
  state.best_eval_metric_value = np.float32(0.25)
  save_step(checkpointer, 9, "best")
  checkpointer.close()
  return workdir


@pytest.fixture
def workdir(saved: Path, tmp_path: Path) -> Path:
  """Returns a copy of `saved` that a test may break."""
  return Path(shutil.copytree(saved, tmp_path / "workdir"))


def step_10(workdir: Path) -> Path:
  return workdir / "checkpoints" / "latest" / "10"


every_damage = pytest.mark.parametrize(
  ("corrupt", "says"),
  [
    (truncate, r"arrays/\S+ is not as it was written"),
    (flip, r"arrays/\S+ is not as it was written"),
    (delete, r"arrays/\S+ is missing"),
    (forget, "checksums.json is missing"),
    (scribble, r"checksums.json cannot be read \(.*\)"),
    (uncommit, "incomplete"),
  ],
)


def test_list_shows_series_step_size_time_and_health(
  workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (step_10(workdir) / "arrays" / "more").write_bytes(bytes(12_345_678))
  secs = datetime.datetime(2024, 2, 29, 13, 5, 7).timestamp()
  for path in workdir.glob("checkpoints/*/*/commit_success.txt"):
    os.utime(path, (secs, secs))
  # Of a NumPy, a Python and a C library, files are of other sizes.
  small = r"0\.0\d MiB"
  assert re.fullmatch(
    rf"latest  9    {small}  2024-02-29 13:05:07  ok\n"
    r"latest  10  11\.7\d MiB  2024-02-29 13:05:07  ok\n"
    rf"best    9    {small}  2024-02-29 13:05:07  ok\n",
    show(capsys, "list", workdir),
  )


@every_damage
def test_damage_is_listed(
  workdir: Path, capsys: pytest.CaptureFixture[str], corrupt: Corrupt, says: str
) -> None:
  corrupt(step_10(workdir))
  lines = show(capsys, "list", workdir).splitlines()
  assert re.fullmatch(rf"latest  10 .*  {says}", lines[1])
  # Without its last file, it was never complete.
  assert (" MiB  -  " in lines[1]) == (corrupt is uncommit)
  assert lines[0].endswith(" ok") and lines[2].endswith(" ok")


@every_damage
def test_damage_is_an_error_of_verify(
  workdir: Path,
  capsys: pytest.CaptureFixture[str],
  corrupt: Corrupt,
  says: str,
) -> None:
  corrupt(step_10(workdir))
  message = fails(RunError, "verify", workdir)
  assert re.fullmatch(
    rf"checkpoint {step_10(workdir)}: {says} \(1 of 3 bad\); move it away.*",
    message,
  )
  first, second, third = capsys.readouterr().out.splitlines()
  assert (first, third) == ("latest  9   ok", "best    9   ok")
  assert re.fullmatch(f"latest  10  {says}", second)
  # Of one that is named, the others do not matter.
  call("verify", step_10(workdir).with_name("9"))
  assert re.fullmatch(
    rf"checkpoint {step_10(workdir)}: {says} \(1 of 1 bad\); .*",
    fails(RunError, "verify", step_10(workdir)),
  )


@every_damage
def test_inspect_and_diff_pass_over_damage_unless_it_is_named(
  workdir: Path,
  capsys: pytest.CaptureFixture[str],
  corrupt: Corrupt,
  says: str,
) -> None:
  corrupt(step_10(workdir))
  call("inspect", workdir)
  output, errors = capsys.readouterr()
  assert output.startswith(f"checkpoint {workdir}/checkpoints/latest/9\n")
  warning = rf"warning: checkpoint {step_10(workdir)}: it is damaged \({says}\)"
  ignored = "" if corrupt is uncommit else f"{warning}, and is ignored\n"
  assert re.fullmatch(ignored, errors)
  # One is not enough, but why differs.
  fails(UsageError if corrupt is uncommit else RunError, "diff", workdir)
  capsys.readouterr()
  try:
    call("inspect", step_10(workdir))
  except RunError as error:
    assert f"checkpoint {step_10(workdir)}: it cannot be read" in str(error)
    assert corrupt in (truncate, flip, delete)
  assert re.fullmatch(f"{warning}\n", capsys.readouterr().err)


def test_only_damaged_ones_are_an_error(workdir: Path) -> None:
  for step in ("9", "10"):
    flip(step_10(workdir).with_name(step))
  message = fails(RunError, "inspect", workdir)
  assert re.search(r"latest/9: it is damaged .* there are too few", message)


def test_what_is_no_checkpoint_is_listed_as_what_it_is(
  workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  latest = workdir / "checkpoints" / "latest"
  damaged = Series(latest).set_aside(10, "damaged").name
  incomplete = Series(latest).set_aside(9, "incomplete").name
  tmp = "11.orbax-checkpoint-tmp-1"
  for name in (tmp, "x", "12\x1b[2J\n"):
    (latest / name).mkdir()
  (latest / "13").write_text("a file")
  rows = [
    re.split("  +", line) for line in show(capsys, "list", workdir).splitlines()
  ]
  assert [(row[1], row[-1]) for row in rows] == [
    ("x", "no checkpoint"),
    (incomplete, "set aside"),
    (damaged, "set aside"),
    (tmp, "an unfinished save"),
    (r"12\x1b[2J\n", "no checkpoint"),
    ("9", "ok"),
  ]
  assert show(capsys, "verify", workdir) == "best  9  ok\n"
  shutil.rmtree(workdir / "checkpoints" / "best")
  assert "it holds no checkpoint" in fails(UsageError, "verify", workdir)
  message = fails(UsageError, "inspect", workdir)
  assert f"0 of the 1 checkpoints needed are in {latest};" in message
  # One that was set aside can be looked at by its name.
  assert show(capsys, "verify", latest / damaged) == f"latest  {damaged}  ok\n"


@pytest.mark.parametrize("command", ["list", "verify", "inspect", "diff"])
@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("none", "there is no such directory"),
    ("", "there is no such directory"),
    ("x" * 300, r"it cannot be read \(File name too long\)"),
    ("file", "it is not a directory"),
    ("empty", "(it holds no|0 of the .) ?checkpoint"),
    ("run", "(it holds no|0 of the .) ?checkpoint"),
    ("series", "(it holds no|0 of the .) ?checkpoint"),
  ],
)
def test_a_wrong_path_is_a_usage_error(
  workdir: Path, command: str, name: str, says: str
) -> None:
  (workdir / "empty").mkdir()
  (workdir / "run" / "checkpoints" / "latest").mkdir(parents=True)
  (workdir / "file").touch()
  path = str(workdir / name) if name else ""
  if name == "series":
    path = str(workdir / "checkpoints" / "latest")
  message = fails(UsageError, command, path)
  assert re.match(f"path {path}: {says}.*; name the workdir", message)
  if command == "diff":
    assert fails(UsageError, command, workdir, path).startswith(f"path {path}:")


def test_one_checkpoint_has_no_second_newest(workdir: Path) -> None:
  assert fails(UsageError, "diff", step_10(workdir)) == (
    f"OTHER: {step_10(workdir)} is one checkpoint; name a second one"
  )
  shutil.rmtree(step_10(workdir))
  message = fails(UsageError, "diff", workdir)
  assert f"path {workdir}: 1 of the 2 checkpoints needed are in" in message


def test_deeply_nested_checksums_are_one_line(workdir: Path) -> None:
  (step_10(workdir) / "checksums.json").write_text("[" * 100_000)
  try:
    call("list", workdir)
  except RunError as error:
    assert "nested too deeply" in str(error)


def test_what_is_deleted_meanwhile_is_not_bad(
  workdir: Path,
  capsys: pytest.CaptureFixture[str],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  find_damage = checksums.find_damage

  def delete_first(path: Path) -> str:
    if path.name == "10":
      shutil.rmtree(path)
    return find_damage(path)

  monkeypatch.setattr(checksums, "find_damage", delete_first)
  assert show(capsys, "verify", workdir) == (
    "latest  9   ok\nlatest  10  deleted meanwhile\nbest    9   ok\n"
  )


def test_a_relative_path_has_its_series_and_step(
  workdir: Path,
  capsys: pytest.CaptureFixture[str],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.chdir(step_10(workdir))
  assert show(capsys, "verify", ".") == "latest  10  ok\n"
  copy = shutil.copytree(".", workdir / "copy")
  assert show(capsys, "verify", copy) == "-  copy  ok\n"


def test_nothing_on_disk_changes(workdir: Path) -> None:
  flip(step_10(workdir))
  shutil.copytree(step_10(workdir), step_10(workdir).with_name("11"))
  uncommit(step_10(workdir).with_name("11"))
  before = everything(workdir)
  for command in ("list", "verify", "inspect", "diff"):
    for path in (workdir, step_10(workdir)):
      with contextlib.suppress(RunError, UsageError):
        call(command, path)
  assert everything(workdir) == before


def everything(directory: Path) -> dict[Path, tuple[int, bytes]]:
  return {
    path: (
      path.stat().st_mtime_ns,
      path.read_bytes() if path.is_file() else b"",
    )
    for path in [directory, *directory.rglob("*")]
  }


FRESH = """
import sys
from distlm import arguments, inspection
parser = arguments.Parser()
inspection.add_arguments(parser)
inspection.run(parser.parse_args(["list", sys.argv[1]]))
print(*{"jax", "numpy", "orbax"} & set(sys.modules))
inspection.run(parser.parse_args(["verify", sys.argv[1]]))
"""


def test_no_accelerator_is_used_and_list_needs_no_jax(workdir: Path) -> None:
  result = subprocess.run(
    [sys.executable, "-c", FRESH, str(workdir)],
    # JAX would fail, since there is none.
    env={**os.environ, "JAX_PLATFORMS": "cuda"},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.returncode == 0, result.stderr
  listed, _, verified = result.stdout.partition("\n\n")
  assert (listed + "\n").count(" ok\n") == verified.count(" ok\n") == 3
  assert result.stderr == ""
