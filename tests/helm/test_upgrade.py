"""Upgrades of a release. The tests are about the values of an older chart, about roles that are
scaled to 0, about Kueue's rules, and about immutable fields."""

import gzip
import json
from copy import deepcopy
from functools import reduce
from typing import Any

import pytest
from helm_sdkpy import UpgradeError

from helm import charts, goldens
from helm.charts import at, defaults, leaves, merged, upgrade
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
        del reduce(dict.get, sections, result)[key]
    return result


@pytest.mark.parametrize(
    "older",
    [{}, without(LEAVES), without(LEAVES[::2]), without(LEAVES[1::2])],
    ids=["nothing", "sections", "each second", "each other second"],
)
def test_an_upgrade_that_reuses_values_of_an_older_chart_is_as_a_fresh_install(older):
    """With --reuse-values Helm renders the new templates with the older chart's defaults, which
    lack newer values."""
    with ApiServer() as server:
        charts.install(server, CHOSEN, chart=charts.other_chart(older))
        upgraded = charts.rendered(upgrade(server, {}, reuse_values=True))
    assert upgraded.objects == charts.render(CHOSEN, release="t").objects


def test_another_chart_version_changes_no_pod_but_another_template_the_runners():
    values = goldens.values("jobs")
    old = charts.render(values)
    new = charts.render(values, chart=charts.other_chart(version="0.2.0"))
    assert new.objects != old.objects
    kept = [[pod for pod in one.pods() if "test-" not in component(pod)] for one in (new, old)]
    assert kept[0] == kept[1]
    other = charts.render(merged(values, at("trainer.tmpSize", "3Gi")))
    runners = [pod_of(one.pods(), "trainer")["metadata"]["annotations"] for one in (old, other)]
    assert runners[0]["tandem/job-template"] != runners[1]["tandem/job-template"]
    assert container_of(old.pods(), "trainer") == container_of(other.pods(), "trainer")


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
        upgrade(server, changed, reuse_values=True)
        return spec()["replicas"]

    with ApiServer() as server:
        charts.install(server, merged(BASE, SHARED if name == "engine" else {}))
        spec()["replicas"] = 2  # `kubectl scale` would change `replicas` in this way.
        if name == "inference":
            assert replicas() == 2
        else:
            with pytest.raises(UpgradeError, match=f"{name} has 2 replicas"):
                replicas()
        spec()["replicas"] = 0
        assert replicas(image={"tag": "2"}) == 0
        spec()["replicas"] = 1
        assert replicas() == 1
        assert replicas(**{role: {"replicas": 0}}) == replicas() == 0


# A pattern for the names in the chart's message → a change of values. Kueue 0.19's webhook for
# StatefulSets refuses these changes.
KUEUE_REFUSES = {
    "requests, .*trainer": at("trainer.gpus", 2),
    "requests, .*inference": at("inference.resources.requests.cpu", "5"),
    "requests, .*nodeSelector.*trainer": at("trainer.nodeSelector", {"pool": "a"}),
    "requests, .*containers.*trainer": at("trainer.extraContainers", [{"name": "x", "image": "x"}]),
    r"kueue\.queue of StatefulSet": at("kueue.queue", ""),
    r"kueue\.priorityClass of StatefulSet": at("kueue.priorityClass", "high"),
}


def test_what_kueue_refuses_is_refused():
    values = merged(BASE, {"kueue": {"queue": "post-training"}})
    with ApiServer(kueue=True) as server:
        assert "no kueue.x-k8s.io" not in charts.install(server, values)["info"]["notes"]
        upgrade(server, merged(values, {"image": {"tag": "2"}}))
        for stateful_set in server.objects("StatefulSet"):
            stateful_set["status"] = {"readyReplicas": 1}
        for named, change in KUEUE_REFUSES.items():
            with pytest.raises(UpgradeError, match=f"refuses to change {named}"):
                upgrade(server, merged(values, change))


def test_upgrades_change_no_immutable_field():
    with ApiServer() as server:
        release = charts.install(server, BASE)
        # Helm stores a release in a Secret, which holds at most 1 MiB.
        assert len(gzip.compress(json.dumps(release).encode())) < 600_000
        # A ResourceClaimTemplate is immutable, so a claim with other values has another name.
        for values in (SHARED, merged(SHARED, {"shared": {"deviceClassName": "mig"}}), CHOSEN, {}):
            upgrade(server, merged(BASE, values))
