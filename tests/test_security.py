"""Tests that a run executes nothing it reads, and opens no door."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import tiny_run

import distlm
from distlm.data import tokenizers

ROOT = Path(distlm.__file__).parent.parent
SHORT = (
  "--config.training_steps=10",
  "--config.model.num_layers=1",
  "--config.evaluation.interval=0",
  "--config.evaluation.batches=1",
)
# What reads code from data, in the libraries that distlm uses and around them.
DANGEROUS = re.compile(
  r"\b_?c?[Pp]ickle\b|allow_pickle|\bmarshal\b|shelve|\bdill\b|joblib|np\.load\b|numpy\.load\b|torch\.load"
  r"|yaml\.(unsafe_)?load\b|\bexec\(|(?<![\w.])eval\(|os\.system|shell=True"
)


class _Bomb:
  """Makes a file when it is unpickled."""

  def __init__(self, target: Path) -> None:
    self._target = target

  def __reduce__(self) -> tuple[object, tuple[str]]:
    return os.mkdir, (str(self._target),)


def test_a_bomb_goes_off_where_it_is_unpickled(tmp_path: Path) -> None:
  pickle.loads(pickle.dumps(_Bomb(tmp_path / "boom")))
  assert (tmp_path / "boom").exists()


def test_nothing_in_the_source_could_run_what_it_reads() -> None:
  for folder in ("distlm", "experiments", "benchmarks"):
    for path in (ROOT / folder).rglob("*.py"):
      found = DANGEROUS.search(path.read_text())
      assert found is None, f"{path}: {found}"
  assert DANGEROUS.search("np.load(file)")
  assert not DANGEROUS.search("updater.eval(x)")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns the workdir of a run of 10 steps, beside its inputs."""
  directory = tmp_path_factory.mktemp("run")
  config = tiny_run.write_inputs(directory)
  workdir = directory / "run"
  tiny_run.run(
    tiny_run.arguments("train", config, workdir, *SHORT),
    tiny_run.environment(directory / "compiled"),
  )
  return workdir


def test_bombs_in_every_file_of_a_run_do_not_go_off(
  trained: Path, tmp_path: Path
) -> None:
  inputs = tmp_path / "inputs"
  shutil.copytree(trained.parent, inputs)
  boom = tmp_path / "boom"
  bomb = pickle.dumps(_Bomb(boom))
  files = [
    path
    for path in inputs.rglob("*")
    if path.is_file() and "compiled" not in path.parts
    if path.name not in ("config.py", "text.txt")
  ]
  assert len(files) > 20
  env = tiny_run.environment(None)
  # Each kind of file by itself, as the first bad one may end the run.
  for path in sorted(files, key=lambda path: (path.name, path.parts)):
    before = path.read_bytes()
    path.write_bytes(bomb)
    _read_all(inputs)
    path.write_bytes(before)
    assert not boom.exists(), path
  for path in files:
    path.write_bytes(bomb)
  args = tiny_run.arguments("train", inputs / "config.py", inputs / "run")
  code, _, errors = tiny_run.finish(tiny_run.start([*args, *SHORT], env))
  assert not boom.exists()
  assert code in (1, 2), errors
  assert errors.splitlines()[-1].startswith("error: "), errors


def _read_all(inputs: Path) -> None:
  """Reads what a run and the commands on checkpoints read, in this process."""
  config, workdir = inputs / "config.py", inputs / "run"
  args = tiny_run.arguments("eval", config, workdir, "--once", *SHORT)
  assert tiny_run.run_here([*args, "--config.accumulation_steps=1"]) in (
    0,
    1,
    2,
  )
  for command in ("list", "verify", "inspect", "diff"):
    assert tiny_run.run_here(["checkpoint", command, str(workdir)]) in (0, 1, 2)
  tokenizers.make_tokenizer("byte", [])


def _listening(pid: int) -> set[str]:
  """Returns the addresses that a process listens on, as Linux writes them."""
  inodes = set()
  for descriptor in Path(f"/proc/{pid}/fd").iterdir():
    try:
      inodes.add(os.readlink(descriptor))
    except FileNotFoundError:
      continue
  lines = [
    line.split()
    for family in ("tcp", "tcp6", "udp", "udp6")
    for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
  ]
  # 0A: a TCP socket that listens; 07: a UDP socket that waits.
  return {
    line[1].rpartition(":")[0]
    for line in lines
    if line[3] in ("0A", "07") and f"socket:[{line[9]}]" in inodes
  }


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_listens_on_nothing_and_a_local_job_on_loopback(
  trained: Path, tmp_path: Path, num_processes: int
) -> None:
  args = tiny_run.arguments(
    "train",
    trained.parent / "config.py",
    tmp_path,
    *(*SHORT, "--config.training_steps=100000"),
  )
  processes = tiny_run.start_job(
    args, num_processes, tiny_run.environment(trained.parent / "compiled")
  )
  try:
    tiny_run.wait_until(
      lambda: 3 in tiny_run.steps(tmp_path, "train"), processes[0]
    )
    for process in processes:
      found = _listening(process.pid)
      assert found <= (LOOPBACK if num_processes > 1 else set())
    if num_processes > 1:
      assert _listening(processes[0].pid)  # It can be seen.
  finally:
    for process in processes:
      process.kill()
      process.communicate()
