"""Upgrades with --reuse-values from an older chart: keys it lacked get the defaults, the user's
values stay."""

import gzip
import json
from copy import deepcopy
from typing import Any

import pytest

from helm import charts, matrix
from helm.charts import Rendered, merged
from helm.kubernetes_api import ApiServer
from helm.matrix import EVERYTHING, SHARED
from helm.renders import of

CHOSEN: dict[str, Any] = merged(
    matrix.BASE,
    {
        "commonLabels": {"cost": "42"},
        "controller": {
            "resources": {"limits": {"memory": "5Gi"}},
            "settings": {"maxRequestBytes": 123456789},
        },
        "trainer": {
            "settings": {"launch": "fork", "tensorParallel": 2},
            "gpus": 2,
            "podLabels": {"team": "ml"},
        },
        "inference": {
            "resources": {"requests": {"cpu": "7"}},
            "startupMinutes": 90,
            "preStopSeconds": 9,
        },
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
        "monitoring": {
            "monitors": {"kind": "pod"},
            "rules": {"enabled": True, "runbook": "https://example.org"},
        },
        "data": {"size": "7Gi"},
    },
)
"""A user's values in every section."""


def without(*removed: tuple[str, ...]) -> dict[str, Any]:
    """The defaults without these keys."""
    result = deepcopy(matrix.defaults())
    for *sections, key in removed:
        node = result
        for section in sections:
            node = node[section]
        del node[key]
    return result


LEAVES = [tuple(path.split(".")) for path, _ in matrix.leaves(matrix.defaults())]
OLDER: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no single value, all sections": without(*LEAVES),
    "each second value": without(*LEAVES[::2]),
    "each other second value": without(*LEAVES[1::2]),
}
"""values.yaml of charts before this one."""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory):
    """Makes a chart of version 0.0.9 with other defaults and these templates."""
    directory = tmp_path_factory.mktemp("charts")
    return lambda values: charts.other_version(directory, "0.0.9", values)


def objects(rendered: Rendered) -> list[dict[str, Any]]:
    """The objects as of this chart's version."""
    return json.loads(
        json.dumps(sorted(rendered.objects, key=str)).replace("tandem-0.0.9", "tandem-0.1.0")
    )


@pytest.mark.parametrize("lacking", OLDER)
def test_values_of_an_older_chart_render_as_a_fresh_install(lacking, older):
    """With --reuse-values Helm renders the new templates with the older chart's defaults. So does
    this test."""
    rendered = charts.render(CHOSEN, release="a", chart=older(OLDER[lacking]))
    assert objects(rendered) == objects(of(CHOSEN))
    text = json.dumps(rendered.objects)
    for value in (
        "123456789",
        "5120Mi",
        "https://example.org",
        "7Gi",
        '"cost": "42"',
        '"team": "ml"',
        '"fork"',
    ):
        assert value in text


@pytest.mark.parametrize(
    ("lacking", "chosen"),
    [
        ("each second value", CHOSEN),
        ("each other second value", merged(CHOSEN, merged(EVERYTHING, SHARED))),
    ],
    ids=["chosen", "everything"],
)
def test_an_upgrade_that_reuses_values(lacking, chosen, older):
    with ApiServer() as server:
        charts.install(server, chosen, release="a", chart=older(OLDER[lacking]))
        first = charts.rendered(charts.upgrade(server, {}, release="a", reuse_values=True))
        second = charts.rendered(
            charts.upgrade(server, {"image": {"tag": "2"}}, release="a", reuse_values=True)
        )
    assert objects(first) == objects(of(chosen))
    assert "0.1.0" in json.dumps(first.objects)
    assert objects(second) == objects(of(merged(chosen, {"image": {"tag": "2"}})))


def test_a_stored_value_that_this_chart_does_not_know_is_refused_by_name(older):
    with ApiServer() as server:
        charts.install(
            server,
            matrix.BASE,
            release="a",
            chart=older({**matrix.defaults(), "gone": {"since": "0.0.9"}}),
        )
        with pytest.raises(
            charts.helm_sdkpy.UpgradeError, match="additional properties 'gone' not allowed"
        ):
            charts.upgrade(server, {}, release="a", reuse_values=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("role", "component"),
    [("controller", "controller"), ("inference", "inference"), ("trainer", "engine")],
)
def test_a_role_that_is_scaled_to_0_stays_at_0(role, component):
    values = merged(matrix.BASE, SHARED if component == "engine" else {})

    def spec() -> dict[str, Any]:
        objects = [*server.objects("Deployment"), *server.objects("StatefulSet")]
        return next(o["spec"] for o in objects if o["metadata"]["name"] == f"t-tandem-{component}")

    def replicas(**changed: Any) -> int:
        charts.upgrade(server, changed, reuse_values=True)
        return spec()["replicas"]

    with ApiServer() as server:
        charts.install(server, values)
        assert replicas() == 1
        spec()["replicas"] = 2  # kubectl scale
        if component == "inference":
            assert replicas() == 2
        else:
            with pytest.raises(
                charts.helm_sdkpy.UpgradeError, match=rf"t-tandem-{component} has 2 replicas"
            ):
                replicas()
        spec()["replicas"] = 0
        assert replicas(image={"tag": "2"}) == 0
        spec()["replicas"] = 1
        assert replicas() == 1
        assert replicas(**{role: {"replicas": 0}}) == replicas() == 0
        assert replicas(**{role: {"replicas": 1}}) == 1


KUEUE_REFUSES = [
    (matrix.at("trainer.gpus", 2), "requests, .*trainer"),
    (matrix.at("inference.resources.requests.cpu", "5"), "requests, .*inference"),
    (matrix.at("inference.extendedResources", {"rdma/hca": 1}), "requests, .*inference"),
    (matrix.at("trainer.nodeSelector", {"pool": "a"}), "requests, .*nodeSelector.*trainer"),
    (
        matrix.at("trainer.extraContainers", [{"name": "more", "image": "busybox"}]),
        "requests, .*containers.*trainer",
    ),
    (matrix.at("kueue.queue", "other"), r"kueue\.queue of StatefulSet"),
    (matrix.at("kueue.queue", ""), r"kueue\.queue of StatefulSet"),
    (matrix.at("kueue.priorityClass", "high"), r"kueue\.priorityClass of StatefulSet"),
]
"""The rules of Kueue 0.19's webhook for StatefulSets: a change and what the message names."""


def test_what_kueue_refuses_is_refused_before_anything_changes():
    values = merged(matrix.BASE, {"kueue": {"queue": "post-training"}})
    with ApiServer(kueue=True) as server:
        assert "no kueue.x-k8s.io" not in charts.install(server, values)["info"]["notes"]
        charts.upgrade(
            server,
            merged(values, {"image": {"tag": "2"}, "trainer": {"settings": {"launch": "fork"}}}),
        )
        for stateful_set in server.objects("StatefulSet"):
            stateful_set["status"] = {"readyReplicas": 1}
        before = deepcopy(server.objects())
        for change, named in KUEUE_REFUSES:
            with pytest.raises(
                charts.helm_sdkpy.UpgradeError, match=f"Kueue refuses to change {named}"
            ):
                charts.upgrade(server, merged(values, change))
        assert server.objects() == before
        for name in ("t-tandem-trainer", "t-tandem-inference"):
            server.answer("DELETE", f"/apis/apps/v1/namespaces/ns/statefulsets/{name}", b"")
        charts.upgrade(server, merged(values, KUEUE_REFUSES[0][0]))
        assert len(server.objects("StatefulSet")) == 2


@pytest.mark.parametrize(
    ("change", "count", "device_class"),
    [
        ({"trainer": {"gpus": 4}, "inference": {"gpus": 4}}, 4, "gpu.nvidia.com"),
        ({"shared": {"deviceClassName": "mig.nvidia.com"}}, 2, "mig.nvidia.com"),
    ],
)
def test_the_claim_of_shared_gpus_can_change(change, count, device_class):
    """A ResourceClaimTemplate is immutable, so another claim has another name."""
    with ApiServer() as server:
        charts.install(server, merged(matrix.BASE, SHARED))
        charts.upgrade(server, merged(merged(matrix.BASE, SHARED), change))
        (template,) = server.objects("ResourceClaimTemplate")
        (engine,) = server.objects("StatefulSet")
    (claim,) = engine["spec"]["template"]["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    exactly = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert (exactly["count"], exactly["deviceClassName"]) == (count, device_class)


def test_upgrades_change_no_immutable_field_and_an_uninstall_keeps_the_data():
    with ApiServer() as server:
        release = charts.install(server, matrix.BASE)
        # Helm stores a release in a Secret, which holds at most 1 MiB.
        assert len(gzip.compress(json.dumps(release).encode())) < 600_000
        for values in (SHARED, EVERYTHING, {"podDisruptionBudget": {"enabled": True}}, {}):
            notes = charts.upgrade(server, merged(matrix.BASE, values))["info"]["notes"]
            assert ("no kueue.x-k8s.io" in notes) == ("kueue" in values)
        names = {o["metadata"]["name"] for o in server.objects("StatefulSet")}
        assert names == {"t-tandem-trainer", "t-tandem-inference"}
        server.objects("StatefulSet")[0]["spec"]["serviceName"] = "other"
        with pytest.raises(
            charts.helm_sdkpy.UpgradeError, match=r"spec\.serviceName: field is immutable"
        ):
            charts.upgrade(server, matrix.BASE)
        charts.uninstall(server)
        assert [(o["kind"], o["metadata"]["name"]) for o in server.objects()] == [
            ("PersistentVolumeClaim", "t-tandem-data")
        ]
