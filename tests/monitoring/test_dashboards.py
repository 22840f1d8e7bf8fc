"""Conventions of the dashboards: what makes them work unchanged under compose and in Kubernetes, and readable."""

import re
import subprocess
import sys

import yaml
from images.grafana.source.limits import LIMITS

from monitoring.dashboards import DASHBOARDS, GRAFANA, metrics, panels
from monitoring.prometheus_tools import PROMETHEUS
from monitoring.series import TARGETS
from monitoring.test_alerts import alerts

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_they_are_what_their_source_makes(tmp_path):
    subprocess.run([sys.executable, str(GRAFANA / "source"), str(tmp_path)], check=True, timeout=60)
    made, there = ({path.name: path.read_text() for path in directory.iterdir()}
                   for directory in (tmp_path, GRAFANA / "dashboards"))  # fmt: skip
    assert there == made, "run `python images/grafana/source`"


def test_a_dashboard_is_portable():
    assert list(DASHBOARDS) == ["gpu-memory", "inference", "jobs", "overview", "training"]
    for name, board in DASHBOARDS.items():
        assert (board["id"], board["uid"], board["tags"]) == (None, f"tandem-{name}", ["tandem"])
        source, *variables = board["templating"]["list"]
        assert source["name"] == "datasource"
        assert {"namespace", "pod", "role", "uuid"} <= {variable["name"] for variable in variables}
        for variable in variables:
            assert variable["datasource"] == DATASOURCE
            assert variable["allValue"] == ".*"
            assert variable["definition"] == variable["query"]["query"]
        assert any("tandem_jobs_finished_total" in note.get("expr", "") for note in board["annotations"]["list"])


def test_a_panel_says_what_it_shows():
    for name, panel in panels():
        where = f"{name}: {panel['title']}"
        text = re.sub(r"(\w*)\{([\w,]+)\}(\w*)", lambda m: " ".join(m[1] + part + m[3] for part in m[2].split(",")),
                      panel["description"])  # fmt: skip
        assert panel["datasource"] == DATASOURCE, where
        assert panel["fieldConfig"]["defaults"].keys() >= {"unit", "noValue"}, where
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE, where
            assert "namespace=~" in target["expr"], f"{where}: a query is limited to what was chosen"
            assert not re.search(r"\brate\([^)]*\[1m\]", target["expr"]), where
            for metric in metrics(target["expr"]):
                base = re.sub(r"_(bucket|sum|count)$", "", metric)
                assert metric in text or base in text, f"{where}: the description does not name {metric}"


def test_limits_are_those_of_the_alerts():
    for alert, limit in LIMITS.items():
        rule = alerts()[alert]
        text = rule["expr"].replace("256 * 1024^2", str(256 * 2**20))
        assert re.search(rf"(?<![\w.]){re.escape(f'{limit:.15g}')}(?![\w.])", text), f"{alert} has another limit"


def test_grafana_is_provisioned_with_them():
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    slowest = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == slowest
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "tandem.yml").read_text())["providers"][0]
    assert provider["type"] == "file"


def test_targets_have_the_labels_that_rules_and_dashboards_join_on():
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    found = []
    for job in config["scrape_configs"]:
        ((static,), name) = job["static_configs"], job["job_name"]
        found += [{"job": name, **static["labels"], "instance": target} for target in static["targets"]]
    assert found == list(TARGETS.values())
