"""The objects of a pretended cluster: create, replace, apply, delete, watch, with an API server's own refusals."""

from __future__ import annotations

import copy
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from helm.cluster_kinds import Kind

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural and group, namespace, name."""

SECRET_LIMIT = 1024 * 1024
MUTABLE_SPEC = {
    "StatefulSet": {
        "replicas",
        "template",
        "updateStrategy",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
        "ordinals",
        "revisionHistoryLimit",
    },
    "PersistentVolumeClaim": {"resources", "volumeName", "volumeAttributesClassName"},
    "Pod": {"activeDeadlineSeconds", "tolerations", "nodeName", "schedulingGates"},
    "Job": {
        "parallelism",
        "completions",
        "suspend",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    },
}
"""What may change in these kinds' spec; anything else is refused, as a real server does."""
IMMUTABLE_SPEC = {"Deployment": {"selector"}, "DaemonSet": {"selector"}}


class Refused(Exception):
    """An answer of the API server that isn't success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        """The `Status` object a client is sent."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "reason": self.reason,
            "code": self.code,
            "message": str(self),
        }


@dataclass(frozen=True)
class Event:
    """One line of a watch."""

    type: str
    object: Object
    version: int


@dataclass
class Watch:
    """Somebody who is told of every change to one kind (or to all)."""

    kind: Kind | None
    events: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)


class Store:
    """Thread-safe. Objects go in and come out as copies."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[tuple[Kind, str, str], Object] = {}
        self._version = 1
        self._recent: deque[tuple[Kind, Event]] = deque(maxlen=1000)
        self._watches: list[Watch] = []

    @property
    def version(self) -> str:
        return str(self._version)

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """One object, or `Refused` 404."""
        with self._lock:
            found = self._objects.get((kind, namespace, name))
            if found is None:
                raise Refused(404, "NotFound", f'{_resource(kind)} "{name}" not found')
            return copy.deepcopy(found)

    def list(self, kind: Kind | None = None, namespace: str | None = None) -> list[Object]:
        """All objects of a kind (None: of every kind) in a namespace (None: in all)."""
        with self._lock:
            return [
                copy.deepcopy(found)
                for (k, ns, _), found in self._objects.items()
                if kind in (None, k) and namespace in (None, ns)
            ]

    def create(self, kind: Kind, namespace: str, obj: Object, *, dry_run: bool = False) -> Object:
        """Stores a new object; refuses one that exists, and a namespace that doesn't."""
        with self._lock:
            obj = copy.deepcopy(obj)
            meta = obj.setdefault("metadata", {})
            if "name" not in meta and "generateName" in meta:
                meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
            name = meta.get("name")
            if not name:
                raise Refused(422, "Invalid", f"{kind.kind}: metadata.name: Required value")
            if kind.namespaced:
                if meta.setdefault("namespace", namespace) != namespace:
                    raise Refused(400, "BadRequest", f"namespace of {name} is not the namespace of the request")
                if not any(k.kind == "Namespace" and n == namespace for k, _, n in self._objects):
                    raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
            if (kind, namespace, name) in self._objects:
                raise Refused(409, "AlreadyExists", f'{_resource(kind)} "{name}" already exists')
            _check_size(kind, obj)
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), "generation": 1}
            obj |= {"apiVersion": kind.api_version, "kind": kind.kind}
            if kind.kind == "Pod":
                obj.setdefault("status", {"phase": "Pending"})
            if not dry_run:
                self._commit("ADDED", kind, namespace, name, obj)
            return copy.deepcopy(obj)

    def replace(self, kind: Kind, namespace: str, name: str, obj: Object, *, dry_run: bool = False) -> Object:
        """Puts a whole object in place of the one that is there; its status and identity stay."""
        with self._lock:
            old = self.get(kind, namespace, name)
            new = copy.deepcopy(obj)
            meta = new.setdefault("metadata", {})
            asked = meta.get("resourceVersion")
            if asked and asked != old["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", f'{_resource(kind)} "{name}": the object has been modified')
            for key in ("uid", "creationTimestamp", "namespace", "name", "generation"):
                if key in old["metadata"]:
                    meta[key] = old["metadata"][key]
            if "status" in old:
                new["status"] = old["status"]
            new |= {"apiVersion": kind.api_version, "kind": kind.kind}
            _check_size(kind, new)
            _check_immutable(kind, name, old, new)
            if new.get("spec") != old.get("spec"):
                meta["generation"] += 1
            if not dry_run:
                self._commit("MODIFIED", kind, namespace, name, new)
            return copy.deepcopy(new)

    def set_status(self, kind: Kind, namespace: str, name: str, status: Object) -> Object:
        """What a controller or a kubelet posts."""
        with self._lock:
            obj = self.get(kind, namespace, name)
            obj["status"] = copy.deepcopy(status)
            self._commit("MODIFIED", kind, namespace, name, obj)
            return copy.deepcopy(obj)

    def delete(self, kind: Kind, namespace: str, name: str) -> Object:
        """Removes the object at once: no finalizers, no grace."""
        with self._lock:
            obj = self.get(kind, namespace, name)
            del self._objects[(kind, namespace, name)]
            self._tell("DELETED", kind, obj)
            return obj

    def clear(self, keep: Callable[[Object], bool]) -> None:
        """Forgets every object but those to keep, without telling anybody."""
        with self._lock:
            self._objects = {key: obj for key, obj in self._objects.items() if keep(obj)}
            self._recent.clear()

    def watch(self, kind: Kind | None, since: int | None) -> tuple[Sequence[Event], Watch]:
        """What there is now (`since` None) or what happened after a version, and a queue of what happens next."""
        with self._lock:
            if since is None:
                past = [Event("ADDED", obj, int(obj["metadata"]["resourceVersion"])) for obj in self.list(kind)]
            else:
                past = [event for k, event in self._recent if kind in (None, k) and event.version > since]
            watch = Watch(kind)
            self._watches.append(watch)
            return past, watch

    def unwatch(self, watch: Watch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
        watch.events.put(None)

    def close(self) -> None:
        """Ends every watch."""
        for watch in list(self._watches):
            self.unwatch(watch)

    def _commit(self, event: str, kind: Kind, namespace: str, name: str, obj: Object) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._objects[(kind, namespace, name)] = obj
        self._tell(event, kind, obj)

    def _tell(self, type_: str, kind: Kind, obj: Object) -> None:
        if type_ == "DELETED":
            self._version += 1
            obj["metadata"]["resourceVersion"] = str(self._version)
        event = Event(type_, copy.deepcopy(obj), self._version)
        self._recent.append((kind, event))
        for watch in self._watches:
            if watch.kind in (None, kind):
                watch.events.put(event)


def _resource(kind: Kind) -> str:
    return f"{kind.plural}.{kind.group}" if kind.group else kind.plural


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_size(kind: Kind, obj: Object) -> None:
    if kind.kind in ("Secret", "ConfigMap"):
        size = sum(len(value) for part in ("data", "stringData", "binaryData") for value in obj.get(part, {}).values())
        size = size * 3 // 4 if kind.kind == "Secret" else size
        if size > SECRET_LIMIT:
            name = obj["metadata"]["name"]
            raise Refused(422, "Invalid", f'{kind.kind} "{name}" is invalid: data: Too long: {size} > {SECRET_LIMIT}')


def _check_immutable(kind: Kind, name: str, old: Object, new: Object) -> None:
    before, after = old.get("spec", {}), new.get("spec", {})
    if kind.kind in MUTABLE_SPEC:
        frozen = (set(before) | set(after)) - MUTABLE_SPEC[kind.kind]
    else:
        frozen = IMMUTABLE_SPEC.get(kind.kind, set())
    changed = sorted(key for key in frozen if before.get(key) != after.get(key))
    if changed:
        where = ", ".join(f"spec.{key}" for key in changed)
        raise Refused(422, "Invalid", f'{kind.kind} "{name}" is invalid: {where}: field is immutable')
