"""One pod: its volumes and its network, its init containers one after another, its containers together, its end."""

from __future__ import annotations

import base64
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from helm import engine
from helm.cluster_store import Object
from helm.container_life import ContainerLife
from helm.engine import docker

if TYPE_CHECKING:
    from helm.kubelet import Kubelet


class PodLife:
    """A pod that runs, in threads of its own, until it ends or is stopped."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet = kubelet
        self.object = pod
        self.spec = pod["spec"]
        self.namespace, self.name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self.uid = pod["metadata"]["uid"]
        self.prefix = f"{kubelet.id}-{self.name}-{self.uid[:5]}"
        self.stopping = threading.Event()
        self.deadline = float("inf")
        self.address = ""
        self.phase = "Pending"
        self._status: Object | None = None
        self._posting = threading.RLock()
        self.inits = [ContainerLife(self, spec, init=True) for spec in self.spec.get("initContainers", [])]
        self.containers = [ContainerLife(self, spec) for spec in self.spec["containers"]]
        self._pause = ""
        self._own_volumes: list[str] = []
        self._mounts: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name=f"pod {self.name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def labels(self) -> dict[str, str]:
        return self.object["metadata"].get("labels", {})

    @property
    def claims(self) -> set[str]:
        """The docker volumes of the claims that it uses."""
        return set(self._mounts.values()) - set(self._own_volumes)

    def stop(self, grace: float | None = None) -> None:
        """Begins to end it, once."""
        if not self.stopping.is_set():
            seconds = self.spec.get("terminationGracePeriodSeconds", 30) if grace is None else grace
            self.deadline = time.monotonic() + seconds
            self.stopping.set()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    # ---------------------------------------------------------------- its life

    def _run(self) -> None:
        try:
            engine.check_known(self.object)
            self._live()
        except Exception as error:
            self.kubelet.note(self, "", "Broken", f"{type(error).__name__}: {error}")
            self.kubelet.errors.append(error)
            self.phase = "Failed"
        finally:
            self._clear()
            self.post()
            self.kubelet.changed.set()

    def _live(self) -> None:
        if not self._made_volumes():
            return
        self._make_network()
        for init in self.inits:
            if init.run() != 0:
                self.phase = "Pending" if self.stopping.is_set() else "Failed"
                return
        self.phase = "Running"
        codes: dict[str, int | None] = {}
        threads = [
            threading.Thread(target=self._run_container, args=(container, codes), daemon=True)
            for container in self.containers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.stopping.is_set():
            self.phase = "Succeeded" if set(codes.values()) == {0} else "Failed"

    def _run_container(self, container: ContainerLife, codes: dict[str, int | None]) -> None:
        try:
            codes[container.name] = container.run()
        except Exception as error:
            self.kubelet.note(self, container.name, "Broken", f"{type(error).__name__}: {error}")
            self.kubelet.errors.append(error)
            self.stop(0)

    def _clear(self) -> None:
        for container in (*self.inits, *self.containers):
            if container.id:
                docker("rm", "-f", container.id, check=False)
        if self._pause:
            docker("rm", "-f", self._pause, check=False)
        if self._own_volumes:
            docker("volume", "rm", "-f", *self._own_volumes, check=False)
        self._mounts.clear()

    # ---------------------------------------------------------------- network and volumes

    def _make_network(self) -> None:
        # Those names that don't wait for the pod to be ready; the others are given by the kubelet's Services.
        aliases = [alias for service in self._services() if service["spec"].get("clusterIP") == "None"
                   for alias in self.kubelet.aliases(service)]  # fmt: skip
        words = [word for alias in aliases for word in ("--network-alias", alias)]
        hostname = self.spec.get("hostname", self.name)
        self._pause = docker(
            "run", "-d", "--name", f"{self.prefix}-pause", "--label", self.kubelet.label, "--hostname", hostname,
            "--network", self.kubelet.network, *words, "--user", "65535:65535", "--cap-drop", "ALL", "--read-only",
            "--entrypoint", "sleep", self.kubelet.helper, "infinity",
        ).splitlines()[-1]  # fmt: skip
        networks = json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", self._pause))
        self.address = networks[self.kubelet.network]["IPAddress"]
        self.post()

    def _services(self) -> list[Object]:
        return [s for s in self.kubelet.objects("Service", self.namespace) if selects(s["spec"].get("selector"), self)]

    def arguments(self, container: Object) -> list[str]:
        """What `docker create` is given for a container."""
        services = self.kubelet.objects("Service", self.namespace)
        own = engine.container_arguments(self.object, container, self._mounts, services)
        return ["--label", self.kubelet.label, "--network", f"container:{self._pause}", *own]

    def _made_volumes(self) -> bool:
        """Makes them, waiting for what they need; False if the pod was to go meanwhile."""
        said = ""
        while not self.stopping.is_set():
            try:
                contents = {v["name"]: self._secret_files(v["projected"])
                            for v in self.spec.get("volumes", []) if "projected" in v}  # fmt: skip
                claims = {v["name"]: self.kubelet.claim(self.namespace, v["persistentVolumeClaim"]["claimName"])
                          for v in self.spec.get("volumes", []) if "persistentVolumeClaim" in v}  # fmt: skip
            except LookupError as error:
                if str(error) != said:
                    said = str(error)
                    self.kubelet.note(self, "", "FailedMount", said)
                    self.post()
                self.stopping.wait(0.5)
                continue
            self._make_volumes(contents, claims)
            return True
        return False

    def _make_volumes(self, contents: dict[str, dict[str, Any]], claims: dict[str, str]) -> None:
        wanted: dict[str, dict[str, Any]] = {}
        group = self.spec.get("securityContext", {}).get("fsGroup")
        for volume in self.spec.get("volumes", []):
            name = volume["name"]
            if name in claims:
                self._mounts[name] = claims[name]
                wanted[name] = {"mode": 0o755, "owned": True}
                continue
            options = []
            empty = volume.get("emptyDir", {})
            if empty.get("medium") == "Memory":
                size = engine.quantity(empty["sizeLimit"])
                kind = f"o=size={size},mode=2777,gid={group or 0}"
                options = ["--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", kind]
            elif "emptyDir" in volume:
                wanted[name] = {"mode": 0o777, "owned": True}
            else:
                wanted[name] = {"mode": 0o755, "owned": False, "files": contents[name]}
            docker("volume", "create", "--label", self.kubelet.label, *options, f"{self.prefix}-{name}")
            self._mounts[name] = f"{self.prefix}-{name}"
            self._own_volumes.append(self._mounts[name])
        engine.prepare_volumes(self.kubelet.helper, self._mounts, wanted, group)

    def refresh_secrets(self) -> None:
        """Files of Secrets follow them."""
        group = self.spec.get("securityContext", {}).get("fsGroup")
        wanted: dict[str, dict[str, Any]] = {}
        for volume in self.spec.get("volumes", []):
            if "projected" in volume:
                try:
                    files = self._secret_files(volume["projected"])
                except LookupError:
                    continue
                wanted[volume["name"]] = {"mode": 0o755, "owned": False, "files": files}
        engine.prepare_volumes(self.kubelet.helper, self._mounts, wanted, group)

    def _secret_files(self, projected: Object) -> dict[str, tuple[int, str]]:
        """Mode and text of each file; LookupError where a Secret or a key is missing that may not be."""
        files = {}
        secrets = {s["metadata"]["name"]: s for s in self.kubelet.objects("Secret", self.namespace)}
        for source in projected["sources"]:
            if set(source) != {"secret"}:
                raise NotImplementedError(f"projected {sorted(source)}")
            asked = source["secret"]
            found = secrets.get(asked["name"])
            if found is None:
                if asked.get("optional"):
                    continue
                raise LookupError(f'secret "{asked["name"]}" not found')
            texts = {key: base64.b64decode(value).decode() for key, value in found.get("data", {}).items()}
            texts |= found.get("stringData", {})
            for item in asked["items"]:
                if item["key"] in texts:
                    mode = item.get("mode", projected.get("defaultMode", 0o644))
                    files[item["path"]] = (mode, texts[item["key"]])
                elif not asked.get("optional"):
                    raise LookupError(f"references non-existent secret key: {item['key']}")
        return files

    # ---------------------------------------------------------------- its status

    @property
    def ready(self) -> bool:
        return self.phase == "Running" and all(container.ready for container in self.containers)

    def post(self) -> None:
        """Its status to the cluster, where it changed and the pod is still known there."""
        with self._posting:
            initialized = self.phase not in ("Pending",)
            conditions = {"PodScheduled": True, "Initialized": initialized, "ContainersReady": self.ready,
                          "Ready": self.ready}  # fmt: skip
            status = {
                "phase": self.phase,
                "podIP": self.address,
                "conditions": [{"type": k, "status": str(v)} for k, v in conditions.items()],
                "initContainerStatuses": [_container_status(c) for c in self.inits],
                "containerStatuses": [_container_status(c) for c in self.containers],
            }
            if status != self._status:
                self._status = status
                self.kubelet.post(self.object, status)


def _container_status(container: ContainerLife) -> Object:
    return {
        "name": container.name,
        "image": container.spec["image"],
        "ready": container.ready or (container.init and container.state.get("terminated", {}).get("exitCode") == 0),
        "started": container.started,
        "restartCount": container.restarts,
        "state": dict(container.state),
    }


def selects(selector: dict[str, str] | None, pod: PodLife) -> bool:
    """Whether a selector of labels means this pod."""
    return bool(selector) and all(pod.labels.get(key) == value for key, value in selector.items())
