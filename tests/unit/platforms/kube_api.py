"""A small Kubernetes API server: it keeps objects, refuses wrong ones, and has the pods that a
test gives it.

It answers over HTTP as the real one does to `kubernetes`' own client: strict field validation,
conflicts, missing kinds and objects, foreground deletion, label selectors and logs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from crd_rules import crd_faults
from kube_admission import admission_faults
from kube_schemas import RESOURCES_SERVED, Resource, schema_faults

NAMESPACE = "default"
TOKEN = "a-token"


@dataclass
class KubeApi:
    """What the server knows. Tests read and change it."""

    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Plurals of kinds that are not installed."""

    unknown_fields: set[str] = field(default_factory=set)
    """Fields that an older version of a CRD does not have."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def kubeconfig(self, folder: Path, token: str = TOKEN) -> Path:
        """A kubeconfig with two contexts, of which `other` is not the current one."""
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        path = folder / "kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": name, "context": context} for name in ("main", "other")],
            "current-context": "main",
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.objects]

    def add_pod(self, labels: Mapping[str, str], node: str | None, **status: Any) -> str:
        """A pod as a controller makes it; returns its name."""
        name = f"pod-{len(self.pods)}"
        status.setdefault("phase", "Running" if node else "Pending")
        spec: dict[str, Any] = {"containers": [{"name": "node", "image": "i"}]}
        if node:
            spec["nodeName"] = node
        metadata = {"name": name, "namespace": NAMESPACE, "labels": dict(labels)}
        self.pods.append({"metadata": metadata, "spec": spec, "status": status})
        return name


@contextmanager
def serve() -> Iterator[KubeApi]:
    """The server on a port of its own, while the block runs."""
    api = KubeApi()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": api}))
    api.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Refusal(Exception):
    def __init__(self, code: int, message: str, name: str = "") -> None:
        super().__init__(message)
        self.code, self.name = code, name


class _Handler(BaseHTTPRequestHandler):
    api: KubeApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._answer(lambda: self._read())

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"null")
        self._answer(lambda: self._create(body))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(lambda: self._delete())

    def _answer(self, act: Any) -> None:
        code, found = 200, None
        self.api.asked.append((self.command, self.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise _Refusal(401, "Unauthorized")
            found = act()
        except _Refusal as refusal:
            code = refusal.code
            details = {"name": refusal.name} if refusal.name else {}
            found = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": str(refusal),
                "code": code,
                "details": details,
            }
        is_text = isinstance(found, str)
        payload = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _place(self) -> tuple[str, list[str], dict[str, list[str]]]:
        """The group and version, the words after the namespace, and the query."""
        parts = urlsplit(self.path)
        words = parts.path.strip("/").split("/")
        version = words[1] if words[0] == "api" else "/".join(words[1:3])
        rest = words[2:] if words[0] == "api" else words[3:]
        if rest[:1] != ["namespaces"] or len(rest) < 3:
            raise _Refusal(404, "the server could not find the requested resource")
        if rest[1] != NAMESPACE:
            raise _Refusal(404, f'namespaces "{rest[1]}" not found')
        return version, rest[2:], parse_qs(parts.query)

    def _resource(self, version: str, plural: str) -> Resource:
        for one in RESOURCES_SERVED:
            if (one.api_version, one.plural) == (
                version,
                plural,
            ) and plural not in self.api.missing:
                return one
        raise _Refusal(404, "the server could not find the requested resource")

    def _found(self, resource: Resource, name: str) -> dict[str, Any]:
        found = self.api.objects.get((resource.kind, name))
        if found is None:
            raise _Refusal(404, f'{resource.plural} "{name}" not found', name)
        return found

    def _read(self) -> Any:
        version, words, query = self._place()
        if version == "v1" and words[0] == "pods":
            return self._read_pods(words, query)
        resource = self._resource(version, words[0])
        found = self._found(resource, words[1])
        if "deletionTimestamp" in found["metadata"] and not self.api.pods:
            del self.api.objects[resource.kind, words[1]]
        return found

    def _read_pods(self, words: list[str], query: dict[str, list[str]]) -> Any:
        if words[2:] == ["log"]:
            if words[1] not in self.api.logs:
                raise _Refusal(400, f'container "node" in pod "{words[1]}" is waiting to start')
            return self.api.logs[words[1]]
        wanted = dict(pair.split("=") for pair in query["labelSelector"][0].split(","))
        items = [
            one for one in self.api.pods if wanted.items() <= one["metadata"]["labels"].items()
        ]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    def _create(self, body: Any) -> Any:
        version, words, query = self._place()
        resource = self._resource(version, words[0])
        faults = schema_faults(resource, body)
        text = json.dumps(body)
        faults += [
            f'unknown field "{name}"' for name in self.api.unknown_fields if f'"{name}"' in text
        ]
        unknown = [fault for fault in faults if fault.startswith("unknown field")]
        if unknown and query.get("fieldValidation") == ["Strict"]:
            raise _Refusal(400, f"strict decoding error: {', '.join(unknown)}")
        # Without strict validation a server drops unknown fields, and nobody notices.
        faults = [fault for fault in faults if fault not in unknown]
        name = body["metadata"]["name"]
        faults = faults or admission_faults(body, self.api.objects) or crd_faults(body)
        if faults:
            raise _Refusal(422, f'{resource.kind} "{name}" is invalid: {"; ".join(faults)}')
        if (resource.kind, name) in self.api.objects:
            raise _Refusal(409, f'{resource.plural} "{name}" already exists', name)
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{len(self.api.asked)}"}}
        self.api.objects[resource.kind, name] = made
        return made

    def _delete(self) -> Any:
        version, words, query = self._place()
        resource = self._resource(version, words[0])
        found = self._found(resource, words[1])
        if query.get("propagationPolicy") == ["Foreground"] and resource.kind != "ConfigMap":
            # What it has made goes first; with the last pod it goes too.
            found["metadata"]["deletionTimestamp"] = "2026-11-18T12:00:00Z"
        else:
            del self.api.objects[resource.kind, words[1]]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
