"""A value of its own for every key of values.yaml, so that one render shows which of them arrive."""

from __future__ import annotations

import re
from typing import Any

from helm.charts import merged
from helm.matrix import BASE, at, defaults, leaves, schema_of

PATTERNED = (
    "mark-{n}",
    "{big}Gi",
    "{big}s",
    "{big}m",
    "mark-{n}.example.org",
    "example.org/mark-{n}",
    "sha256:{n:064x}",
)
"""Texts to be tried for a key whose schema has a pattern."""
LISTS: dict[str, Any] = {
    "pullSecrets": "{m}",
    "tolerations": {"key": "{m}", "operator": "Exists"},
    "topologySpreadConstraints": {"topologyKey": "{m}", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"},
    "extraEnv": {"name": "{m}", "value": "1"},
    "extraVolumes": {"name": "{m}", "emptyDir": {}},
    "extraVolumeMounts": {"name": "{m}", "mountPath": "/{m}"},
    "extraContainers": {"name": "{m}", "image": "busybox"},
    "extraInitContainers": {"name": "{m}", "image": "busybox"},
    "clients": {"podSelector": {"matchLabels": {"a": "{m}"}}},
    "prometheus": {"podSelector": {"matchLabels": {"a": "{m}"}}},
    "extraEgress": {"to": [{"podSelector": {"matchLabels": {"a": "{m}"}}}]},
    "parentRefs": {"name": "{m}"},
    "relabelings": {"action": "replace", "targetLabel": "{m}", "replacement": "x"},
    "metricRelabelings": {"action": "replace", "targetLabel": "{m}", "replacement": "x"},
    "extraObjects": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{m}"}},
}
"""An item of each list, by the list's own name; `{m}` is its mark."""


def filled(template: Any, mark: str) -> Any:
    """The template with its mark."""
    if isinstance(template, dict):
        return {key: filled(value, mark) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(value, mark) for value in template]
    return template.replace("{m}", mark) if isinstance(template, str) else template


def mark(path: str, n: int) -> tuple[Any, str] | None:
    """A value for a key and the text by which it is known; None for switches, choices and what has no own text."""
    schema, name = schema_of(path), path.rpartition(".")[2]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "enum" in schema or "boolean" in kinds:
        return None
    if name in LISTS:
        return [filled(LISTS[name], f"mark-{n}-x")], f"mark-{n}-x"
    if name == "affinity":
        term = {"matchExpressions": [{"key": f"mark-{n}-x", "operator": "Exists"}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        return {"nodeAffinity": required}, f"mark-{n}-x"
    if "integer" in kinds:
        value = schema.get("minimum", 0) + 43000 + n
        return value, str(value)
    if "number" in kinds and "string" not in kinds:
        return (43000 + n) / 100000, str((43000 + n) / 100000)
    if "string" in kinds:
        pattern = schema.get("pattern", "")
        text = next(t for t in (p.format(n=n, big=43000 + n) for p in PATTERNED) if re.search(pattern, t))
        return text, text
    if "object" in kinds and name in ("alertLabels", "extendedResources"):
        return {f"mark_{n}_x" if name == "alertLabels" else f"example.org/mark_{n}_x": "1"}, f"mark_{n}_x"
    return ({"example.org/mark": f"mark-{n}-x"}, f"mark-{n}-x") if "additionalProperties" in schema else None


def marks() -> dict[str, tuple[Any, str]]:
    """The marked keys."""
    found: dict[str, tuple[Any, str]] = {}
    for n, (path, _) in enumerate(leaves(defaults()), 100):
        if path.startswith("monitoring.dashboards.labels"):
            path = "monitoring.dashboards.labels"
        if (one := mark(path, n)) is not None:
            found[path] = one
    return found


def values(paths: set[str]) -> dict[str, Any]:
    """These keys with their marks, on what must be set."""
    result = BASE
    for path, (value, _) in marks().items():
        if path in paths:
            result = merged(result, at(path, value))
    return result
