"""Kubernetes through its own Python client, with its refusals as errors that say what to do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ExitCode, UserError, brief, printable

# Seconds that the server has for one answer.
_REQUEST_S = 30
_POLL_S = 0.5
_TAIL_LINES = 200
_NOT_FOUND, _CONFLICT = 404, 409


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object as its address needs it. No group is Kubernetes' own."""

    name: str
    group: str
    version: str
    plural: str
    needs: str = ""
    """What has to be installed for the server to know it."""


CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps")
JOB_SET = Kind("JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet 0.10 or later")
TRAIN_JOB = Kind(
    "TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", "Kubeflow Trainer 2.2 or later"
)
RUNTIME = Kind(
    "TrainingRuntime",
    "trainer.kubeflow.org",
    "v1alpha1",
    "trainingruntimes",
    "Kubeflow Trainer 2.2 or later",
)
VOLCANO_JOB = Kind(
    "Job",
    "batch.volcano.sh",
    "v1alpha1",
    "jobs",
    "Volcano 1.9 or later (1.15 for any kubernetes.topology)",
)
KINDS = (CONFIG_MAP, JOB_SET, TRAIN_JOB, RUNTIME, VOLCANO_JOB)


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind that a manifest is of."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    for kind in KINDS:
        if (kind.group, kind.version, kind.name) == (group, version, manifest["kind"]):
            return kind
    raise LookupError(f"{manifest['apiVersion']} {manifest['kind']} is none of a job's kinds")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """What is known of one pod."""

    name: str
    index: int
    phase: str
    node: str | None
    trouble: str
    """Why it does not run, by the scheduler or the node; empty where nothing is said."""


class KubernetesCluster:
    """The objects of one namespace."""

    def __init__(self, namespace: str, context: str | None) -> None:
        self.namespace = namespace
        self._api = _connect(context)

    def create(self, manifest: Mapping[str, Any]) -> None:
        """Create an object. Unknown fields are refused, which other versions would drop."""
        kind = kind_of(manifest)
        name = manifest["metadata"]["name"]
        with _errors(f"{kind.name} {self.namespace}/{name} was refused", kind):
            strict = {"field_validation": "Strict", "_request_timeout": _REQUEST_S}
            if kind is CONFIG_MAP:
                self._core.create_namespaced_config_map(self.namespace, dict(manifest), **strict)
            else:
                self._custom.create_namespaced_custom_object(
                    *self._place(kind), dict(manifest), **strict
                )

    def read(self, kind: Kind, name: str) -> dict[str, Any] | None:
        """An object; None where there is none of that name."""
        from kubernetes.client.exceptions import ApiException

        with _errors(f"{kind.name} {self.namespace}/{name} cannot be read", kind):
            try:
                found = self._custom.get_namespaced_custom_object(
                    *self._place(kind), name, _request_timeout=_REQUEST_S
                )
            except ApiException as error:
                if _is_missing(error):
                    return None
                raise
        return dict(found)

    def delete(self, kind: Kind, name: str) -> bool:
        """Delete an object. A job stays until the pods that it has made are gone.

        False where there is none of that name.
        """
        from kubernetes.client.exceptions import ApiException

        policy = "Background" if kind in (CONFIG_MAP, RUNTIME) else "Foreground"
        options: dict[str, Any] = {"propagation_policy": policy, "_request_timeout": _REQUEST_S}
        with _errors(f"{kind.name} {self.namespace}/{name} cannot be deleted", kind):
            try:
                if kind is CONFIG_MAP:
                    self._core.delete_namespaced_config_map(name, self.namespace, **options)
                else:
                    self._custom.delete_namespaced_custom_object(
                        *self._place(kind), name, **options
                    )
            except ApiException as error:
                if _is_missing(error):
                    return False
                raise
        return True

    def wait_until_gone(self, kind: Kind, name: str, patience_s: float) -> None:
        """Wait for a deletion, which ends when the pods have saved and ended."""
        deadline = time.monotonic() + patience_s
        while self.read(kind, name) is not None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{kind.name} {self.namespace}/{name} is still there",
                    why=f"its pods did not end within {patience_s:.0f} s",
                    fix=f"kubectl get pods -n {self.namespace}, then the same command again",
                    code=ExitCode.ENVIRONMENT,
                )
            time.sleep(_POLL_S)

    def pods(self, selector: str, index_label: str) -> list[PodSeen]:
        """The pods with these labels, in the order of their nodes."""
        with _errors(f"pods of {self.namespace} cannot be listed"):
            found = self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, _request_timeout=_REQUEST_S
            )
        seen = [
            PodSeen(
                name=pod.metadata.name,
                index=int((pod.metadata.labels or {}).get(index_label, 0)),
                phase=pod.status.phase or "Unknown",
                node=pod.spec.node_name,
                trouble=_trouble(pod.status),
            )
            for pod in found.items
        ]
        return sorted(seen, key=lambda one: (one.index, one.name))

    def log(self, pod: str) -> str:
        """The end of what a pod has printed; a pod that has not started has printed nothing."""
        from kubernetes.client.exceptions import ApiException

        with _errors(f"the log of {self.namespace}/{pod} cannot be read"):
            try:
                return str(
                    self._core.read_namespaced_pod_log(
                        pod, self.namespace, tail_lines=_TAIL_LINES, _request_timeout=_REQUEST_S
                    )
                )
            except ApiException as error:
                if error.status in (400, _NOT_FOUND):
                    return ""
                raise

    @property
    def _core(self) -> Any:
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self._api)

    @property
    def _custom(self) -> Any:
        from kubernetes.client import CustomObjectsApi

        return CustomObjectsApi(self._api)

    def _place(self, kind: Kind) -> Sequence[str]:
        return kind.group, kind.version, self.namespace, kind.plural


def _connect(context: str | None) -> Any:
    try:
        from kubernetes import config
    except ImportError as error:
        raise UserError(
            "the Python client of Kubernetes is not installed",
            fix="pip install 'shardwise[kubernetes]'; without it: kubectl create -f manifest.yaml",
            code=ExitCode.ENVIRONMENT,
        ) from error
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    try:
        if in_pod and context is None:
            from kubernetes.client import ApiClient, Configuration

            settings = Configuration()
            config.load_incluster_config(client_configuration=settings)
            return ApiClient(settings)
        # The client itself would read the variable once, when it is imported.
        file = os.environ.get("KUBECONFIG")
        return config.new_client_from_config(config_file=file, context=context)
    except (config.ConfigException, OSError) as error:
        raise UserError(
            "no Kubernetes cluster is known here" if context is None else f"no context {context}",
            why=brief(error),
            fix="kubectl config get-contexts shows what the kubeconfig has; KUBECONFIG names "
            "another file",
            code=ExitCode.ENVIRONMENT,
        ) from error


@contextmanager
def _errors(what: str, kind: Kind | None = None) -> Iterator[None]:
    """Refusals of the server, and a server that does not answer, as one error."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        fix = _fix(error, kind)
        raise UserError(
            what,
            why=_message(error),
            fix=f"{fix}; kubectl get events says more",
            code=ExitCode.ENVIRONMENT,
        ) from error
    except (HTTPError, OSError) as error:
        raise UserError(
            "the Kubernetes API server does not answer",
            why=brief(error),
            fix="kubectl cluster-info tells whether it can be reached from here",
            code=ExitCode.ENVIRONMENT,
        ) from error


def _message(error: Any) -> str:
    try:
        said = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        said = error.reason or "the server gave no reason"
    return f"{error.status}: {printable(str(said))}"


def _is_missing(error: Any) -> bool:
    """Whether the object is missing, and not the whole kind."""
    if error.status != _NOT_FOUND:
        return False
    try:
        return bool(json.loads(error.body).get("details", {}).get("name"))
    except (ValueError, TypeError, AttributeError):
        return False


def _fix(error: Any, kind: Kind | None) -> str:
    if error.status in (401, 403):
        return (
            "ask for the right to create and read it in that namespace: kubectl auth can-i --list"
        )
    if error.status == _CONFLICT:
        return "stop the job of that name first, or give this run another name: name=NAME-2"
    if kind is not None and kind.needs and error.status in (400, _NOT_FOUND, 422):
        return (
            f"the cluster needs {kind.needs}: kubectl get crd {kind.plural}.{kind.group}; a field "
            "that it names is a setting of section `kubernetes` or `launch`"
        )
    return "try the same command again"


def _trouble(status: Any) -> str:
    """What keeps a pod from running, in the words of the scheduler or of its node."""
    for one in status.container_statuses or []:
        waiting = one.state.waiting if one.state else None
        if waiting is not None and waiting.reason not in (None, "ContainerCreating"):
            return printable(f"{waiting.reason}: {waiting.message or ''}".rstrip(": "))
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return printable(condition.message or condition.reason or "")
    return ""
