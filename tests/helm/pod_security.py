"""The rules of Kubernetes' Pod Security Standards, profile restricted (baseline is part of it): what a pod breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
PROFILES = {"RuntimeDefault", "Localhost"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
}
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"


def violations(pod: Object) -> Iterator[str]:
    """Of a pod's (or a template's) metadata and spec."""
    spec = pod["spec"]
    context = spec.get("securityContext") or {}
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is set"
    for name, value in (pod["metadata"].get("annotations") or {}).items():
        if name.startswith(APPARMOR_ANNOTATION) and not (value == "runtime/default" or value.startswith("localhost/")):
            yield f"AppArmor annotation {value}"
    for sysctl in context.get("sysctls") or []:
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    for volume in spec.get("volumes") or []:
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']} is a {', '.join(kinds - VOLUMES)}"
    yield from (f"pod: {problem}" for problem in _both(context))
    for field in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(field) or []:
            yield from (f"{container['name']}: {problem}" for problem in _container(container, context))


def _both(context: Object) -> Iterator[str]:
    """What pods and containers may set, and how."""
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "hostProcess"
    labels = context.get("seLinuxOptions") or {}
    if labels.get("type", "") not in SELINUX_TYPES or labels.get("user") or labels.get("role"):
        yield f"seLinuxOptions {labels}"
    if (context.get("appArmorProfile") or {"type": "RuntimeDefault"})["type"] not in PROFILES:
        yield "AppArmor is unconfined"
    if (context.get("seccompProfile") or {"type": "RuntimeDefault"})["type"] not in PROFILES:
        yield "seccomp is unconfined"
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot is false"
    if context.get("runAsUser") == 0:
        yield "runs as root"


def _container(container: Object, pod: Object) -> Iterator[str]:
    context = container.get("securityContext") or {}
    yield from _both(context)
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("procMount", "Default") != "Default":
        yield f"procMount {context['procMount']}"
    capabilities = context.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        yield "does not drop all capabilities"
    if more := set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
        yield f"adds {', '.join(sorted(more))}"
    if not (context.get("runAsNonRoot") or ("runAsNonRoot" not in context and pod.get("runAsNonRoot"))):
        yield "runAsNonRoot is not set"
    if not (context.get("seccompProfile") or pod.get("seccompProfile")):
        yield "seccompProfile is not set"
    for port in container.get("ports") or []:
        if port.get("hostPort"):
            yield f"hostPort {port['hostPort']}"
    lifecycle = container.get("lifecycle") or {}
    handlers = [container.get(probe) for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    for handler in [*handlers, lifecycle.get("postStart"), lifecycle.get("preStop")]:
        for kind in ("httpGet", "tcpSocket"):
            if ((handler or {}).get(kind) or {}).get("host"):
                yield f"a probe or hook asks {handler[kind]['host']}"
