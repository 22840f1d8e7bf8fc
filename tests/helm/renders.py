"""Renders that the property tests share: named values, each rendered once, and what one wants to know of the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from helm import charts, matrix
from helm.charts import CHART, Object, Rendered, merged

ROLES = ("controller", "trainer", "inference")
NAMESPACE = "ns"
RELEASES = ("a", "b")
"""Two in one namespace."""

NAME, INSTANCE, COMPONENT = (f"app.kubernetes.io/{key}" for key in ("name", "instance", "component"))
_STEALING = {COMPONENT: "controller", NAME: "other", INSTANCE: "b", "tandem": "mine"}
"""Labels of a user who tries to be another component, or another release."""
_PEER = {"namespaceSelector": {"matchLabels": {"team": "research"}}, "podSelector": {"matchLabels": {"app": "proxy"}}}
EVERYTHING: dict[str, Any] = {
    "commonLabels": _STEALING,
    "models": {"existingClaim": "models"},
    "networkPolicy": {
        "clients": [_PEER],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}],
    },
    "podDisruptionBudget": {"enabled": True},
    "kueue": {"queue": "post-training"},
    "ingress": {"enabled": True, **matrix.HOSTS},
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], **matrix.HOSTS},
    "monitoring": {"monitors": {"kind": "pod"}, "rules": {"enabled": True}, "dashboards": {"enabled": True}},
    **{role: {"podLabels": _STEALING} for role in ROLES},
}
"""Every switch on."""
SHARED = {"gpuMode": "shared", "trainer": {"gpus": 2}, "inference": {"gpus": 2}}
ONE_NODE = {"data": {"accessMode": "ReadWriteOnce"}, "cache": {"accessMode": "ReadWriteOnce"}}
_SERVICES = {"monitoring": {"monitors": {"kind": "service"}}}

_BASED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "shared by claim": SHARED,
    "shared by resource": {**SHARED, "shared": {"via": "resource"}},
    "one node": ONE_NODE,
    "one node for the cache": {"cache": {"accessMode": "ReadWriteOnce"}},
    "one node, shared": {**ONE_NODE, **SHARED},
    "existing claims": {"data": {"existingClaim": "work"}, "cache": {"existingClaim": "scratch"}},
    "ephemeral cache": {"cache": {"type": "ephemeral"}},
    "tiny model on GPUs": {"baseModel": "", "tinyModel": True},
    "OpenShift": {"podSecurity": {"assignedUser": True}},
    "everything": EVERYTHING,
    "everything by services": merged(EVERYTHING, _SERVICES),
    "everything, shared": merged(EVERYTHING, SHARED),
    "everything, shared, by services": merged(merged(EVERYTHING, SHARED), _SERVICES),
    "everything, one node": merged(EVERYTHING, ONE_NODE),
}
VALUES: dict[str, dict[str, Any]] = {
    **{name: merged(matrix.BASE, values) for name, values in _BASED.items()},
    **{path.name: charts.load_values(path) for path in matrix.files()},
}
"""By name; a test is for all of them unless it says otherwise."""
CASES = list(VALUES)


@cache
def _of(values: str, options: str) -> Rendered:
    return charts.render(json.loads(values), **json.loads(options))


def of(values: dict[str, Any], **options: Any) -> Rendered:
    """A render, made once for equal arguments."""
    return _of(json.dumps(values, sort_keys=True), json.dumps({"release": "a", **options}, sort_keys=True))


def case(name: str, release: str = "a") -> Rendered:
    """The render of named values."""
    return of(VALUES[name], release=release)


def with_values(**values: Any) -> Rendered:
    """The least values, and these."""
    return of(merged(matrix.BASE, values))


def value(name: str, path: str) -> Any:
    """What a value is in a case, its default where the case says nothing."""
    node = merged(charts.load_values(CHART / "values.yaml"), VALUES[name])
    for part in path.split("."):
        node = node[part]
    return node


def is_shared(name: str) -> bool:
    return value(name, "gpuMode") == "shared"


def component_of(name: str, role: str) -> str:
    """The component whose pod has the role's container."""
    return "engine" if is_shared(name) and role != "controller" else role


def component(template: Object) -> str:
    """Of a pod's template."""
    return template["metadata"]["labels"][COMPONENT]


def containers(template: Object) -> Iterator[Object]:
    """Of a pod, those before its start too."""
    yield from template["spec"].get("initContainers", [])
    yield from template["spec"]["containers"]


def pod_of(rendered: Rendered, role: str) -> Object:
    """The template of the pod that has a role's container."""
    found = [t for _, t in rendered.pods() if any(c["name"] == role for c in t["spec"]["containers"])]
    assert len(found) == 1, f"{len(found)} pods have a container {role}"
    return found[0]


def container_of(rendered: Rendered, role: str) -> Object:
    """A role's container."""
    return next(c for c in pod_of(rendered, role)["spec"]["containers"] if c["name"] == role)


def preflight_of(rendered: Rendered, role: str) -> Object:
    """A role's preflight."""
    found = [c for c in pod_of(rendered, role)["spec"]["initContainers"] if ["--role", role] == c["args"][2:4]]
    assert len(found) == 1
    return found[0]


def environment(container: Object) -> dict[str, str]:
    """The variables of a container."""
    names = [variable["name"] for variable in container.get("env", [])]
    assert len(names) == len(set(names)), f"a variable more than once: {names}"
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def volume(template: Object, container: Object, path: str) -> Object:
    """The volume that a container has at a path."""
    name = next(m["name"] for m in container["volumeMounts"] if m["mountPath"] == path)
    return next(v for v in template["spec"]["volumes"] if v["name"] == name)
