"""Upgrades with --reuse-values from an older chart: what it did not know has the defaults, what was set stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import charts, matrix
from helm.charts import CHART, Rendered, merged, shutil
from helm.kubernetes_api import ApiServer
from helm.renders import EVERYTHING, SHARED, of

CHOSEN: dict[str, Any] = merged(matrix.BASE, {
    "commonLabels": {"cost": "42"},
    "controller": {"resources": {"limits": {"memory": "5Gi"}}, "settings": {"maxRequestBytes": 123456789}},
    "trainer": {"settings": {"launch": "fork", "tensorParallel": 2}, "gpus": 2, "podLabels": {"team": "ml"}},
    "inference": {"resources": {"requests": {"cpu": "7"}}, "startupMinutes": 90, "preStopSeconds": 9},
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
    "monitoring": {"monitors": {"kind": "pod"}, "rules": {"enabled": True, "runbook": "https://example.org"}},
    "data": {"size": "7Gi"},
})  # fmt: skip
"""What a user set, in every section."""


def paths(node: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of values.yaml, sections too."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*prefix, key)
            yield from paths(value, (*prefix, key))


def without(*removed: tuple[str, ...]) -> dict[str, Any]:
    """The defaults of a chart that did not know some keys."""
    result = deepcopy(matrix.defaults())
    for path in removed:
        node = result
        for part in path[:-1]:
            node = node.get(part, {})
        node.pop(path[-1], None)
    return result


ALL = list(paths(matrix.defaults()))
LEAVES = [path for path in ALL if not any(other[:-1] == path for other in ALL)]
SECTIONS = [path for path in ALL if path not in LEAVES]
OLDER: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no single value, all sections": without(*LEAVES),
    "each second value": without(*LEAVES[::2]),
    "each other second value": without(*LEAVES[1::2]),
    **{f"no level {level}": without(*(path for path in ALL if len(path) == level)) for level in (2, 3, 4)},
    **{f"no {path[0]}": without(path) for path in SECTIONS if len(path) == 1},
}
"""values.yaml of charts before this one, by what they lacked."""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory):
    """Makes a chart of version 0.0.9 with other defaults, and these templates."""
    directory = tmp_path_factory.mktemp("charts")

    def make(values: dict[str, Any]) -> Path:
        chart = directory / f"{len(list(directory.iterdir()))}" / "tandem"
        shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("values.schema.json"))
        text = (chart / "Chart.yaml").read_text()
        assert "\nversion: 0.1.0\n" in text
        (chart / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0\n", "\nversion: 0.0.9\n"))
        (chart / "values.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return chart

    return make


def objects(rendered: Rendered) -> list[dict[str, Any]]:
    """Without the chart's version."""
    return json.loads(json.dumps(sorted(rendered.objects, key=str)).replace("tandem-0.0.9", "tandem-0.1.0"))


def test_every_key_is_missing_in_some_older_chart():
    def lacks(values: dict[str, Any], path: tuple[str, ...]) -> bool:
        """The key, but not its section."""
        for part in path[:-1]:
            if part not in values:
                return False
            values = values[part]
        return path[-1] not in values

    assert len(ALL) > 200
    assert [path for path in ALL if not any(lacks(values, path) for values in OLDER.values())] == []


@pytest.mark.parametrize("lacking", OLDER)
def test_values_of_an_older_chart_render_as_a_fresh_install(lacking, older):
    """With --reuse-values Helm renders the new templates over the older chart's defaults: that is what is made here."""
    rendered = charts.render(CHOSEN, release="a", chart=older(OLDER[lacking]))
    assert objects(rendered) == objects(of(CHOSEN))


@pytest.mark.parametrize("lacking", ["each second value", "each other second value"])
@pytest.mark.parametrize("chosen", [CHOSEN, merged(CHOSEN, merged(EVERYTHING, SHARED))], ids=["chosen", "everything"])
def test_an_upgrade_that_reuses_values(lacking, chosen, older):
    """Really: installed, stored, upgraded."""
    with ApiServer() as server:
        charts.install(server, chosen, release="a", chart=older(OLDER[lacking]))
        found = charts.rendered(charts.upgrade(server, {}, release="a", reuse_values=True))
        again = charts.rendered(charts.upgrade(server, {"image": {"tag": "2"}}, release="a", reuse_values=True))
    assert objects(found) == objects(of(chosen))
    assert "0.1.0" in json.dumps(found.objects)
    assert objects(again) == objects(of(merged(chosen, {"image": {"tag": "2"}}))), "what was set before stays"


def test_what_a_user_set_is_in_the_objects(older):
    """Were CHOSEN ignored in both, they would still be equal."""
    text = json.dumps(charts.render(CHOSEN, release="a", chart=older({})).objects)
    for value in ("123456789", "5120Mi", "https://example.org", "7Gi", '"cost": "42"', '"team": "ml"', '"fork"'):
        assert value in text


def test_a_stored_value_that_this_chart_does_not_know_is_refused_by_name(older):
    values = {**matrix.defaults(), "gone": {"since": "0.0.9"}}
    with ApiServer() as server:
        charts.install(server, matrix.BASE, release="a", chart=older(values))
        with pytest.raises(charts.helm_sdkpy.UpgradeError, match="additional properties 'gone' not allowed"):
            charts.upgrade(server, {}, release="a", reuse_values=True)


def test_an_upgrade_to_other_defaults_keeps_selectors_and_claims():
    """What can't be changed in a cluster isn't, whatever is switched on."""
    with ApiServer() as server:
        charts.install(server, matrix.BASE, release="a")
        for values in (EVERYTHING, {"podDisruptionBudget": {"enabled": True}}, {}):
            charts.upgrade(server, merged(matrix.BASE, values), release="a")
        found = {o["metadata"]["name"] for o in server.objects("StatefulSet")}
    assert found == {"a-tandem-trainer", "a-tandem-inference"}
