"""The means of the chart's tests, with a small chart: what they must notice, they notice."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_sdkpy
import pytest
import yaml

from helm import charts, schemas
from helm.cluster import Cluster
from helm.cluster_http import matches
from helm.cluster_store import Event, Refused

CONFIG = """
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-config}
data:
  greeting: {{ .Values.greeting }}
  kubernetes: {{ .Capabilities.KubeVersion.Version }}
  podmonitors: {{ .Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor" | quote }}
  rules: {{ .Files.Get "files/rules/one.yml" | quote }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .Release.Name }}-data
  annotations: {helm.sh/resource-policy: keep}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Gi}}
"""
WORKLOADS = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: {{ .Release.Name }}-set}
spec:
  serviceName: {{ .Values.greeting }}
  selector: {matchLabels: {app: {{ .Release.Name }}}}
  template:
    metadata: {labels: {app: {{ .Release.Name }}}}
    spec: {containers: [{name: main, image: {{ .Values.image }}}]}
"""
TEST = """
apiVersion: v1
kind: Pod
metadata: {name: {{ .Release.Name }}-test, annotations: {helm.sh/hook: test}}
spec: {restartPolicy: Never, containers: [{name: main, image: busybox}]}
"""
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "global": {"type": "object"},
        "image": {"type": "string"},
        "greeting": {"type": "string"},
        "nested": {"type": "object", "additionalProperties": False, "properties": {"deep": {"type": "integer"}}},
    },
}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A chart with a test pod, a kept claim, a schema and a link to files outside of it."""
    root = tmp_path / "small"
    (root / "templates").mkdir(parents=True)
    (root / "files").mkdir()
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "one.yml").write_text("a rule")
    (root / "files" / "rules").symlink_to("../../rules")
    chart = {"apiVersion": "v2", "name": "small", "version": "0.1.0", "kubeVersion": ">=1.30.0-0"}
    (root / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (root / "values.yaml").write_text("greeting: hello\nimage: busybox\nnested: {deep: 1}\n")
    (root / "values.schema.json").write_text(json.dumps(SCHEMA))
    (root / "templates" / "config.yaml").write_text(CONFIG)
    (root / "templates" / "set.yaml").write_text(WORKLOADS)
    (root / "templates" / "test.yaml").write_text(TEST)
    (root / "templates" / "NOTES.txt").write_text("{{ .Values.greeting }} from {{ .Release.Namespace }}")
    return root


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def pod(**container: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "busybox", **container}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [main]}}


def test_render_gives_objects_hooks_and_notes(chart):
    rendered = charts.render(
        {"greeting": "hi"}, release="r", namespace="team", version="1.30.0", groups=(), chart=chart
    )
    data = rendered.one("ConfigMap", "-config")["data"]
    assert data == {"greeting": "hi", "kubernetes": "v1.30.0", "podmonitors": "false", "rules": "a rule"}
    assert rendered.notes.strip() == "hi from team"
    assert [obj["metadata"]["name"] for obj, _ in rendered.pods()] == ["r-set", "r-test"]
    assert all(template["spec"]["containers"] for _, template in rendered.pods())
    assert charts.render(chart=chart).one("ConfigMap")["data"]["podmonitors"] == "true"
    with pytest.raises(LookupError, match="0 objects are a ConfigMap"):
        rendered.one("ConfigMap", "-other")


def test_a_render_fails_with_helms_own_message(chart):
    with pytest.raises(helm_sdkpy.InstallError, match="at '/nested': additional properties 'deeep' not allowed"):
        charts.render({"nested": {"deeep": 2}}, chart=chart)
    (chart / "Chart.yaml").write_text((chart / "Chart.yaml").read_text().replace("1.30", "1.38"))
    with pytest.raises(helm_sdkpy.InstallError, match=r"requires kubeVersion: >=1\.38\.0-0"):
        charts.render(chart=chart)


def test_a_key_given_twice_and_a_name_used_twice_are_noticed(chart):
    path = chart / "templates" / "config.yaml"
    path.write_text(f"{CONFIG}\n---\n{CONFIG}")
    with pytest.raises(ValueError, match=r"more than once.*t-config"):
        charts.render(chart=chart)
    path.write_text(CONFIG.replace("\ndata:\n", "\ndata: {}\ndata:\n"))
    with pytest.raises(yaml.constructor.ConstructorError, match=r"given twice: \{'data'\}"):
        charts.render(chart=chart)


def test_lint_takes_values_and_sees_errors(chart):
    assert charts.lint(chart=chart) == []
    assert charts.lint({"greeting": "hi"}, chart=chart) == []
    assert "error values.yaml" in charts.lint({"greting": "hi"}, chart=chart)


def test_the_package_holds_what_links_point_at(chart, tmp_path):
    archive = charts.package(tmp_path / "dist", chart)
    assert charts.render(chart=archive).one("ConfigMap")["data"]["rules"] == "a rule"


def test_a_claim_outlives_install_upgrade_and_uninstall(chart, cluster):
    charts.install(cluster, {"greeting": "one"}, chart=chart)
    claim = cluster.objects("PersistentVolumeClaim", "ns")[0]
    charts.upgrade(cluster, {"image": "other"}, chart=chart, reuse_values=True)
    data = cluster.objects("ConfigMap", "ns")[0]["data"]
    assert data["greeting"] == "one"
    stateful_set = cluster.objects("StatefulSet", "ns")[0]
    assert stateful_set["spec"]["template"]["spec"]["containers"][0]["image"] == "other"
    assert stateful_set["metadata"]["generation"] == 2
    charts.upgrade(cluster, {"greeting": "one"}, chart=chart)
    assert cluster.objects("StatefulSet", "ns")[0]["spec"]["template"]["spec"]["containers"][0]["image"] == "busybox"
    charts.uninstall(cluster)
    assert [o["metadata"]["uid"] for o in cluster.objects(namespace="ns")] == [claim["metadata"]["uid"]]


def test_two_releases_in_one_namespace_are_kept_apart(chart, cluster):
    charts.install(cluster, release="a", chart=chart)
    charts.install(cluster, release="b", chart=chart)
    charts.install(cluster, release="a", namespace="other", chart=chart)
    assert charts.upgrade(cluster, release="a", chart=chart)["version"] == 2
    charts.uninstall(cluster, release="a")
    names = {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in cluster.objects("StatefulSet")}
    assert names == {("ns", "b-set"), ("other", "a-set")}
    assert charts.upgrade(cluster, release="b", chart=chart)["version"] == 2


def test_an_upgrade_that_changes_what_cannot_change_is_refused(chart, cluster):
    charts.install(cluster, chart=chart)
    with pytest.raises(helm_sdkpy.UpgradeError, match=r"spec\.serviceName: field is immutable"):
        charts.upgrade(cluster, {"greeting": "other"}, chart=chart)


def test_a_new_chart_sees_old_values_only_when_they_are_reused(chart, cluster):
    charts.install(cluster, {"greeting": "mine"}, chart=chart)
    (chart / "values.yaml").write_text("greeting: hello\nimage: busybox\nadded: 1\n")
    (chart / "templates" / "config.yaml").write_text(CONFIG.replace("{{ .Values.greeting }}", "v{{ .Values.added }}"))
    schema = SCHEMA | {"properties": {**SCHEMA["properties"], "added": {"type": "integer"}}}
    (chart / "values.schema.json").write_text(json.dumps(schema))
    charts.upgrade(cluster, chart=chart, reuse_values=True)
    assert cluster.objects("ConfigMap", "ns")[0]["data"]["greeting"] == "v"
    (chart / "values.schema.json").write_text(json.dumps(schema | {"required": ["added"]}))
    with pytest.raises(helm_sdkpy.UpgradeError, match="missing property 'added'"):
        charts.upgrade(cluster, chart=chart, reuse_values=True)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_helm_test_ends_as_its_pod_does(chart, cluster, exit_code):
    def kubelet(event: Event) -> None:
        if event.object["kind"] == "Pod" and event.type == "ADDED":
            cluster.update_status(event.object, {"phase": "Running"})
            time.sleep(0.2)
            terminated = {"name": "main", "state": {"terminated": {"exitCode": exit_code}}}
            phase = "Failed" if exit_code else "Succeeded"
            cluster.update_status(event.object, {"phase": phase, "containerStatuses": [terminated]})

    charts.install(cluster, chart=chart)
    stop = cluster.watch(kubelet)
    try:
        if exit_code:
            with pytest.raises(helm_sdkpy.ChartError, match="t-test failed"):
                charts.run_tests(cluster)
        else:
            assert charts.run_tests(cluster)["hooks"][0]["last_run"]["phase"] == "Succeeded"
    finally:
        stop()


def test_helm_waits_for_what_a_watch_tells(chart, cluster):
    """`--wait`: Helm 4 lists and watches; a StatefulSet that becomes ready ends it, one that doesn't fails it."""

    def controller(event: Event) -> None:
        if event.object["kind"] == "StatefulSet" and event.type == "ADDED":
            time.sleep(0.2)
            counts = dict.fromkeys(("replicas", "readyReplicas", "currentReplicas", "updatedReplicas"), 1)
            revisions = dict.fromkeys(("currentRevision", "updateRevision"), "a")
            cluster.update_status(event.object, {"observedGeneration": 1, **counts, **revisions})
        if event.object["kind"] == "PersistentVolumeClaim" and event.type == "ADDED":
            cluster.update_status(event.object, {"phase": "Bound"})

    with pytest.raises(helm_sdkpy.InstallError, match="t-set not ready"):
        charts.install(cluster, chart=chart, wait=True, timeout=1)
    cluster.reset()
    stop = cluster.watch(controller)
    try:
        assert charts.install(cluster, chart=chart, wait=True, timeout=20)["info"]["status"] == "deployed"
    finally:
        stop()


def test_the_server_refuses_what_a_real_one_refuses(cluster):
    kind = cluster.kind(pod())
    with pytest.raises(Refused, match='namespaces "nowhere" not found'):
        cluster.store.create(kind, "nowhere", pod())
    big = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"x": "A" * 1_500_000}}
    with pytest.raises(Refused, match="Too long"):
        cluster.put(big)
    cluster.store.create(kind, "default", pod())
    with pytest.raises(Refused, match="already exists"):
        cluster.store.create(kind, "default", pod())
    with pytest.raises(KeyError, match=r"serves no resource\.k8s\.io/v1"), Cluster("1.30.0") as old:
        old.put({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}})


@pytest.mark.parametrize(
    ("selector", "fits"),
    [("a=1", True), ("a!=1", False), ("a in (1,2),b", True), ("!b", False), ("!c,b=2", True), ("c=3", False)],
)
def test_label_selectors(selector, fits):
    assert matches({"a": "1", "b": "2"}, selector) is fits


def resources(request: str, limit: str, name: str = "memory") -> dict[str, Any]:
    return pod(resources={"requests": {name: request}, "limits": {name: limit}})


def workload(label: str) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": label}}, "spec": pod()["spec"]}
    spec = {"selector": {"matchLabels": {"app": "a"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}


def monitor(kind: str, endpoints: str, **endpoint: Any) -> dict[str, Any]:
    spec = {"selector": {}, endpoints: [{"port": "http", **endpoint}]}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": kind, "metadata": {"name": "m"}, "spec": spec}


def rule(**fields: Any) -> dict[str, Any]:
    group = {"name": "g", "rules": [{"alert": "A", "expr": "up == 0", **fields}]}
    meta = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "r"}}
    return meta | {"spec": {"groups": [group]}}


def route(**fields: Any) -> dict[str, Any]:
    spec = {"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"name": "s", "port": 80}]}], **fields}
    meta = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": "r"}}
    return meta | {"spec": spec}


@pytest.mark.parametrize("version", [charts.OLDEST, charts.NEWEST])
@pytest.mark.parametrize(
    ("good", "bad", "named"),
    [
        (pod(), pod(imag="x"), r"spec.containers.0: .*'imag' was unexpected"),
        (pod(), pod(env=[{"name": "A", "value": 1}]), r"env.0.value: 1 is not of type 'string'"),
        (pod(env=[{"name": "A"}]), pod(env=[{"name": "A"}, {"name": "A"}]), r"env: \('A',\) more than once"),
        (pod(), pod() | {"metadata": {"name": "a", "labels": {"v": "1+2"}}}, r"'1\+2' is not a valid label"),
        (pod(), pod() | {"metadata": {"name": "A_"}}, "'A_' is not a valid name"),
        (pod(), pod() | {"apiVersion": "apps/v1"}, "has no apps/v1 Pod"),
        (pod(), pod(volumeMounts=[{"name": "v", "mountPath": "/v"}]), "there is no volume v"),
        (resources("1Gi", "1Gi"), resources("1.5Gi", "1Gi"), "request 1.5Gi is above the limit 1Gi"),
        (resources("1", "1", "a.b/c"), resources("1", "2", "a.b/c"), "a.b/c: an extended resource.s request and limit"),
        (workload("a"), workload("b"), "does not match the labels"),
        (monitor("PodMonitor", "podMetricsEndpoints"), monitor("PodMonitor", "endpoints"), "endpoints"),
        (
            monitor("ServiceMonitor", "endpoints"),
            monitor("ServiceMonitor", "endpoints", prt="x"),
            "'prt' was unexpected",
        ),
        (rule(), rule(annotations={"summary": 1}), r"summary: 1 is not of type 'string'"),
        (rule(), rule() | {"metadata": {"name": "r", "label": {}}}, "'label' was unexpected"),
        (route(), route(hostname="a.b"), "'hostname' was unexpected"),
        (route(), route() | {"kind": "HTTPRout"}, "no schema of gateway.networking.k8s.io/v1 HTTPRout"),
    ],
)
def test_each_kind_of_schema_catches_a_wrong_field(version, good, bad, named):
    assert schemas.validate(good, version) == []
    problems = schemas.validate(bad, version)
    assert re.search(named, problems[0])
