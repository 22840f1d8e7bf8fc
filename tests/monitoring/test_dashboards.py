"""Conventions for the dashboards. With these conventions the dashboards are readable, and work
unchanged under compose and in Kubernetes."""

import json
import re
import subprocess
import sys

import yaml
from images.grafana.source.limits import LIMITS

from monitoring.dashboards import DASHBOARDS, GRAFANA, metrics, panels, queries, resolved
from monitoring.prometheus_tools import PROMETHEUS, RULES, promtool
from monitoring.series import TARGETS, input_series
from monitoring.stacks import sharing_in_one_pod
from monitoring.test_alerts import alerts

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_they_are_what_their_source_makes(tmp_path):
    subprocess.run([sys.executable, str(GRAFANA / "source"), str(tmp_path)], check=True, timeout=60)
    made, there = (
        {path.name: path.read_text() for path in directory.iterdir()}
        for directory in (tmp_path, GRAFANA / "dashboards")
    )
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
        assert any(
            "tandem_jobs_finished_total" in note.get("expr", "")
            for note in board["annotations"]["list"]
        )


def test_a_panel_says_what_it_shows():
    for name, panel in panels():
        where = f"{name}: {panel['title']}"
        text = re.sub(
            r"(\w*)\{([\w,]+)\}(\w*)",
            lambda m: " ".join(m[1] + part + m[3] for part in m[2].split(",")),
            panel["description"],
        )
        assert panel["datasource"] == DATASOURCE, where
        assert panel["fieldConfig"]["defaults"].keys() >= {"unit", "noValue"}, where
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE, where
            assert "namespace=~" in target["expr"], (
                f"{where}: a query is limited to what was chosen"
            )
            assert not re.search(r"\brate\([^)]*\[1m\]", target["expr"]), where
            for metric in metrics(target["expr"]):
                base = re.sub(r"_(bucket|sum|count)$", "", metric)
                assert metric in text or base in text, (
                    f"{where}: the description does not name {metric}"
                )


def test_limits_are_those_of_the_alerts():
    for alert, limit in LIMITS.items():
        rule = alerts()[alert]
        text = rule["expr"].replace("256 * 1024^2", str(256 * 2**20))
        assert re.search(rf"(?<![\w.]){re.escape(f'{limit:.15g}')}(?![\w.])", text), (
            f"{alert} has another limit"
        )


def test_every_query_can_be_answered_where_trainer_and_inference_are_one_pod(tmp_path):
    """The test expects an empty result of each query, so promtool prints the result or the query's
    error. A join in which two series match is an error."""
    (tmp_path / "tandem.yml").write_text((RULES / "tandem.yml").read_text())
    asked = [
        {"expr": resolved(expr), "eval_time": "60m", "exp_samples": []} for _, expr in queries()
    ]
    test = {
        "interval": "1m",
        "input_series": input_series(sharing_in_one_pod(), 61),
        "promql_expr_test": asked,
    }
    (tmp_path / "cases.yml").write_text(
        json.dumps({"rule_files": ["tandem.yml"], "evaluation_interval": "1m", "tests": [test]})
    )
    done = promtool("test", "rules", "cases.yml", cwd=tmp_path)
    printed = done.stdout + done.stderr
    assert "err: " not in printed, printed
    joined = [part for part in printed.split("expr: ") if re.search(r"\bon \(", part)]
    assert len(joined) == sum(bool(re.search(r"\bon \(", query["expr"])) for query in asked) >= 1
    for part in joined:
        assert "got: nil" not in part, f"the stack has nothing to join: {part}"
    assert printed.count("got:") > 50, printed


def test_grafana_is_provisioned_with_them():
    source = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"][0]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    slowest = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"][
        "scrape_interval"
    ]
    assert source["jsonData"]["timeInterval"] == slowest
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "tandem.yml").read_text())[
        "providers"
    ][0]
    assert provider["type"] == "file"


def test_targets_have_the_labels_that_rules_and_dashboards_join_on():
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    found = []
    for job in config["scrape_configs"]:
        name = job["job_name"]
        if "http_sd_configs" in job:  # tests/metrics/test_exporter.py checks the exporter's answer
            labels = {one["target_label"]: one["replacement"] for one in job["relabel_configs"]}
            found.append({"job": name, **labels, "instance": "inference:8000"})
            assert job["http_sd_configs"][0]["url"] == "http://inference:9401/targets"
            continue
        (static,) = job["static_configs"]
        found += [
            {"job": name, **static["labels"], "instance": target} for target in static["targets"]
        ]
    assert found == list(TARGETS.values())
