"""A Kubernetes API server in memory: as much of one as Helm asks, and as a small kubelet needs.

It stores what it is sent and refuses what a real server refuses (unknown kinds, missing namespaces, second creations,
changes to immutable fields, Secrets over 1 MiB). It runs nothing: whoever wants pods to end sets their status.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

import yaml

from helm import cluster_kinds
from helm.cluster_http import Handler
from helm.cluster_kinds import OPTIONAL_GROUPS, Kind
from helm.cluster_store import Event, Object, Refused, Store


class Cluster:
    """`with Cluster(version="1.37.0") as cluster:`; `groups` are the optional CRD groups that are installed."""

    def __init__(self, version: str = "1.37.0", groups: tuple[str, ...] = OPTIONAL_GROUPS) -> None:
        self.version = version
        self.kinds = cluster_kinds.served(version, groups)
        self.store = Store()
        self.logs: dict[tuple[str, str], str] = {}
        """What `GET pods/<name>/log` answers, by namespace and name."""
        self.hold_pods = 0.0
        """For how many seconds the creation of a pod is answered only once the pod has ended."""
        self.unrecorded: Object | None = None
        """The Secret that would have recorded a release, where this cluster doesn't let Helm (`records` False)."""
        self.records = True
        self._paths = {(kind.plural, kind.group, kind.version): kind for kind in self.kinds}
        for name in ("default", "kube-system"):
            self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        handler = type("ClusterHandler", (Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Cluster:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def kubeconfig(self) -> str:
        """A kubeconfig, as YAML."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "memory", "cluster": {"server": self.url}}],
                "users": [{"name": "memory", "user": {}}],
                "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "memory"}}],
                "current-context": "memory",
            },
            sort_keys=False,
        )

    def served(self, plural: str, group: str, version: str) -> Kind | None:
        """The kind behind a path, or None."""
        return self._paths.get((plural, group, version))

    def kind(self, obj: Object) -> Kind:
        """The kind of an object; an error where this cluster doesn't serve it."""
        for kind in self.kinds:
            if (kind.api_version, kind.kind) == (obj.get("apiVersion"), obj.get("kind")):
                return kind
        raise KeyError(f"this cluster serves no {obj.get('apiVersion')} {obj.get('kind')}")

    def objects(self, kind: str | None = None, namespace: str | None = None) -> list[Object]:
        """Copies of what is stored, by kind (`"Pod"`) and namespace."""
        return [obj for obj in self.store.list(None, namespace) if kind in (None, obj["kind"])]

    def put(self, obj: Object) -> Object:
        """Creates an object, or replaces the one of its name."""
        kind = self.kind(obj)
        meta = obj["metadata"]
        namespace = meta.get("namespace", "default") if kind.namespaced else ""
        if any(o["metadata"]["name"] == meta["name"] for o in self.store.list(kind, namespace)):
            return self.store.replace(kind, namespace, meta["name"], obj)
        return self.store.create(kind, namespace, obj)

    def update_status(self, obj: Object, status: Object) -> Object:
        """Replaces an object's status, as its controller or kubelet would."""
        meta = obj["metadata"]
        return self.store.set_status(self.kind(obj), meta.get("namespace", ""), meta["name"], status)

    def delete(self, obj: Object) -> None:
        """Removes an object."""
        meta = obj["metadata"]
        self.store.delete(self.kind(obj), meta.get("namespace", ""), meta["name"])

    def watch(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """Calls back for every object there is and every change from now on, in order, in a thread of its own.

        Returns what stops it. An exception in the callback ends the thread and is printed.
        """
        past, watch = self.store.watch(None, None)

        def follow() -> None:
            for event in past:
                callback(event)
            while (event := watch.events.get()) is not None:
                callback(event)

        threading.Thread(target=follow, daemon=True, name="cluster-watch").start()
        return lambda: self.store.unwatch(watch)

    def create(self, kind: Kind, namespace: str, obj: Object, *, dry_run: bool = False) -> Object:
        """What a client's request to create an object does."""
        if not self.records and obj.get("type") == "helm.sh/release.v1":
            self.unrecorded = obj
            raise Refused(403, "Forbidden", "this cluster records no releases")
        created = self.store.create(kind, namespace, obj, dry_run=dry_run)
        if kind.kind == "Pod" and not dry_run:
            self.hold(created)
        return created

    def hold(self, pod: Object) -> None:
        """Waits until a pod has ended or is gone, for at most `hold_pods` seconds."""
        end = time.monotonic() + self.hold_pods
        same = pod["metadata"]["uid"]
        while time.monotonic() < end:
            found = [o for o in self.objects("Pod", pod["metadata"]["namespace"]) if o["metadata"]["uid"] == same]
            if not found or found[0].get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            time.sleep(0.05)

    def reset(self) -> None:
        """Forgets every object but the namespaces."""
        self.store.clear(lambda obj: obj["kind"] == "Namespace")
        self.logs.clear()
