"""Jobs of several real processes that must not start: one line, and all end."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import process_job
import pytest
import tiny_run

from distlm import workdir as workdirs

FITS = "--config.accumulation_steps=1"


@pytest.fixture
def config(tmp_path: Path) -> Path:
  return tiny_run.write_inputs(tmp_path)


def _start_all(
  config: Path,
  flags: Sequence[Sequence[str]],
  address: str | None = None,
  ids: Sequence[int] | None = None,
) -> list[tuple[int, str]]:
  """Returns the exit code and the one line of each process.

  Args:
    config: of the run.
    flags: further ones of each process.
    address: of the coordinator.
    ids: of the processes, if not 0, 1 and so on.
  """
  ids = range(len(flags)) if ids is None else ids
  common = [
    *tiny_run.arguments("train", config, config.parent / "run", FITS),
    f"--coordinator={address or process_job.free_address()}",
    f"--num-processes={len(flags)}",
  ]
  env = tiny_run.environment(None)
  processes = [
    tiny_run.start([*common, f"--process-id={index}", *more], env)
    for index, more in zip(ids, flags, strict=True)
  ]
  try:
    ends = [tiny_run.finish(process) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert [output for _, output, _ in ends] == [""] * len(ends)
  return [(code, tiny_run.check_one_line(errors)) for code, _, errors in ends]


@pytest.mark.parametrize(
  ("of_second", "says"),
  [
    ("--devices=2", "--devices is 2 there and 1 in process 0"),
    (
      "--config.model.num_layers=3",
      "config.model.num_layers is 3 there and 2 in process 0",
    ),
    ("--jaxline_mode=train", "--jaxline_mode is 'train' there and"),
  ],
)
def test_processes_that_were_told_different_things(
  config: Path, of_second: str, says: str
) -> None:
  ends = _start_all(config, [["--devices=1"], ["--devices=1", of_second]])
  assert ends[0] == ends[1]
  code, line = ends[0]
  assert code == 2
  assert line.startswith("process 1 (pid ")
  assert says in line


def test_processes_that_see_different_texts(config: Path) -> None:
  other = config.with_name("other.txt")
  other.write_text("another text " * 2000)
  flags = [[f"--config.data.source={config.with_name('text.txt')}"]]
  # As on two hosts where the same path is not the same file.
  flags.append([f"--config.data.source={other}"])
  ends = _start_all(config, flags)
  assert ends[0] == ends[1]
  assert "the text is " in ends[0][1]


def test_one_index_twice(config: Path) -> None:
  fits = "--config.data.global_batch_size=6"
  ends = _start_all(config, [[fits]] * 3, ids=(0, 1, 1))
  assert [code for code, _ in ends] == [2, 2, 2]
  for _, line in ends:
    assert line.startswith("--process-id=1: two processes have it, pid ")


def test_a_port_in_use(config: Path) -> None:
  with socket.create_server(("127.0.0.1", 0)) as server:
    address = f"127.0.0.1:{server.getsockname()[1]}"
    more = [[], ["--start-timeout=1"]]
    (code, line), (worker_code, worker_line) = _start_all(config, more, address)
  assert code == 2
  assert f"--coordinator={address}: process 0 cannot listen there" in line
  assert worker_code == 1
  assert f"process 0 at {address} gave no answer" in worker_line


def test_a_coordinator_that_is_no_host(config: Path) -> None:
  [_, (code, line)] = _start_all(
    config, [["--start-timeout=2"]] * 2, "no.invalid:1234"
  )
  assert code == 2
  assert "could not reach process 0 at --coordinator=no.invalid:1234" in line


def test_a_workdir_in_use_ends_all_processes(config: Path) -> None:
  with workdirs.claim(config.parent / "run", {}, "train", False):
    ends = _start_all(config, [[], []])
  assert [code for code, _ in ends] == [2, 2]
  assert "it is in use by process " in ends[0][1]
  assert ends[1][1] == f"process 0: {ends[0][1]}"


def test_a_worker_that_cannot_start_ends_all_processes(config: Path) -> None:
  ends = _start_all(config, [[], ["--config.data.source=/none.txt"]])
  assert [code for code, _ in ends] == [2, 2]
  assert ends[1][1].startswith("data.source=/none.txt: ")
  assert ends[0][1] == f"process 1: {ends[1][1]}"


def test_a_process_that_never_comes(config: Path) -> None:
  args = tiny_run.arguments("train", config, config.parent / "run", FITS)
  args += [f"--coordinator={process_job.free_address()}", "--num-processes=2"]
  code, output, errors = tiny_run.finish(
    tiny_run.start(
      [*args, "--process-id=0", "--start-timeout=1"],
      tiny_run.environment(None),
    )
  )
  assert (code, output) == (1, "")
  assert "process(es) 1 of 2 did not come to " in tiny_run.check_one_line(
    errors
  )


@pytest.mark.parametrize("secs", ["0", "-1", "nan"])
def test_a_start_timeout_that_cannot_be(
  config: Path, secs: str, capsys: pytest.CaptureFixture[str]
) -> None:
  args = tiny_run.arguments("train", config, config.parent / "run")
  assert tiny_run.run_here([*args, f"--start-timeout={secs}"]) == 2
  assert f"--start-timeout={secs}: it must be positive" in (
    capsys.readouterr().err
  )
