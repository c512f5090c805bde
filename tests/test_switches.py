from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from distlm import switches

TUNABLES = "GLIBC_TUNABLES"
ON_CPU = {"JAX_PLATFORMS": "cpu"}


class Config:
  """What is used of `jax.config`."""

  def __init__(self, directory: str | None = None) -> None:
    self.jax_compilation_cache_dir = directory

  def update(self, name: str, value: Any) -> None:
    setattr(self, name, value)


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
  arguments = ["train", "--config=a b"]
  monkeypatch.setattr(sys, "argv", ["distlm/__main__.py", *arguments])
  python = ["python3", "-X", "utf8", "-m", "distlm"]
  monkeypatch.setattr(sys, "orig_argv", [*python, *arguments])


def _restarted(environ: dict[str, str]) -> list[Any]:
  calls: list[Any] = []
  switches.restart_with_malloc_settings(
    environ, lambda *arguments: calls.append(arguments)
  )
  return calls


def test_a_command_is_started_again_with_settings_of_malloc() -> None:
  ((program, arguments, environ),) = _restarted(dict(ON_CPU))
  assert (
    arguments == [program, *sys.orig_argv[1:]] and program == sys.executable
  )
  assert "glibc.malloc.hugetlb=1" in environ[TUNABLES].split(":")
  # What it starts, and it itself, are not started again.
  assert _restarted(environ) == []


@pytest.mark.parametrize("theirs", ["", "glibc.malloc.perturb=1"])
def test_what_the_user_sets_stays(theirs: str) -> None:
  environ = {**ON_CPU, TUNABLES: theirs}
  assert _restarted(environ) == [] and environ[TUNABLES] == theirs


@pytest.mark.parametrize(
  ("argv", "orig_argv"),
  [
    (["-", "train"], ["python3", "-", "train"]),  # From standard input.
    (["", "train"], ["python3"]),  # In a session.
    (["distlm", "train"], ["python3", "script.py"]),  # It chose the command.
  ],
)
def test_what_would_not_come_to_the_same_is_not_started_again(
  argv: list[str], orig_argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(sys, "argv", argv)
  monkeypatch.setattr(sys, "orig_argv", orig_argv)
  assert _restarted(dict(ON_CPU)) == []


def test_a_command_that_cannot_be_started_again_goes_on() -> None:
  def fail(*arguments: Any) -> None:
    raise PermissionError(*arguments)

  switches.restart_with_malloc_settings(dict(ON_CPU), fail)


def test_a_training_starts_so_and_says_so(tmp_path: Path) -> None:
  config = tiny_run.write_inputs(tmp_path)
  args = tiny_run.arguments("train", config, tmp_path / "run")
  env = tiny_run.environment(None)
  env.pop(TUNABLES, None)
  run = [sys.executable, "-m", "distlm", *args, "--config.training_steps=6"]
  # One device needs no more threads than XLA takes by itself.
  env.pop("NPROC", None)
  process = subprocess.Popen(run, env=env, stdout=subprocess.PIPE, text=True)
  output, _ = process.communicate(timeout=tiny_run.TIMEOUT_SECS)
  assert process.returncode == 0
  (row,) = (line for line in output.splitlines() if "switches" in line)
  assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:" in row
  assert "XLA_FLAGS=--xla_cpu" in row and "NPROC" not in row


def test_programs_are_kept_by_kind_of_cpu(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  config = Config()
  switches.keep_compiled(config, {"XDG_CACHE_HOME": str(tmp_path)})
  assert config.jax_compilation_cache_dir is not None
  first = Path(config.jax_compilation_cache_dir)
  assert first.parent == tmp_path / "distlm" / "compiled" and first.is_dir()
  monkeypatch.setattr(switches.platform, "machine", lambda: "another")
  switches.keep_compiled(other := Config(), {"XDG_CACHE_HOME": str(tmp_path)})
  assert other.jax_compilation_cache_dir not in (None, str(first))


def test_the_users_directory_stays(tmp_path: Path) -> None:
  config = Config("theirs")
  switches.keep_compiled(config, {"XDG_CACHE_HOME": str(tmp_path)})
  assert config.jax_compilation_cache_dir == "theirs"
  assert not list(tmp_path.iterdir())


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
  file = tmp_path / "file"
  file.touch()
  config = Config()
  switches.keep_compiled(config, {"XDG_CACHE_HOME": str(file)})
  assert config.jax_compilation_cache_dir is None


def test_a_shell_reads_them_as_they_are() -> None:
  environ = {"XLA_FLAGS": "--a=1 --b", "NPROC": "16", "HOME": "x", "x": ""}
  text = switches.in_effect(environ)
  script = f"{text} sh -c 'echo \"$NPROC|$XLA_FLAGS\"'"
  output = subprocess.check_output(
    ["sh", "-c", script], text=True, env={"PATH": os.environ["PATH"]}
  )
  assert output == "16|--a=1 --b\n" and "HOME" not in text
