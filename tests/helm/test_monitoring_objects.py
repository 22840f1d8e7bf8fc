"""Monitors find the right ports of the right pods; rules and dashboards are those of compose."""

import re
from typing import Any

import pytest
import yaml

from helm import charts
from helm.charts import CHART, Object, Rendered, merged
from helm.matrix import BASE, CASES, COMPONENT, INSTANCE
from helm.pods import selects
from helm.renders import (
    NAMESPACE,
    RELEASES,
    case,
    component,
    component_of,
    templates,
    value,
    with_values,
)
from monitoring.dashboards import metrics

ROOT = CHART.parents[1]
PROMETHEUS = yaml.safe_load((ROOT / "images" / "prometheus" / "prometheus.yml").read_text())
JOBS = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
OF_THE_RELEASE = {'namespace=~".+"': f'namespace="{NAMESPACE}"', 'pod=~".+-(': 'pod=~"a-tandem-('}
"""What the chart replaces in the rules on kube-state-metrics."""


def in_namespace(rule: Object) -> Object:
    """The rule with each metric restricted to the release's namespace."""
    names, matcher = "|".join(metrics(rule["expr"])), f'namespace="{NAMESPACE}"'
    expr = re.sub(rf"(?<![\w:])({names})(?![\w:])", rf"\1{{{matcher}}}", rule["expr"])
    return rule | {"expr": expr.replace(f"{matcher}}}{{", f"{matcher},")}


def groups_of(file: str, replaced: dict[str, str]) -> list[Object]:
    """The groups in a file of rules, with texts replaced."""
    text = (ROOT / "images" / "prometheus" / "rules" / file).read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return yaml.safe_load(text)["groups"]


TANDEM = [
    group | {"rules": [*map(in_namespace, group["rules"])]} for group in groups_of("tandem.yml", {})
]
KUBERNETES = groups_of("kubernetes.yml", OF_THE_RELEASE)
DASHBOARDS = sorted((ROOT / "images" / "grafana" / "dashboards").glob("*.json"))
MONITORED = [name for name in CASES if value(name, "monitoring.monitors.kind") != "none"]


def camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def target(rendered: list[Rendered], monitor: Object) -> tuple[str, int]:
    """The component and the port that a monitor finds in a namespace with these releases."""
    spec, endpoint = monitor["spec"], endpoint_of(monitor)
    assert (spec["namespaceSelector"], endpoint["path"]) == (
        {"matchNames": [NAMESPACE]},
        "/metrics",
    )
    selected = [(spec["selector"]["matchLabels"], endpoint["port"])]
    if monitor["kind"] == "ServiceMonitor":
        selected = [
            (service["spec"]["selector"], port["targetPort"])
            for r in rendered
            for service in r.all("Service")
            if selects(spec["selector"], service["metadata"]["labels"])
            for port in service["spec"]["ports"]
            if port["name"] == endpoint["port"]
        ]
    ((labels, name),) = selected
    assert labels[INSTANCE] == "a"
    pod = templates(rendered[0])[labels[COMPONENT]]
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
    (number,) = (
        port["containerPort"] for port in ports if name in (port["name"], port["containerPort"])
    )
    return component(pod), number


def endpoint_of(monitor: Object) -> Object:
    (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
    return endpoint


@pytest.mark.parametrize("name", MONITORED)
def test_each_monitor_finds_the_target_of_its_job_and_no_other(name):
    rendered = [case(name, release) for release in RELEASES]
    kind = {"pod": "PodMonitor", "service": "ServiceMonitor"}[
        value(name, "monitoring.monitors.kind")
    ]
    monitors = {
        f"tandem-{m['metadata']['name'].removeprefix('a-tandem-')}": m
        for m in rendered[0].all(kind)
    }
    assert set(monitors) == set(JOBS)
    assert not rendered[0].all(
        {"PodMonitor": "ServiceMonitor", "ServiceMonitor": "PodMonitor"}[kind]
    )
    for job, monitor in monitors.items():
        if "static_configs" in JOBS[job]:
            (static,) = JOBS[job]["static_configs"]
            (address,) = static["targets"]
            role = static["labels"]["role"]
        else:  # each vLLM of the container; here a pod has one
            address, role = "inference:8000", "inference"
        assert target(rendered, monitor) == (
            component_of(name, role),
            int(address.rpartition(":")[2]),
        ), job
        endpoint = endpoint_of(monitor)
        labels = {r["targetLabel"]: r["replacement"] for r in endpoint["relabelings"]}
        assert labels == {"job": job, "role": role}
        assert all(set(r) == {"targetLabel", "replacement"} for r in endpoint["relabelings"])
        expected = [
            {camel(key): v for key, v in r.items()}
            for r in JOBS[job].get("metric_relabel_configs", [])
        ]
        assert endpoint.get("metricRelabelings", []) == expected
        assert endpoint["interval"] == JOBS[job].get(
            "scrape_interval", PROMETHEUS["global"]["scrape_interval"]
        )
        assert endpoint["scrapeTimeout"] == PROMETHEUS["global"]["scrape_timeout"]


def test_users_options_of_monitors():
    more = [{"action": "labeldrop", "regex": "x"}]
    settings = {
        "kind": "pod",
        "labels": {"release": "kps"},
        "annotations": {"a": "b"},
        "relabelings": more,
        "metricRelabelings": more,
        "interval": "30s",
        "gpuInterval": "6s",
        "scrapeTimeout": "4s",
    }
    plain, changed = (
        with_values(monitoring={"monitors": s}).all("PodMonitor")
        for s in ({"kind": "pod"}, settings)
    )
    assert [endpoint_of(m)["interval"] for m in changed] == ["30s", "6s", "6s", "30s"]
    for before, after in zip(plain, changed, strict=True):
        assert after["metadata"]["labels"] == before["metadata"]["labels"] | {"release": "kps"}
        assert after["metadata"]["annotations"] == {"a": "b"}
        assert endpoint_of(after)["scrapeTimeout"] == "4s"
        for key in ("relabelings", "metricRelabelings"):
            assert endpoint_of(after)[key] == [*endpoint_of(before).get(key, []), *more]


def rules(**settings: Any) -> list[Object]:
    """The groups of a PrometheusRule made with these values."""
    return with_values(monitoring={"rules": {"enabled": True, **settings}}).one("PrometheusRule")[
        "spec"
    ]["groups"]


def alerts(groups: list[Object]) -> dict[str, Object]:
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_the_rules_are_those_of_compose_in_the_releases_namespace():
    assert rules() == TANDEM + KUBERNETES
    assert rules(kubernetes=False) == TANDEM
    assert len(alerts(TANDEM)) > 20
    assert any("record" in rule for group in TANDEM for rule in group["rules"])


def test_the_rules_count_a_gpu_as_free_where_jobs_do():
    made = with_values(
        monitoring={"rules": {"enabled": True}}, settings={"freeGpuBytes": 2**31}
    ).one("PrometheusRule")
    raised = [
        rule["expr"]
        for rule in alerts(made["spec"]["groups"]).values()
        if "2147483648" in rule["expr"]
    ]
    assert len(raised) == 2
    assert "256 * 1024^2" not in str(made)


@pytest.mark.parametrize(
    "name", [name for name in CASES if value(name, "monitoring.rules.enabled")]
)
def test_the_rules_on_kube_state_metrics_select_the_pods_of_the_release(name):
    rendered = case(name)
    exprs = " ".join(
        rule["expr"]
        for group in rendered.one("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
    )
    selectors = re.findall(r"\bkube_\w+\s*\{([^}]*)\}", exprs)
    assert len(selectors) == len(re.findall(r"\bkube_", exprs)) >= 4
    own = [f"{obj['metadata']['name']}-0" for obj in rendered.all("StatefulSet")]
    own += [f"{obj['metadata']['name']}-6d4f9c7b8-x2x7q" for obj in rendered.all("Deployment")]
    assert len(own) == len(templates(rendered))
    others = ["ingress-nginx-controller-6d4f9c7b8-x2x7q", "b-tandem-trainer-0", "a-tandem-test-job"]
    for selector in selectors:
        matchers = {
            label: (sign, text)
            for label, sign, text in re.findall(r'(\w+)(=~?)"([^"]*)"', selector)
        }
        assert matchers["namespace"] == ("=", NAMESPACE), selector
        sign, pattern = matchers["pod"]
        assert sign == "=~"
        assert [pod for pod in own + others if re.fullmatch(pattern, pod)] == own, selector


def test_disabled_and_overridden_rules():
    everything = alerts(TANDEM + KUBERNETES)
    first, second, third, *_ = everything
    changed = alerts(
        rules(disabled=[first], overrides={second: {"for": "77m"}, third: {"severity": "info"}})
    )
    del everything[first]
    everything[second] = {**everything[second], "for": "77m"}
    everything[third] = {
        **everything[third],
        "labels": everything[third]["labels"] | {"severity": "info"},
    }
    assert changed == everything
    group = next(g for g in TANDEM + KUBERNETES if all("alert" in rule for rule in g["rules"]))
    without = rules(disabled=[rule["alert"] for rule in group["rules"]])
    assert without == [g for g in TANDEM + KUBERNETES if g != group], "an empty group disappears"


def test_labels_and_runbook_of_alerts():
    labelled = rules(alertLabels={"team": "ml", "severity": "page"})
    for group, before in zip(labelled, TANDEM + KUBERNETES, strict=True):
        for rule, was in zip(group["rules"], before["rules"], strict=True):
            more = (
                {"labels": was["labels"] | {"team": "ml", "severity": "page"}}
                if "alert" in was
                else {}
            )
            assert rule == was | more
    mine = "https://example.org/run"
    for name, rule in alerts(rules(runbook=mine)).items():
        was = alerts(TANDEM + KUBERNETES)[name]["annotations"]
        expected = was["runbook_url"].replace("docs/alerts.md", mine)
        assert expected.startswith(mine)
        assert rule["annotations"] == was | {"runbook_url": expected}


@pytest.mark.parametrize(
    "name", [name for name in CASES if value(name, "monitoring.dashboards.enabled")]
)
def test_the_dashboards_are_those_of_compose_byte_for_byte(name):
    files = {}
    for config in (
        o for o in case(name).all("ConfigMap") if "-dashboard-" in o["metadata"]["name"]
    ):
        assert (
            config["metadata"]["labels"].items()
            >= value(name, "monitoring.dashboards.labels").items()
        )
        files |= config["data"]
        assert len(str(config)) < 2**20, "too large for a ConfigMap"
    assert {file: text.encode() for file, text in files.items()} == {
        f"{NAMESPACE}.a-tandem-{path.name}": path.read_bytes() for path in DASHBOARDS
    }


def test_namespace_and_labels_of_dashboards():
    dashboards = {
        "enabled": True,
        "namespace": "grafana",
        "labels": {"grafana_dashboard": None, "mine": "yes"},
    }
    for config in with_values(monitoring={"dashboards": dashboards}).all("ConfigMap"):
        assert config["metadata"]["namespace"] == "grafana"
        assert config["metadata"]["labels"]["mine"] == "yes"


def test_releases_of_one_name_have_dashboards_of_their_own_in_one_namespace():
    """Both releases are called t, so their objects could collide, and so could the files that
    Grafana's sidecar writes into one directory."""
    values = merged(BASE, {"monitoring": {"dashboards": {"enabled": True, "namespace": "grafana"}}})
    made = [
        config
        for team in ("a", "b")
        for config in charts.render(values, namespace=team).all("ConfigMap")
    ]
    assert len({config["metadata"]["name"] for config in made}) == 2 * len(DASHBOARDS)
    assert len({key for config in made for key in config["data"]}) == 2 * len(DASHBOARDS)
