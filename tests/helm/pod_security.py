"""The rules of Kubernetes' Pod Security Standards, profile restricted, which includes baseline."""

from collections.abc import Callable, Iterator
from typing import Any

Object = dict[str, Any]
VOLUMES = {
    "name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
PROFILES = {"RuntimeDefault", "Localhost"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {"kernel.shm_rmid_forced"} | {f"net.ipv4.{name}" for name in (
    "ip_local_port_range", "ip_unprivileged_port_start", "tcp_syncookies", "ping_group_range",
    "ip_local_reserved_ports", "tcp_keepalive_time", "tcp_fin_timeout", "tcp_keepalive_intvl", "tcp_keepalive_probes",
    "tcp_rmem", "tcp_wmem",
)}  # fmt: skip
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle.postStart", "lifecycle.preStop")

Rules = dict[str, Callable[[Any], bool]]
"""Path of a field → whether a value is allowed. `*` stands for each item of a list. Absent fields are allowed."""


def _unset(value: Any) -> bool:
    return not value


CONTEXT: Rules = {
    "securityContext.windowsOptions.hostProcess": _unset,
    "securityContext.seLinuxOptions.type": SELINUX_TYPES.__contains__,
    "securityContext.seLinuxOptions.user": _unset,
    "securityContext.seLinuxOptions.role": _unset,
    "securityContext.appArmorProfile.type": PROFILES.__contains__,
    "securityContext.seccompProfile.type": PROFILES.__contains__,
    "securityContext.runAsNonRoot": lambda value: value is not False,
    "securityContext.runAsUser": lambda value: value != 0,
}
POD: Rules = CONTEXT | {
    **dict.fromkeys(("hostNetwork", "hostPID", "hostIPC"), _unset),
    "securityContext.sysctls.*.name": SYSCTLS.__contains__,
    "volumes.*": lambda volume: set(volume) <= VOLUMES,
}
CONTAINER: Rules = CONTEXT | {
    "securityContext.privileged": _unset,
    "securityContext.procMount": lambda value: value == "Default",
    "securityContext.capabilities.add.*": lambda value: value == "NET_BIND_SERVICE",
    "ports.*.hostPort": _unset,
    **{f"{probe}.{kind}.host": _unset for probe in PROBES for kind in ("httpGet", "tcpSocket")},
}


def violations(pod: Object) -> Iterator[str]:
    """The rules that a pod or a pod template (`metadata` and `spec`) violates."""
    for name, value in (pod["metadata"].get("annotations") or {}).items():
        if name.startswith(APPARMOR_ANNOTATION) and not (value == "runtime/default" or value.startswith("localhost/")):
            yield f"AppArmor annotation {value}"
    spec = pod["spec"]
    yield from (f"pod: {problem}" for problem in _broken(POD, spec))
    for field in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(field) or []:
            problems = (*_broken(CONTAINER, container), *_missing(container, spec.get("securityContext") or {}))
            yield from (f"{container['name']}: {problem}" for problem in problems)


def _broken(rules: Rules, node: Object) -> Iterator[str]:
    for path, allowed in rules.items():
        yield from (f"{path} is {value}" for value in _values(node, path.split(".")) if not allowed(value))


def _missing(container: Object, pod_context: Object) -> Iterator[str]:
    """The fields that a container must have, itself or from its pod."""
    context = container.get("securityContext") or {}
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in ((context.get("capabilities") or {}).get("drop") or []):
        yield "capabilities.drop lacks ALL"
    for field in ("runAsNonRoot", "seccompProfile"):
        if not (pod_context | context).get(field):
            yield f"{field} is not set"


def _values(node: Any, path: list[str]) -> Iterator[Any]:
    if not path:
        yield node
    elif path[0] == "*":
        for item in node:
            yield from _values(item, path[1:])
    elif node.get(path[0]) is not None:
        yield from _values(node[path[0]], path[1:])
