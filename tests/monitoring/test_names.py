"""Rules and dashboards name only metrics that exist, every metric of ours is seen somewhere, and every query parses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from monitoring.dashboards import metrics, queries, resolved, rules
from monitoring.promtool import promtool
from tandem.metrics.catalogue import CATALOGUE, VLLM_METRICS, Metric

PROMETHEUS_OWN = {"up", "ALERTS"}
KUBE_STATE_METRICS = {
    "kube_pod_container_status_last_terminated_reason",
    "kube_pod_container_status_restarts_total",
    "kube_pod_status_phase",
}
# Seen neither on a dashboard nor in a rule, and why.
NOT_DRAWN = {
    "process_virtual_memory_bytes": "address space says nothing about memory",
    "process_open_fds": "no program of ours comes near its limit",
    "process_max_fds": "as above",
    "vllm:lora_requests_info": "dropped when scraped: a series per combination of adapters",
}


def exported(metric: Metric) -> set[str]:
    """The names a metric has in PromQL."""
    parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
    return {metric.name + part for part in parts}


EXISTING = {name for metric in CATALOGUE + VLLM_METRICS for name in exported(metric)}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def test_how_metrics_are_found_in_promql():
    expr = """
        clamp_min(4 * sum by (a, b) (rate(x_sum{le="y", z=~"w(v)"}[6h])) / (u:t:s > 0) or 0 * max by (q) (r_1), 900)
          and on (n) group_left (m) label_replace(p offset 5m, "gpu", "$1", "uuid", "(.*)") unless o{i="\\"j\\""} == 1e3
    """
    assert metrics(expr) == {"x_sum", "u:t:s", "r_1", "p", "o"}


@pytest.mark.parametrize(("where", "expr"), queries())
def test_a_dashboard_names_only_what_exists(where, expr):
    assert metrics(expr)
    assert metrics(expr) <= EXISTING | RECORDED | PROMETHEUS_OWN


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_only_what_exists(rule):
    assert metrics(rule["expr"])
    assert metrics(rule["expr"]) <= EXISTING | RECORDED | PROMETHEUS_OWN | KUBE_STATE_METRICS


def test_every_metric_is_seen_somewhere():
    seen = {name for _, expr in queries() for name in metrics(expr)}
    seen |= {name for rule in rules() for name in metrics(rule["expr"])}
    unseen = {metric.name for metric in CATALOGUE + VLLM_METRICS if not exported(metric) & seen}
    assert unseen == set(NOT_DRAWN)


def test_every_recorded_series_is_used():
    seen = {name for _, expr in queries() for name in metrics(expr)}
    seen |= {name for rule in rules() for name in metrics(rule["expr"])}
    assert seen >= RECORDED


def test_labels_are_those_of_the_metric():
    """A matcher on a label that the metric never has selects nothing, and no test of values would show it."""
    target = {"job", "instance", "namespace", "pod", "role", "le"}
    known = {name: set(metric.labels) | target for metric in CATALOGUE + VLLM_METRICS for name in exported(metric)}
    found = [*queries(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())]
    for where, expr in found:
        for name, matchers in re.findall(r"\b([a-z_:][\w:]*)\s*\{([^}]*)\}", expr):
            if name in known:
                named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)))
                assert named <= known[name], f"{where}: {name} has no label {named - known[name]}"


def test_values_in_matchers_are_those_of_the_metric():
    found = [*queries(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())]
    values = {name: metric.labels for metric in CATALOGUE + VLLM_METRICS for name in exported(metric)}
    for where, expr in found:
        for name, matchers in re.findall(r"\b([a-z_:][\w:]*)\s*\{([^}]*)\}", expr):
            for label, _, text in re.findall(r'(\w+)\s*(=~|!~|!=|=)"([^"$]*)"', matchers):
                allowed = values.get(name, {}).get(label)
                if allowed:
                    assert set(text.split("|")) <= set(allowed), f"{where}: {name} has no {label}={text!r}"


def test_every_query_parses(tmp_path):
    tmp_path.chmod(0o755)
    parsed = [{"record": f"query:{number}", "expr": resolved(expr)} for number, (_, expr) in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "dashboards", "rules": parsed}]}))
    done = promtool("check", "rules", "queries.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_vllm_still_has_the_metrics_that_we_name():
    """In the source of the vLLM that is installed: its names change from version to version."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"
    text = source.read_text()
    for metric in VLLM_METRICS:
        if metric.name.startswith("vllm:"):
            # The client adds _total to counters' names.
            name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
            assert f'"{name}"' in text, f"{source} has no {name}"
