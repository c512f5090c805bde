"""Tests that `distlm doctor` finds what is wrong with a training."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
import tiny_run
import verify_run
from doctor_run import Found, examine

from distlm import language_model, workdir
from distlm.doctor import machine

__all__ = ["examine"]  # A fixture.

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def train(
  examine: Callable[..., Found], config: Path, tmp_path: Path
) -> Callable[..., Found]:
  """Returns a function that examines a training of 16 sequences a batch."""

  def train(*more: str) -> Found:
    return examine(
      f"--config={config}",
      f"--workdir={tmp_path / 'run'}",
      "--config.data.global_batch_size=16",
      *more,
    )

  return train


def test_a_training_without_a_fault(
  train: Callable[..., Found], config: Path, tmp_path: Path
) -> None:
  found = train()
  assert (found.code, found.faults()) == (0, {})
  assert found.conclusion == "training would work"
  assert found.rows["text"][1] == "20,000 tokens in 1 document(s)"
  assert found.rows["run"][1] == "a new one"
  assert found.rows["batch"][1] == (
    "8 device(s) x 2 accumulation step(s) x 1 sequence(s)"
  )
  settings, store = verify_run.open_config(config)
  found = train(*verify_run.FLAGS)
  forward = language_model.make_model(settings, store.tokenizer.vocab_size)
  updater = language_model.make_updater(settings, forward)
  state = jax.jit(updater.init)(jax.random.PRNGKey(0))
  count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  assert found.rows["model"][1] == f"{count:,} parameters"
  # It has looked, and left nothing.
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("flag", "row", "message"),
  [
    ("data.source=/no/such/text", "text", "/no/such/text"),
    ("data.sequence_length=100000", "text", "too few for one sequence"),
    ("data.global_batch_size=12", "training", "use 16"),
    ("model.vocab_size=5", "training", "model.vocab_size=5: "),
    ("model.num_layer=5", "config", "model.num_layers"),
    ("data.cache_dir=/proc/none", "data cache", "/proc/none: it cannot be"),
  ],
)
def test_settings_that_cannot_work(
  flag: str, row: str, message: str, train: Callable[..., Found]
) -> None:
  found = train(f"--config.{flag}")
  assert found.code == 1
  assert found.faults()[row] == "PROBLEM"
  assert message in found.rows[row][1]
  assert found.conclusion.startswith(f"training would fail: {row}: ")


def test_a_config_that_is_not_there(examine: Callable[..., Found]) -> None:
  found = examine("--config=/no/such/config.py")
  assert (found.code, found.faults()) == (1, {"config": "PROBLEM"})
  assert "/no/such/config.py" in found.conclusion


def test_a_run_with_other_settings(
  train: Callable[..., Found], tmp_path: Path
) -> None:
  (tmp_path / "run/checkpoints/latest/5").mkdir(parents=True)
  settings = {"model": {"num_layers": 77}}
  (tmp_path / "run/config.json").write_text(json.dumps(settings))
  found = train()
  assert (found.code, found.faults()) == (1, {"run": "PROBLEM"})
  assert "model.num_layers" in found.conclusion


def test_a_workdir_in_use(train: Callable[..., Found], tmp_path: Path) -> None:
  directory = tmp_path / "run"
  with workdir.claim(directory, {}, "train", once=False):
    found = train()
  assert (found.code, found.faults()) == (1, {"run": "PROBLEM"})
  assert "it is in use by process" in found.conclusion
  assert train().code == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
  """A file system of 1 MiB, or none where nobody may mount it."""
  directory = tmp_path / "run"
  directory.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory]
  if shutil.which("mount") is None or subprocess.run(command).returncode:
    pytest.skip("mounting is not permitted here")
  try:
    yield directory
  finally:
    subprocess.run(["umount", "-l", directory], check=True)


def test_a_disk_that_is_small_full_or_read_only(
  examine: Callable[..., Found], disk: Path
) -> None:
  found = examine(f"--workdir={disk}/new")
  assert (found.code, found.faults()) == (0, {"workdir": "warning"})
  assert "0.0 GiB free" in found.rows["workdir"][1]
  assert found.conclusion == "training would work, with 1 warning(s)"

  (disk / "filler").write_bytes(bytes(2**20 - 2**13))
  found = examine(f"--workdir={disk}/new")
  assert (found.code, found.faults()) == (1, {"workdir": "PROBLEM"})
  assert "No space left on device" in found.conclusion

  subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
  found = examine(f"--workdir={disk}")
  assert (found.code, found.faults()) == (1, {"workdir": "PROBLEM"})
  assert "Read-only file system" in found.conclusion


@pytest.mark.parametrize(
  ("num_checkpoints", "verdict", "code"),
  [(0.9, "PROBLEM", 1), (4.5, "warning", 0), (5.5, "ok", 0)],
)
def test_room_for_the_checkpoints(
  num_checkpoints: float,
  verdict: str,
  code: int,
  train: Callable[..., Found],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  # Three that stay, the best one and the next one, of 6 million parameters with
  # two moments each.
  size = 6e6 * 3 * 4
  usage = Usage(10**12, 0, int(num_checkpoints * size))
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  found = train("--config.model.model_size=496")
  assert re.match("6,0[0-9]{2},[0-9]{3} par", found.rows["model"][1])
  assert (found.code, found.rows["checkpoints"][0]) == (code, verdict)


def test_memory_of_a_device(
  train: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
  # Shared by the 8 devices of a CPU.
  monkeypatch.setattr(machine, "available_memory", lambda: 8 * 2**17)
  found = train("--config.model.model_size=128")
  assert (found.code, found.faults()) == (1, {"memory": "PROBLEM"})
  # What does not fit is not tried.
  assert "psum 4 KiB" in found.rows
  assert "psum 64 KiB" not in found.rows
