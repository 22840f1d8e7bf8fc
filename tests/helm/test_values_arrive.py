"""No value without a use: each key of values.yaml is given a value of its own, and is found in what is rendered."""

from __future__ import annotations

import json

from helm import charts, marks
from helm.charts import merged

ROLES = ("controller", "trainer", "inference")
OVER_OTHERS = {
    "data.existingClaim",
    "cache.existingClaim",
    "fullnameOverride",
    *(f"{role}.image.{key}" for role in ROLES for key in ("registry", "repository", "tag")),
}
"""Keys that take the place of others."""
OVER_ALL = {f"{role}.image.digest" for role in ROLES}
"""Keys that take the place of those."""
NOT_VERBATIM = {
    # Added up with /dev/shm, or counted in other units; other tests compare the sums.
    *(f"{role}.resources.{kind}.memory" for role in ROLES for kind in ("requests", "limits")),
    "inference.startupMinutes",
    # Must fit other values: test_matrix has them.
    "trainer.settings.tensorParallel",
    "trainer.cpuRanks",
    "monitoring.rules.disabled",
    "monitoring.rules.overrides",
    "global",
}
ON = {
    "ingress": {"enabled": True},
    "gateway": {"enabled": True},
    "monitoring": {"monitors": {"kind": "pod"}, "rules": {"enabled": True}, "dashboards": {"enabled": True}},
}


def test_every_value_arrives():
    found = marks.marks()
    plain = set(found) - OVER_OTHERS - OVER_ALL - NOT_VERBATIM
    shared = {"gpuMode": "shared"}
    text = ""
    for paths, switches in (
        (plain, ON),
        (plain | OVER_OTHERS, ON),
        (plain | OVER_OTHERS | OVER_ALL, ON),
        ({"shared.deviceClassName"}, shared),
    ):
        text += json.dumps(charts.render(merged(marks.values(paths), switches)).objects)
    assert [path for path in set(found) - NOT_VERBATIM if found[path][1] not in text] == []
    assert len(found) > 120
