"""Tests of commands that find checkpoints of their run damaged."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import fault_runs
import jaxline.train
import pytest
import tiny_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> fault_runs.Runs:
  return fault_runs.make(tmp_path_factory.getbasetemp())


@pytest.fixture
def workdir(runs: fault_runs.Runs, tmp_path: Path) -> Path:
  return fault_runs.copy_of_half(runs, tmp_path)


def _largest(checkpoint: Path) -> Path:
  return max(fault_runs.files(checkpoint), key=lambda path: path.stat().st_size)


def _truncate_largest(checkpoint: Path) -> str:
  path = _largest(checkpoint)
  os.truncate(path, path.stat().st_size // 2)
  return str(path.relative_to(checkpoint))


def _flip_a_bit_of_the_largest(checkpoint: Path) -> str:
  path = _largest(checkpoint)
  content = bytearray(path.read_bytes())
  content[len(content) // 3] ^= 1
  path.write_bytes(content)
  return str(path.relative_to(checkpoint))


def _remove_metadata(checkpoint: Path) -> str:
  (checkpoint / "metadata" / "metadata").unlink()
  return "metadata/metadata"


def _remove_checksums(checkpoint: Path) -> str:
  (checkpoint / "checksums.json").unlink()
  return "checksums.json"


def _checkpoint(workdir: Path, step: int, series: str = "latest") -> Path:
  return workdir / "checkpoints" / series / f"{step}"


def _names(workdir: Path) -> list[str]:
  return sorted(
    str(path.relative_to(workdir)) for path in workdir.glob("checkpoints/*/*")
  )


def _is_renamed(checkpoint: Path, reason: str, warning: str) -> bool:
  """Returns whether a checkpoint was set aside, and this warning says it."""
  [aside] = checkpoint.parent.glob(f"{checkpoint.name}.damaged-*")
  assert warning.startswith(f"warning: checkpoint {checkpoint}: it is damaged")
  assert reason in warning
  return warning.endswith(f"and was renamed {aside.name}")


def _contents(checkpoint: Path) -> dict[str, bytes]:
  return {
    str(path.relative_to(checkpoint)): path.read_bytes()
    for path in fault_runs.files(checkpoint)
  }


def _train(runs: fault_runs.Runs, workdir: Path) -> tuple[str, list[str]]:
  """Goes on to the bits of the whole run; returns output and warnings."""
  code, output, errors = tiny_run.finish(
    tiny_run.start(fault_runs.arguments(runs, workdir), runs.env)
  )
  assert code == 0, errors
  fault_runs.assert_ended(runs, workdir)
  fault_runs.assert_whole(workdir)
  return output, errors.splitlines()


@pytest.mark.parametrize(
  "damage",
  [
    _truncate_largest,
    _flip_a_bit_of_the_largest,
    _remove_metadata,
    pytest.param(_remove_checksums, marks=pytest.mark.slow),
  ],
)
def test_the_one_before_the_damaged_is_used(
  runs: fault_runs.Runs, workdir: Path, damage: Callable[[Path], str]
) -> None:
  newest = _checkpoint(workdir, 20)
  reason = damage(newest)
  before = _contents(newest)
  output, [warning] = _train(runs, workdir)
  assert _is_renamed(newest, reason, warning)
  assert "from 15 to 30 (resumed)" in output
  [aside] = newest.parent.glob("20.damaged-*")
  assert _contents(aside) == before


def test_the_two_newest_damaged(runs: fault_runs.Runs, workdir: Path) -> None:
  reasons = {
    15: _flip_a_bit_of_the_largest(_checkpoint(workdir, 15)),
    20: _truncate_largest(_checkpoint(workdir, 20)),
  }
  output, warnings = _train(runs, workdir)
  assert len(warnings) == 2
  for step, reason in reasons.items():
    checkpoint = _checkpoint(workdir, step)
    assert any(
      _is_renamed(checkpoint, reason, warning)
      for warning in warnings
      if f"{checkpoint}:" in warning
    )
  assert "from 10 to 30 (resumed)" in output


def test_the_best_damaged(runs: fault_runs.Runs, workdir: Path) -> None:
  best = _checkpoint(workdir, 20, "best")
  reason = _flip_a_bit_of_the_largest(best)
  output, [warning] = _train(runs, workdir)
  assert _is_renamed(best, reason, warning)
  assert "from 20 to 30 (resumed)" in output
  assert tiny_run.saved_steps(workdir, "best") == [30]


@pytest.mark.slow
def test_the_best_and_the_newest_damaged(
  runs: fault_runs.Runs, workdir: Path
) -> None:
  _flip_a_bit_of_the_largest(_checkpoint(workdir, 20))
  _truncate_largest(_checkpoint(workdir, 20, "best"))
  output, warnings = _train(runs, workdir)
  assert len(warnings) == 2
  assert "from 15 to 30 (resumed)" in output


def _fail(runs: fault_runs.Runs, workdir: Path) -> tuple[str, str]:
  """Returns output and the one line of error of a command that must fail."""
  code, output, errors = tiny_run.finish(
    tiny_run.start(fault_runs.arguments(runs, workdir), runs.env)
  )
  message = tiny_run.check_one_line(errors)
  assert code == 1
  return output, message


def _evaluate(runs: fault_runs.Runs, workdir: Path, *more: str) -> int:
  return tiny_run.run_here(
    tiny_run.arguments("eval", runs.config, workdir, *fault_runs.MORE, *more)
  )


def _uncommit(checkpoint: Path) -> str:
  (checkpoint / "commit_success.txt").unlink()
  return "commit_success.txt"


@pytest.mark.parametrize("damage", [_truncate_largest, _uncommit])
def test_all_damaged_is_an_error_and_stays_one(
  runs: fault_runs.Runs,
  workdir: Path,
  damage: Callable[[Path], str],
) -> None:
  for step in tiny_run.saved_steps(workdir):
    damage(_checkpoint(workdir, step))
  before = _names(workdir)
  messages = set()
  for _ in range(2):
    output, message = _fail(runs, workdir)
    assert "step 1/" not in output
    messages.add(message)
    assert _names(workdir) == before
  [message] = messages
  assert str(_checkpoint(workdir, 20)) in message
  assert "--workdir" in message


def test_an_evaluation_of_a_damaged_newest_takes_the_one_before(
  runs: fault_runs.Runs, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  reason = _flip_a_bit_of_the_largest(_checkpoint(workdir, 20))
  before = _names(workdir)
  assert _evaluate(runs, workdir, "--once") == 0
  output, errors = capsys.readouterr()
  assert "eval step 15  loss" in output
  assert errors.endswith(", and is ignored\n")
  assert errors.startswith(f"warning: checkpoint {_checkpoint(workdir, 20)}: ")
  assert reason in errors
  assert errors.count("\n") == 1
  assert _names(workdir) == before


def test_an_evaluation_of_damaged_checkpoints_only_is_an_error(
  runs: fault_runs.Runs, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  for step in tiny_run.saved_steps(workdir):
    _flip_a_bit_of_the_largest(_checkpoint(workdir, step))
  before = _names(workdir)
  assert _evaluate(runs, workdir, "--once") == 1
  message = tiny_run.check_one_line(capsys.readouterr().err)
  assert str(_checkpoint(workdir, 20)) in message
  assert _names(workdir) == before


def test_a_continuous_evaluation_passes_over_the_damaged(
  runs: fault_runs.Runs,
  workdir: Path,
  capsys: pytest.CaptureFixture[str],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  _flip_a_bit_of_the_largest(_checkpoint(workdir, 20))
  before = _names(workdir)
  coming = iter((25, 30))

  class Time:
    """In the 10 s that JAXline waits for it, the next checkpoint comes."""

    time = staticmethod(time.time)

    @staticmethod
    def sleep(secs: float) -> None:
      del secs
      step = next(coming)
      to = _checkpoint(workdir, step)
      shutil.copytree(_checkpoint(runs.whole, step), to)
      if step == 25:
        _truncate_largest(to)

  monkeypatch.setattr(jaxline.train, "time", Time)
  assert _evaluate(runs, workdir) == 0
  output, errors = capsys.readouterr()
  evaluated = [
    line.split()[2] for line in output.splitlines() if "eval step" in line
  ]
  assert evaluated == ["15", "30"]
  assert [line.split(":")[1] for line in errors.splitlines()] == [
    f" checkpoint {_checkpoint(workdir, step)}" for step in (20, 25)
  ]
  here = {name for name in _names(workdir) if "latest" in name}
  assert here - {*before} == {
    "checkpoints/latest/25",
    "checkpoints/latest/30",
  }


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/latest"])
def test_a_file_in_place_of_a_directory_of_checkpoints(
  runs: fault_runs.Runs,
  workdir: Path,
  name: str,
) -> None:
  path = workdir / name
  path.rename(path.with_name("elsewhere"))
  path.write_text("precious")
  _, message = _fail(runs, workdir)
  assert str(path) in message
  assert path.read_text() == "precious"
