"""Rules and dashboards name only metrics that exist, each of our metrics is used in a dashboard or
a rule, and every query parses."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from images.grafana.vllm_metrics import VLLM_METRICS

from monitoring.dashboards import metrics, queries, resolved, rules
from monitoring.prometheus_tools import promtool
from tandem.metrics.catalogue import CATALOGUE
from tandem.metrics.metric import Metric

PROMETHEUS_OWN = {"up", "ALERTS"}
KUBE_STATE_METRICS = {
    "kube_pod_container_status_last_terminated_reason",
    "kube_pod_container_status_restarts_total",
    "kube_pod_status_phase",
}
# Metrics that no dashboard and no rule uses, with the reason.
NOT_DRAWN = {
    "process_virtual_memory_bytes": "address space says nothing about memory",
    "process_open_fds": "no program of ours comes near its limit",
    "process_max_fds": "as above",
    "tandem_run_bytes": (
        "says which run to tidy once the volume is full; the dashboards show the volume"
    ),
    "vllm:lora_requests_info": "dropped when scraped: a series per combination of adapters",
}


def exported(metric: Metric) -> set[str]:
    """The names a metric has in PromQL."""
    parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
    return {metric.name + part for part in parts}


EXPRESSIONS = [
    *queries(),
    *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
]
"""(where, PromQL) of every query and rule."""
SEEN = {name for _, expr in EXPRESSIONS for name in metrics(expr)}
EXISTING = {name for metric in CATALOGUE + VLLM_METRICS for name in exported(metric)}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def test_how_metrics_are_found_in_promql():
    expr = """
        clamp_min(4 * sum by (a, b) (rate(x_sum{le="y", z=~"w(v)"}[6h])) / (u:t:s > 0)
          or 0 * max by (q) (r_1), 900)
          and on (n) group_left (m) label_replace(p offset 5m, "gpu", "$1", "uuid", "(.*)")
          unless o{i="\\"j\\""} == 1e3
    """
    assert metrics(expr) == {"x_sum", "u:t:s", "r_1", "p", "o"}


def test_queries_and_rules_name_only_what_exists():
    for where, expr in EXPRESSIONS:
        assert metrics(expr), where
        kube = KUBE_STATE_METRICS if "Tandem" in where else set()
        assert metrics(expr) <= EXISTING | RECORDED | PROMETHEUS_OWN | kube, where


def test_every_metric_and_recorded_series_is_seen_somewhere():
    unseen = {metric.name for metric in CATALOGUE + VLLM_METRICS if not exported(metric) & SEEN}
    assert unseen == set(NOT_DRAWN)
    assert SEEN >= RECORDED


def test_labels_in_matchers_are_those_of_the_metric():
    """If a metric never has the label or the value of a matcher, the matcher selects nothing. No
    test of values would find this mistake."""
    of_target = {"job", "instance", "namespace", "pod", "role", "le"}
    labels = {
        name: metric.labels for metric in CATALOGUE + VLLM_METRICS for name in exported(metric)
    }
    for where, expr in EXPRESSIONS:
        for name, matchers in re.findall(r"\b([a-z_:][\w:]*)\s*\{([^}]*)\}", expr):
            if name not in labels:
                continue
            for label, text in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
                assert label in labels[name].keys() | of_target, (
                    f"{where}: {name} has no label {label}"
                )
                values = labels[name].get(label)
                if values and "$" not in text:
                    assert set(text.split("|")) <= set(values), (
                        f"{where}: {name} has no {label}={text!r}"
                    )


def test_every_query_parses(tmp_path):
    parsed = [
        {"record": f"query:{number}", "expr": resolved(expr)}
        for number, (_, expr) in enumerate(queries())
    ]
    (tmp_path / "queries.yml").write_text(
        json.dumps({"groups": [{"name": "dashboards", "rules": parsed}]})
    )
    done = promtool("check", "rules", "queries.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_names_and_labels_are_in_its_source():
    root = Path(find_spec("vllm").submodule_search_locations[0])
    source = (root / "v1/metrics/loggers.py").read_text()
    for metric in VLLM_METRICS:
        if not metric.name.startswith("vllm:"):
            continue  # metrics of prometheus_fastapi_instrumentator and of our plugin
        # prometheus_client itself adds _total to a counter's name
        name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        made = re.search(rf"(_\w+_cls)\(\s*name=\"{name}\"|name = \"{name}\"", source)
        assert made, f"vLLM has no {name}"
        assert made[1] is None or made[1] == f"_{metric.kind}_cls", name
        for label in metric.labels:
            known = re.search(rf"\"{label}\"", source) or metric.name == "vllm:cache_config_info"
            assert known, (name, label)
