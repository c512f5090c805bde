"""Tests launch/tpu_pod.sh with a stand-in for gcloud, without a TPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
import tpu_pod_stand_in
from tpu_pod_stand_in import Pod, finish

HOSTILE = {
  "PROJECT": "it's $HOME",
  "ACCELERATOR_TYPE": 'v5"16',
  "RUNTIME_VERSION": "`date` ; a\\b",
  "NFS_SHARE": "10.0.0.2:/my 'share'",
  "CONFIG": "my experiments/it's.py",
  "WORKDIR": '/mnt/my $(runs)/it\'s "one"\nof mine',
}
HOSTILE_FLAGS = [
  "--config.data.source=['a b.txt', \"c\"]",
  "",
  "*",
  "$x",
  "-- ",
]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
  pod = tpu_pod_stand_in.make(tmp_path)
  yield pod
  # What a failed test left would train for ever.
  (pod.home / "end").write_text("0")


@pytest.fixture
def worker(pod: Pod) -> Pod:
  return tpu_pod_stand_in.with_worker(pod)


@pytest.mark.parametrize(
  ("state", "verbs"),
  [
    ("", ["describe", "create", "scp", "ssh"]),
    ("READY", ["describe", "scp", "ssh"]),
    ("PREEMPTED", ["describe", "delete", "create", "scp", "ssh"]),
  ],
)
def test_up_makes_what_is_not_there(
  pod: Pod, state: str, verbs: list[str]
) -> None:
  code, _, errors = pod.run("up", STATE=state)
  assert (code, errors) == (0, "")
  assert pod.verbs() == verbs


def test_up_asks_for_what_is_set(pod: Pod) -> None:
  assert pod.run("up", SPOT="true", PROJECT="mine")[0] == 0
  where = ["--zone=us-west4-a", "--project=mine", "--quiet"]
  describe, create, scp, ssh = (call[3:] for call in pod.calls())
  kind = ["--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"]
  assert describe == ["describe", "my-tpu", "--format=value(state)", *where]
  assert create == ["create", "my-tpu", *kind, "--spot", *where]
  archive = ["runs/my-tpu.tar.gz", "my-tpu:distlm.tar.gz"]
  assert scp == ["scp", *archive, "--worker=all", *where]
  assert ssh[:3] == ["ssh", "my-tpu", "--worker=all"]
  assert ssh[4:] == where


def test_up_installs_the_checkout_and_mounts_the_share(worker: Pod) -> None:
  code, _, errors = worker.run("up", NFS_SHARE="10.0.0.2:/share")
  assert (code, errors) == (0, "")
  code_directory = worker.home / "distlm" / "code"
  files = [path for path in code_directory.rglob("*") if path.is_file()]
  assert sorted(str(path.relative_to(code_directory)) for path in files) == [
    *("constraints.txt", "distlm/cli.py", "experiments/tiny.py"),
    *("launch/tpu_pod.sh", "my experiments/it's.py"),
  ]
  calls = worker.calls("WORKER_CALLS")
  wanted = ["--constraint", "code/constraints.txt", "--editable", "code"]
  assert calls[1][:2] == ["uv", "venv"]
  assert calls[2][-5:] == [*wanted, "jax[tpu]"]
  mount = ["sudo", "mount", "-t", "nfs", "10.0.0.2:/share", "/mnt/distlm"]
  assert mount in calls
  assert worker.run("up")[0] == 0
  assert {call[0] for call in worker.calls("WORKER_CALLS")} == {"python3", "uv"}


@pytest.mark.parametrize(
  ("args", "state"),
  [
    *((["up"], state) for state in ("", "READY", "PREEMPTED")),
    (["train", *HOSTILE_FLAGS], "READY"),
    *(([name], "READY") for name in ("follow", "logs", "stop", "down")),
  ],
)
def test_a_dry_run_prints_what_a_run_does(
  pod: Pod, args: list[str], state: str
) -> None:
  settings = {**HOSTILE, "STATE": state}
  code, printed, errors = pod.run("--dry-run", *args, **settings)
  assert (code, errors) == (0, "")
  assert pod.calls() == []
  archive = pod.checkout / "runs" / "my-tpu.tar.gz"
  assert not archive.exists()

  _, output, _ = pod.run(*args, **settings)
  calls = pod.calls()
  assert calls
  if args == ["logs"]:  # It ends there, as the stand-in sends none.
    assert printed.startswith(output)
  else:
    assert printed == output

  archive.unlink(missing_ok=True)
  subprocess.run(
    ["bash"],
    input=printed,
    cwd=pod.home,
    env={**pod.env, "STATE": state},
    stderr=subprocess.DEVNULL,
    text=True,
  )
  assert pod.calls() == calls
  assert archive.exists() == (args == ["up"])


def test_settings_reach_gcloud_as_they_are(pod: Pod) -> None:
  assert pod.run("up", **HOSTILE)[0] == 0
  for call in pod.calls():
    assert f"--project={HOSTILE['PROJECT']}" in call
    if call[3] == "create":
      assert f"--accelerator-type={HOSTILE['ACCELERATOR_TYPE']}" in call
      assert f"--version={HOSTILE['RUNTIME_VERSION']}" in call
  assert pod.run("up", WORKER_HOME=str(pod.home), **HOSTILE)[0] == 0
  mount = ["sudo", "mount", "-t", "nfs", HOSTILE["NFS_SHARE"], "/mnt/distlm"]
  assert mount in pod.calls("WORKER_CALLS")


def test_all_workers_train_with_these_arguments(worker: Pod) -> None:
  (worker.home / "end").write_text("0")
  code, output, errors = worker.run("train", *HOSTILE_FLAGS, **HOSTILE)
  assert (code, errors) == (0, "")
  assert output.endswith("training\n")
  assert worker.wait_for_training() == [
    "train",
    f"--config={HOSTILE['CONFIG']}",
    f"--workdir={HOSTILE['WORKDIR']}",
    *HOSTILE_FLAGS,
  ]
  assert [call[5] for call in worker.calls()] == ["--worker=all", "--worker=0"]


@pytest.mark.parametrize(("ended", "code"), [(2, 2), (1, 1), (134, 1)])
def test_a_failed_training_is_told(worker: Pod, ended: int, code: int) -> None:
  (worker.home / "end").write_text(str(ended))
  assert worker.run("train")[0] == code
  again, output, errors = worker.run("follow")
  assert again == code
  assert output.endswith("training\n")
  assert tiny_run.check_one_line(errors).startswith("follow: ")


def test_a_running_training_is_left_alone_until_stopped(worker: Pod) -> None:
  training = worker.start("train")
  assert worker.wait_for_training()[0] == "train"
  for subcommand in ("train", "up"):
    code, _, errors = worker.run(subcommand)
    assert code == 1
    assert "a training runs on this worker" in errors
  assert worker.calls("WORKER_CALLS") == []  # Nothing was installed.
  code, output, errors = worker.run("stop")
  assert (code, errors) == (0, "")
  assert output.endswith("training\nsaved\n")
  assert finish(training)[0] == 0
  assert worker.run("stop")[1].endswith("no training runs on this worker\n")


@pytest.mark.parametrize(("ended", "code"), [("143", 0), ("1", 1)])
def test_stop_tells_whether_the_training_saved(
  worker: Pod, ended: str, code: int
) -> None:
  training = worker.start("train", STOP_CODE=ended)
  worker.wait_for_training()
  assert worker.run("stop")[0] == code
  assert finish(training)[0] == 1


def test_a_training_outlives_the_connection(worker: Pod) -> None:
  training = worker.start("train")
  worker.wait_for_training()
  calls = Path(worker.env["CALLS"])
  while '"--worker=0"' not in calls.read_text():
    assert training.poll() is None
    time.sleep(0.01)
  os.killpg(training.pid, signal.SIGINT)
  code, _, errors = finish(training)
  assert code == 130
  assert "The training goes on." in errors
  with contextlib.suppress(ProcessLookupError):
    os.killpg(training.pid, signal.SIGKILL)
  following = worker.start("follow")
  with contextlib.suppress(subprocess.TimeoutExpired):
    following.wait(timeout=0.3)
  assert following.poll() is None
  (worker.home / "end").write_text("0")
  code, output, _ = finish(following)
  assert code == 0
  assert output.endswith("training\n")


def test_an_old_number_of_a_process_does_not_matter(worker: Pod) -> None:
  (worker.home / "distlm" / "log").write_text("finished\n")
  (worker.home / "distlm" / "exit").write_text("0\n")
  (worker.home / "distlm" / "pid").write_text(f"{os.getpid()}\n")
  code, output, errors = worker.run("follow")
  assert (code, errors) == (0, "")
  assert output.endswith("finished\n")


def test_logs_come_from_worker_0(worker: Pod) -> None:
  workdir = worker.directory / "my run"
  events = workdir / "tensorboard" / "train" / "events.out"
  events.parent.mkdir(parents=True)
  events.write_bytes(bytes(range(256)))
  (workdir / "metrics.jsonl").write_text("{}\n")
  code, output, errors = worker.run("logs", WORKDIR=str(workdir))
  assert (code, errors) == (0, "")
  ours = worker.checkout / "runs" / "my-tpu" / "my run"
  assert (ours / "metrics.jsonl").read_text() == "{}\n"
  copied = ours / "tensorboard" / "train" / "events.out"
  assert copied.read_bytes() == events.read_bytes()
  assert output.endswith("--logdir 'runs/my-tpu/my run/tensorboard'\n")
  assert "--worker=0" in worker.calls()[0]
  (workdir / "metrics.jsonl").unlink()
  assert worker.run("logs", WORKDIR=str(workdir))[0] == 1


def test_stop_and_down_are_for_all_of_the_pod(pod: Pod) -> None:
  assert pod.run("stop")[0] == pod.run("down", CONFIG="gone.py")[0] == 0
  stop, down = pod.calls()
  assert stop[3:6] == ["ssh", "my-tpu", "--worker=all"]
  assert down[3:] == ["delete", "my-tpu", "--zone=us-west4-a", "--quiet"]


@pytest.mark.parametrize(
  ("subcommand", "verb", "before"),
  [
    ("up", "create", ["describe"]),
    ("up", "scp", ["describe", "create"]),
    ("up", "ssh", ["describe", "create", "scp"]),
    *((name, "ssh", []) for name in ("train", "follow", "logs", "stop")),
    ("down", "delete", []),
  ],
)
def test_a_failure_of_gcloud_ends_it(
  pod: Pod, subcommand: str, verb: str, before: list[str]
) -> None:
  code, _, errors = pod.run(subcommand, FAILS=verb)
  assert code == 1
  assert errors.splitlines()[-1].startswith(f"error: {subcommand}: ")
  assert pod.verbs() == [*before, verb]


@pytest.mark.parametrize(
  ("args", "settings", "says"),
  [
    ([], {}, "COMMAND=: it must be up, train"),
    (["upp"], {}, "COMMAND=upp: it must be up, train"),
    (["--dry", "up"], {}, "--dry: there is no such flag"),
    (["up", "--dry-run"], {}, "--dry-run: it goes before up"),
    (["up"], {"TPU_NAME": ""}, "TPU_NAME=: it must be lower-case letters"),
    (["up"], {"TPU_NAME": "-x"}, "TPU_NAME=-x: it must be lower-case letters"),
    (["down"], {"ZONE": ""}, "ZONE=: it must be lower-case letters"),
    (["up"], {"SPOT": "yes"}, "SPOT=yes: it must be true or false"),
    (["up"], {"NFS_SHARE": "/mnt"}, "NFS_SHARE=/mnt: it must be HOST:/PATH"),
    (["train"], {"WORKDIR": "gs://b/x"}, "WORKDIR=gs://b/x: it must be an abs"),
    (["train"], {"CONFIG": "gone.py"}, "CONFIG=gone.py: there is no such file"),
    (["train"], {"CONFIG": "/x.py"}, "CONFIG=/x.py: it must be a path in this"),
  ],
)
def test_bad_input_is_refused_in_one_line(
  pod: Pod, args: list[str], settings: dict[str, str], says: str
) -> None:
  for more in ([], ["--dry-run"]):
    code, output, errors = pod.run(*more, *args, **settings)
    assert (code, output) == (2, "")
    assert tiny_run.check_one_line(errors).startswith(says)
  assert pod.calls() == []


def test_a_missing_gcloud_is_told(pod: Pod) -> None:
  path = pod.directory / "few"
  path.mkdir()
  for name in ("env", "bash", "dirname", "basename"):
    program = shutil.which(name)
    assert program
    (path / name).symlink_to(program)
  code, output, errors = pod.run("down", PATH=str(path))
  assert (code, output) == (2, "")
  assert tiny_run.check_one_line(errors).startswith(f"PATH={path}: gcloud is")
  assert pod.run("--dry-run", "down", PATH=str(path))[0] == 0


def test_help_is_the_head_of_the_script(pod: Pod) -> None:
  code, output, _ = pod.run("--help")
  assert code == 0
  assert "launch/tpu_pod.sh train [FLAG...]" in output
  assert output.endswith("\n  done\n")
