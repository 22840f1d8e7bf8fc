"""Pods inside objects, their security, and the checks of an API server on pods that no schema
contains."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Object = dict[str, Any]
QUANTITY = re.compile(r"^([0-9.]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")
FACTORS = {"": 1, "m": 1e-3} | {s: 1000.0**i for i, s in enumerate("kMGTPE", 1)}
FACTORS |= {f"{s}i": 1024.0**i for i, s in enumerate("KMGTPE", 1)}
PORT_NAME = re.compile(r"^(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$")


def pod_template(obj: Object) -> Object | None:
    """The `metadata` and `spec` of the pod that an object is or makes; None for other objects."""
    if obj["kind"] == "Pod":
        return {"metadata": obj["metadata"], "spec": obj["spec"]}
    workloads = ("Deployment", "StatefulSet", "DaemonSet", "Job")
    return obj["spec"]["template"] if obj["kind"] in workloads else None


def containers(template: Object) -> list[Object]:
    """A pod's init containers and containers."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def quantity(value: str | float) -> float:
    """`2Gi`, `250m` or 4 as a number. ValueError for anything else."""
    match = QUANTITY.match(str(value))
    if not match:
        raise ValueError(f"{value!r} is not a quantity")
    return float(match[1]) * FACTORS[match[2] or ""]


FIELDS = {
    "pod": {
        "affinity",
        "automountServiceAccountToken",
        "containers",
        "enableServiceLinks",
        "initContainers",
        "nodeSelector",
        "resourceClaims",
        "restartPolicy",
        "securityContext",
        "serviceAccountName",
        "terminationGracePeriodSeconds",
        "tolerations",
        "volumes",
    },
    "container": {
        "args",
        "command",
        "env",
        "image",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resources",
        "securityContext",
        "startupProbe",
        "volumeMounts",
    },
    "volume": {"emptyDir", "name", "persistentVolumeClaim", "projected"},
    "source": {"secret"},
    "mount": {"mountPath", "name", "readOnly"},
    "port": {"containerPort", "name"},
    "probe": {"exec", "failureThreshold", "httpGet", "periodSeconds", "timeoutSeconds"},
}
"""What pods may have. Host namespaces and ports, host paths, sysctls and the like are other
fields."""
POD_CONTEXT = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
USER = {"runAsUser": 2000, "runAsGroup": 0, "fsGroup": 0}
CONTAINER_CONTEXT = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def breaches(template: Object, *, assigned_user: bool = False) -> list[str]:
    """The fields of a pod that the profile forbids. `assigned_user`: the cluster chooses the user
    and the group."""
    spec, found = template["spec"], []

    def check(kind: str, node: Object) -> None:
        found.extend(f"{kind}: {field}" for field in set(node) - FIELDS[kind])

    check("pod", spec)
    context = {
        key: value for key, value in spec["securityContext"].items() if key != "fsGroupChangePolicy"
    }
    if context != POD_CONTEXT | ({} if assigned_user else USER):
        found.append(f"pod: {context}")
    found += [
        f"pod: {name}"
        for name in ("automountServiceAccountToken", "enableServiceLinks")
        if spec[name]
    ]
    for volume in spec["volumes"]:
        check("volume", volume)
        for source in volume.get("projected", {}).get("sources", []):
            check("source", source)
    for container in containers(template):
        check("container", container)
        if container["securityContext"] != CONTAINER_CONTEXT:
            found.append(f"{container['name']}: {container['securityContext']}")
        for kind, nodes in (
            ("mount", container["volumeMounts"]),
            ("port", container.get("ports", [])),
        ):
            for node in nodes:
                check(kind, node)
        for probe in (
            container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")
        ):
            check("probe", probe)
            found += [f"probe: {probe}"] if set(probe.get("httpGet", {})) - {"path", "port"} else []
    return found


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects an object with these labels. `In` is the only operator that
    the chart uses."""
    expressions = selector.get("matchExpressions", [])
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def problems(obj: Object) -> Iterator[str]:
    """The reasons for which an API server would refuse a pod although its object fits the
    schema."""
    template = pod_template(obj)
    if template is None:
        return
    spec, labels = template["spec"], template["metadata"].get("labels", {})
    wanted = obj["spec"].get("selector", {}).get("matchLabels", {})
    if not wanted.items() <= labels.items():
        yield f"spec.selector: {wanted} does not match the labels of the template"
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    claims = {claim["name"] for claim in spec.get("resourceClaims", [])}
    names = [container["name"] for container in containers(template)]
    yield from (
        f"several containers are named {name}"
        for name in sorted(set(names))
        if names.count(name) > 1
    )
    for container in containers(template):
        yield from (
            f"container {container['name']}: {text}"
            for text in _container(container, volumes, claims)
        )


def _container(container: Object, volumes: set[str], claims: set[str]) -> Iterator[str]:
    resources = container.get("resources", {})
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"there is no volume {mount['name']} to mount"
    for port in container.get("ports", []):
        if not PORT_NAME.match(port.get("name", "a")):
            yield f"{port['name']!r} is not a valid name of a port"
    for claim in resources.get("claims", []):
        if claim["name"] not in claims:
            yield f"the pod has no resource claim {claim['name']}"
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, value in {**requests, **limits}.items():
        try:
            request, limit = quantity(requests.get(name, value)), quantity(limits.get(name, value))
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        if request > limit:
            yield f"{name}: request {requests[name]} is above the limit {limits[name]}"
        if "/" in name and (name not in limits or request != limit or request % 1):
            yield f"{name}: an extended resource's request and limit are one whole number"
