"""The fields of Kubernetes that our manifests use, strictly: any other field is refused.

Written from the public API types, at these versions: Kubernetes 1.35 (core/v1, batch/v1), JobSet
0.12 (jobset.x-k8s.io/v1alpha2), Kubeflow Trainer 2.3 (trainer.kubeflow.org/v1alpha1), Volcano 1.15
(batch.volcano.sh/v1alpha1). What a webhook of theirs refuses stands in kube_admission.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DNS_NAME = rf"{DNS_LABEL}(\.{DNS_LABEL})*"
_KEY = rf"({DNS_NAME}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"


@dataclass(frozen=True)
class Text:
    pattern: str = r"(?s).*"
    longest: int = 2**20

    def faults(self, value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{place}: must be a string, is {value!r}"
        elif len(value) > self.longest or not re.fullmatch(self.pattern, value):
            yield f"{place}: {value!r} does not match {self.pattern}"


@dataclass(frozen=True)
class Number:
    least: int = -(2**31)
    most: int = 2**31 - 1

    def faults(self, value: Any, place: str) -> Iterator[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{place}: must be an integer, is {value!r}"
        elif not self.least <= value <= self.most:
            yield f"{place}: {value} is not from {self.least} to {self.most}"


@dataclass(frozen=True)
class Flag:
    def faults(self, value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, bool):
            yield f"{place}: must be a boolean, is {value!r}"


@dataclass(frozen=True)
class Items:
    of: Any
    most: int = 10_000
    least: int = 0
    key: str | None = None
    """Items must differ in this field."""

    def faults(self, value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{place}: must be an array, is {value!r}"
            return
        if not self.least <= len(value) <= self.most:
            yield f"{place}: must have {self.least} to {self.most} items"
        for index, item in enumerate(value):
            yield from self.of.faults(item, f"{place}[{index}]")
        keys = [item.get(self.key) for item in value if isinstance(item, dict)]
        if self.key and len(set(keys)) != len(keys):
            yield f"{place}: duplicate {self.key}"


@dataclass(frozen=True)
class Pairs:
    of: Any
    keys: str = r"(?s).*"

    def faults(self, value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place}: must be an object, is {value!r}"
            return
        for key, inner in value.items():
            if not re.fullmatch(self.keys, key):
                yield f"{place}: key {key!r} does not match {self.keys}"
            yield from self.of.faults(inner, f"{place}.{key}")


@dataclass(frozen=True)
class Fields:
    known: Mapping[str, Any]
    required: tuple[str, ...] = ()
    least: int = 0
    exactly_one: tuple[str, ...] = ()

    def faults(self, value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place}: must be an object, is {value!r}"
            return
        for name in self.required:
            if name not in value:
                yield f"{place}.{name}: Required value"
        if self.exactly_one and sum(name in value for name in self.exactly_one) != 1:
            yield f"{place}: must have exactly one of {', '.join(self.exactly_one)}"
        if len(value) < self.least:
            yield f"{place}: must have at least {self.least} properties"
        for name, inner in value.items():
            if name not in self.known:
                yield f'unknown field "{place}.{name}"'
            else:
                yield from self.known[name].faults(inner, f"{place}.{name}")


def words(*allowed: str) -> Text:
    return Text("|".join(map(re.escape, allowed)))


ANY = Text()
NAME = Text(DNS_NAME, 253)
LABEL = Text(DNS_LABEL)
QUANTITY = Text(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
COUNT = Number(0)
LABELS = Pairs(Text(_VALUE), _KEY)
METADATA = Fields(
    {
        "name": NAME,
        "namespace": LABEL,
        "labels": LABELS,
        "annotations": Pairs(ANY, _KEY),
    }
)
PLAIN_METADATA = Fields({"labels": LABELS, "annotations": Pairs(ANY, _KEY)})
FIELD_PATH = Text(
    r"status\.podIP|metadata\.(labels|annotations)\['" + _KEY + r"'\]",
)
ENV = Fields(
    {
        "name": Text(r"[-._a-zA-Z][-._a-zA-Z0-9]*"),
        "value": ANY,
        "valueFrom": Fields(
            {"fieldRef": Fields({"fieldPath": FIELD_PATH}, ("fieldPath",))}, ("fieldRef",)
        ),
    },
    ("name",),
    exactly_one=("value", "valueFrom"),
)
ENVS = Items(ENV, key="name")
RESOURCES = Fields({"requests": Pairs(QUANTITY, _KEY), "limits": Pairs(QUANTITY, _KEY)})
REFERENCE = Fields({"name": NAME}, ("name",))
CONTAINER = Fields(
    {
        "name": LABEL,
        "image": Text(r"\S+"),
        "command": Items(ANY),
        "env": ENVS,
        "envFrom": Items(Fields({"secretRef": REFERENCE})),
        "ports": Items(Fields({"containerPort": Number(1, 65535)}, ("containerPort",))),
        "resources": RESOURCES,
        "workingDir": Text(r"/.*"),
        "volumeMounts": Items(
            Fields(
                {"name": LABEL, "mountPath": Text(r"[^:]+"), "readOnly": Flag()},
                ("name", "mountPath"),
            ),
            key="mountPath",
        ),
        "securityContext": Fields({"capabilities": Fields({"add": Items(Text(r"[A-Z_]+"))})}),
    },
    ("name", "image"),
)
VOLUME = Fields(
    {
        "name": LABEL,
        "persistentVolumeClaim": Fields({"claimName": NAME}, ("claimName",)),
        "emptyDir": Fields({"medium": words("Memory"), "sizeLimit": QUANTITY}),
        "configMap": REFERENCE,
    },
    ("name",),
    exactly_one=("persistentVolumeClaim", "emptyDir", "configMap"),
)
NODE_TERM = Fields(
    {
        "matchExpressions": Items(
            Fields(
                {
                    "key": Text(_KEY),
                    "operator": words("In", "NotIn"),
                    "values": Items(ANY, least=1),
                },
                ("key", "operator"),
            )
        )
    }
)
AFFINITY = Fields(
    {
        "nodeAffinity": Fields(
            {
                "requiredDuringSchedulingIgnoredDuringExecution": Fields(
                    {"nodeSelectorTerms": Items(NODE_TERM, least=1)}, ("nodeSelectorTerms",)
                )
            }
        )
    }
)
POD_SPEC = Fields(
    {
        "restartPolicy": words("Always", "OnFailure", "Never"),
        "terminationGracePeriodSeconds": COUNT,
        "activeDeadlineSeconds": Number(1),
        "shareProcessNamespace": Flag(),
        "enableServiceLinks": Flag(),
        "containers": Items(CONTAINER, least=1, key="name"),
        "volumes": Items(VOLUME, key="name"),
        "affinity": AFFINITY,
        "nodeSelector": LABELS,
        "tolerations": Items(
            Fields({"key": Text(_KEY), "operator": words("Exists", "Equal"), "value": ANY})
        ),
        "imagePullSecrets": Items(REFERENCE),
        "serviceAccountName": NAME,
    },
    ("containers",),
)
POD_TEMPLATE = Fields({"metadata": PLAIN_METADATA, "spec": POD_SPEC}, ("spec",))
FAILURE_RULE = Fields(
    {
        "action": words("FailJob", "FailIndex", "Ignore", "Count"),
        "onExitCodes": Fields(
            {
                "containerName": LABEL,
                "operator": words("In", "NotIn"),
                "values": Items(Number(1, 255), most=255, least=1),
            },
            ("operator", "values"),
        ),
        "onPodConditions": Items(
            Fields({"type": ANY, "status": words("True", "False", "Unknown")}, ("type", "status")),
            most=20,
        ),
    },
    ("action",),
    exactly_one=("onExitCodes", "onPodConditions"),
)
SUCCESS_RULE = Fields({"succeededIndexes": Text(r"[0-9,-]+"), "succeededCount": Number(1)})
JOB_TEMPLATE = Fields(
    {
        "metadata": PLAIN_METADATA,
        "spec": Fields(
            {
                "completionMode": words("Indexed", "NonIndexed"),
                "parallelism": COUNT,
                "completions": COUNT,
                "backoffLimit": COUNT,
                "activeDeadlineSeconds": Number(1),
                "podFailurePolicy": Fields(
                    {"rules": Items(FAILURE_RULE, most=20, least=1)}, ("rules",)
                ),
                "successPolicy": Fields(
                    {"rules": Items(SUCCESS_RULE, most=20, least=1)}, ("rules",)
                ),
                "template": POD_TEMPLATE,
            },
            ("template",),
        ),
    }
)
JOBSET_SPEC = Fields(
    {
        "network": Fields({"enableDNSHostnames": Flag(), "publishNotReadyAddresses": Flag()}),
        "failurePolicy": Fields(
            {
                "maxRestarts": COUNT,
                "restartStrategy": words("Recreate", "BlockingRecreate", "InPlaceRestart"),
                "rules": Items(
                    Fields(
                        {
                            "name": Text(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", 128),
                            "action": words(
                                "FailJobSet",
                                "RestartJobSet",
                                "RestartJobSetAndIgnoreMaxRestarts",
                                "RestartJob",
                                "RestartJobAndIgnoreMaxRestarts",
                            ),
                            "onJobFailureReasons": Items(
                                words(
                                    "BackoffLimitExceeded",
                                    "DeadlineExceeded",
                                    "FailedIndexes",
                                    "MaxFailedIndexesExceeded",
                                    "PodFailurePolicy",
                                )
                            ),
                            "onJobFailureMessagePatterns": Items(ANY),
                        },
                        ("name", "action"),
                    ),
                    key="name",
                ),
            }
        ),
        "replicatedJobs": Items(
            Fields(
                {"name": LABEL, "replicas": COUNT, "template": JOB_TEMPLATE}, ("name", "template")
            ),
            key="name",
        ),
    }
)
TRAINER = Fields(
    {
        "image": Text(r"\S+", 500),
        "command": Items(ANY, most=128),
        "env": Items(ENV, most=128, key="name"),
        "numNodes": COUNT,
        "numProcPerNode": Number(1),
        "resourcesPerNode": RESOURCES,
    }
)
TRAIN_JOB_SPEC = Fields(
    {
        "runtimeRef": Fields(
            {"name": Text(r".+", 253), "apiGroup": Text(r".*", 253), "kind": Text(r".*", 253)},
            ("name",),
        ),
        "trainer": TRAINER,
        "activeDeadlineSeconds": Number(1),
    },
    ("runtimeRef",),
)
RUNTIME_SPEC = Fields(
    {
        "mlPolicy": Fields({"numNodes": COUNT, "torch": Fields({})}),
        "podGroupPolicy": Fields({"coscheduling": Fields({"scheduleTimeoutSeconds": COUNT})}),
        "template": Fields({"metadata": PLAIN_METADATA, "spec": JOBSET_SPEC}, least=1),
    },
    least=1,
)
POLICY = Fields(
    {
        # A typed list would be refused for values that the webhook knows and the CRD does not.
        "action": words("RestartJob", "TerminateJob", "AbortJob", "CompleteJob"),
        "events": Items(words("*", "PodPending", "PodFailed", "PodEvicted", "TaskCompleted")),
        "exitCode": Number(),
    }
)
VOLCANO_SPEC = Fields(
    {
        "schedulerName": Text(r".*", 63),
        "minAvailable": COUNT,
        "minSuccess": Number(1),
        "maxRetry": COUNT,
        "queue": NAME,
        "plugins": Pairs(Items(ANY), r"svc|env|ssh|pytorch"),
        "policies": Items(POLICY),
        "networkTopology": Fields(
            {
                "mode": words("hard", "soft"),
                "highestTierAllowed": COUNT,
                "highestTierName": Text(r".*", 253),
            }
        ),
        "tasks": Items(
            Fields(
                {
                    "name": LABEL,
                    "replicas": COUNT,
                    "minAvailable": COUNT,
                    "template": POD_TEMPLATE,
                }
            ),
            least=1,
            key="name",
        ),
    }
)


@dataclass(frozen=True)
class Resource:
    """One kind that the server has."""

    kind: str
    api_version: str
    plural: str
    spec: Any
    body: str = "spec"
    required: tuple[str, ...] = field(default=())

    @property
    def schema(self) -> Fields:
        known = {
            "apiVersion": words(self.api_version),
            "kind": words(self.kind),
            "metadata": METADATA,
            self.body: self.spec,
        }
        return Fields(known, ("apiVersion", "kind", "metadata", self.body))


RESOURCES_SERVED = (
    Resource("ConfigMap", "v1", "configmaps", Pairs(ANY, r"[-._a-zA-Z0-9]+"), "data"),
    Resource("JobSet", "jobset.x-k8s.io/v1alpha2", "jobsets", JOBSET_SPEC),
    Resource("TrainJob", "trainer.kubeflow.org/v1alpha1", "trainjobs", TRAIN_JOB_SPEC),
    Resource("TrainingRuntime", "trainer.kubeflow.org/v1alpha1", "trainingruntimes", RUNTIME_SPEC),
    Resource("Job", "batch.volcano.sh/v1alpha1", "jobs", VOLCANO_SPEC),
)


def schema_faults(resource: Resource, manifest: Any) -> list[str]:
    """What the server would refuse; unknown fields begin with `unknown field`."""
    return [fault.replace('"$.', '"') for fault in resource.schema.faults(manifest, "$")]
