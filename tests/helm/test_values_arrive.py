"""Every key of values.yaml has a use: a distinct value for each of them appears in the rendered objects."""

import json
import re
from typing import Any

from helm import charts
from helm.charts import merged
from helm.matrix import BASE, ROLES, TEMPLATES, at, defaults, leaves, marked, schema_of

PATTERNED = ("mark{n}x", "{big}Gi", "{big}s", "{big}m", "mark{n}x.example.org", "example.org/mark{n}x",
             "sha256:{n:064x}")  # fmt: skip
"""Values for a key whose schema has a pattern; the first that matches is used."""

OVERRIDING = {
    "data.existingClaim",
    "cache.existingClaim",
    "fullnameOverride",
    *(f"{role}.image.{key}" for role in ROLES for key in ("registry", "repository", "tag")),
}
"""Keys that replace others."""
DIGESTS = {f"{role}.image.digest" for role in ROLES}
"""Keys that replace some of OVERRIDING."""
NOT_VERBATIM = {
    # Added to /dev/shm or converted; other tests compare the results.
    *(f"{role}.resources.{kind}.memory" for role in ROLES for kind in ("requests", "limits")),
    "inference.startupMinutes",
    # 0 or 1; test_upgrade sets them.
    *(f"{role}.replicas" for role in ROLES),
    # Must agree with other values; test_matrix sets them.
    "trainer.settings.tensorParallel",
    "trainer.cpuRanks",
    "monitoring.rules.disabled",
    "monitoring.rules.overrides",
    "global",
}
_LOAD_BALANCER = {"service": {"type": "LoadBalancer"}}
ON = {
    "controller": _LOAD_BALANCER,
    "inference": _LOAD_BALANCER,
    "ingress": {"enabled": True},
    "gateway": {"enabled": True},
    "monitoring": {"monitors": {"kind": "pod"}, "rules": {"enabled": True}, "dashboards": {"enabled": True}},
}


def distinct(path: str, n: int) -> tuple[Any, str] | None:
    """A value for a key and the text that identifies it; None for switches, choices and values without such a text."""
    schema, name, mark = schema_of(path), path.rpartition(".")[2], f"mark{n}x"
    kinds = schema.get("type", [])
    if "enum" in schema or "boolean" in kinds:
        return None
    if name in TEMPLATES:
        return marked(name, mark), mark
    if "integer" in kinds:
        value = schema.get("minimum", 0) + 43000 + n
        return value, str(value)
    if "number" in kinds and "string" not in kinds:
        return (43000 + n) / 100000, str((43000 + n) / 100000)
    if "string" in kinds:
        texts = (pattern.format(n=n, big=43000 + n) for pattern in PATTERNED)
        text = next(text for text in texts if re.search(schema.get("pattern", ""), text))
        return text, text
    return ({"example.org/mark": mark}, mark) if "additionalProperties" in schema else None


def test_every_value_arrives():
    paths = dict.fromkeys(path.replace("labels.grafana_dashboard", "labels") for path, _ in leaves(defaults()))
    values = {path: value for n, path in enumerate(paths, 100) if (value := distinct(path, n)) is not None}
    assert len(values) > 120
    plain = set(values) - OVERRIDING - DIGESTS - NOT_VERBATIM
    text = ""
    for keys, switches in (
        (plain, ON),
        (plain | OVERRIDING, ON),
        (plain | OVERRIDING | DIGESTS, ON),
        ({"shared.deviceClassName"}, {"gpuMode": "shared"}),
    ):
        given = BASE
        for path in keys:
            given = merged(given, at(path, values[path][0]))
        text += json.dumps(charts.render(merged(given, switches)).objects)
    assert [path for path in set(values) - NOT_VERBATIM if values[path][1] not in text] == []
