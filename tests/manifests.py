"""The manifests of launch/, and a check of what Kubernetes says of them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[1]
_VERSIONS = ("1.29", kubernetes_validate.latest_version())

Document = dict[str, Any]


def _fields(required: str = "", **fields: Any) -> Document:
  return {
    "type": "object",
    "properties": fields,
    "required": required.split(),
    "additionalProperties": False,
  }


def _list(of: Document) -> Document:
  return {"type": "array", "items": of}


def _one_of(values: str) -> Document:
  return {"enum": values.split()}


_TEXT, _TRUTH, _NUMBER = (
  {"type": name} for name in ("string", "boolean", "integer")
)
# The field names of the CRD jobset.x-k8s.io/v1alpha2 of JobSet 0.10, which has
# no schema in kubernetes_validate. Of a Job it has the template.
_JOBSET = _fields(
  "apiVersion kind metadata spec",
  apiVersion=_one_of("jobset.x-k8s.io/v1alpha2"),
  kind=_one_of("JobSet"),
  metadata={"type": "object", "required": ["name"]},
  spec=_fields(
    coordinator=_fields(
      "replicatedJob", jobIndex=_NUMBER, podIndex=_NUMBER, replicatedJob=_TEXT
    ),
    failurePolicy=_fields(
      maxRestarts=_NUMBER,
      restartStrategy=_one_of("Recreate BlockingRecreate"),
      rules=_list(
        _fields(
          "action name",
          action=_one_of(
            "FailJobSet RestartJobSet RestartJobSetAndIgnoreMaxRestarts"
          ),
          name={**_TEXT, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
          onJobFailureMessagePatterns=_list(_TEXT),
          onJobFailureReasons=_list(
            _one_of(
              "BackoffLimitExceeded DeadlineExceeded FailedIndexes"
              " MaxFailedIndexesExceeded PodFailurePolicy"
            )
          ),
          targetReplicatedJobs=_list(_TEXT),
        )
      ),
    ),
    managedBy=_TEXT,
    network=_fields(
      enableDNSHostnames=_TRUTH,
      publishNotReadyAddresses=_TRUTH,
      subdomain=_TEXT,
    ),
    replicatedJobs=_list(
      _fields(
        "name template",
        dependsOn=_list(
          _fields("name status", name=_TEXT, status=_one_of("Ready Complete"))
        ),
        groupName=_TEXT,
        name=_TEXT,
        replicas=_NUMBER,
        template=_fields("spec", metadata={}, spec={"type": "object"}),
      )
    ),
    startupPolicy=_fields(startupPolicyOrder=_one_of("AnyOrder InOrder")),
    successPolicy=_fields(
      "operator", operator=_one_of("All Any"), targetReplicatedJobs=_list(_TEXT)
    ),
    suspend=_TRUTH,
    ttlSecondsAfterFinished=_NUMBER,
  ),
)


@dataclasses.dataclass(frozen=True)
class Manifest:
  """A file, as it is or changed for TPUs as it says."""

  documents: list[Document]

  def of_kind(self, kind: str) -> Document:
    (found,) = (one for one in self.documents if one["kind"] == kind)
    return found

  @property
  def jobset(self) -> Document | None:
    return None if len(self.documents) > 1 else self.of_kind("JobSet")

  @property
  def job(self) -> Document:
    return as_job(self.jobset) if self.jobset else self.of_kind("Job")

  @property
  def pod(self) -> Document:
    pod: Document = self.job["spec"]["template"]
    return pod

  @property
  def container(self) -> Document:
    (container,) = self.pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container

  @property
  def env(self) -> dict[str, str]:
    return {one["name"]: one["value"] for one in self.container["env"]}


def as_job(jobset: Document) -> Document:
  """Returns the first Job that the JobSet controller makes."""
  (replicated,) = jobset["spec"]["replicatedJobs"]
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {
      "name": f"{jobset['metadata']['name']}-{replicated['name']}-0"
    },
    **replicated["template"],
  }


def read(name: str, for_tpus: bool = False) -> Manifest:
  text = (ROOT / "launch" / name).read_text()
  if for_tpus:
    (script,) = re.findall(rf"sed '(.*)' launch/{name} ", text)
    sed = ["sed", script]
    text = subprocess.run(
      sed, input=text, capture_output=True, check=True, text=True
    ).stdout
  return Manifest(list(yaml.safe_load_all(text)))


def check(document: Document) -> None:
  """Raises jsonschema's ValidationError if Kubernetes would refuse it."""
  if document["kind"] == "JobSet":
    jsonschema.Draft202012Validator(_JOBSET).validate(document)
    document = as_job(document)
  for version in _VERSIONS:
    kubernetes_validate.validate(document, version, strict=True)
