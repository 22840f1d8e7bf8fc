"""Upgrades of a release. The tests are about the values of an older chart, about roles that are
scaled to 0, about Kueue's rules, and about immutable fields."""

import gzip
import json
from functools import reduce
from itertools import starmap
from typing import Any

import pytest
from helm_sdkpy import UpgradeError

from helm import charts, goldens
from helm.charts import DEFAULTS, Object, at, leaves, merged, upgrade
from helm.kubernetes_api import ApiServer
from helm.pods import ROLES, pod_of

BASE = goldens.values("defaults")
SHARED = {"gpuMode": "shared", "trainer": {"gpus": 2}, "inference": {"gpus": 2}}
CHOSEN = goldens.values("everything")
SECTIONS = {key: {} for key, value in DEFAULTS.items() if isinstance(value, dict)}
HALF = reduce(merged, starmap(at, list(leaves(DEFAULTS).items())[::2]))


@pytest.mark.slow
@pytest.mark.parametrize("older", [{}, SECTIONS, HALF], ids=["nothing", "sections", "half"])
def test_an_upgrade_that_reuses_values_of_an_older_chart_is_as_a_fresh_install(older):
    """With --reuse-values Helm renders the new templates with the older chart's defaults, which
    lack newer values."""
    with ApiServer() as server:
        charts.install(server, CHOSEN, chart=charts.other_chart(older))
        upgraded = charts.rendered(upgrade(server, {}, reuse_values=True))
    assert upgraded.objects == charts.render(CHOSEN, release="t").objects


def test_another_template_of_jobs_changes_only_the_runners_annotation():
    changes = ({}, at("trainer.tmpSize", "3Gi"))
    releases = [charts.render(merged(goldens.values("jobs"), change)).pods() for change in changes]
    old, new = (pod_of(of_release, "trainer") for of_release in releases)
    digests = [pod["metadata"]["annotations"].pop("tandem/job-template") for pod in (old, new)]
    assert digests[0] != digests[1]
    assert old == new


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_is_scaled_to_0_stays_at_0(role):
    kind = "Deployment" if role == "controller" else "StatefulSet"
    name = "engine" if role == "trainer" else role

    def spec() -> Object:
        (found,) = (o for o in server.objects(kind) if o["metadata"]["name"] == f"t-tandem-{name}")
        return found["spec"]

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


# Maps a pattern of the chart's message to the change of values that causes the message. The chart
# refuses these changes, because Kueue 0.19's webhook for StatefulSets does not allow such changes.
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


@pytest.mark.slow
def test_upgrades_change_no_immutable_field():
    with ApiServer() as server:
        release = charts.install(server, BASE)
        # Helm stores a release in a Secret, which holds at most 1 MiB.
        assert len(gzip.compress(json.dumps(release).encode())) < 600_000
        # A ResourceClaimTemplate is immutable, so a claim with other values has another name.
        for values in (SHARED, merged(SHARED, {"shared": {"deviceClassName": "mig"}}), CHOSEN, {}):
            upgrade(server, merged(BASE, values))
