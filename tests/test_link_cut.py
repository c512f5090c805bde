"""A job on two hosts, network namespaces of this one, whose link is cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import process_job
import pytest
import tiny_run

NUM_STEPS = 40
SECS_TO_END = 60  # The watchdog's 8 s, on a busy machine.
ADDRESSES = ("10.77.213.1", "10.77.213.2")
MORE = (
  f"--config.training_steps={NUM_STEPS}",
  "--config.model.num_layers=1",
  "--config.evaluation.interval=0",
  "--config.watchdog.seconds=8",
  "--devices=2",
)


def _ip(*args: str) -> None:
  subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
  """Makes two namespaces with a link between them; returns their names."""
  if os.geteuid() != 0 or shutil.which("ip") is None:
    pytest.skip("network namespaces need root and the command `ip`")
  names = (f"distlm{os.getpid()}a", f"distlm{os.getpid()}b")
  with contextlib.ExitStack() as stack:
    for name, address in zip(names, ADDRESSES, strict=True):
      try:
        _ip("netns", "add", name)
      except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made: {error.stderr}")
      stack.callback(_ip, "netns", "del", name)
      # Gloo binds the address that the host's own name stands for.
      of_host = Path("/etc/netns", name)
      of_host.mkdir(parents=True)
      stack.callback(shutil.rmtree, of_host)
      (of_host / "hosts").write_text(
        f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
      )
    first, second = names
    _ip(
      *("link", "add", "link0", "netns", first, "type", "veth"),
      *("peer", "name", "link0", "netns", second),
    )
    for name, address in zip(names, ADDRESSES, strict=True):
      _ip("-n", name, "address", "add", f"{address}/24", "dev", "link0")
      _ip("-n", name, "link", "set", "lo", "up")
      _ip("-n", name, "link", "set", "link0", "up")
    yield first, second


def _start(
  hosts: tuple[str, str], config: Path, workdir: Path
) -> list[subprocess.Popen[str]]:
  port = process_job.free_address().rpartition(":")[2]
  args = tiny_run.arguments("train", config, workdir, *MORE)
  return [
    subprocess.Popen(
      [
        *("ip", "netns", "exec", host, sys.executable, "-m", "distlm", *args),
        f"--coordinator={ADDRESSES[0]}:{port}",
        "--num-processes=2",
        f"--process-id={index}",
      ],
      env=tiny_run.environment(None, **tiny_run.COMPILING_FAST),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index, host in enumerate(hosts)
  ]


@pytest.mark.netns
def test_a_cut_link_ends_both_and_the_next_start_goes_on(
  hosts: tuple[str, str], tmp_path: Path
) -> None:
  config = tiny_run.write_inputs(tmp_path)
  workdir, whole = tmp_path / "run", tmp_path / "whole"
  processes = _start(hosts, config, workdir)
  tiny_run.wait_until(
    lambda: max(tiny_run.steps(workdir, "train"), default=0) >= 12,
    processes[0],
  )
  _ip("-n", hosts[1], "link", "set", "link0", "down")
  start = time.monotonic()
  for process in processes:
    code, _, errors = tiny_run.finish(process)
    assert code == 1, errors
    assert "did not get on for" in errors.splitlines()[-1]
  assert time.monotonic() - start < SECS_TO_END
  assert tiny_run.saved_steps(workdir)[-1] < NUM_STEPS

  _ip("-n", hosts[1], "link", "set", "link0", "up")
  for args in (workdir, whole):
    for process in _start(hosts, config, args):
      code, _, errors = tiny_run.finish(process)
      assert code == 0, errors
  tiny_run.assert_same_checkpoint(workdir, whole)
