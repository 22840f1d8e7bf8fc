"""Renders of named values, each made once, and the parts of a render that tests look at."""

import json
from functools import cache
from typing import Any

from helm import charts, matrix
from helm.charts import Object, Rendered, merged
from helm.matrix import COMPONENT, VALUES

NAMESPACE = "ns"
RELEASES = ("a", "b")
"""Two releases in one namespace."""


@cache
def _of(values: str, options: str) -> Rendered:
    return charts.render(json.loads(values), **json.loads(options))


def of(values: dict[str, Any], **options: Any) -> Rendered:
    """A render, made once for equal arguments."""
    return _of(
        json.dumps(values, sort_keys=True), json.dumps({"release": "a", **options}, sort_keys=True)
    )


def case(name: str, release: str = "a") -> Rendered:
    """The render of named values."""
    return of(VALUES[name], release=release)


def with_values(**values: Any) -> Rendered:
    """The render of the required values together with `values`."""
    return of(merged(matrix.BASE, values))


@cache
def value(name: str, path: str) -> Any:
    """A value in a case, or its default if the case does not set it."""
    node = merged(matrix.defaults(), VALUES[name])
    for part in path.split("."):
        node = node[part]
    return node


def is_shared(name: str) -> bool:
    return value(name, "gpuMode") == "shared"


def component_of(name: str, role: str) -> str:
    """The component whose pod has the role's container."""
    return "engine" if is_shared(name) and role != "controller" else role


def component(template: Object) -> str:
    """The component that a pod template's label names."""
    return template["metadata"]["labels"][COMPONENT]


def templates(rendered: Rendered) -> dict[str, Object]:
    """The pod template of each workload, by component."""
    return {
        component(template): template for obj, template in rendered.pods() if obj["kind"] != "Pod"
    }


def pod_of(rendered: Rendered, role: str) -> Object:
    """The template of the one pod that has a role's container."""
    (template,) = (
        t for _, t in rendered.pods() if any(c["name"] == role for c in t["spec"]["containers"])
    )
    return template


def container_of(rendered: Rendered, role: str) -> Object:
    """A role's container."""
    return next(c for c in pod_of(rendered, role)["spec"]["containers"] if c["name"] == role)


def preflight_of(rendered: Rendered, role: str) -> Object:
    """A role's init container `preflight`."""
    (container,) = (
        c
        for c in pod_of(rendered, role)["spec"]["initContainers"]
        if ["--role", role] == c["args"][2:4]
    )
    return container


def environment(container: Object) -> dict[str, str]:
    """A container's environment variables. Each is set once. The value of a variable may be the
    pod's name."""
    variables = {
        variable["name"]: variable.get("value", "metadata.name")
        for variable in container.get("env", [])
    }
    assert len(variables) == len(container.get("env", [])), "a variable is set twice"
    return variables


def volume(rendered: Rendered, role: str, path: str) -> Object:
    """The volume that a role's container mounts at a path."""
    mounts = {
        mount["mountPath"]: mount["name"] for mount in container_of(rendered, role)["volumeMounts"]
    }
    return next(v for v in pod_of(rendered, role)["spec"]["volumes"] if v["name"] == mounts[path])
