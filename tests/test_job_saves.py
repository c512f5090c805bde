"""Jobs of several processes that save slowly, and that evaluate."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import tiny_run

SHORT = (
  "--config.training_steps=20",
  "--config.model.num_layers=1",
  "--config.accumulation_steps=1",
  "--config.evaluation.interval=0",
)
# Saves of "latest" by process 0 take 6 s, before and after JAXline's loop.
SLOW_SAVES = """
import sys, time
from distlm import checksums, checkpoint, cli

take = checkpoint.DiskCheckpointer._take
write = checksums.write_checksums

def slow_take(self, state):
  time.sleep(6)
  return take(self, state)

def slow_write(*args, **kwargs):
  time.sleep(6)
  return write(*args, **kwargs)

checkpoint.DiskCheckpointer._take = slow_take
checksums.write_checksums = slow_write
cli.main()
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


def _env(config: Path) -> dict[str, str]:
  return tiny_run.environment(
    config.parent / "compiled", **tiny_run.COMPILING_FAST
  )


@pytest.fixture(scope="module")
def trained(config: Path) -> Path:
  """Returns the workdir of a whole run, with checkpoints 5, 10, 15 and 20."""
  workdir = config.parent / "trained"
  more = (*SHORT, "--config.checkpoint.keep=4", "--devices=2")
  tiny_run.run(
    tiny_run.arguments("train", config, workdir, *more), _env(config)
  )
  return workdir


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_watchdog_leaves_slow_saves_alone(
  config: Path, tmp_path: Path, num_processes: int
) -> None:
  args = tiny_run.arguments(
    "train",
    config,
    tmp_path,
    *SHORT,
    f"--devices={2 // num_processes}",
    # A step may take 3 s, the first saves and the end 30.
    "--config.watchdog.seconds=3",
    "--config.checkpoint.interval=10",
  )
  processes = tiny_run.start_job(
    args, num_processes, _env(config), ("-c", SLOW_SAVES)
  )
  for process in processes:
    code, _, errors = tiny_run.finish(process)
    assert code == 0, errors
  assert tiny_run.saved_steps(tmp_path) == [10, 20]


def test_two_processes_evaluate_the_same_checkpoint(
  config: Path, trained: Path, tmp_path: Path
) -> None:
  args = tiny_run.arguments("eval", config, trained, *SHORT, "--once")
  [alone] = [
    tiny_run.finish(process)
    for process in tiny_run.start_job([*args, "--devices=2"], 1, _env(config))
  ]
  # Checkpoints come while they evaluate: they begin with the one that is there.
  workdir = tmp_path / "run"
  series = workdir / "checkpoints" / "latest"
  series.mkdir(parents=True)
  for name in ("config.json", "tokenizer.json", "corpus.json"):
    (workdir / name).write_bytes((trained / name).read_bytes())
  come = [trained / "checkpoints" / "latest" / f"{i}" for i in (5, 10, 15, 20)]
  come[0].rename(series / "5")
  args = tiny_run.arguments("eval", config, workdir, *SHORT, "--devices=1")
  processes = tiny_run.start_job(args, 2, _env(config))
  tiny_run.wait_until(
    lambda: 5 in tiny_run.steps(workdir, "eval"), processes[0]
  )
  # One of them sees only the newer of two, when it looks.
  processes[1].send_signal(signal.SIGSTOP)
  come[1].rename(series / "10")
  time.sleep(11)  # JAXline looks every 10 s.
  come[3].rename(series / "20")
  processes[1].send_signal(signal.SIGCONT)
  for process in processes:
    code, _, errors = tiny_run.finish(process)
    assert code == 0, errors
  rows = tiny_run.rows(workdir, "eval")
  assert rows[-1]["step"] == 20
  assert f"loss {rows[-1]['loss']:.4g}" in alone[1]


def test_sigterm_ends_processes_that_wait_for_a_checkpoint(
  config: Path, tmp_path: Path
) -> None:
  (tmp_path / "checkpoints").mkdir()
  args = tiny_run.arguments("eval", config, tmp_path, *SHORT, "--devices=1")
  processes = tiny_run.start_job(args, 2, _env(config))
  tiny_run.wait_until((tmp_path / "eval.log").exists, processes[0])
  tiny_run.wait_until((tmp_path / "eval.1.log").exists, processes[1])
  time.sleep(2)
  for process in processes:
    process.send_signal(signal.SIGTERM)
  ends = [tiny_run.finish(process) for process in processes]
  assert [code for code, _, _ in ends] == [-signal.SIGTERM] * 2
  assert ["Ctrl-C ends it" in output for _, output, _ in ends] == [True, False]
