"""The Kubernetes API server that the Helm library needs to render or to keep a release: objects in
memory, no pods.

It serves discovery, single objects and lists by label, and refuses changes to immutable fields.
`helm.schemas` checks schemas. Nothing checks quotas, limit ranges, admission or Kueue.
"""

import base64
import copy
import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]

KUEUE = "kueue.x-k8s.io"
"""The one group that is absent by default."""
KINDS = {
    "v1": (
        "ConfigMap",
        "Namespace",
        "PersistentVolumeClaim",
        "Pod",
        "Secret",
        "Service",
        "ServiceAccount",
    ),
    "apps/v1": ("Deployment", "StatefulSet"),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
    "resource.k8s.io/v1": ("ResourceClaim", "ResourceClaimTemplate"),
    "monitoring.coreos.com/v1": ("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    "gateway.networking.k8s.io/v1": ("HTTPRoute",),
    f"{KUEUE}/v1beta2": ("LocalQueue",),
}
MUTABLE = {
    "Deployment": {
        "replicas",
        "template",
        "strategy",
        "revisionHistoryLimit",
        "progressDeadlineSeconds",
    },
    "PersistentVolumeClaim": {"resources", "volumeName", "volumeAttributesClassName"},
    "ResourceClaimTemplate": set(),
    "StatefulSet": {
        "replicas",
        "template",
        "updateStrategy",
        "minReadySeconds",
        "ordinals",
        "persistentVolumeClaimRetentionPolicy",
        "revisionHistoryLimit",
    },
}
"""Kind → the fields of its spec that may change; of other kinds all may."""

_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))/(?:namespaces/(?P<namespace>[^/]+)/)?"
    r"(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?$"
)


class Refused(Exception):
    """An error response."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "reason": reason,
            "code": code,
            "message": message,
        }


class ApiServer:
    """`with ApiServer("1.37.0") as server:`"""

    def __init__(self, version: str = "1.37.0", *, kueue: bool = False) -> None:
        self.version = version
        self.records = True
        """Whether Helm may store a release. If not, `recorded` is the record that Helm sent, and
        Helm stops there."""
        self.recorded: Object = {}
        self._objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        self._kinds = {
            (group, _plural(kind)): kind
            for group, kinds in KINDS.items()
            for kind in kinds
            if kueue or KUEUE not in group
        }
        handler = type("BoundHandler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def kubeconfig(self) -> str:
        """A kubeconfig."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "memory",
                "users": [{"name": "memory", "user": {}}],
                "clusters": [
                    {"name": "memory", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
                ],
                "contexts": [
                    {"name": "memory", "context": {"cluster": "memory", "user": "memory"}}
                ],
            }
        )

    def reset(self, *objects: Object) -> None:
        """Replace all objects by these."""
        self._objects = {
            (_plural(obj["kind"]), obj["metadata"]["name"]): copy.deepcopy(obj) for obj in objects
        }

    def objects(self, kind: str | None = None) -> list[Object]:
        """The stored objects, without the records of releases."""
        stored = (obj for obj in self._objects.values() if obj.get("type") != "helm.sh/release.v1")
        return [obj for obj in stored if kind in (None, obj["kind"])]

    def answer(self, method: str, url: str, body: bytes) -> Object:
        """The body of the response to one request. Refused for an error response."""
        split = urlsplit(url)
        if split.path == "/version":
            major, minor, _ = self.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{self.version}"}
        if split.path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if split.path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
        match = _PATH.match(split.path)
        if group := self._resources(split.path.removeprefix("/apis/").removeprefix("/api/")):
            return group
        kind = (
            self._kinds.get((match["core"] or match["group"], match["plural"])) if match else None
        )
        if match is None or kind is None:
            raise Refused(
                404, "NotFound", f"the server could not find the requested resource {split.path}"
            )
        with self._lock:
            if match["name"] is None and method == "GET":
                return self._list(
                    kind, match["plural"], parse_qs(split.query).get("labelSelector", [""])[0]
                )
            return self._one(method, match["plural"], kind, match["name"], body)

    def _list(self, kind: str, plural: str, selector: str) -> Object:
        wanted = dict(term.split("=") for term in selector.split(",") if term)
        stored = (obj for (resource, _), obj in self._objects.items() if resource == plural)
        items = [
            obj for obj in stored if wanted.items() <= obj["metadata"].get("labels", {}).items()
        ]
        return {
            "kind": f"{kind}List",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }

    def _one(self, method: str, plural: str, kind: str, name: str | None, body: bytes) -> Object:
        if method in ("POST", "PUT", "PATCH"):
            obj = _release_secret(body) if body.startswith(b"k8s\x00") else yaml.safe_load(body)
            name = obj["metadata"]["name"]
            if obj.get("type") == "helm.sh/release.v1" and not self.records:
                self.recorded = obj
                raise Refused(403, "Forbidden", "this server records no releases")
            if old := self._objects.get((plural, name)):
                _check_immutable(kind, name, old.get("spec", {}), obj.get("spec", {}))
            obj["metadata"] |= {"uid": f"{plural}-{name}", "resourceVersion": "1"}
            self._objects[plural, name] = obj
            return obj
        if (obj := self._objects.get((plural, str(name)))) is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return self._objects.pop((plural, str(name))) if method == "DELETE" else obj

    def _groups(self) -> list[Object]:
        versions = dict.fromkeys(
            api_version for api_version, _ in self._kinds if api_version != "v1"
        )
        return [
            {
                "name": group,
                "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
            }
            for group, version in (api_version.split("/") for api_version in versions)
        ]

    def _resources(self, api_version: str) -> Object | None:
        kinds = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind != "Namespace",
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }
            for (group, plural), kind in self._kinds.items()
            if group == api_version
        ]
        return (
            {"kind": "APIResourceList", "groupVersion": api_version, "resources": kinds}
            if kinds
            else None
        )


def _plural(kind: str) -> str:
    lower = kind.lower()
    return (
        lower[:-1] + "ies"
        if lower.endswith("y")
        else lower + ("es" if lower.endswith("s") else "s")
    )


def _release_secret(body: bytes) -> Object:
    """The Secret in which Helm records a release. Helm sends it as protobuf; the tests need its
    text fields only."""
    (data,) = re.findall(rb"H4sI[A-Za-z0-9+/=]+", body)
    name = re.search(rb"sh\.helm\.release\.v1\.[a-z0-9.-]+\.v[0-9]+", body)
    assert name, "an object in protobuf is not the record of a release"
    release = json.loads(gzip.decompress(base64.b64decode(data)))
    labels = {
        "owner": "helm",
        "name": release["name"],
        "version": str(release["version"]),
        "status": release["info"]["status"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "helm.sh/release.v1",
        "metadata": {"name": name[0].decode(), "labels": labels},
        "data": {"release": base64.b64encode(data).decode()},
    }


def _check_immutable(kind: str, name: str, old: Object, new: Object) -> None:
    for field in sorted({*old, *new}):
        if old.get(field) != new.get(field) and kind in MUTABLE and field not in MUTABLE[kind]:
            raise Refused(
                422, "Invalid", f'{kind} "{name}" is invalid: spec.{field}: field is immutable'
            )


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: a render makes dozens of requests."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            code, answer = 200, self.api.answer(self.command, self.path, body)
        except Refused as refused:
            code, answer = refused.code, refused.status
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815
