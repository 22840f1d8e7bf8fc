"""Pods inside objects, and the parts of a pod that tests look at."""

import re
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
NAME, INSTANCE, COMPONENT = (
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
)
ROLES = ("controller", "trainer", "inference")
QUANTITY = re.compile(r"^([0-9.]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")
FACTORS = {"": 1, "m": 1e-3} | {s: 1000.0**i for i, s in enumerate("kMGTPE", 1)}
FACTORS |= {f"{s}i": 1024.0**i for i, s in enumerate("KMGTPE", 1)}


def pod_template(obj: Object) -> Object | None:
    """The `metadata` and `spec` of the pod that an object is or makes. None if the object is no pod
    and makes none."""
    if obj["kind"] == "Pod":
        return {"metadata": obj["metadata"], "spec": obj["spec"]}
    workloads = ("Deployment", "StatefulSet", "DaemonSet", "Job")
    return obj["spec"]["template"] if obj["kind"] in workloads else None


def containers(pod: Object) -> list[Object]:
    """A pod's init containers and containers."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def quantity(value: str | float) -> float:
    """`2Gi`, `250m` or 4 as a number. ValueError for anything else."""
    if not (match := QUANTITY.match(str(value))):
        raise ValueError(f"{value!r} is not a quantity")
    return float(match[1]) * FACTORS[match[2] or ""]


def component(pod: Object) -> str:
    """The component that a pod's label names."""
    return pod["metadata"]["labels"][COMPONENT]


def pod_of(pods: list[Object], role: str) -> Object:
    """The only pod that has the container of `role`. Pods of Jobs do not count."""
    pods = [pod for pod in pods if component(pod) != "job"]
    (found,) = (p for p in pods if any(c["name"] == role for c in p["spec"]["containers"]))
    return found


def container_of(pods: list[Object], role: str) -> Object:
    """The container of the role `role`."""
    return next(c for c in pod_of(pods, role)["spec"]["containers"] if c["name"] == role)


def environment(container: Object) -> dict[str, str]:
    """Name → value of a container's environment variables. A variable whose value Kubernetes takes
    from the pod's name has the value `metadata.name`."""
    return {v["name"]: v.get("value", "metadata.name") for v in container.get("env", [])}


def volume(pod: Object, container: Object, path: str) -> Object:
    """The volume that a container mounts at a path."""
    (name,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == path)
    return next(v for v in pod["spec"]["volumes"] if v["name"] == name)


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects an object with these labels. The chart's selectors use the
    operator `In` only."""
    expressions = selector.get("matchExpressions", [])
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
