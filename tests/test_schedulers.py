"""Tests of what SLURM, Open MPI, Cloud TPU and Kubernetes tell a process."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from scheduler_environments import (
  OPEN_MPI_4,
  OPEN_MPI_4_IN_SLURM,
  OPEN_MPI_5,
  OPEN_MPI_PORT,
  POD,
  SLURM,
  SLURM_ALLOCATION,
  SLURM_BATCH,
  SLURM_ONE_NODE,
  SLURM_PORT,
  SLURM_SHELL,
  TPU,
  TPU_SLICES,
  VARIABLES,
  Environ,
  find,
  slurm,
)

from distlm import schedulers
from distlm.cluster import ONE_PROCESS, ProcessSpec
from distlm.errors import UsageError


@pytest.fixture(autouse=True)
def no_chips(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(schedulers, "_TPU_CHIPS", ())


@pytest.mark.parametrize(
  ("environ", "expected"),
  [
    (SLURM, (f"n1:{SLURM_PORT}", 3, 2, 1, 0, "SLURM")),
    (SLURM_ONE_NODE, (f"127.0.0.1:{SLURM_PORT}", 2, 1, 2, 1, "SLURM")),
    (
      slurm("a[09-11]", "2(x2),1", 3, 1, 1, 5),
      (f"a09:{SLURM_PORT}", 5, 3, 2, 1, "SLURM"),
    ),
    # Started by hand in the shell of another step.
    (
      SLURM | {"SLURM_PTY_PORT": "1"},
      (f"n1:{SLURM_PORT}", 3, 2, 1, 0, "SLURM"),
    ),
    (OPEN_MPI_4, (f"127.0.0.1:{OPEN_MPI_PORT}", 2, 1, 2, 1, "Open MPI")),
    (
      OPEN_MPI_4_IN_SLURM,
      (f"192.0.2.2:{OPEN_MPI_PORT}", 4, 2, 2, 0, "Open MPI"),
    ),
    (
      OPEN_MPI_4_IN_SLURM
      | {"OMPI_MCA_orte_hnp_uri": "925564928.0;tcp6://[fd00::2,fd00::3]:40181"},
      (f"[fd00::2]:{OPEN_MPI_PORT}", 4, 2, 2, 0, "Open MPI"),
    ),
    (
      OPEN_MPI_5,
      (f"127.0.0.1:{61440 + (24049 + 1021) % 4096}", 2, 0, 2, 0, "Open MPI"),
    ),
    (
      OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "4"},
      (f"n1-a:{61440 + (24049 + 1021) % 4096}", 4, 0, 2, 0, "Open MPI"),
    ),
    (TPU, ("t-0.svc:8476", 2, 1, 1, 0, "Cloud TPU")),
    (TPU_SLICES, ("s-0.svc:8476", 6, 5, 1, 0, "Cloud TPU")),
    (
      TPU_SLICES | {"TPU_WORKER_HOSTNAMES": "t-0", "TPU_WORKER_ID": "0"},
      ("s-0.svc:8476", 3, 2, 1, 0, "Cloud TPU"),
    ),
    (
      TPU | {"TPU_PROCESS_ADDRESSES": "h:8476,h:8477,i:8476,i:8477"},
      ("h:8478", 4, 1, 2, 1, "Cloud TPU"),
    ),
    (VARIABLES, ("a:1", 4, 3, 1, 0, "DISTLM_* variables")),
    (
      VARIABLES | {"DISTLM_COORDINATOR": "localhost:1"},
      ("localhost:1", 4, 3, 4, 3, "DISTLM_* variables"),
    ),
    (VARIABLES | SLURM, ("a:1", 4, 3, 1, 0, "DISTLM_* variables")),
  ],
)
def test_each_source_by_itself(environ: Environ, expected: Any) -> None:
  assert find(environ) == ProcessSpec(*expected)


@pytest.mark.parametrize(
  "environ",
  [
    {},
    SLURM_BATCH,
    SLURM_ALLOCATION,
    SLURM_SHELL,
    # Of what ssh carries along, no single variable may be missing.
    *({k: v for k, v in SLURM.items() if k != name} for name in SLURM
      if name not in ("SLURM_JOBID", "SLURM_STEPID", "SLURM_NTASKS")),
    # Shells in which another step's variables are left.
    SLURM | {"SLURM_JOBID": "3"},
    SLURM | {"SLURM_STEPID": "0"},
    SLURM | {"SLURM_PROCID": "3"},
    SLURM | {"SLURM_STEP_NUM_TASKS": "2"},
    SLURM | {"SLURM_STEP_NUM_TASKS": "4"},
    SLURM | {"SLURM_NODEID": "2"},
    SLURM | {"SLURM_LOCALID": "1"},
    SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,x"},
    SLURM | {"SLURM_PROCID": "-1"},
    OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0",
                  "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                  "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "2"},
    {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    {"JOB_COMPLETION_INDEX": "3"},
  ],
)  # fmt: skip
def test_what_is_no_job_of_several_is_one_process(environ: Environ) -> None:
  assert find(environ) == ONE_PROCESS
  assert ProcessSpec(None, 1, 0, 1, 0, "one process") == ONE_PROCESS


@pytest.mark.parametrize(
  ("nodes", "first"),
  [
    ("n1", "n1"),
    ("n1,n2", "n1"),
    ("n[3-5,7]", "n3"),
    ("n[7,3-5],m1", "n7"),
    ("a[01-03]-b", "a01-b"),
    ("x[1-2]y[3-4]", "x1y3"),
    ("x[1,2]y[03,4],z", "x1y03"),
    ("n-0-1.example.org,n-0-2.example.org", "n-0-1.example.org"),
    ("192.0.2.[1-2]", "192.0.2.1"),
  ],
)
def test_the_first_host_of_slurm_s_lists(nodes: str, first: str) -> None:
  found = find(SLURM | {"SLURM_STEP_NODELIST": nodes})
  assert found.coordinator == f"{first}:{SLURM_PORT}"


def test_jobs_of_a_host_do_not_share_a_port() -> None:
  """Neither steps, nor jobs, nor mpiruns, whatever process of theirs asks."""

  def port(environ: Environ) -> int:
    coordinator = find(environ).coordinator
    assert coordinator is not None
    return int(coordinator.rpartition(":")[2])

  steps = [
    {"SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_STEP_ID": step,
     "SLURM_STEPID": step}
    for job in ("999999", "1000000") for step in ("0", "1", "4294967290")
  ]  # fmt: skip
  families = [925564928 + (n << 16) for n in range(3)]
  environs = [
    *(SLURM_ONE_NODE | step for step in steps),
    *(OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": f"{n}.0;tcp://x:1"}
      for n in families),
    *(OPEN_MPI_5 | {"PMIX_NAMESPACE": f"prterun-n1-{pid}@{job}"}
      for pid in (24050, 24051) for job in (1, 2)),
  ]  # fmt: skip
  ports = [port(environ) for environ in environs]
  assert len(set(ports)) == len(ports) == 13
  assert all(61440 <= number <= 65535 for number in ports)
  for environ in (SLURM_ONE_NODE, OPEN_MPI_4):
    other = {k: "0" for k in environ if k in ("SLURM_PROCID", "SLURM_LOCALID")}
    other |= {k: "0" for k in environ if k.endswith("_RANK")}
    assert port(environ | other) == port(environ)


@pytest.mark.parametrize(
  ("name", "index", "coordinator"),
  [
    # A Job, and one of a JobSet.
    ("j-3.svc.ns.svc.cluster.local", 3, "j-0.svc.ns.svc.cluster.local:8476"),
    ("set-w-0-12.set", 12, "set-w-0-0.set:8476"),
    ("job3-3.svc", 3, "job3-0.svc:8476"),
  ],
)
def test_a_pod_finds_the_first_pod_of_its_job(
  monkeypatch: pytest.MonkeyPatch, name: str, index: int, coordinator: str
) -> None:
  monkeypatch.setattr(socket, "getfqdn", lambda: name)
  environ = {"JOB_COMPLETION_INDEX": f"{index}", "DISTLM_NUM_PROCESSES": "20"}
  assert find(environ) == ProcessSpec(
    coordinator, 20, index, 1, 0, "DISTLM_* variables and Kubernetes"
  )
  assert find(environ, None, 30, None).found_by == "flags and Kubernetes"


@pytest.mark.parametrize("name", ["job-3", "job-13-x.svc", "job-2.svc"])
def test_a_pod_without_a_service_says_what_it_lacks(
  monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
  monkeypatch.setattr(socket, "getfqdn", lambda: name)
  with pytest.raises(UsageError, match=f"{name}, has no name .* JOB-3.SERVICE"):
    find(POD)
