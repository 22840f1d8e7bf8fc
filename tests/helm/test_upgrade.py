"""Upgrades of a release. The tests are about the values of an older chart, about roles that are
scaled to 0, about Kueue's rules, and about immutable fields."""

import gzip
import json
from copy import deepcopy
from typing import Any

import pytest

from helm import charts, goldens
from helm.charts import at, defaults, leaves, merged
from helm.kubernetes_api import ApiServer
from helm.pods import component, container_of, pod_of

BASE = goldens.values("defaults")
SHARED = {"gpuMode": "shared", "trainer": {"gpus": 2}, "inference": {"gpus": 2}}
CHOSEN = goldens.values("everything")
LEAVES = list(leaves(defaults()))


def without(removed: list[str]) -> dict[str, Any]:
    """The chart's default values without the keys at the paths `removed`."""
    result = deepcopy(defaults())
    for *sections, key in (path.split(".") for path in removed):
        node = result
        for section in sections:
            node = node[section]
        del node[key]
    return result


def objects(release: charts.Rendered) -> list[dict[str, Any]]:
    """The objects of a release with this chart's version in place of 0.0.9."""
    text = json.dumps(sorted(release.objects, key=str)).replace("tandem-0.0.9", "tandem-0.1.0")
    return json.loads(text)


@pytest.mark.parametrize(
    "older",
    [{}, without(LEAVES), without(LEAVES[::2]), without(LEAVES[1::2])],
    ids=["nothing", "sections", "each second", "each other second"],
)
def test_values_of_an_older_chart_render_as_a_fresh_install(older, tmp_path):
    """With --reuse-values Helm renders the new templates with the older chart's defaults, which
    lack newer values."""
    chart = charts.other_version(tmp_path, "0.0.9", older)
    assert objects(charts.render(CHOSEN, chart=chart)) == objects(charts.render(CHOSEN))


def test_another_chart_version_changes_no_pod_but_another_template_the_runners(tmp_path):
    values = goldens.values("jobs")
    new = charts.render(values, chart=charts.other_version(tmp_path, "0.2.0"))
    assert new.one("StatefulSet", "trainer")["metadata"]["labels"]["helm.sh/chart"].endswith(
        "0.2.0"
    )
    kept = [pod for pod in charts.render(values).pods() if not component(pod).startswith("test-")]
    assert [pod for pod in new.pods() if not component(pod).startswith("test-")] == kept
    other = charts.render(merged(values, at("trainer.tmpSize", "3Gi"))).pods()
    old, changed = (
        pod_of(pods, "trainer")["metadata"]["annotations"] for pods in (new.pods(), other)
    )
    assert old["tandem/job-template"] != changed["tandem/job-template"]
    assert container_of(new.pods(), "trainer") == container_of(other, "trainer")


def test_an_upgrade_reuses_values_and_refuses_one_that_it_does_not_know(tmp_path):
    older = charts.other_version(tmp_path, "0.0.9", without(LEAVES[::2]))
    with ApiServer() as server:
        charts.install(server, CHOSEN, chart=older)
        first = charts.rendered(charts.upgrade(server, {}, reuse_values=True))
        assert objects(first) == objects(charts.render(CHOSEN, release="t"))
    gone = charts.other_version(tmp_path, "0.0.9", {**defaults(), "gone": {"since": "0.0.9"}})
    with ApiServer() as server:
        charts.install(server, BASE, chart=gone)
        with pytest.raises(charts.helm_sdkpy.UpgradeError, match="'gone' not allowed"):
            charts.upgrade(server, {}, reuse_values=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("role", "name"),
    [("controller", "controller"), ("inference", "inference"), ("trainer", "engine")],
)
def test_a_role_that_is_scaled_to_0_stays_at_0(role, name):
    def spec() -> dict[str, Any]:
        workloads = [*server.objects("Deployment"), *server.objects("StatefulSet")]
        return next(o["spec"] for o in workloads if o["metadata"]["name"] == f"t-tandem-{name}")

    def replicas(**changed: Any) -> int:
        charts.upgrade(server, changed, reuse_values=True)
        return spec()["replicas"]

    with ApiServer() as server:
        charts.install(server, merged(BASE, SHARED if name == "engine" else {}))
        spec()["replicas"] = 2  # As `kubectl scale` does.
        if name == "inference":
            assert replicas() == 2
        else:
            with pytest.raises(charts.helm_sdkpy.UpgradeError, match=f"{name} has 2 replicas"):
                replicas()
        spec()["replicas"] = 0
        assert replicas(image={"tag": "2"}) == 0
        spec()["replicas"] = 1
        assert replicas() == 1
        assert replicas(**{role: {"replicas": 0}}) == replicas() == 0


# Changes that the webhook of Kueue 0.19 for StatefulSets refuses: a pattern for the names in the
# chart's message → the change of values.
KUEUE_REFUSES = {
    "requests, .*trainer": at("trainer.gpus", 2),
    "requests, .*inference": at("inference.resources.requests.cpu", "5"),
    "requests, .*nodeSelector.*trainer": at("trainer.nodeSelector", {"pool": "a"}),
    "requests, .*containers.*trainer": at("trainer.extraContainers", [{"name": "x", "image": "x"}]),
    r"kueue\.queue of StatefulSet": at("kueue.queue", ""),
    r"kueue\.priorityClass of StatefulSet": at("kueue.priorityClass", "high"),
}


def test_what_kueue_refuses_is_refused_before_anything_changes():
    values = merged(BASE, {"kueue": {"queue": "post-training"}})
    with ApiServer(kueue=True) as server:
        assert "no kueue.x-k8s.io" not in charts.install(server, values)["info"]["notes"]
        charts.upgrade(server, merged(values, {"image": {"tag": "2"}}))
        for stateful_set in server.objects("StatefulSet"):
            stateful_set["status"] = {"readyReplicas": 1}
        before = deepcopy(server.objects())
        for named, change in KUEUE_REFUSES.items():
            with pytest.raises(charts.helm_sdkpy.UpgradeError, match=f"refuses to change {named}"):
                charts.upgrade(server, merged(values, change))
        assert server.objects() == before


def test_upgrades_change_no_immutable_field_and_an_uninstall_keeps_the_data():
    with ApiServer() as server:
        release = charts.install(server, BASE)
        # Helm stores a release in a Secret, which holds at most 1 MiB.
        assert len(gzip.compress(json.dumps(release).encode())) < 600_000
        # A ResourceClaimTemplate is immutable, so a claim with other values has another name.
        for values in (SHARED, merged(SHARED, {"shared": {"deviceClassName": "mig"}}), CHOSEN, {}):
            notes = charts.upgrade(server, merged(BASE, values))["info"]["notes"]
            assert ("no kueue.x-k8s.io" in notes) == ("kueue" in values)
            for claim in server.objects("ResourceClaimTemplate"):
                assert claim["metadata"]["name"] in str(server.objects("StatefulSet"))
        names = {o["metadata"]["name"] for o in server.objects("StatefulSet")}
        assert names == {"t-tandem-trainer", "t-tandem-inference"}
        charts.uninstall(server)
        left = [(o["kind"], o["metadata"]["name"]) for o in server.objects()]
        assert left == [("PersistentVolumeClaim", "t-tandem-data")]
