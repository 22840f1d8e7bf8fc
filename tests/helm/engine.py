"""What a pod's spec says, as arguments of the docker command; nothing here decides anything.

A field of a pod that is neither translated nor known to mean nothing on one machine is refused, so that the kubelet of
the tests can't leave out what a chart begins to ask for.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from helm.cluster_store import Object

TRANSLATED = {
    "pod": {
        "containers", "enableServiceLinks", "hostname", "initContainers", "restartPolicy", "securityContext",
        "subdomain", "terminationGracePeriodSeconds", "volumes",
    },
    "container": {
        "args", "command", "env", "image", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe",
        "resources", "securityContext", "startupProbe", "volumeMounts",
    },
    "podSecurity": {"fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile"},
    "containerSecurity": {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"},
    "volume": {"emptyDir", "name", "persistentVolumeClaim", "projected"},
    "mount": {"mountPath", "name", "readOnly"},
    "probe": {"exec", "failureThreshold", "httpGet", "periodSeconds", "successThreshold", "timeoutSeconds"},
}  # fmt: skip
WITHOUT_MEANING_HERE = {
    "pod": {
        "affinity", "automountServiceAccountToken", "nodeSelector", "priorityClassName", "serviceAccountName",
        "tolerations", "topologySpreadConstraints",
    },
    "container": {"imagePullPolicy"},
}  # fmt: skip
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
API_SERVER = "10.96.0.1"


class DockerError(Exception):
    """A docker command failed."""


def docker(*arguments: str, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
    """`docker ...`: what it printed, errors among it."""
    done = subprocess.run(["docker", *arguments], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", timeout=timeout, check=False)  # fmt: skip
    if check and done.returncode:
        raise DockerError(f"docker {' '.join(arguments)}: {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout


def check_known(pod: Object) -> None:
    """Refuses a pod with a field that this kubelet would leave out."""
    spec = pod["spec"]
    _check("pod", spec)
    _check("podSecurity", spec.get("securityContext", {}))
    for volume in spec.get("volumes", []):
        _check("volume", volume)
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        _check("container", container)
        _check("containerSecurity", container.get("securityContext", {}))
        for mount in container.get("volumeMounts", []):
            _check("mount", mount)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            _check("probe", container.get(kind, {}))
    if spec.get("automountServiceAccountToken") is not False:
        raise NotImplementedError("a pod with a service account's token")


def _check(what: str, fields: Object) -> None:
    unknown = set(fields) - TRANSLATED[what] - WITHOUT_MEANING_HERE.get(what, set())
    if unknown:
        raise NotImplementedError(f"this kubelet doesn't know a {what}'s {sorted(unknown)}")


def quantity(value: Any) -> int:
    """A quantity of bytes: `6Gi`, `512Mi`, `1000`."""
    text = str(value)
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * UNITS.get(unit, 1))


def container_arguments(pod: Object, container: Object, mounts: dict[str, str], services: list[Object]) -> list[str]:
    """The arguments of `docker create` that come from the spec: options, image, command.

    `mounts`: the docker volume of each of the pod's volumes.
    """
    spec, security = pod["spec"], container.get("securityContext", {})
    pod_security = spec.get("securityContext", {})
    options = []
    if "runAsUser" in pod_security:
        options += ["--user", f"{pod_security['runAsUser']}:{pod_security.get('runAsGroup', 0)}"]
    if "fsGroup" in pod_security:
        options += ["--group-add", str(pod_security["fsGroup"])]
    if security.get("readOnlyRootFilesystem"):
        options += ["--read-only"]
    for capability in security.get("capabilities", {}).get("drop", []):
        options += ["--cap-drop", capability]
    for capability in security.get("capabilities", {}).get("add", []):
        options += ["--cap-add", capability]
    if security.get("allowPrivilegeEscalation") is False:
        options += ["--security-opt", "no-new-privileges"]
    limits = container.get("resources", {}).get("limits", {})
    if unknown := set(limits) - {"cpu", "memory"}:
        raise NotImplementedError(f"this kubelet has no {sorted(unknown)} to give")
    if "memory" in limits:
        # Without swap, as nodes are.
        memory = str(quantity(limits["memory"]))
        options += ["--memory", memory, "--memory-swap", memory]
    if "cpu" in limits:
        options += ["--cpus", str(limits["cpu"])]
    for name, value in environment(pod, container, services).items():
        options += ["--env", f"{name}={value}"]
    for mount in container.get("volumeMounts", []):
        # Kubernetes copies nothing from the image into a new volume.
        words = f"type=volume,src={mounts[mount['name']]},dst={mount['mountPath']},volume-nocopy"
        options += ["--mount", words + (",readonly" if mount.get("readOnly") else "")]
    command, args = container.get("command", []), container.get("args", [])
    if command:
        options += ["--entrypoint", command[0]]
    return [*options, container["image"], *command[1:], *args]


def environment(pod: Object, container: Object, services: list[Object]) -> dict[str, str]:
    """A container's variables beside its image's: Kubernetes' own, its Services', its spec's."""
    found = {"KUBERNETES_SERVICE_HOST": API_SERVER, "KUBERNETES_SERVICE_PORT": "443",
             "KUBERNETES_PORT": f"tcp://{API_SERVER}:443"}  # fmt: skip
    if pod["spec"].get("enableServiceLinks", True):
        for service in services:
            if service["spec"].get("clusterIP") != "None":
                name = service["metadata"]["name"].upper().replace("-", "_")
                port = str(service["spec"]["ports"][0]["port"])
                found |= {f"{name}_SERVICE_HOST": "10.96.0.2", f"{name}_SERVICE_PORT": port}
                found |= {f"{name}_PORT": f"tcp://10.96.0.2:{port}"}
    for variable in container.get("env", []):
        if set(variable) != {"name", "value"}:
            raise NotImplementedError(f"a variable from {sorted(variable)}")
        if not isinstance(variable["value"], str):
            raise TypeError(f"{variable['name']}: Kubernetes takes only strings")
        found[variable["name"]] = variable["value"]
    return found


# Run as root in a container that has the pod's volumes at /v/<name>: owner and mode as Kubernetes gives them, and files
# of Secrets, whose names are links into a directory that is changed at once.
PREPARE = """
import json, os, shutil, sys, tempfile
asked = json.load(sys.stdin)
group = asked["group"]
for name, volume in asked["volumes"].items():
    root = f"/v/{name}"
    found = os.stat(root)
    wanted = volume["mode"] | (0o2070 if group is not None and volume["owned"] else 0)
    if found.st_mode & wanted != wanted or found.st_gid != (group or 0):
        os.chown(root, -1, group or 0)
        os.chmod(root, found.st_mode & 0o7777 | wanted)
    if "files" not in volume:
        continue
    new = tempfile.mkdtemp(prefix="..", dir=root)
    os.chmod(new, 0o755)
    for file, (mode, text) in volume["files"].items():
        with open(f"{new}/{file}", "w") as out:
            out.write(text)
        os.chown(out.name, 0, group or 0)
        os.chmod(out.name, mode | (0o040 if group is not None else 0))
    old = os.path.realpath(f"{root}/..data")
    os.symlink(os.path.basename(new), f"{root}/..new")
    os.replace(f"{root}/..new", f"{root}/..data")
    if old != f"{root}/..data":
        shutil.rmtree(old)
    for file in os.listdir(root):
        if not file.startswith("..") and file not in volume["files"]:
            os.unlink(f"{root}/{file}")
    for file in volume["files"]:
        if not os.path.islink(f"{root}/{file}"):
            os.symlink(f"..data/{file}", f"{root}/{file}")
"""


def prepare_volumes(image: str, mounts: dict[str, str], volumes: dict[str, Any], group: int | None) -> None:
    """Gives volumes the owner, mode and files that Kubernetes gives them."""
    options = [w for n in volumes for w in ("--mount", f"type=volume,src={mounts[n]},dst=/v/{n},volume-nocopy")]
    asked = json.dumps({"group": group, "volumes": volumes})
    docker("run", "--rm", "-i", "--user", "0:0", "--network", "none", "--entrypoint", "python3", *options, image,
           "-c", PREPARE, stdin=asked)  # fmt: skip
