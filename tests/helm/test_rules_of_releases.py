"""Several releases and one Prometheus: the rules of a release look at its own namespace, and at all
of it."""

import json
import re
from typing import Any

import pytest

from helm import charts
from helm.charts import Object, merged
from helm.matrix import BASE
from monitoring.prometheus_tools import promtool

TEAMS = ("team-a", "team-b")
TARGETS = ("controller", "trainer", "inference", "vllm")


def rules_of(team: str, **settings: Any) -> Object:
    """The rules of the release in a namespace, as Prometheus reads them."""
    values = merged(
        BASE, {"monitoring": {"rules": {"enabled": True, "kubernetes": False, **settings}}}
    )
    return charts.render(values, namespace=team).one("PrometheusRule")["spec"]


def firing(tmp_path, rules: dict[str, Object], series: dict[str, str], names: list[str]) -> str:
    """What promtool prints after 20 minutes of these series, about every alert of these names that
    fires."""
    for team, spec in rules.items():
        (tmp_path / f"{team}.yml").write_text(json.dumps(spec))
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": name, "exp_alerts": []} for name in names
        ],
    }
    files = {
        "rule_files": [f"{team}.yml" for team in rules],
        "evaluation_interval": "1m",
        "tests": [test],
    }
    (tmp_path / "cases.yml").write_text(json.dumps(files))
    done = promtool("test", "rules", "cases.yml", cwd=tmp_path)
    return done.stdout + done.stderr


def ups(team: str, *targets: str, value: int = 1) -> dict[str, str]:
    """`up` of targets in a namespace."""
    return {
        f'up{{job="tandem-{name}",namespace="{team}",pod="{name}"}}': f"{value}x30"
        for name in targets
    }


def test_a_release_without_targets_is_missed_while_another_has_all(tmp_path):
    rules = {team: rules_of(team) for team in TEAMS}
    printed = firing(tmp_path, rules, ups("team-a", *TARGETS), ["TandemTargetAbsent"])
    absent = re.findall(
        r'Labels:\{alertname="TandemTargetAbsent", job="tandem-(\w+)", namespace="([^"]+)"', printed
    )
    assert sorted(absent) == sorted((target, "team-b") for target in TARGETS), printed


@pytest.mark.parametrize(
    "changes",
    [{"disabled": ["TandemTargetDown"]}, {"overrides": {"TandemTargetDown": {"for": "1h"}}}],
)
def test_what_a_release_changes_holds_though_another_has_the_rule_as_it_was(tmp_path, changes):
    series = ups("team-a", *TARGETS, value=0) | ups("team-b", *TARGETS)
    rules = {"team-a": rules_of("team-a", **changes), "team-b": rules_of("team-b")}
    assert "SUCCESS" in firing(tmp_path, rules, series, ["TandemTargetDown"])
    rules["team-a"] = rules_of("team-a")
    printed = firing(tmp_path, rules, series, ["TandemTargetDown"])
    assert printed.count('alertname="TandemTargetDown"') == 3, printed


def test_prometheus_takes_the_rules(tmp_path):
    (tmp_path / "rules.yml").write_text(json.dumps(rules_of("team-a")))
    done = promtool("check", "rules", "rules.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
