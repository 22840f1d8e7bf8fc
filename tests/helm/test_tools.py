"""`helm.charts` on a small chart, and `helm.schemas` on invalid objects."""

import json
import re
from pathlib import Path
from typing import Any

import helm_sdkpy
import pytest
import yaml

from helm import charts, schemas
from helm.kubernetes_api import ApiServer

CONFIG = """
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-config}
data:
  greeting: {{ .Values.greeting }}
  kubernetes: {{ .Capabilities.KubeVersion.Version }}
  podmonitors: {{ .Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor" | quote }}
  rules: {{ .Files.Get "files/rules/one.yml" | quote }}
"""
WORKLOADS = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: {{ .Release.Name }}-set}
spec:
  serviceName: {{ .Values.greeting }}
  selector: {matchLabels: {app: a}}
  template: {metadata: {labels: {app: a}}, spec: {containers: [{name: main, image: {{ .Values.image }}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: {{ .Release.Name }}-test, annotations: {helm.sh/hook: test}}
spec: {restartPolicy: Never, containers: [{name: main, image: busybox}]}
"""
VALUES_SCHEMA = {"properties": {"global": {}, "image": {}, "greeting": {}}, "additionalProperties": False}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A chart with a test pod, a schema and a link to files outside it."""
    root = tmp_path / "small"
    (root / "templates").mkdir(parents=True)
    (root / "files").mkdir()
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "one.yml").write_text("a rule")
    (root / "files" / "rules").symlink_to("../../rules")
    chart = {"apiVersion": "v2", "name": "small", "version": "0.1.0", "kubeVersion": ">=1.30.0-0"}
    (root / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (root / "values.yaml").write_text("greeting: hello\nimage: busybox\n")
    (root / "values.schema.json").write_text(json.dumps(VALUES_SCHEMA))
    for name, text in (("config", CONFIG), ("workloads", WORKLOADS)):
        (root / "templates" / f"{name}.yaml").write_text(text)
    (root / "templates" / "NOTES.txt").write_text("{{ .Values.greeting }} from {{ .Release.Namespace }}")
    return root


def test_render_gives_objects_hooks_and_notes(chart):
    options = {"release": "r", "namespace": "team", "version": "1.30.0", "groups": (), "chart": chart}
    rendered = charts.render({"greeting": "hi"}, **options)
    data = rendered.one("ConfigMap", "-config")["data"]
    assert data == {"greeting": "hi", "kubernetes": "v1.30.0", "podmonitors": "false", "rules": "a rule"}
    assert rendered.notes.strip() == "hi from team"
    assert [obj["metadata"]["name"] for obj, _ in rendered.pods()] == ["r-set", "r-test"]
    assert charts.render(chart=chart).one("ConfigMap")["data"]["podmonitors"] == "true"


def test_a_key_given_twice_and_a_name_used_twice_are_errors(chart):
    path = chart / "templates" / "config.yaml"
    path.write_text(f"{CONFIG}\n---\n{CONFIG}")
    with pytest.raises(ValueError, match=r"more than once.*t-config"):
        charts.render(chart=chart)
    path.write_text(CONFIG.replace("\ndata:\n", "\ndata: {}\ndata:\n"))
    with pytest.raises(yaml.constructor.ConstructorError, match=r"given twice: \{'data'\}"):
        charts.render(chart=chart)


def test_lint_takes_values_and_sees_errors(chart):
    assert charts.lint({"greeting": "hi"}, chart=chart) == []
    assert "error values.yaml" in charts.lint({"greting": "hi"}, chart=chart)


def test_the_package_holds_the_targets_of_links(chart, tmp_path):
    archive = charts.package(tmp_path / "dist", chart)
    assert charts.render(chart=archive).one("ConfigMap")["data"]["rules"] == "a rule"


def test_an_upgrade_of_an_immutable_field_is_refused(chart):
    with ApiServer() as server:
        charts.install(server, chart=chart)
        charts.upgrade(server, {"image": "other"}, chart=chart)
        (stateful_set,) = server.objects("StatefulSet")
        assert stateful_set["spec"]["template"]["spec"]["containers"][0]["image"] == "other"
        with pytest.raises(helm_sdkpy.UpgradeError, match=r"spec\.serviceName: field is immutable"):
            charts.upgrade(server, {"greeting": "other"}, chart=chart)


def obj(api_version: str, kind: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": "a"}, "spec": spec}


def pod(**container: Any) -> dict[str, Any]:
    return obj("v1", "Pod", containers=[{"name": "main", "image": "busybox", **container}])


def resources(request: str, limit: str, name: str = "memory") -> dict[str, Any]:
    return pod(resources={"requests": {name: request}, "limits": {name: limit}})


def workload(label: str) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": label}}, "spec": pod()["spec"]}
    return obj("apps/v1", "Deployment", selector={"matchLabels": {"app": "a"}}, template=template)


def monitor(endpoints: str) -> dict[str, Any]:
    return obj("monitoring.coreos.com/v1", "PodMonitor", selector={}, **{endpoints: [{"port": "http"}]})


def rule(**fields: Any) -> dict[str, Any]:
    group = {"name": "g", "rules": [{"alert": "A", "expr": "up == 0", **fields}]}
    return obj("monitoring.coreos.com/v1", "PrometheusRule", groups=[group])


def route(**fields: Any) -> dict[str, Any]:
    rules = [{"backendRefs": [{"name": "s", "port": 80}]}]
    return obj("gateway.networking.k8s.io/v1", "HTTPRoute", parentRefs=[{"name": "g"}], rules=rules, **fields)


@pytest.mark.parametrize("version", [charts.OLDEST, charts.NEWEST])
@pytest.mark.parametrize(
    ("good", "bad", "named"),
    [
        (pod(), pod(imag="x"), r"spec.containers.0: .*'imag' was unexpected"),
        (pod(), pod(env=[{"name": "A", "value": 1}]), r"env.0.value: 1 is not of type 'string'"),
        (pod(env=[{"name": "A"}]), pod(env=[{"name": "A"}, {"name": "A"}]), r"env: A more than once"),
        (pod(), pod() | {"metadata": {"name": "a", "labels": {"v": "1+2"}}}, r"'1\+2' is not a valid label"),
        (pod(), pod() | {"metadata": {"name": "A_"}}, "'A_' is not a valid name"),
        (pod(), pod() | {"apiVersion": "apps/v1"}, "has no apps/v1 Pod"),
        (pod(), pod(volumeMounts=[{"name": "v", "mountPath": "/v"}]), "there is no volume v"),
        (resources("1Gi", "1Gi"), resources("1.5Gi", "1Gi"), "request 1.5Gi is above the limit 1Gi"),
        (resources("1", "1", "a.b/c"), resources("1", "2", "a.b/c"), "a.b/c: an extended resource.s request and limit"),
        (workload("a"), workload("b"), "does not match the labels"),
        (monitor("podMetricsEndpoints"), monitor("endpoints"), "endpoints"),
        (rule(), rule(annotations={"summary": 1}), r"summary: 1 is not of type 'string'"),
        (route(), route(hostname="a.b"), "'hostname' was unexpected"),
        (route(), route() | {"kind": "HTTPRout"}, "no schema of gateway.networking.k8s.io/v1 HTTPRout"),
    ],
)
def test_validate_finds_an_invalid_object(version, good, bad, named):
    assert schemas.validate(good, version) == []
    assert re.search(named, schemas.validate(bad, version)[0])
