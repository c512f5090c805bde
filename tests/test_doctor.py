"""Tests that `distlm doctor` finds what is wrong with machine and devices."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import process_job
import pytest
import tiny_run
from doctor_run import SIZES, Found, examine, run_here, run_job

from distlm import collectives as device_collectives
from distlm import facts
from distlm.cluster import ProcessSpec
from distlm.doctor import collectives, machine, report, together
from distlm.errors import RunError, UsageError

__all__ = ["examine"]  # A fixture.


def test_a_machine_without_a_fault(examine: Callable[..., Found]) -> None:
  found = examine()
  assert found.code == 0
  assert not set(found.faults().values()) - {"warning"}
  assert found.conclusion.startswith("training would work")
  assert found.rows["jax, jaxlib"][1] == f"{jax.__version__}, 0.10.2"
  assert found.rows["backend"] == ("ok", "cpu")
  assert "8 cpu device(s)" in found.rows["process 0"][1]
  assert found.rows["job"][1] == "1 process(es), by one process"
  for name in ("psum 4 KiB", "all_gather 64 KiB"):
    assert re.fullmatch(r"right, \S+ ms, \S+ GB/s", found.rows[name][1])


def test_tensorboard_that_is_missing(
  examine: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setitem(sys.modules, "tensorboard", None)
  found = examine()
  assert (found.code, found.faults()) == (0, {"tensorboard": "warning"})
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  found = examine()
  assert found.code == 1
  assert found.faults()["tensorboardX"] == "PROBLEM"
  assert "pip install tensorboardX" in found.conclusion


def test_a_sum_that_is_wrong(
  examine: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
  right = device_collectives.psum

  def wrong(tree: Any, axis_name: str | None) -> Any:
    total = right(tree, axis_name)
    return total.at[-1].add(1) if total.size == SIZES[0] // 4 else total

  monkeypatch.setattr(device_collectives, "psum", wrong)
  found = examine()
  assert (found.code, found.faults()) == (1, {"psum 4 KiB": "PROBLEM"})
  # One on each device.
  assert "WRONG on process 0 (8 elements)" in found.conclusion


def test_a_sum_without_one_device(
  examine: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
  right = device_collectives.psum
  monkeypatch.setattr(
    device_collectives,
    "psum",
    lambda x, axis: right(x * (jax.lax.axis_index(axis) != 3), axis),
  )
  assert set(examine().faults()) == {"psum 4 KiB", "psum 64 KiB"}


def test_contents_that_are_gathered_wrong(
  examine: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
  right = device_collectives.all_gather

  def wrong(x: jax.Array) -> jax.Array:
    gathered = right(x)
    # A row twice, and another one missing; texts stay as they are.
    return gathered.at[2].set(gathered[5]) if x.dtype == "f4" else gathered

  monkeypatch.setattr(device_collectives, "all_gather", wrong)
  found = examine()
  assert found.code == 1
  assert set(found.faults()) == {"all_gather 4 KiB", "all_gather 64 KiB"}

  monkeypatch.setattr(device_collectives, "all_gather", lambda x: right(x) * 0)
  with pytest.raises(RunError, match="all_gather does not return what"):
    run_here()


def test_bandwidth_is_that_of_the_busiest_link() -> None:
  psum = collectives.try_psum(SIZES[0])
  all_gather = collectives.try_all_gather(SIZES[0])
  assert (psum.num_bytes, all_gather.num_bytes) == (4096, 4096)
  # A ring of 8 sends 7/8 of the result twice, to sum and to spread.
  second = psum._replace(num_bytes=10**9, secs=2.0)
  assert second.gigabytes_per_sec == 0.875
  second = all_gather._replace(num_bytes=10**9, secs=2.0)
  assert second.gigabytes_per_sec == 0.4375


def test_texts_are_gathered_whole() -> None:
  for text in ("", "a", "ab\N{SNOWMAN}c", "x" * 1001):
    assert collectives.gather_texts(text) == [text]


def test_too_few_threads(
  examine: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("NPROC", "8")
  assert examine().faults() == {"NPROC": "warning"}


@pytest.mark.parametrize(
  ("num_devices", "num_processes", "verdict"),
  [(1, 1, report.OK), (2, 1, report.WARNING), (1, 2, report.WARNING)],
)
def test_one_device_alone_needs_no_more_threads(
  num_devices: int,
  num_processes: int,
  verdict: str,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setenv("NPROC", "2")
  spec = ProcessSpec(num_processes=num_processes)
  rows = together._check_environment(num_devices, spec)
  assert {row.name: row.verdict for row in rows}["NPROC"] == verdict


def test_versions_that_do_not_suit(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  versions = {**facts.versions(), "version of jaxlib": "0.9.1"}
  monkeypatch.setattr(facts, "versions", lambda: versions)
  monkeypatch.setattr(
    machine.importlib.metadata, "version", lambda name: "0.10.2"
  )
  rows = {row.name: row for row in machine.check_versions()}
  assert rows["jax, jaxlib"].verdict == "warning"
  # JAX would leave it aside and use the CPU.
  assert rows["jax-cuda13-plugin"].verdict == "PROBLEM"
  assert rows["jax-cuda13-plugin"].advice == (
    'pip install "jax-cuda13-plugin==0.9.1"'
  )
  assert rows["libtpu"].verdict == "ok"


@pytest.mark.parametrize(
  ("wanted", "verdict", "says"),
  [
    (None, "PROBLEM", f'pip install "jax[cuda13]=={jax.__version__}"'),
    ("cpu", "ok", "JAX_PLATFORMS=cpu leaves unused"),
    ("cuda", "PROBLEM", "unset JAX_PLATFORMS"),
  ],
)
def test_a_gpu_that_jax_cannot_use(
  wanted: str | None,
  verdict: str,
  says: str,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  (tmp_path / "dev/nvidia0").mkdir(parents=True)
  monkeypatch.setattr(machine.xla_flags, "cuda_plugins", lambda: [])
  monkeypatch.delenv("JAX_PLATFORMS")
  if wanted:
    monkeypatch.setenv("JAX_PLATFORMS", wanted)
  [row] = machine.check_accelerators(tmp_path)
  assert row.verdict == verdict
  assert says in str(row)
  [row] = machine.check_accelerators(tmp_path / "dev")
  assert row.verdict == ("PROBLEM" if wanted == "cuda" else "ok")


def check_network(*spec: Any) -> dict[str, str]:
  return {
    row.name: row.verdict for row in machine.check_network(ProcessSpec(*spec))
  }


def test_names_that_do_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
  def resolve(host: str, *args: Any, **kwargs: Any) -> list[Any]:
    if host not in known:
      raise socket.gaierror(-2, "Name or service not known")
    return [(0, 0, 0, "", (known[host], 0))]

  known = {"me": "127.0.1.1", "other": "192.0.2.1"}  # TEST-NET: nobody's.
  monkeypatch.setattr(socket, "gethostname", lambda: "me")
  monkeypatch.setattr(socket, "getaddrinfo", resolve)
  assert set(check_network().values()) == {"ok"}
  # Two on this host, then one of two.
  assert check_network("me:1234", 2, 0, 2, 0)["hostname"] == "ok"
  assert check_network("me:1234", 2, 0)["hostname"] == "warning"
  assert check_network("me:1234", 2, 0)["coordinator"] == "ok"
  # The coordinator's port is process 0's to open.
  assert check_network("other:1234", 2, 0)["coordinator"] == "PROBLEM"
  assert check_network("other:1234", 2, 1)["coordinator"] == "ok"
  assert check_network("nobody:1234", 2, 1)["coordinator"] == "PROBLEM"
  known.clear()
  assert check_network()["hostname"] == "warning"
  assert check_network("me:1234", 2, 1)["hostname"] == "PROBLEM"


def test_a_process_that_does_not_come(
  capsys: pytest.CaptureFixture[str],
) -> None:
  with pytest.raises(RunError, match=r"training would fail: processes: .*1 of"):
    run_here(
      f"--coordinator={process_job.free_address()}",
      *("--num-processes=2", "--process-id=0", "--start-timeout=0.3"),
    )
  # What it found until then is shown.
  assert "\njax, jaxlib " in capsys.readouterr().out


def test_flags_that_cannot_work() -> None:
  for flag in ("--devices=0", "--num-processes=2", "--devices=many"):
    with pytest.raises(UsageError, match=flag.partition("=")[0]):
      run_here(flag)


def test_a_collective_that_hangs_is_named() -> None:
  code = """
import time
from distlm.doctor import collectives
with collectives.not_for_ever("what ends in time", 0.2):
  pass
time.sleep(0.4)
with collectives.not_for_ever("psum of 1 MiB", 0.2):
  time.sleep(60)
"""
  process = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True
  )
  assert process.returncode == 1
  message = tiny_run.check_one_line(process.stderr)
  assert message.startswith("psum of 1 MiB did not end in 0.2 s, in process 0")


def test_processes_that_agree(tmp_path: Path) -> None:
  config = tiny_run.write_inputs(tmp_path)
  workdir = f"--workdir={tmp_path / 'run'}"
  pids, found, codes = run_job([f"--config={config}", workdir])
  assert (codes, found.faults()) == ([0, 0], {})
  for index, pid in enumerate(pids):
    value = found.rows[f"process {index}"][1]
    assert value.startswith(f"pid {pid} on {socket.gethostname()}: 2 cpu ")
  assert found.rows["same everywhere"][1] == "versions, code, settings, text"
  assert found.rows["batch"][1].startswith("4 device(s) x 2 accumulation")
  assert found.rows["job"][1] == "2 process(es), by flags"
  for name in ("psum 64 KiB", "all_gather 64 KiB"):
    assert re.fullmatch(r"right, \S+ ms, \S+ GB/s", found.rows[name][1])


def test_a_fault_of_the_first_process_alone() -> None:
  _, found, codes = run_job(["--workdir=/proc/none"], ["--workdir=."])
  # The other one knows of it too.
  assert (codes, found.faults()) == ([1, 1], {"workdir": "PROBLEM"})


def test_processes_that_differ(tmp_path: Path) -> None:
  config = tiny_run.write_inputs(tmp_path)
  pids, found, codes = run_job(
    [f"--config={config}", f"--workdir={tmp_path / 'run'}"],
    ["--config.model.num_layers=3", "--workdir=/proc/none"],
  )
  name = f"process 1 (pid {pids[1]} on {socket.gethostname()})"
  assert codes == [1, 1]
  assert found.faults() == {
    "same everywhere": "PROBLEM",
    "workdir of process 1": "PROBLEM",
  }
  assert found.rows["same everywhere"][1] == (
    f"{name}: config.model.num_layers is 3 there and 2 in process 0"
  )
  assert found.conclusion.startswith(
    "training would fail: workdir of process 1: /proc/none: it cannot be"
    f" written (No such file or directory) (pid {pids[1]} on "
  )
  # It can compute all the same.
  assert found.rows["psum 4 KiB"][0] == "ok"
