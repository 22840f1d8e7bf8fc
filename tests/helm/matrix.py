"""The values the chart is tried with, most of them found by walking its own values.yaml and values.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from helm.charts import CHART, load_values, merged

BASE: dict[str, Any] = {"baseModel": "Qwen/Qwen3-8B"}
"""The least that must be set."""
HOSTS = {"controllerHost": "api.example.org", "inferenceHost": "models.example.org"}
GATEWAY = {"gateway": {**HOSTS, "parentRefs": [{"name": "public", "namespace": "gateways"}]}}

NEEDS: dict[str, dict[str, Any]] = {
    "ingress.enabled": {"ingress": HOSTS},
    "gateway.enabled": GATEWAY,
    "gpuMode": {"shared": {"via": "resource"}},
    "shared.via": {"gpuMode": "shared"},
    "monitoring.rules.kubernetes": {"monitoring": {"rules": {"enabled": True}}},
}
"""What must be set for a value to be allowed, or to matter."""
INSTEAD: dict[str, dict[str, Any]] = {"tinyModel": {"baseModel": ""}}
"""What else is set with a value that isn't the default."""


@dataclass(frozen=True)
class Choice:
    """One value that isn't the default, and what has to be set with it."""

    path: str
    value: Any

    @property
    def name(self) -> str:
        return (
            f"{self.path}={json.dumps(self.value)}" if not isinstance(self.value, str) else f"{self.path}={self.value}"
        )

    @property
    def before(self) -> dict[str, Any]:
        """The values without the choice."""
        return merged(BASE, NEEDS.get(self.path, {}))

    @property
    def values(self) -> dict[str, Any]:
        """The values with it."""
        return merged(merged(self.before, at(self.path, self.value)), INSTEAD.get(self.path, {}))


@cache
def defaults() -> dict[str, Any]:
    """values.yaml."""
    return load_values(CHART / "values.yaml")


@cache
def schema() -> dict[str, Any]:
    """values.schema.json."""
    return json.loads((CHART / "values.schema.json").read_text())


def at(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 → {"a": {"b": 1}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a mapping of mappings; empty mappings are values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, node


def mappings(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping that has keys of its own, the whole first."""
    yield path, node
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from mappings(value, f"{path}.{key}".lstrip("."))


def schema_of(path: str) -> dict[str, Any]:
    """The schema of one value."""
    node = schema()
    for part in path.split("."):
        node = node["properties"][part] if part in node.get("properties", {}) else node["additionalProperties"]
    return node


def switches() -> list[Choice]:
    """Every boolean of values.yaml, turned."""
    return [Choice(path, not value) for path, value in leaves(defaults()) if isinstance(value, bool)]


def choices() -> list[Choice]:
    """Every choice among names that isn't the default."""
    return [
        Choice(path, choice)
        for path, value in leaves(defaults())
        if not isinstance(value, dict | list | bool)
        for choice in schema_of(path).get("enum", [])
        if choice is not None and choice != value
    ]


def files() -> list[Path]:
    """The values that come with the chart."""
    return [CHART / "values-cpu.yaml", *sorted((CHART / "examples").glob("*.yaml"))]


def roles(**values: Any) -> dict[str, Any]:
    """The same values for each of the three roles."""
    return {role: dict(values) for role in ("controller", "trainer", "inference")}


def pod_extras(name: str = "more") -> dict[str, Any]:
    """What a role takes in Kubernetes' own words; `name` is in the names of what it adds."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    sidecar = {"image": "example.org/sidecar:1", "securityContext": restricted}
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    return {
        "podLabels": {"team": "research"},
        "podAnnotations": {"example.org/note": "yes"},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "gpu", "effect": "NoExecute"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        "topologySpreadConstraints": [spread],
        "priorityClassName": "high",
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "extraVolumes": [{"name": name, "emptyDir": {}}],
        "extraVolumeMounts": [{"name": name, "mountPath": f"/{name}"}],
        "extraContainers": [{"name": f"{name}-sidecar", **sidecar}],
        "extraInitContainers": [{"name": f"{name}-before", **sidecar}],
    }


def settings() -> dict[str, Any]:
    """Every setting that is null, set to something its schema allows."""
    found: dict[str, Any] = {}
    for path, value in leaves(defaults()):
        if value is None:
            found = merged(found, at(path, sample(schema_of(path))))
    return found


def sample(schema: dict[str, Any]) -> Any:
    """A value that a schema of a nullable scalar allows."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = next(kind for kind in schema["type"] if kind != "null")
    return {"boolean": True, "integer": schema.get("minimum", 1), "number": 0.5, "string": "text"}[kind]


def whole() -> dict[str, dict[str, Any]]:
    """Values that are set together."""
    peer = {"namespaceSelector": {"matchLabels": {"team": "research"}}}
    egress = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {"a": "b"}}
    template = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-more}"
    relabeling = [{"action": "replace", "targetLabel": "cluster", "replacement": "one"}]
    drop = [{"action": "drop", "regex": "go_.*", "sourceLabels": ["__name__"]}]
    everything = {"labels": {"release": "prometheus"}, "annotations": {"example.org/a": "b"}}
    monitoring = {
        "monitors": {"kind": "pod", "relabelings": relabeling, "metricRelabelings": drop, **everything},
        "rules": {
            "enabled": True,
            "alertLabels": {"team": "ml"},
            "runbook": "https://example.org/alerts",
            **everything,
        },
        "dashboards": {"enabled": True, "namespace": "ns", "annotations": {"grafana_folder": "Tandem"}},
    }
    services = {"service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.org/lb": "internal"}}}
    claims = {"data": {"existingClaim": "work"}, "cache": {"existingClaim": "scratch"}}
    one_node = {"data": {"accessMode": "ReadWriteOnce"}, "cache": {"accessMode": "ReadWriteOnce"}}
    shared = {"gpuMode": "shared", "shared": {"via": "resource"}}
    names = {
        "nameOverride": "post",
        "commonLabels": {"cost": "42"},
        "serviceAccount": {"create": False, "name": "mine"},
    }
    cases: dict[str, dict[str, Any]] = {
        "defaults": {},
        "pod extras": roles(**pod_extras()),
        "pod extras, shared": {"trainer": pod_extras("one"), "inference": pod_extras("two"), **shared},
        "every setting": settings(),
        "existing claims": {**claims, "models": {"existingClaim": "models"}},
        "existing claims, one node": merged(claims, one_node),
        "one node": one_node,
        "one node, ephemeral cache": merged(one_node, {"cache": {"type": "ephemeral"}}),
        "one node, shared": {**one_node, **shared},
        "no storage class": {"data": {"storageClass": "-"}, "cache": {"storageClass": "-"}},
        "network": {"networkPolicy": {"clients": [peer], "prometheus": [peer], "extraEgress": [egress]}},
        "everything public": merged(
            {"ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", **HOSTS}},
            merged(GATEWAY, {"gateway": {"enabled": True}, "controller": services, "inference": services}),
        ),
        "one host": {"ingress": {"enabled": True, "inferenceHost": "models.example.org"}},
        "monitoring": {"monitoring": monitoring},
        "monitoring by services": merged({"monitoring": monitoring}, at("monitoring.monitors.kind", "service")),
        "monitoring, shared": {"monitoring": monitoring, **shared},
        "kueue, shared": {"kueue": {"queue": "q", "priorityClass": "high"}, **shared},
        "many GPUs, RDMA": {
            role: {"gpus": 8, "gpuResource": "nvidia.com/mig-3g.40gb", "extendedResources": {"rdma/hca": 1}}
            for role in ("trainer", "inference")
        },
        "CPU ranks": {"device": "cpu", "trainer": {"cpuRanks": 2, "settings": {"tensorParallel": 2}}},
        "names": names,
        "a long name": {"fullnameOverride": "a" * 40},
        "digests": roles(image={"digest": "sha256:" + "0" * 64, "registry": "registry.example.org"}),
        "pull secrets": {"image": {"pullSecrets": ["pull"], "registry": "registry.example.org", "tag": "1"}},
        "more objects": {"extraObjects": [extra, template]},
    }
    return {name: merged(BASE, values) for name, values in cases.items()}
