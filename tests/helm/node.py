"""Runs the pods that the chart renders on a Docker engine, as their specs say.

User, groups, capabilities, read-only file systems, limits, variables, volumes, Secrets, init containers, probes,
preStop hooks and grace periods are real. There are no controllers, restarts, scheduling, NetworkPolicies and GPUs. A
field that is neither translated nor listed as meaningless on one machine is an error.
"""

import json
import secrets
import subprocess
import time
from typing import Self

import httpx

from compose_stack import docker
from helm.kubernetes_api import Object
from helm.pods import containers, quantity
from helm.reachability import selects

TRANSLATED = {
    "pod": {
        "containers", "enableServiceLinks", "hostname", "initContainers", "restartPolicy", "securityContext",
        "terminationGracePeriodSeconds", "volumes",
    },
    "container": {
        "args", "command", "env", "image", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe",
        "resources", "securityContext", "startupProbe", "volumeMounts",
    },
    "podSecurity": {"fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile"},
    "containerSecurity": {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"},
    "volume": {"emptyDir", "name", "persistentVolumeClaim", "projected"},
    "mount": {"mountPath", "name", "readOnly"},
    "limit": {"cpu", "memory"},
    "probe": {"exec", "failureThreshold", "httpGet", "periodSeconds", "successThreshold", "timeoutSeconds"},
}  # fmt: skip
WITHOUT_MEANING_HERE = {
    "pod": {
        "affinity", "automountServiceAccountToken", "nodeSelector", "priorityClassName", "serviceAccountName",
        "tolerations", "topologySpreadConstraints",
    },
    "container": {"imagePullPolicy"},
}  # fmt: skip


class Node:
    """A Docker network for pods. Leaving the context removes it with its containers and volumes.

    `secret_values`: name of a Secret → key → text. `helper`: an image with python3.
    """

    def __init__(self, services: list[Object], secret_values: dict[str, dict[str, str]], *, helper: str) -> None:
        self.services, self.secret_values, self.helper = services, secret_values, helper
        self.id = f"tandem-node-{secrets.token_hex(3)}"
        self.label = f"tandem.node={self.id}"

    def __enter__(self) -> Self:
        docker("network", "create", "--label", self.label, self.id)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, remove in (("container", "rm -f"), ("volume", "volume rm -f"), ("network", "network rm")):
            if left := self.left(kind):
                docker(*remove.split(), *left, check=kind != "volume")

    def left(self, kind: str) -> list[str]:
        """The ids of this node's objects on the engine; `kind`: container, volume or network."""
        all_of_them = ["-a"] if kind == "container" else []
        return docker(kind, "ls", "-q", *all_of_them, "--filter", f"label={self.label}").stdout.split()

    def volume(self, name: str, *options: str) -> str:
        """The Docker volume that has this name on this node."""
        docker("volume", "create", "--label", self.label, *options, f"{self.id}-{name}")
        return f"{self.id}-{name}"


class RunningPod:
    """A pod on a node: its init containers have ended, its containers are started."""

    def __init__(self, node: Node, name: str, template: Object) -> None:
        self.node, self.name, self.spec = node, name, template["spec"]
        self.containers: dict[str, str] = {}
        """Name → Docker id, including init containers."""
        self._mounts: dict[str, str] = {}
        """Name of a volume → name of the Docker volume."""
        _check_known(self.spec)
        self._make_volumes()
        aliases = [
            f"--network-alias={service['metadata']['name']}.{service['metadata']['namespace']}.svc"
            for service in node.services
            if selects({"matchLabels": service["spec"]["selector"]}, template["metadata"]["labels"])
        ]
        self._network = docker(
            "run", "-d", "--label", node.label, "--hostname", self.spec.get("hostname", name), "--network", node.id,
            *aliases, "--user", "65535:65535", "--entrypoint", "sleep", node.helper, "infinity",
        ).stdout.strip()  # fmt: skip
        networks = json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", self._network).stdout)
        self.address = networks[node.id]["IPAddress"]
        for init in self.spec.get("initContainers", []):
            self._start_container(init)
            assert self.wait_end(init["name"], 120) == 0, f"{self.name}: {init['name']}\n{self.log(init['name'])}"
        for container in self.spec["containers"]:
            self._start_container(container)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the startup and the readiness probe of every container succeed."""
        end = time.monotonic() + timeout
        for container in self.spec["containers"]:
            for kind in ("startupProbe", "readinessProbe"):
                while wrong := self.probe(container, kind):
                    state = docker("inspect", "-f", "{{.State.Running}}", self.containers[container["name"]])
                    assert state.stdout.strip() == "true", f"{self.name} ended\n{self.log(container['name'])}"
                    assert time.monotonic() < end, f"{self.name}: {wrong}\n{self.log(container['name'])}"
                    time.sleep(2)  # a probe starts Python in the container, which needs its share of the CPU to start

    def probe(self, container: Object, kind: str) -> str | None:
        """Why a probe fails; None if it succeeds or the container has none of this kind."""
        if (probe := container.get(kind)) is None:
            return None
        timeout = probe.get("timeoutSeconds", 1)
        if get := probe.get("httpGet"):
            port = {p["name"]: p["containerPort"] for p in container["ports"]}.get(get["port"], get["port"])
            url = f"http://{self.address}:{port}{get['path']}"
            try:
                status = httpx.get(url, timeout=timeout, trust_env=False).status_code
            except httpx.TransportError as error:
                return f"{url}: {error}"
            return None if 200 <= status < 400 else f"{url} answers {status}"
        command = ["docker", "exec", self.containers[container["name"]], *probe["exec"]["command"]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + 5, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout} s"
        return None if done.returncode == 0 else f"exit {done.returncode}: {done.stdout}{done.stderr}"

    def exec(self, *command: str, check: bool = True) -> str:
        """The output and errors of a command in the pod's first container."""
        done = docker("exec", self.containers[self.spec["containers"][0]["name"]], *command, check=check)
        return done.stdout + done.stderr

    def log(self, container: str) -> str:
        done = docker("logs", "--tail", "100", self.containers[container])
        return done.stdout + done.stderr

    def wait_end(self, container: str, timeout: float) -> int:
        """The exit status of a container that ends by itself."""
        return int(docker("wait", self.containers[container], timeout=timeout).stdout)

    def stop(self) -> int:
        """Run preStop, SIGTERM and, after the grace period, SIGKILL; the exit status of the pod's only container."""
        (container,) = self.spec["containers"]
        end = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        if hook := container.get("lifecycle", {}).get("preStop"):
            self.exec(*hook["exec"]["command"])
        left = round(end - time.monotonic())
        docker("stop", "--time", str(left), self.containers[container["name"]], timeout=left + 30)
        return self.wait_end(container["name"], 30)

    def _start_container(self, container: Object) -> None:
        name = f"{self.node.id}-{self.name}-{container['name']}"
        arguments = ["--label", self.node.label, "--network", f"container:{self._network}", *self._options(container)]
        self.containers[container["name"]] = docker("create", "--name", name, *arguments).stdout.strip()
        docker("start", name)

    def _options(self, container: Object) -> list[str]:
        """The arguments of `docker create`: options, image, command."""
        security, pod_security = container.get("securityContext", {}), self.spec.get("securityContext", {})
        options = []
        if "runAsUser" in pod_security:
            options += ["--user", f"{pod_security['runAsUser']}:{pod_security.get('runAsGroup', 0)}"]
        if "fsGroup" in pod_security:
            options += ["--group-add", str(pod_security["fsGroup"])]
        if security.get("readOnlyRootFilesystem"):
            options += ["--read-only"]
        for change, names in security.get("capabilities", {}).items():
            options += [f"--cap-{change}={name}" for name in names]
        if security.get("allowPrivilegeEscalation") is False:
            options += ["--security-opt", "no-new-privileges"]
        limits = container.get("resources", {}).get("limits", {})
        if "memory" in limits:
            size = int(quantity(limits["memory"]))
            options += [f"--memory={size}", f"--memory-swap={size}"]
        if "cpu" in limits:
            options += ["--cpus", str(limits["cpu"])]
        for variable in container.get("env", []):
            assert set(variable) == {"name", "value"}, f"a variable from {sorted(variable)}"
            options += ["--env", f"{variable['name']}={variable['value']}"]
        for mount in container.get("volumeMounts", []):
            # Kubernetes copies nothing from the image into a new volume.
            words = f"type=volume,src={self._mounts[mount['name']]},dst={mount['mountPath']},volume-nocopy"
            options += ["--mount", words + (",readonly" if mount.get("readOnly") else "")]
        command, args = container.get("command", []), container.get("args", [])
        if command:
            options += ["--entrypoint", command[0]]
        return [*options, container["image"], *command[1:], *args]

    def _make_volumes(self) -> None:
        group = self.spec.get("securityContext", {}).get("fsGroup")
        wanted: dict[str, Object] = {}
        for volume in self.spec.get("volumes", []):
            name, options = volume["name"], []
            if claim := volume.get("persistentVolumeClaim"):
                self._mounts[name] = self.node.volume(claim["claimName"])
                wanted[name] = {"mode": 0o755, "owned": True}
                continue
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = int(quantity(volume["emptyDir"]["sizeLimit"]))
                options = ["--opt", "type=tmpfs", "--opt", "device=tmpfs",
                           "--opt", f"o=size={size},mode=2777,gid={group or 0}"]  # fmt: skip
            elif "emptyDir" in volume:
                wanted[name] = {"mode": 0o777, "owned": True}
            else:
                wanted[name] = {"mode": 0o755, "owned": False, "files": self._secret_files(volume["projected"])}
            self._mounts[name] = self.node.volume(f"{self.name}-{name}", *options)
        mounts = [w for n in wanted for w in ("--mount", f"type=volume,src={self._mounts[n]},dst=/v/{n},volume-nocopy")]
        docker("run", "--rm", "-i", "--user", "0:0", "--network", "none", "--entrypoint", "python3", *mounts,
               self.node.helper, "-c", PREPARE, stdin=json.dumps({"group": group, "volumes": wanted}))  # fmt: skip

    def _secret_files(self, projected: Object) -> dict[str, tuple[int, str]]:
        """File → mode and text. AssertionError for a missing key of a Secret that is not optional."""
        files = {}
        for source in projected["sources"]:
            secret = source["secret"]
            values = self.node.secret_values.get(secret["name"], {})
            for item in secret["items"]:
                assert item["key"] in values or secret.get("optional"), f"no key {item['key']} in {secret['name']}"
                if item["key"] in values:
                    files[item["path"]] = (item.get("mode", projected["defaultMode"]), values[item["key"]])
        return files


def _check_known(spec: Object) -> None:
    """AssertionError for a field that is not translated."""
    _check("pod", spec)
    _check("podSecurity", spec.get("securityContext", {}))
    assert spec["automountServiceAccountToken"] is False
    for volume in spec.get("volumes", []):
        _check("volume", volume)
    for container in containers({"spec": spec}):
        _check("container", container)
        _check("containerSecurity", container.get("securityContext", {}))
        _check("limit", container.get("resources", {}).get("limits", {}))
        for mount in container.get("volumeMounts", []):
            _check("mount", mount)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            _check("probe", container.get(kind, {}))


def _check(kind: str, fields: Object) -> None:
    unknown = set(fields) - TRANSLATED[kind] - WITHOUT_MEANING_HERE.get(kind, set())
    assert not unknown, f"{kind}: {sorted(unknown)} not translated"


# Runs as root with the pod's volumes at /v/<name>. Sets the owners and modes that Kubernetes sets, and writes the files
# of Secrets.
PREPARE = """
import json, os, sys
pod = json.load(sys.stdin)
group = pod["group"]
for name, volume in pod["volumes"].items():
    root = f"/v/{name}"
    mode = volume["mode"] | (0o2070 if group is not None and volume["owned"] else 0)
    os.chown(root, -1, group or 0)
    os.chmod(root, os.stat(root).st_mode & 0o7777 | mode)
    for file, (mode, text) in volume.get("files", {}).items():
        with open(f"{root}/{file}", "w") as out:
            out.write(text)
        os.chown(out.name, 0, group or 0)
        os.chmod(out.name, mode | (0o040 if group is not None else 0))
"""
