"""Tests of exit codes, by processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--devices=0"], "--devices=0: it must be 1 or more"),
    (["--devices=-1"], "--devices=-1: it must be 1 or more"),
    (["--devices=3"], "1 processes x 3 devices x accumulation_steps=2"),
    # With more, XLA's first collective would hang.
    (
      ["--devices=257", "--config.data.global_batch_size=514"],
      "--devices=257: ",
    ),
    (["--num-processes=2"], "needs all three"),
    (
      ["--coordinator=x:1", "--num-processes=2", "--process-id=2"],
      "--process-id=2: it must be from 0 to 1",
    ),
    (["--config.model.num_heads=0"], "config.model.num_heads=0: "),
  ],
)
def test_the_process_ends_with_code_2(
  config: Path, tmp_path: Path, flags: list[str], says: str
) -> None:
  args = tiny_run.arguments("train", config, tmp_path / "run", *flags)
  code, output, errors = tiny_run.finish(
    tiny_run.start(args, tiny_run.environment(None))
  )
  assert (code, output) == (2, "")
  assert says in tiny_run.check_one_line(errors)
  assert not (tmp_path / "run").exists()


def test_a_workdir_of_a_live_process(config: Path, tmp_path: Path) -> None:
  args = tiny_run.arguments("train", config, tmp_path, "--devices=1")
  env = tiny_run.environment(None)
  first = tiny_run.start(args, env)
  try:
    tiny_run.wait_until((tmp_path / "config.json").exists, first)
    code, _, errors = tiny_run.finish(tiny_run.start(args, env))
  finally:
    first.kill()
    first.communicate()
  assert code == 2
  assert f"in use by process {first.pid} on " in tiny_run.check_one_line(errors)


def test_a_wrong_command_line_is_answered_without_importing_jax() -> None:
  result = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "distlm", "train", "--once"],
    capture_output=True,
    text=True,
    timeout=tiny_run.TIMEOUT_SECS,
  )
  assert result.returncode == 2
  assert not re.search(r"\| +jax\b", result.stderr)
