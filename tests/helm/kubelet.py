"""A node for the cluster in memory: runs the pods that Helm put there on a real Docker engine, faithfully to their
specs where it matters, and posts back how they are.

No init process, no environment of the caller's, no image content in volumes; probes are executed, restarts counted,
grace periods kept. Not done: scheduling, NetworkPolicies (one network for all), service-account tokens, GPUs. What a
spec asks for and this kubelet doesn't know is refused.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from helm import workloads
from helm.cluster import Cluster
from helm.cluster_store import Event, Object, Refused
from helm.engine import docker
from helm.pod_life import PodLife
from helm.services import ServiceProxy

WATCHED = ("Pod", "StatefulSet", "Deployment", "Service", "Secret", "PersistentVolumeClaim")


@dataclass(frozen=True)
class Note:
    """Something that happened to a pod, as in its events."""

    at: float
    pod: str
    container: str
    what: str
    detail: str = ""
    log: str = ""

    def __str__(self) -> str:
        return f"{self.at:7.1f} {self.pod}/{self.container or '-'} {self.what} {self.detail}"


class Kubelet:
    """`with Kubelet(cluster, helper="an image with python3") as node:`; nothing of it is left on the engine after that.

    `hurry`: how many times as often startup probes ask (for as long as they may); `backoff`: seconds before the first
    restart of a container, 10 in Kubernetes.
    """

    def __init__(self, cluster: Cluster, *, helper: str, hurry: float = 4.0, backoff: float = 1.0) -> None:
        self.cluster = cluster
        self.helper = helper
        self.hurry = hurry
        self.backoff = backoff
        self.id = f"tandem-kubelet-{secrets.token_hex(3)}"
        self.label = f"tandem.kubelet={self.id}"
        self.network = self.id
        self.notes: list[Note] = []
        self.errors: list[Exception] = []
        self.changed = threading.Event()
        self._begin = time.monotonic()
        self._seen: dict[tuple[str, str, str], Object] = {}
        self._lock = threading.RLock()
        self._pods: dict[tuple[str, str], PodLife] = {}
        self._proxies: dict[str, ServiceProxy] = {}
        self._claims: dict[tuple[str, str], str] = {}
        self._logs: dict[tuple[str, str], list[str]] = {}
        self.numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kubelet")

    def __enter__(self) -> Kubelet:
        docker("network", "create", "--label", self.label, self.network)
        self._unwatch = self.cluster.watch(self._hear)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._unwatch()
        self._closing.set()
        self.changed.set()
        self._thread.join(60)
        for pod in self._pods.values():
            pod.stop(2)
        for pod in self._pods.values():
            pod.join(60)
        for proxy in self._proxies.values():
            proxy.close()
        chosen = ["-q", "--filter", f"label={self.label}"]
        for kind, remove in (
            ("container", ["rm", "-f"]),
            ("volume", ["volume", "rm", "-f"]),
            ("network", ["network", "rm"]),
        ):
            listed = ["ls", "-a"] if kind == "container" else ["ls"]
            for found in docker(kind, *listed, *chosen).split():
                docker(*remove, found, check=False)

    # ---------------------------------------------------------------- what its parts ask

    def objects(self, kind: str, namespace: str | None = None) -> list[Object]:
        """What the cluster was last heard to have; not to be changed."""
        with self._lock:
            return [o for (k, ns, _), o in self._seen.items() if k == kind and namespace in (None, ns)]

    def aliases(self, service: Object) -> list[str]:
        """A Service's names; the shortest is known in its namespace only, of which there is one here."""
        short = service["metadata"]["name"]
        name = f"{short}.{service['metadata']['namespace']}"
        return [short, name, f"{name}.svc", f"{name}.svc.cluster.local"]

    def claim(self, namespace: str, name: str) -> str:
        """The docker volume of a claim; LookupError where there is no such claim."""
        if not any(o["metadata"]["name"] == name for o in self.objects("PersistentVolumeClaim", namespace)):
            raise LookupError(f'persistentvolumeclaim "{name}" not found')
        with self._lock:
            if (namespace, name) not in self._claims:
                volume = f"{self.id}-{namespace}-{name}"
                docker("volume", "create", "--label", self.label, volume)
                self._claims[namespace, name] = volume
            return self._claims[namespace, name]

    def runs(self, namespace: str, begins: str) -> bool:
        """Whether something of a pod with a name beginning so is still there."""
        return any(ns == namespace and name.startswith(begins) and pod.alive
                   for (ns, name), pod in list(self._pods.items()))  # fmt: skip

    def note(self, pod: PodLife, container: str, what: str, detail: str = "", log: str = "") -> None:
        self.notes.append(Note(time.monotonic() - self._begin, pod.name, container, what, detail, log))
        self.changed.set()

    def keep_log(self, pod: PodLife, container: str, log: str) -> None:
        """Keeps what a container printed, and shows it to the cluster's clients."""
        self._logs.setdefault((pod.name, container), []).append(log)
        self.cluster.logs[pod.namespace, pod.name] = log

    def post(self, obj: Object, status: Object) -> None:
        """A status, unless the object is gone or is another one by now."""
        meta = obj["metadata"]
        try:
            kind = self.cluster.kind(obj)
            if self.cluster.store.get(kind, meta["namespace"], meta["name"])["metadata"]["uid"] == meta["uid"]:
                self.cluster.update_status(obj, status)
        except Refused:
            return

    # ---------------------------------------------------------------- what tests ask

    def pod(self, begins: str) -> PodLife:
        """The pod that runs under a name beginning so."""
        found = [
            pod for key, pod in list(self._pods.items()) if key[1].startswith(begins) and not pod.stopping.is_set()
        ]
        assert len(found) == 1, f"{len(found)} pods are named {begins}*\n{self.tails()}"
        return found[0]

    def exec(self, pod: str, *command: str, check: bool = True, timeout: float = 60) -> str:
        """What a command printed in the first container of a pod."""
        return docker("exec", self.pod(pod).containers[0].id, *command, check=check, timeout=timeout)

    def log(self, pod: str, container: str) -> str:
        """What the last container of this name that ended has printed; pods of a name beginning so."""
        return next((logs[-1] for (p, c), logs in reversed(self._logs.items()) if p.startswith(pod) and c == container),
                    "")  # fmt: skip

    def noted(self, what: str, pod: str = "", container: str = "", since: int = 0) -> list[Note]:
        """What was noted, of some kind, after the first `since` notes."""
        return [n for n in self.notes[since:]
                if n.what == what and n.pod.startswith(pod) and container in ("", n.container)]  # fmt: skip

    def until[T](self, what: str, check: Callable[[], T], timeout: float) -> T:
        """The first true answer of `check`, asked whenever something changed."""
        deadline = time.monotonic() + timeout
        while not (answer := check()):
            assert not self.errors, f"{self.errors}\n{self.tails()}"
            assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}\n{self.tails()}"
            time.sleep(0.2)
        return answer

    def all_ready(self) -> bool:
        """Whether every workload's pod is of its last revision, where that is to be, and ready."""
        found = [w for kind in workloads.KINDS for w in self.objects(kind)]

        def done(workload: Object) -> bool:
            status = workload.get("status", {})
            rolls = workload["spec"].get("updateStrategy", {}).get("type") != "OnDelete"
            return (status.get("observedGeneration") == workload["metadata"]["generation"]
                    and status.get("readyReplicas") == 1 and status["replicas"] == 1
                    and (not rolls or status["updatedReplicas"] == 1))  # fmt: skip

        return bool(found) and all(map(done, found))

    def tails(self, characters: int = 2500) -> str:
        """What happened, and the end of what every container printed."""
        parts = ["\n".join(map(str, self.notes[-40:]))]
        for (of, name), logs in list(self._logs.items())[-6:]:
            parts.append(f"==== {of}/{name} (ended)\n{logs[-1][-characters:]}")
        for pod in list(self._pods.values()):
            for container in (*pod.inits, *pod.containers):
                if container.id:
                    log = docker("logs", container.id, check=False)
                    parts.append(f"==== {pod.name}/{container.name} {container.state}\n{log[-characters:]}")
        return "\n".join(parts)

    # ---------------------------------------------------------------- its loop

    def _hear(self, event: Event) -> None:
        obj = event.object
        if obj["kind"] in WATCHED:
            key = (obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
            with self._lock:
                if event.type == "DELETED":
                    self._seen.pop(key, None)
                else:
                    self._seen[key] = obj
            self.changed.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.changed.wait(0.5)
            self.changed.clear()
            try:
                self._step()
            except Refused as error:
                # Somebody else was quicker; what is to be done is looked at anew.
                if error.code not in (404, 409):
                    self.errors.append(error)
            except Exception as error:
                self.errors.append(error)
                raise

    def _step(self) -> None:
        pods = {(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in self.objects("Pod")}
        for key, running in list(self._pods.items()):
            if key not in pods or pods[key]["metadata"]["uid"] != running.uid:
                running.stop()
                if not running.alive:
                    del self._pods[key]
        for key, pod in pods.items():
            if key not in self._pods and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                self._pods[key] = PodLife(self, pod)
        workloads.reconcile(self)
        self._services()
        self._volumes()

    def _services(self) -> None:
        wanted = {o["metadata"]["uid"]: o for o in self.objects("Service") if o["spec"].get("clusterIP") != "None"}
        for uid in set(self._proxies) - set(wanted):
            self._proxies.pop(uid).close()
        for uid, service in wanted.items():
            if uid not in self._proxies:
                name = f"{self.id}-service-{service['metadata']['name']}"
                self._proxies[uid] = ServiceProxy(service, name, self.label, self.network, self.aliases(service),
                                                  self.helper)  # fmt: skip
            self._proxies[uid].service = service
            self._proxies[uid].update(list(self._pods.values()))

    def _volumes(self) -> None:
        claims = {(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in self.objects("PersistentVolumeClaim")}
        for claim in claims.values():
            if claim.get("status", {}).get("phase") != "Bound":
                self.post(claim, {"phase": "Bound"})
        used = {volume for pod in self._pods.values() for volume in pod.claims}
        for key, volume in list(self._claims.items()):
            # Not while a pod has it.
            if key not in claims and volume not in used:
                docker("volume", "rm", volume)
                del self._claims[key]
