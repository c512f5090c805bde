"""What `distlm doctor` finds out once all processes are joined."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distlm import cluster, facts, parallel, rendezvous, switches, xla_flags
from distlm.cluster import ProcessSpec
from distlm.doctor import collectives, machine, training
from distlm.doctor.report import OK, PROBLEM, WARNING, Report, Row
from distlm.doctor.training import Plan

_ENOUGH_THREADS_PER_DEVICE = 4
# Argument, result and what it is compared with, twice.
_ARRAYS_OF_TRIAL = 6

_FORMULA = (
  "collectives of all devices: the size of the result, the median time, and"
  " size / time x 2 (N - 1) / N of psum, x (N - 1) / N of all_gather, which"
  " nccl-tests call busbw"
)

# What each process tells the others of itself, of JSON types.
Account = dict[str, Any]


def examine(
  report: Report, spec: ProcessSpec, num_devices: int | None, plan: Plan
) -> None:
  """Reports on devices, processes, flags, collectives and the training.

  All processes must call it, and end with the same problems.

  Args:
    report: gets the rows.
    spec: which process this is.
    num_devices: the user's --devices.
    plan: what is to be trained.
  """
  devices = _devices()
  memory = _memory(devices, spec)
  report.try_check("environment", _check_environment, len(devices), spec)
  report.try_check("training", training.check_on_devices, plan, memory)
  own = {
    "process": parallel.process_index(),
    "pid": os.getpid(),
    "host": socket.gethostname(),
    "devices": [device.id for device in devices],
    "kind": parallel.device_kind(),
    "memory": memory,
    "findings": [row for row in report.rows if row.verdict != OK],
    "facts": _facts(num_devices, plan),
  }
  with collectives.not_for_ever("the first all_gather"):
    accounts = _exchange(own)
  if parallel.process_index() > 0:
    # From here on as in process 0, so that all end with the same exit code.
    report.rows = [Row(*finding) for finding in accounts[0]["findings"]]
  report.add(_describe(account) for account in accounts)
  report.add(_findings_of_others(accounts))
  if len(accounts) > 1:
    report.add([_compare(accounts)])
  if len(accounts) * len(devices) > 1:
    report.show(_FORMULA)
  for num_bytes in _sizes_that_fit(accounts):
    for attempt in (collectives.try_psum, collectives.try_all_gather):
      report.try_check("collectives", _try, attempt, num_bytes)


def _devices() -> list[Any]:
  """Returns the devices of this process, by what they hold."""
  everywhere: Any = parallel.replicate(np.zeros([], np.uint8))
  return [shard.device for shard in everywhere.addressable_shards]


def _memory(devices: Sequence[Any], spec: ProcessSpec) -> int | None:
  """Returns the bytes that each device has, or None if it is not known."""
  stats = [device.memory_stats() or {} for device in devices]
  limits = [limit for one in stats if (limit := one.get("bytes_limit"))]
  if limits:
    return int(min(limits))
  available = machine.available_memory()
  if jax.default_backend() != "cpu" or available is None:
    return None
  return available // (len(devices) * spec.num_local_processes)


def _facts(num_devices: int | None, plan: Plan) -> dict[str, Any]:
  settings = plan.config.to_dict() if plan.config else {}
  more = {"the text": plan.store.fingerprint if plan.store else None}
  found = facts.of_run(settings, num_devices, more)
  # As the others will read them.
  return json.loads(json.dumps(found))


def _check_environment(num_devices: int, spec: ProcessSpec) -> Iterator[Row]:
  """Yields the variables that decide what XLA does."""
  for name in switches.VARIABLES:
    value = os.environ.get(name, "")
    threads = int(value) if name == "NPROC" and value.isdecimal() else None
    if (
      threads is not None
      and jax.default_backend() == "cpu"
      and cluster.pool_threads(num_devices, spec.num_processes) is not None
      and threads < _ENOUGH_THREADS_PER_DEVICE * num_devices
    ):
      text = f"{value}, for {num_devices} devices: XLA may abort in a step"
      yield Row(name, text, WARNING, "unset it; distlm sets it")
    else:
      yield Row(name, value or "not set")
  for flag, state in xla_flags.describe(os.environ):
    yield Row("flag", state if state.startswith("-") else f"{flag}: {state}")
  platform = xla_flags.find_platform(os.environ)
  backend = jax.default_backend()
  if platform == "cpu" or backend == platform:
    yield Row("backend", backend)
  else:
    advice = "see the warnings of JAX; python -c 'import jax; jax.devices()'"
    yield Row(
      "backend", f"{backend}, although there is a {platform}", PROBLEM, advice
    )


def _exchange(own: Account) -> list[Account]:
  """Returns the accounts of all processes, in their order."""
  texts = collectives.gather_texts(json.dumps(own))
  return [json.loads(text) for text in texts]


def _describe(account: Account) -> Row:
  memory = account["memory"]
  size = f" of {memory / machine.GIB:.1f} GiB" if memory else ""
  ids = ", ".join(map(str, account["devices"]))
  return Row(
    f"process {account['process']}",
    f"pid {account['pid']} on {account['host']}: {len(account['devices'])}"
    f" {account['kind']} device(s){size}, id {ids}",
  )


def _name(account: Account) -> str:
  return (
    f"process {account['process']} (pid {account['pid']} on {account['host']})"
  )


def _findings_of_others(accounts: Sequence[Account]) -> Iterator[Row]:
  """Yields what other processes than 0 found, unless it did as well."""
  known = accounts[0]["findings"]
  for account in accounts[1:]:
    for finding in account["findings"]:
      if finding not in known:
        row = Row(*finding)
        yield row._replace(
          name=f"{row.name} of process {account['process']}",
          value=f"{row.value} (pid {account['pid']} on {account['host']})",
        )


def _compare(accounts: Sequence[Account]) -> Row:
  """Returns whether all processes are about to run the same."""
  ours = accounts[0]["facts"]
  differing = []
  for account in accounts[1:]:
    named = rendezvous.differences(account["facts"], ours)
    if named:
      differing.append(f"{_name(account)}: {named}")
  if differing:
    advice = "start all with the same command, code, versions and text"
    return Row("same everywhere", "; ".join(differing), PROBLEM, advice)
  value = "versions, code" + (", settings, text" if ours["the text"] else "")
  return Row("same everywhere", value)


def _sizes_that_fit(accounts: Sequence[Account]) -> list[int]:
  """Returns the sizes to try, which must be the same for all processes."""
  known = [account["memory"] for account in accounts if account["memory"]]
  least = min(known, default=float("inf"))
  return [
    size for size in collectives.SIZES_BYTES if _ARRAYS_OF_TRIAL * size <= least
  ]


def _try(attempt: Any, num_bytes: int) -> Iterator[Row]:
  name = f"{attempt.__name__.removeprefix('try_')} {_size(num_bytes)}"
  with collectives.not_for_ever(name):
    trial = attempt(num_bytes)
    wrong = _exchange({"num_wrong": trial.num_wrong})
  if any(account["num_wrong"] for account in wrong):
    where = ", ".join(
      f"process {index} ({account['num_wrong']:,} elements)"
      for index, account in enumerate(wrong)
      if account["num_wrong"]
    )
    advice = "look for failing devices, links or drivers"
    yield Row(name, f"WRONG on {where}", PROBLEM, advice)
  else:
    speed = f", {trial.gigabytes_per_sec:.3g} GB/s" if trial.bus_share else ""
    yield Row(name, f"right, {trial.secs * 1e3:.3g} ms{speed}")


def _size(num_bytes: int) -> str:
  if num_bytes < 2**20:
    return f"{num_bytes // 2**10} KiB"
  return f"{num_bytes // 2**20} MiB"
