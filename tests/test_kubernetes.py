"""Tests the manifests of launch/ against the schemas that Kubernetes publishes.

There is no cluster here. What its controllers do with a pod that ended is
written out from their documentation.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import manifests
import pytest
from manifests import Manifest

from distlm import arguments, cli, cluster
from distlm import config as configs

STOPPED_CODE = 128 + signal.SIGTERM
REFUSED_CODE = arguments._USAGE_CODE
# Of the Job controller, before it starts a pod again.
LONGEST_DELAY_SECS = 600


@pytest.fixture(
  params=[
    (name, for_tpus)
    for name in ("kubernetes.yaml", "jobset.yaml")
    for for_tpus in (False, True)
  ],
  ids=lambda param: f"{param[0]}-{'TPU' if param[1] else 'GPU'}",
)
def manifest(request: pytest.FixtureRequest) -> Manifest:
  return manifests.read(*request.param)


def keys(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
  """Yields the paths of all fields, but not of what the user may name."""
  free = ("labels", "selector", "nodeSelector", "limits", "requests")
  if isinstance(node, dict):
    for key, value in node.items():
      yield (*path, key)
      if key not in free:
        yield from keys(value, (*path, key))
  elif isinstance(node, list):
    for index, value in enumerate(node):
      yield from keys(value, (*path, index))


def test_kubernetes_takes_them(manifest: Manifest) -> None:
  for document in manifest.documents:
    manifests.check(document)


def test_kubernetes_takes_the_volume() -> None:
  (claim,) = manifests.read("kubernetes_volume.yaml").documents
  manifests.check(claim)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml"])
def test_a_misspelled_field_is_refused(name: str) -> None:
  accepted, count = [], 0
  files = [manifests.read(name), manifests.read("kubernetes_volume.yaml")]
  for document in [one for file in files for one in file.documents]:
    for path in keys(document):
      if path in (("kind",), ("apiVersion",)):
        continue  # They choose the schema.
      changed = copy.deepcopy(document)
      node: Any = changed
      for step in path[:-1]:
        node = node[step]
      node[f"{path[-1]}x"] = node.pop(path[-1])
      count += 1
      try:
        manifests.check(changed)
      except jsonschema.ValidationError:
        continue
      accepted.append(path)
  assert accepted == []
  assert count > 70


def test_what_the_schemas_do_not_say_fits(manifest: Manifest) -> None:
  spec, pod = manifest.job["spec"], manifest.pod["spec"]
  assert spec["completionMode"] == "Indexed"
  assert pod["restartPolicy"] == "Never"  # Needed by all of the policies.
  assert spec["podReplacementPolicy"] == "Failed"
  if manifest.jobset:
    assert spec["backoffLimit"] == 0
  else:
    assert spec["maxFailedIndexes"] == 0 < spec["backoffLimitPerIndex"]
    assert "backoffLimit" not in spec
  for rule in spec["podFailurePolicy"]["rules"]:
    codes = rule.get("onExitCodes")
    if codes is not None:
      assert codes["containerName"] == manifest.container["name"]
      assert sorted({*codes["values"]} - {0}) == codes["values"]
  mounts = [one["name"] for one in manifest.container["volumeMounts"]]
  assert sorted(mounts) == sorted(one["name"] for one in pod["volumes"])
  claim = manifests.read("kubernetes_volume.yaml").of_kind(
    "PersistentVolumeClaim"
  )
  (claimed,) = (
    one["persistentVolumeClaim"]["claimName"]
    for one in pod["volumes"]
    if "persistentVolumeClaim" in one
  )
  assert claimed == claim["metadata"]["name"]
  assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_all_find_process_0(manifest: Manifest) -> None:
  jobset, pod = manifest.jobset, manifest.pod
  if jobset is not None:
    subdomain = jobset["spec"]["network"]["subdomain"]
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    assert jobset["spec"]["network"]["publishNotReadyAddresses"]
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert "subdomain" not in pod["spec"]  # The controller sets it.
    ports = []
  else:
    service = manifest.of_kind("Service")
    subdomain = service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert (
      service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    )
    assert pod["spec"]["subdomain"] == subdomain
    ports = [one["port"] for one in service["spec"]["ports"]]
  host, port = manifest.env["DISTLM_COORDINATOR"].split(":")
  name = manifest.job["metadata"]["name"]
  assert host == f"{name}-0.{subdomain}"
  ports += [one["containerPort"] for one in manifest.container["ports"]]
  assert {int(port)} == {*ports}


def test_there_are_as_many_pods_as_processes(manifest: Manifest) -> None:
  spec = manifest.job["spec"]
  number = int(manifest.env["DISTLM_NUM_PROCESSES"])
  assert number == spec["completions"] == spec["parallelism"] > 1


def test_distlm_takes_the_command_line(
  manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
  for name, value in manifest.env.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")  # Kubernetes does.
  # Process 1 itself, so that it gets SIGTERM.
  assert manifest.container["command"] == ["distlm"]
  others, overrides = arguments.split_overrides(manifest.container["args"])
  args = cli._make_parser().parse_args(others)
  assert args.command == "train"
  assert args.jaxline_mode == "train_eval"
  assert args.signal_exit_code
  assert args.start_timeout > LONGEST_DELAY_SECS
  process = cluster.find_process(
    args.coordinator, args.num_processes, args.process_id, os.environ
  )
  assert process.process_id == 1
  assert process.num_processes == manifest.job["spec"]["completions"]
  assert process.coordinator == manifest.env["DISTLM_COORDINATOR"]
  config = configs.load_config_file(str(manifests.ROOT / args.config))
  configs.apply_overrides(config, overrides)
  cache = Path(configs.parse_config(config).data.cache_dir)
  (runs,) = (
    one["mountPath"]
    for one in manifest.container["volumeMounts"]
    if one["name"] == "runs"
  )
  assert Path(args.workdir).parent == cache.parent == Path(runs)


def test_a_stopped_run_has_time_to_save(manifest: Manifest) -> None:
  assert manifest.pod["spec"]["terminationGracePeriodSeconds"] >= 60


def test_one_form_has_gpus_and_the_other_tpus() -> None:
  for name in ("kubernetes.yaml", "jobset.yaml"):
    gpu, tpu = manifests.read(name), manifests.read(name, for_tpus=True)
    assert [*gpu.container["resources"]["limits"]] == ["nvidia.com/gpu"]
    assert [*tpu.container["resources"]["limits"]] == ["google.com/tpu"]
    assert "/dev/shm" in [
      one["mountPath"] for one in gpu.container["volumeMounts"]
    ]
    assert len(tpu.pod["spec"]["nodeSelector"]) == 2
    assert tpu.pod["spec"].keys() - gpu.pod["spec"].keys() == {"nodeSelector"}


def test_both_forms_have_the_same_pods() -> None:
  job, jobset = manifests.read("kubernetes.yaml"), manifests.read("jobset.yaml")
  pods = [copy.deepcopy(one.pod) for one in (job, jobset)]
  assert pods[0]["spec"].pop("subdomain")
  for pod in pods:
    (coordinator,) = (
      one
      for one in pod["spec"]["containers"][0]["env"]
      if one["name"] == "DISTLM_COORDINATOR"
    )
    assert coordinator.pop("value")
  assert pods[0] == pods[1]


def outcome(
  job: manifests.Document, code: int, disrupted: bool
) -> tuple[str, str]:
  """Returns what the Job controller does about a failed pod, and says of it."""
  for index, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
    action = rule["action"]
    end = f"matching {action} rule at index {index}"
    if code in rule.get("onExitCodes", {}).get("values", []):
      assert rule["onExitCodes"]["operator"] == "In"
      pod = "Container distlm for pod default/distlm-worker-0-1-x7k2p"
      return action, f"{pod} failed with exit code {code} {end}"
    wanted = {"type": "DisruptionTarget", "status": "True"}
    if disrupted and wanted in rule.get("onPodConditions", []):
      pod = "Pod default/distlm-worker-0-1-x7k2p"
      return action, f"{pod} has condition DisruptionTarget {end}"
  return "Count", "Job has reached the specified backoff limit"


def outcome_of_jobset(
  jobset: manifests.Document, code: int, disrupted: bool
) -> str:
  """Returns what the JobSet controller does about a failed pod."""
  action, message = outcome(manifests.as_job(jobset), code, disrupted)
  assert action in ("FailJob", "Count")
  reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
  for rule in jobset["spec"]["failurePolicy"]["rules"]:
    patterns = rule.get("onJobFailureMessagePatterns", [""])
    if reason in rule["onJobFailureReasons"] and any(
      re.search(pattern, message) for pattern in patterns
    ):
      return str(rule["action"])
  return "RestartJobSet"


@pytest.mark.parametrize(
  ("code", "disrupted", "of_job", "of_jobset"),
  [
    (REFUSED_CODE, False, "FailJob", "FailJobSet"),
    (STOPPED_CODE, False, "Ignore", "RestartJobSetAndIgnoreMaxRestarts"),
    (STOPPED_CODE, True, "Ignore", "RestartJobSetAndIgnoreMaxRestarts"),
    (137, True, "Ignore", "RestartJobSetAndIgnoreMaxRestarts"),
    *((code, False, "Count", "RestartJobSet") for code in (1, 25, 134, 137)),
  ],
)
def test_a_failed_pod_is_retried_if_that_may_help(
  code: int, disrupted: bool, of_job: str, of_jobset: str
) -> None:
  job = manifests.read("kubernetes.yaml").job
  assert outcome(job, code, disrupted)[0] == of_job
  jobset = manifests.read("jobset.yaml").jobset
  assert jobset is not None
  assert outcome_of_jobset(jobset, code, disrupted) == of_jobset
