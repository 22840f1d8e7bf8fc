"""The HTTP face of the pretended cluster."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import yaml

from helm import cluster_kinds, cluster_protobuf
from helm.cluster_kinds import Kind
from helm.cluster_store import Event, Object, Refused

if TYPE_CHECKING:
    from helm.cluster import Cluster

PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
TERM = re.compile(r"^\s*(!?)([^\s!=,()]+)\s*(?:(==?|!=|\s+in\s+|\s+notin\s+)\s*(.*))?$")
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def matches(labels: dict[str, Any], selector: str) -> bool:
    """Whether labels fit a selector as in `a=b,c!=d,e in (f,g),h,!i`."""
    for term in re.split(r",(?![^(]*\))", selector) if selector else []:
        found = TERM.match(term)
        if not found:
            raise Refused(400, "BadRequest", f"unable to parse selector {selector!r}")
        absent, key, operator, value = found.groups()
        operator = (operator or "").strip()
        values = [v.strip() for v in (value or "").strip("() ").split(",")]
        have = str(labels[key]) if key in labels else None
        if not operator:
            fits = (have is None) == bool(absent)
        elif operator in ("!=", "notin"):
            fits = have not in values
        else:
            fits = have in values
        if not fits:
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    cluster: Cluster
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Silent: a render makes a hundred requests."""

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def do_PATCH(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        split = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(split.query, keep_blank_values=True).items()}
        try:
            answer = self._static(split.path) if self.command in ("GET", "HEAD") else None
            if answer is None:
                answer = self._object(split.path, query, body)
            if answer is not None:
                self._send(201 if self.command == "POST" else 200, answer)
        except Refused as refused:
            self._send(refused.code, refused.status())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _send(self, code: int, answer: Object | str, content_type: str = "application/json") -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        if isinstance(answer, dict) and answer.get("kind") == "APIGroupDiscoveryList":
            content_type = AGGREGATED
        elif isinstance(answer, str):
            content_type = "text/plain"
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _static(self, path: str) -> Object | str | None:
        """Health, version and discovery; None where the path is an object's."""
        kinds = self.cluster.kinds
        aggregated = "as=APIGroupDiscoveryList" in self.headers.get("Accept", "")
        if path in ("/livez", "/readyz", "/healthz"):
            return "ok"
        if path == "/version":
            major, minor = cluster_kinds.minor(self.cluster.version)
            git = "v" + self.cluster.version.removeprefix("v")
            return {"major": str(major), "minor": str(minor), "gitVersion": git, "platform": "linux/amd64"}
        if path == "/api":
            versions = {"kind": "APIVersions", "versions": ["v1"]}
            return cluster_kinds.aggregated(kinds, core=True) if aggregated else versions
        if path == "/apis":
            return cluster_kinds.aggregated(kinds, core=False) if aggregated else cluster_kinds.groups(kinds)
        if path == "/openapi/v3":
            return cluster_kinds.openapi_index(kinds)
        if found := re.match(r"^(/openapi/v3)?/(?:api/v1|apis/([^/]+)/([^/]+))$", path):
            document = cluster_kinds.openapi if found[1] else cluster_kinds.resources
            return document(kinds, found[2] or "", found[3] or "v1")
        return None

    def _object(self, path: str, query: dict[str, str], body: bytes) -> Object | str | None:
        found = PATH.match(path)
        kind = self.cluster.served(found["plural"], found["group"] or "", found["version"] or "v1") if found else None
        if not found or kind is None:
            raise Refused(404, "NotFound", f"the server could not find the requested resource ({path})")
        namespace, name, sub = found["namespace"], found["name"], found["sub"]
        if self.command == "GET" and name is None:
            if query.get("watch") in ("true", "1"):
                self._watch(kind, namespace, query)
                return None
            return self._list(kind, namespace, query)
        return self._one(kind, namespace or "", name, sub, query, body)

    def _one(
        self, kind: Kind, namespace: str, name: str | None, sub: str | None, query: dict[str, str], body: bytes
    ) -> Object | str:
        store, dry_run = self.cluster.store, query.get("dryRun") == "All"
        if self.command == "POST" and name is None:
            return self.cluster.create(kind, namespace, self._decode(body), dry_run=dry_run)
        if name is None or (sub is not None and sub not in ("status", "log")):
            raise Refused(405, "MethodNotAllowed", f"{self.command} {self.path} is not served here")
        if self.command == "GET" and sub == "log":
            store.get(kind, namespace, name)
            return self.cluster.logs.get((namespace, name), "")
        if self.command in ("GET", "HEAD"):
            return store.get(kind, namespace, name)
        if self.command == "DELETE":
            return store.delete(kind, namespace, name)
        if self.command == "PUT":
            new = self._decode(body)
        else:
            new = self._patched(kind, namespace, name, body)
            if new is None:
                return self.cluster.create(kind, namespace, self._decode(body), dry_run=dry_run)
        if sub == "status":
            return store.set_status(kind, namespace, name, new.get("status", {}))
        return store.replace(kind, namespace, name, new, dry_run=dry_run)

    def _patched(self, kind: Kind, namespace: str, name: str, body: bytes) -> Object | None:
        """The object after a PATCH; None where a server-side apply creates it."""
        content_type = self.headers.get("Content-Type", "")
        if content_type.startswith("application/apply-patch"):
            # Helm is the only manager of what it applies, so what it no longer sends is gone.
            try:
                self.cluster.store.get(kind, namespace, name)
            except Refused:
                return None
            return self._decode(body)
        if content_type.startswith("application/merge-patch+json"):
            old = self.cluster.store.get(kind, namespace, name)
            return merged(old, json.loads(body))
        raise Refused(415, "UnsupportedMediaType", f"PATCH with {content_type}: only server-side apply and merge patch")

    def _decode(self, body: bytes) -> Object:
        content_type = self.headers.get("Content-Type", "")
        if "json" in content_type:
            return json.loads(body)
        if "yaml" in content_type:
            return yaml.load(body, Loader=yaml.CSafeLoader)
        try:
            return cluster_protobuf.secret(body)
        except ValueError as error:
            raise Refused(
                415, "UnsupportedMediaType", f"{self.command} {self.path}, {content_type}: {error}"
            ) from error

    def _fits(self, obj: Object, namespace: str | None, query: dict[str, str]) -> bool:
        meta = obj["metadata"]
        fields = {"metadata.name": meta["name"], "metadata.namespace": meta.get("namespace", "")}
        return (
            namespace in (None, meta.get("namespace"))
            and matches(meta.get("labels", {}), query.get("labelSelector", ""))
            and matches(fields, query.get("fieldSelector", ""))
        )

    def _list(self, kind: Kind, namespace: str | None, query: dict[str, str]) -> Object:
        items = [obj for obj in self.cluster.store.list(kind) if self._fits(obj, namespace, query)]
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": self.cluster.store.version},
            "items": items,
        }

    def _watch(self, kind: Kind, namespace: str | None, query: dict[str, str]) -> None:
        """Streams one JSON line per change until the client or the cluster goes away."""
        since = query.get("resourceVersion", "")
        initial = query.get("sendInitialEvents") == "true"
        store = self.cluster.store
        past, watch = store.watch(kind, None if initial or since in ("", "0") else int(since))
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in past:
                self._line(event, namespace, query)
            if initial:
                meta = {"resourceVersion": store.version, "annotations": {"k8s.io/initial-events-end": "true"}}
                mark = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta}
                self._chunk({"type": "BOOKMARK", "object": mark})
            while (event := watch.events.get()) is not None:
                self._line(event, namespace, query)
            self.wfile.write(b"0\r\n\r\n")
        finally:
            store.unwatch(watch)

    def _line(self, event: Event, namespace: str | None, query: dict[str, str]) -> None:
        if self._fits(event.object, namespace, query):
            self._chunk({"type": event.type, "object": event.object})

    def _chunk(self, line: Object) -> None:
        data = json.dumps(line).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
