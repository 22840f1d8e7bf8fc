"""A Kubernetes API server in memory. The Helm library renders and stores releases in this server.
The runner's executor creates Jobs in this server.

The server stores objects as a real API server does. The server refuses a new object whose name
exists already. The server refuses a change that names an old resource version of the object. A
deleted object stays until its finalizers are gone. The server checks Jobs against Kubernetes' own
schemas and against a quota. The function `admission` of a test accepts or refuses each new Job. The
server checks requests against the rules of a Role. The method `fail` makes requests fail. The
server runs no pods: a Job controller and a kubelet are in `executor.nodes`.
"""

import base64
import copy
import gzip
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

Object = dict[str, Any]

KUEUE = "kueue.x-k8s.io"
"""The API group of Kueue. It is the only group that the server lacks by default."""
KINDS = {
    "v1": (
        "ConfigMap",
        "Event",
        "Namespace",
        "PersistentVolumeClaim",
        "Pod",
        "Secret",
        "Service",
        "ServiceAccount",
    ),
    "apps/v1": ("DaemonSet", "Deployment", "StatefulSet"),
    "authorization.k8s.io/v1": ("SelfSubjectAccessReview",),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "admissionregistration.k8s.io/v1": (
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ),
    "resource.k8s.io/v1": ("ResourceClaim", "ResourceClaimTemplate"),
    "monitoring.coreos.com/v1": ("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    "gateway.networking.k8s.io/v1": ("HTTPRoute",),
    f"{KUEUE}/v1beta2": ("LocalQueue", "Workload"),
}
NOT_NAMESPACED = {"Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
MUTABLE = {
    "Deployment": {
        "replicas",
        "template",
        "strategy",
        "revisionHistoryLimit",
        "progressDeadlineSeconds",
    },
    "Job": {
        "parallelism",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "suspend",
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
"""Kind → the fields of its spec that may change. All fields of the other kinds may change."""
FOREGROUND = "foregroundDeletion"
"""The finalizer of an object that is removed only after its dependent objects."""

_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))/(?:namespaces/(?P<namespace>[^/]+)/)?"
    r"(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>status))?$"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


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


class Cut(Exception):
    """The connection ends without an answer."""


@dataclass
class Fault:
    """A fault for requests with the method `method` and the resource `plural`. The fault applies to
    the next `times` such requests."""

    method: str
    plural: str
    # A number: the answer has this status. "cut": the request gets no answer. "lost": the request
    # is carried out and gets no answer. "slow": the answer takes 6 s.
    how: int | str
    times: int = 1
    message: str = "injected"


class ApiServer:
    """The server. Use: `with ApiServer("1.37.0") as server:`."""

    def __init__(self, version: str = "1.37.0", *, kueue: bool = False) -> None:
        self.version = version
        self.records = True
        """Whether Helm may store a release. If Helm may not, `recorded` is the record that Helm
        sent, and Helm ends with an error."""
        self.recorded: Object = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request, in the order of the requests."""
        self.rules: list[Object] | None = None
        """The rules of the client's Role. With None the client may do everything."""
        self.quota: dict[str, int] = {}
        """The namespace's quota, with `count/jobs.batch` and `pods`. The Job controller reads
        `pods`."""
        self.admission: Callable[[Object], str | None] = lambda obj: None
        """The reason for which a policy or a webhook refuses a new Job, None if it accepts the
        Job."""
        self.changed = threading.Condition(threading.RLock())
        self._versions = itertools.count(1)
        self._objects: dict[tuple[str, str], Object] = {}
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
        """The text of a kubeconfig for this server."""
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
                    {
                        "name": "memory",
                        "context": {"cluster": "memory", "user": "memory", "namespace": "ns"},
                    }
                ],
            }
        )

    def reset(self, *objects: Object) -> None:
        """Replace all stored objects with `objects`."""
        self._objects = {
            (_plural(obj["kind"]), obj["metadata"]["name"]): copy.deepcopy(obj) for obj in objects
        }

    def objects(self, kind: str | None = None) -> list[Object]:
        """The stored objects, without the records of releases."""
        with self.changed:
            stored = [
                obj for obj in self._objects.values() if obj.get("type") != "helm.sh/release.v1"
            ]
            return [obj for obj in stored if kind in (None, obj["kind"])]

    def fail(self, method: str, plural: str, how: int | str, times: int = 1, **more: str) -> None:
        """Adds a `Fault` for requests with the method `method` and the resource `plural`. The fault
        applies to the next `times` such requests."""
        self.faults.append(Fault(method, plural, how, times, **more))

    @contextmanager
    def away(self) -> Iterator[None]:
        """The server answers no request until the `with` block ends."""
        self.fail("*", "*", "cut", times=10**9)
        fault = self.faults[-1]
        try:
            yield
        finally:
            self.faults.remove(fault)

    # ---- actions of controllers

    def add(self, obj: Object) -> Object:
        """Creates an object, as a controller does."""
        with self.changed:
            plural, metadata = _plural(obj["kind"]), obj["metadata"]
            if "name" not in metadata:
                metadata["name"] = metadata.pop("generateName") + uuid.uuid4().hex[:5]
            name = metadata["name"]
            if (plural, name) in self._objects:
                raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
            metadata |= {
                "uid": str(uuid.uuid4()),
                "namespace": metadata.get("namespace", "ns"),
                "creationTimestamp": now(),
                "generation": 1,
            }
            return self._store(obj)

    def change(self, kind: str, name: str, action: Callable[[Object], None]) -> Object | None:
        """Changes an object as a controller does. Returns the object, or None if it is gone. If the
        changed object is marked as deleted and has no finalizers, the server removes it."""
        with self.changed:
            obj = self._objects.get((_plural(kind), name))
            if obj is None:
                return None
            before = json.dumps(obj, sort_keys=True)
            action(obj)
            if obj["metadata"].get("deletionTimestamp") and not obj["metadata"].get("finalizers"):
                del self._objects[_plural(kind), name]
                self.changed.notify_all()
            elif json.dumps(obj, sort_keys=True) != before:
                self._store(obj)
            return obj

    def event(self, about: Object, reason: str, message: str) -> None:
        """Records an Event about the object `about`. `kubectl describe` shows such Events."""
        fields = ("apiVersion", "kind", "metadata")
        api_version, kind, metadata = (about[field] for field in fields)
        self.add(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": f"{metadata['name']}."},
                "involvedObject": {
                    "apiVersion": api_version,
                    "kind": kind,
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": now(),
            }
        )

    def _store(self, obj: Object) -> Object:
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self._objects[_plural(obj["kind"]), obj["metadata"]["name"]] = obj
        self.changed.notify_all()
        return obj

    # ---- requests

    def answer(self, method: str, url: str, body: bytes) -> Object:
        """The body of the response to one request. Raises Refused for an error response."""
        split = urlsplit(url)
        self.requests.append((method, split.path))
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
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        lost = self._inject(method, match["plural"])
        with self.changed:
            if kind == "SelfSubjectAccessReview":
                return self._review(yaml.safe_load(body))
            self._authorize(method, match)
            if match["name"] is None and method == "GET":
                answer = self._list(kind, match["plural"], query)
            else:
                answer = self._one(method, match, kind, query, body)
            answer = copy.deepcopy(answer)
        if lost:
            raise Cut
        return answer

    def _inject(self, method: str, plural: str) -> bool:
        """Applies a fault to the request if there is one. Returns whether the server must carry out
        the request and then lose the answer."""
        for fault in self.faults:
            if fault.method in ("*", method) and fault.plural in ("*", plural) and fault.times:
                fault.times -= 1
                if fault.how == "cut":
                    raise Cut
                if fault.how == "slow":
                    time.sleep(6)
                elif isinstance(fault.how, int):
                    reasons = {
                        403: "Forbidden",
                        410: "Expired",
                        422: "Invalid",
                        429: "TooManyRequests",
                    }
                    raise Refused(fault.how, reasons.get(fault.how, "InternalError"), fault.message)
                return fault.how == "lost"
        return False

    def _allowed(self, verb: str, group: str, plural: str, name: str | None) -> bool:
        return self.rules is None or any(
            group in rule["apiGroups"]
            and plural in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self.rules
        )

    def _authorize(self, method: str, match: re.Match[str]) -> None:
        group = (match["group"] or "").partition("/")[0]
        verb = _VERBS.get(method) or ("get" if match["name"] else "list")
        plural = match["plural"] + (f"/{match['part']}" if match["part"] else "")
        if not self._allowed(verb, group, plural, match["name"]):
            what = f'{plural}.{group} "{match["name"] or ""}"' if group else plural
            raise Refused(
                403,
                "Forbidden",
                f'{what} is forbidden: User "system:serviceaccount:ns:t" cannot {verb} resource'
                f' "{plural}" in API group "{group}" in the namespace "ns"',
            )

    def _review(self, review: Object) -> Object:
        asked = review["spec"]["resourceAttributes"]
        group, plural = asked.get("group", ""), asked["resource"]
        allowed = self._allowed(asked["verb"], group, plural, asked.get("name"))
        return review | {"status": {"allowed": allowed}}

    def _list(self, kind: str, plural: str, query: dict[str, str]) -> Object:
        stored = (obj for (resource, _), obj in self._objects.items() if resource == plural)
        items = [
            obj
            for obj in stored
            if selected(query.get("labelSelector", ""), obj["metadata"].get("labels", {}))
            and _has_fields(query.get("fieldSelector", ""), obj)
        ]
        return {
            "kind": f"{kind}List",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }

    def _one(
        self, method: str, match: re.Match[str], kind: str, query: dict[str, str], body: bytes
    ) -> Object:
        plural, name = match["plural"], match["name"]
        if method in ("POST", "PUT", "PATCH"):
            obj = _release_secret(body) if body.startswith(b"k8s\x00") else yaml.safe_load(body)
            if obj.get("type") == "helm.sh/release.v1" and not self.records:
                self.recorded = obj
                raise Refused(403, "Forbidden", "this server records no releases")
            if method == "POST":
                return self._create(obj, dry="dryRun" in query)
            return self._replace(obj, plural, str(name), status=bool(match["part"]))
        if (obj := self._objects.get((plural, str(name)))) is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        if method == "DELETE":
            # Helm sends the options of a deletion as protobuf.
            foreground = b"Foreground" in body or query.get("propagationPolicy") == "Foreground"
            self._delete(obj, foreground=foreground)
        return obj

    def _create(self, obj: Object, *, dry: bool) -> Object:
        name = obj["metadata"].get("name", "")
        if obj["kind"] == "Job":
            self._admit_job(obj)
        if dry:
            return obj
        if (_plural(obj["kind"]), name) in self._objects:
            plural = _plural(obj["kind"])
            raise Refused(409, "AlreadyExists", f'{plural}.batch "{name}" already exists')
        if obj["kind"] == "Job" and not obj["spec"].get("manualSelector"):
            # The labels of a Job's pods and the Job's selector contain the Job's uid.
            obj = self.add(obj)
            labels = {"batch.kubernetes.io/controller-uid": obj["metadata"]["uid"]}
            obj["spec"]["selector"] = {"matchLabels": labels}
            obj["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {}).update(
                labels | {"batch.kubernetes.io/job-name": name}
            )
            obj["spec"].setdefault("suspend", False)
            obj.setdefault("status", {})
            return self._store(obj)
        return self.add(obj)

    def _admit_job(self, job: Object) -> None:
        name = job["metadata"].get("name")
        try:
            kubernetes_validate.validate(job, self.version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refused(422, "Invalid", f'Job.batch "{name}" is invalid: {error}') from error
        policy = job["spec"]["template"]["spec"].get("restartPolicy")
        if policy not in ("OnFailure", "Never"):
            raise Refused(
                422,
                "Invalid",
                f'Job.batch "{name}" is invalid: spec.template.spec.restartPolicy: Required value:'
                ' valid values: "OnFailure", "Never"',
            )
        if refusal := self.admission(job):
            raise Refused(422, "Invalid", f"jobs.batch {name!r} is forbidden: {refusal}")
        most = self.quota.get("count/jobs.batch")
        used = sum(plural == "jobs" for plural, _ in self._objects)
        if most is not None and used >= most:
            raise Refused(
                403,
                "Forbidden",
                f'jobs.batch "{name}" is forbidden: exceeded quota: of-jobs, requested:'
                f" count/jobs.batch=1, used: count/jobs.batch={used}, limited:"
                f" count/jobs.batch={most}",
            )

    def _replace(self, obj: Object, plural: str, name: str, *, status: bool) -> Object:
        """Carries out a PUT or PATCH request from Helm. Helm's PATCH sends whole objects and
        creates missing objects."""
        obj["metadata"].setdefault("name", name)
        old = self._objects.get((plural, name))
        if old is None:
            return self.add(obj)
        version = obj["metadata"].get("resourceVersion")
        if version and version != old["metadata"].get("resourceVersion"):
            raise Refused(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified;'
                " please apply your changes to the latest version and try again",
            )
        if status:
            return self._store(old | {"status": obj.get("status", {})})
        if obj["kind"] in MUTABLE:
            _check_immutable(obj["kind"], name, old.get("spec", {}), obj.get("spec", {}))
        if "status" in old and "status" not in obj:
            obj["status"] = old["status"]
        obj["metadata"]["uid"] = old["metadata"].get("uid", f"{plural}-{name}")
        return self._store(obj)

    def _delete(self, obj: Object, *, foreground: bool) -> None:
        """Removes an object. An object with finalizers is only marked as deleted. A Pod is also
        only marked as deleted, because its containers must stop first."""

        def mark(obj: Object) -> None:
            finalizers = obj["metadata"].setdefault("finalizers", [])
            # Among the objects of this server, only Jobs have dependent objects.
            if obj["kind"] == "Job" and foreground and FOREGROUND not in finalizers:
                finalizers.append(FOREGROUND)
            obj["metadata"].setdefault("deletionTimestamp", now())
            if obj["kind"] == "Pod" and "kubelet" not in finalizers:
                finalizers.append("kubelet")

        self.change(obj["kind"], obj["metadata"]["name"], mark)

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
                "namespaced": kind not in NOT_NAMESPACED,
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


def now() -> str:
    """The time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def selected(selector: str, labels: dict[str, str]) -> bool:
    """Whether a label selector selects an object with these labels. The selector is a list of
    `a=b`, `a!=b`, `a` and `!a`."""
    for term in filter(None, selector.split(",")):
        key, unequal, value = term.partition("!=")
        if unequal and key:
            if labels.get(key) == value:
                return False
            continue
        key, equal, value = term.replace("==", "=").partition("=")
        if equal:
            if labels.get(key) != value:
                return False
        elif (key.lstrip("!") in labels) == key.startswith("!"):
            return False
    return True


def _has_fields(selector: str, obj: Object) -> bool:
    for term in filter(None, selector.split(",")):
        path, _, value = term.replace("==", "=").partition("=")
        node: Any = obj
        for part in path.split("."):
            node = node.get(part, {}) if isinstance(node, dict) else {}
        if node != value:
            return False
    return True


def _plural(kind: str) -> str:
    lower = kind.lower()
    return (
        lower[:-1] + "ies"
        if lower.endswith("y")
        else lower + ("es" if lower.endswith("s") else "s")
    )


def _release_secret(body: bytes) -> Object:
    """The Secret in which Helm records a release. Helm sends the Secret as protobuf. The tests need
    only the Secret's text fields, so only these are parsed."""
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
        """Logs no requests, because a render makes dozens of requests."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            code = 201 if self.command == "POST" else 200
            answer = self.api.answer(self.command, self.path, body)
        except Refused as refused:
            code, answer = refused.code, refused.status
        except Cut:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815
