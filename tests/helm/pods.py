"""Pods inside objects, and the parts of a pod that tests look at."""

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
NAME, INSTANCE, COMPONENT = (
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
)
ROLES = ("controller", "trainer", "inference")


def pod_template(obj: Object) -> Object | None:
    """The pod (`metadata` and `spec`): the object itself, or the template from which the object
    makes pods. None if the object makes no pod."""
    return obj if obj["kind"] == "Pod" else obj.get("spec", {}).get("template")


def containers(pod: Object) -> list[Object]:
    """A pod's init containers and containers."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def component(pod: Object) -> str:
    """The component that a pod's label names."""
    return pod["metadata"]["labels"][COMPONENT]


def pod_of(pods: list[Object], role: str) -> Object:
    """The only pod that has the container of `role`. Pods of Jobs are left out."""
    pods = [pod for pod in pods if component(pod) != "job"]
    (found,) = (p for p in pods if any(c["name"] == role for c in p["spec"]["containers"]))
    return found


def container_of(pods: list[Object], role: str) -> Object:
    """The container of the role `role`."""
    return next(c for c in pod_of(pods, role)["spec"]["containers"] if c["name"] == role)


def environment(container: Object) -> dict[str, str]:
    """Maps the names of a container's environment variables to their values. A variable that gets
    the pod's name has the value `metadata.name` here."""
    return {v["name"]: v.get("value", "metadata.name") for v in container.get("env", [])}


def mounted(pod: Object, container: Object) -> dict[str, Object]:
    """Mount path → the volume that a container mounts there."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


def ports(pod: Object) -> dict[str, int]:
    """Maps the names of the ports of a pod's containers to the ports' numbers."""
    declared = [port for container in containers(pod) for port in container.get("ports", [])]
    return {port["name"]: port["containerPort"] for port in declared}


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects an object with these labels. The chart's selectors use the
    operator `In` only."""
    expressions = selector.get("matchExpressions", [])
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
