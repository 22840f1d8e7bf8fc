"""Every key of values.yaml has a use: a distinct value for each of them appears in the rendered
objects, which fit their schemas."""

import json
import re
from typing import Any

from helm import charts, schemas
from helm.charts import merged
from helm.matrix import BASE, NEEDS, ROLES, SHARED_BY_RESOURCE, at, defaults, leaves, schema_of

_POD_PEER = [{"podSelector": {"matchLabels": {"a": "MARK"}}}]
_RELABELING = [{"action": "replace", "targetLabel": "MARK", "replacement": "x"}]
_TERM = {"matchExpressions": [{"key": "MARK", "operator": "Exists"}]}
TEMPLATES: dict[str, Any] = {
    "pullSecrets": ["MARK"],
    "tolerations": [{"key": "MARK", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {"topologyKey": "MARK", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}
        }
    },
    "extraEnv": [{"name": "MARK", "value": "1"}],
    "extraVolumes": [{"name": "MARK", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "data", "mountPath": "/MARK"}],
    "extraContainers": [{"name": "MARK", "image": "busybox"}],
    "extraInitContainers": [{"name": "MARK-init", "image": "busybox"}],
    "clients": _POD_PEER,
    "prometheus": _POD_PEER,
    "extraEgress": [{"to": _POD_PEER}],
    "parentRefs": [{"name": "MARK"}],
    "relabelings": _RELABELING,
    "metricRelabelings": _RELABELING,
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "MARK"}}],
    "alertLabels": {"MARK": "1"},
    "extendedResources": {"example.org/MARK": "1"},
}
"""Last part of a key → its value, in which MARK is replaced by a distinct text."""

PATTERNED = (
    "mark{n}x",
    "{big}Gi",
    "{big}s",
    "{big}m",
    "mark{n}x.example.org",
    "example.org/mark{n}x",
    "sha256:{n:064x}",
)
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
    # These values are added to /dev/shm or converted. Other tests compare the results.
    *(f"{role}.resources.{kind}.memory" for role in ROLES for kind in ("requests", "limits")),
    "inference.startupMinutes",
    # 0 or 1; test_upgrade sets them.
    *(f"{role}.replicas" for role in ROLES),
    # These values must agree with other values; test_matrix sets them.
    "trainer.settings.tensorParallel",
    "trainer.cpuRanks",
    "monitoring.rules.disabled",
    "monitoring.rules.overrides",
    "global",
}
_LOAD_BALANCER = {"service": {"type": "LoadBalancer"}}
OF_SEVERAL = {path for path in NEEDS if path.startswith("inference.")}
WARM = {"enabled": True}
OF_JOBS = {path for path in NEEDS if path.startswith("trainer.")} - {
    "trainer.runner.admissionPolicy",
    "trainer.warmup.enabled",
}
ON = {
    "controller": _LOAD_BALANCER,
    "inference": _LOAD_BALANCER,
    "ingress": {"enabled": True},
    "gateway": {"enabled": True},
    "monitoring": {
        "monitors": {"kind": "pod"},
        "rules": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}


def distinct(path: str, n: int) -> tuple[Any, str] | None:
    """A value for a key and the text that identifies it; None for switches, choices and values
    without such a text."""
    schema, name, mark = schema_of(path), path.rpartition(".")[2], f"mark{n}x"
    kinds = schema.get("type", [])
    if "enum" in schema or "boolean" in kinds:
        return None
    if name in TEMPLATES:
        return json.loads(json.dumps(TEMPLATES[name]).replace("MARK", mark)), mark
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
    paths = dict.fromkeys(
        path.replace("labels.grafana_dashboard", "labels") for path, _ in leaves(defaults())
    )
    values = {
        path: value for n, path in enumerate(paths, 100) if (value := distinct(path, n)) is not None
    }
    assert len(values) > 120
    plain = set(values) - OVERRIDING - DIGESTS - NOT_VERBATIM - OF_JOBS
    text = ""
    for version, keys, switches in (
        (charts.OLDEST, plain, ON),
        (charts.NEWEST, plain | OVERRIDING, ON),
        (charts.NEWEST, plain | OVERRIDING | DIGESTS, merged(ON, SHARED_BY_RESOURCE)),
        (charts.NEWEST, plain | OVERRIDING | DIGESTS, ON),
        (charts.NEWEST, {"shared.deviceClassName"}, {"gpuMode": "shared"}),
        (charts.NEWEST, OF_SEVERAL, {"inference": {"replicas": 2}}),
        (charts.NEWEST, OF_JOBS, {"trainer": {"executor": "kubernetes", "warmup": WARM}}),
    ):
        given = BASE
        for path in keys:
            given = merged(given, at(path, values[path][0]))
        rendered = charts.render(merged(given, switches), version=version)
        assert [
            problem for obj in rendered.objects for problem in schemas.validate(obj, version)
        ] == []
        text += json.dumps(rendered.objects)
    assert [path for path in set(values) - NOT_VERBATIM if values[path][1] not in text] == []
