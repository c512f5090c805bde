"""Environments of processes that schedulers have started.

Those of SLURM 22.05, Open MPI 4.1 and 5.0 are real ones, with other hosts, and
without the variables that distlm does not read.
"""

from __future__ import annotations

from typing import Any

from distlm import cluster
from distlm.cluster import ProcessSpec

Environ = dict[str, str]


def slurm(
  nodes: str, counts: str, task: int, node: int, local_task: int, num_tasks: int
) -> Environ:
  """Returns what `srun`, as step 1 of job 2, sets for one of its tasks."""
  return {
    "SLURM_JOBID": "2",
    "SLURM_JOB_ID": "2",
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": nodes,
    "SLURM_STEP_NUM_TASKS": f"{num_tasks}",
    "SLURM_STEP_TASKS_PER_NODE": counts,
    "SLURM_NTASKS": f"{num_tasks}",
    "SLURM_PROCID": f"{task}",
    "SLURM_NODEID": f"{node}",
    "SLURM_LOCALID": f"{local_task}",
  }


# srun -N2 -n3: its last task, on the second node.
SLURM = slurm("n[1-2]", "2,1", 2, 1, 0, 3)
SLURM_ONE_NODE = slurm("n1", "2", 1, 0, 1, 2)
SLURM_PORT = 61440 + 2 + 1021
# The script of sbatch -N2 -n3, outside of srun.
SLURM_BATCH = {
  "SLURM_JOBID": "2",
  "SLURM_JOB_ID": "2",
  "SLURM_LOCALID": "0",
  "SLURM_NODEID": "0",
  "SLURM_NTASKS": "3",
  "SLURM_PROCID": "0",
  "SLURM_TASKS_PER_NODE": "2,1",
}
# The shell of salloc -N2 -n2, on the node from which it was asked for.
SLURM_ALLOCATION = {
  "SLURM_JOBID": "5",
  "SLURM_JOB_ID": "5",
  "SLURM_JOB_NODELIST": "n[1-2]",
  "SLURM_NTASKS": "2",
  "SLURM_TASKS_PER_NODE": "1(x2)",
}
# salloc -N2 -n2 srun --interactive --pty bash.
SLURM_SHELL = slurm("n1", "1", 0, 0, 0, 1) | {
  "SLURM_STEPID": "4294967290",
  "SLURM_STEP_ID": "4294967290",
  "SLURM_PTY_PORT": "37677",
}
# mpirun -n 2 of Open MPI 4.1.4.
OPEN_MPI_4 = {
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_RANK": "1",
  "OMPI_COMM_WORLD_SIZE": "2",
  "OMPI_MCA_orte_hnp_uri": (
    "925564928.0;tcp://192.0.2.2:48445;tcp6://[fd00::2]:40181"
  ),
  "OMPI_MCA_orte_local_daemon_uri": (
    "925564928.0;tcp://192.0.2.2:48445;tcp6://[fd00::2]:40181"
  ),
  "PMIX_NAMESPACE": "925564929",
}
# The same from a script of sbatch -N2 -n2: its daemon is a task of SLURM, and
# what it inherits from that is not its own.
OPEN_MPI_4_IN_SLURM = {
  **slurm("n[1-2]", "1(x2)", 1, 1, 0, 2),
  **OPEN_MPI_4,
  "OMPI_COMM_WORLD_LOCAL_RANK": "0",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_RANK": "2",
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_MCA_orte_local_daemon_uri": "925564928.1;tcp://192.0.2.3:50113",
}
# mpirun -n 2 of Open MPI 5.0.11.
OPEN_MPI_5 = {
  "OMPI_COMM_WORLD_LOCAL_RANK": "0",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_RANK": "0",
  "OMPI_COMM_WORLD_SIZE": "2",
  "PMIX_NAMESPACE": "prterun-n1-a-24049@1",
  "PMIX_SERVER_URI41": "prterun-n1-a-24049@0.0;tcp4://127.0.0.1:45941",
}
OPEN_MPI_PORT = 61440 + (925564928 >> 16) % 4096
TPU = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}
TPU_SLICES = TPU | {
  "MEGASCALE_COORDINATOR_ADDRESS": "s-0.svc:8080",
  "MEGASCALE_NUM_SLICES": "3",
  "MEGASCALE_SLICE_ID": "2",
}
POD = {"JOB_COMPLETION_INDEX": "3", "DISTLM_NUM_PROCESSES": "4"}
VARIABLES = {
  "DISTLM_COORDINATOR": "a:1",
  "DISTLM_NUM_PROCESSES": "4",
  "DISTLM_PROCESS_ID": "3",
}


def find(environ: Environ, *flags: Any) -> ProcessSpec:
  """Finds the process of an environment, without flags or with all three."""
  coordinator, num_processes, process_id = flags or (None,) * 3
  return cluster.find_process(coordinator, num_processes, process_id, environ)
