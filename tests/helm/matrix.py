"""Values for the chart: named sets, and single values that are found in values.yaml and
values.schema.json."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from helm.charts import CHART, load_values, merged

SOURCE = CHART.parent / "source"
ROLES = ("controller", "trainer", "inference")
NAME, INSTANCE, COMPONENT = (
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
)
BASE: dict[str, Any] = {"baseModel": "Qwen/Qwen3-8B"}
"""The required values."""
HOSTS = {"controllerHost": "api.example.org", "inferenceHost": "models.example.org"}
SHARED = {"gpuMode": "shared", "trainer": {"gpus": 2}, "inference": {"gpus": 2}}
SHARED_BY_RESOURCE = {**SHARED, "shared": {"via": "resource"}}
ONE_NODE = {"data": {"accessMode": "ReadWriteOnce"}, "cache": {"accessMode": "ReadWriteOnce"}}
STEALING = {COMPONENT: "controller", NAME: "other", INSTANCE: "b", "tandem": "mine"}
"""A user's labels that claim to be another component of another release."""
_PEER = {
    "namespaceSelector": {"matchLabels": {"team": "research"}},
    "podSelector": {"matchLabels": {"app": "proxy"}},
}
_SERVICE = {
    "type": "LoadBalancer",
    "port": 80,
    "nodePort": 30080,
    "loadBalancerClass": "example.org/internal",
    "annotations": {"example.org/lb": "internal"},
}
EVERYTHING: dict[str, Any] = {
    "commonLabels": STEALING,
    "models": {"existingClaim": "models"},
    "networkPolicy": {
        "clients": [_PEER],
        "extraEgress": [
            {
                "to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}],
                "ports": [{"port": 3128, "protocol": "TCP"}],
            }
        ],
    },
    "podDisruptionBudget": {"enabled": True},
    "kueue": {"queue": "post-training", "priorityClass": "high"},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", **HOSTS},
    "gateway": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        **HOSTS,
    },
    "monitoring": {
        "monitors": {"kind": "pod"},
        "rules": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "controller": {"podLabels": STEALING, "service": _SERVICE},
    "trainer": {"podLabels": STEALING},
    "inference": {"podLabels": STEALING, "service": _SERVICE},
}
"""Every switch on."""
_SERVICES = {"monitoring": {"monitors": {"kind": "service"}}}
JOBS: dict[str, Any] = {"trainer": {"executor": "kubernetes", "hosts": 2, "gpus": 4}}
"""Each attempt is a Kubernetes Job of two pods."""
_FILES = [CHART / "values-cpu.yaml", *sorted((CHART / "examples").glob("*.yaml"))]
_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "shared by claim": SHARED,
    "shared by resource": SHARED_BY_RESOURCE,
    "one node": ONE_NODE,
    "one node for the cache": {"cache": {"accessMode": "ReadWriteOnce"}},
    "one node, shared": {**ONE_NODE, **SHARED},
    "existing claims": {"data": {"existingClaim": "work"}, "cache": {"existingClaim": "scratch"}},
    "ephemeral cache": {"cache": {"type": "ephemeral"}},
    "tiny model on GPUs": {"baseModel": "", "tinyModel": True},
    "OpenShift": {"podSecurity": {"assignedUser": True}},
    "two inference servers": {"inference": {"replicas": 2}},
    "everything": EVERYTHING,
    "everything by services": merged(EVERYTHING, _SERVICES),
    "everything, shared": merged(EVERYTHING, SHARED),
    "everything, shared, by services": merged(merged(EVERYTHING, SHARED), _SERVICES),
    "everything, one node": merged(EVERYTHING, ONE_NODE),
    "everything, two inference servers": merged(EVERYTHING, {"inference": {"replicas": 2}}),
}
VALUES = {name: merged(BASE, values) for name, values in _SETS.items()} | {
    p.name: load_values(p) for p in _FILES
}
"""The sets that every property of the rendered objects is tested with."""
CASES = list(VALUES)

NEEDS: dict[str, dict[str, Any]] = {
    "ingress.enabled": {"ingress": HOSTS},
    "gateway.enabled": {"gateway": {**HOSTS, "parentRefs": [{"name": "public"}]}},
    "gpuMode": {"shared": {"via": "resource"}},
    "shared.via": {"gpuMode": "shared"},
    **{
        f"inference.{name}": {"inference": {"replicas": 2}}
        for name in (
            "drainSeconds",
            "proxy.clusterDomain",
            "proxy.resources.requests.cpu",
            "proxy.resources.requests.memory",
            "proxy.resources.limits.memory",
        )
    },
    **{
        f"trainer.{name}": {"trainer": {"executor": "kubernetes"}}
        for name in (
            "hosts",
            "parallelJobs",
            "settings.lingerSeconds",
            "kernels.existingClaim",
            "warmup.enabled",
            "warmup.nodeSelector",
            "warmup.resources.requests.cpu",
            "warmup.resources.requests.memory",
            "warmup.resources.limits.memory",
            "runner.serviceAccountName",
            "runner.admissionPolicy",
            "runner.resources.requests.cpu",
            "runner.resources.requests.memory",
            "runner.resources.limits.memory",
        )
    },
    "monitoring.rules.kubernetes": {"monitoring": {"rules": {"enabled": True}}},
}
"""Values without which a value is refused or has no effect."""


@cache
def defaults() -> dict[str, Any]:
    """values.yaml."""
    return load_values(CHART / "values.yaml")


@cache
def documented() -> list[Any]:
    """Every key of values.yaml with its comment, as helm/source/values.py reads them."""
    spec = importlib.util.spec_from_file_location("tandem_helm_values", SOURCE / "values.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.read((CHART / "values.yaml").read_text())


@cache
def schema() -> dict[str, Any]:
    """values.schema.json."""
    return json.loads((CHART / "values.schema.json").read_text())


def schema_of(path: str) -> dict[str, Any]:
    """The schema of one value."""
    node = schema()
    for part in path.split("."):
        node = (
            node["properties"][part]
            if part in node.get("properties", {})
            else node["additionalProperties"]
        )
    return node


def at(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 → {"a": {"b": 1}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def keys(node: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key in a mapping of mappings, including the keys of sections."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*prefix, key)
            yield from keys(value, (*prefix, key))


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a mapping of mappings. Empty mappings are values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, node


def choices() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Every boolean of values.yaml negated, and every other member of each enumeration. Yields the
    values without and with the change."""
    found = {}
    for path, value in leaves(defaults()):
        others: list[Any] = [not value]
        if not isinstance(value, bool):
            scalar = not isinstance(value, dict | list)
            others = (
                [o for o in schema_of(path).get("enum", []) if o not in (None, value)]
                if scalar
                else []
            )
        for other in others:
            before = merged(BASE, NEEDS.get(path, {}))
            more = {"baseModel": ""} if path == "tinyModel" else {}
            found[f"{path}={other}"] = before, merged(merged(before, at(path, other)), more)
    return found


def sample(schema: dict[str, Any]) -> Any:
    """A value that the schema of a nullable scalar allows."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = next(kind for kind in schema["type"] if kind != "null")
    return {"boolean": True, "integer": schema.get("minimum", 1), "number": 0.5, "string": "text"}[
        kind
    ]


def roles(**values: Any) -> dict[str, Any]:
    """The same values for each role."""
    return dict.fromkeys(ROLES, values)
