"""Every selector of pods selects one component of one release. Names of two releases don't
collide."""

import pytest

from helm import charts, matrix, schemas
from helm.charts import NEWEST, Object, merged
from helm.matrix import CASES, COMPONENT, EVERYTHING, INSTANCE, NAME, SHARED
from helm.pods import pod_template
from helm.renders import RELEASES, case, component_of, with_values

HEADLESS = "tandem-headless"


def identity(release: str, one: str) -> dict[str, str]:
    """The labels by which a component's pods are selected."""
    return {NAME: "tandem", INSTANCE: release, COMPONENT: one}


def selector(name: str, obj: Object, own: str) -> tuple[Object, str] | None:
    """The labels that an object selects, and the component that it is for. test_network checks
    policies."""
    role = {"inference-pods": "inference", "vllm": "inference"}.get(own, own)
    match obj["kind"]:
        case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
            return obj["spec"]["selector"]["matchLabels"], own
        case "PodMonitor":
            return obj["spec"]["selector"]["matchLabels"], component_of(name, role)
        case "Service":
            if own == "inference" and "two inference servers" in name:
                return obj["spec"]["selector"], "proxy"
            return obj["spec"]["selector"], component_of(name, role)
    return None


@pytest.mark.parametrize("name", CASES)
def test_a_selector_selects_only_its_component(name):
    names = []
    for release in RELEASES:
        names.append({(o["kind"], o["metadata"]["name"]) for o in case(name, release).objects})
        for obj in case(name, release).objects:
            own = obj["metadata"]["name"].removeprefix(f"{release}-tandem-")
            if pod := pod_template(obj):
                labels = pod["metadata"]["labels"]
                assert labels.items() >= identity(release, own).items(), (
                    "a user's labels do not replace them"
                )
                assert "everything" not in name or labels["tandem"] == "mine", (
                    "the user's other labels stay"
                )
            if found := selector(name, obj, own):
                assert found[0] == identity(release, found[1]), own
    assert not names[0] & names[1]


def test_a_user_cannot_mark_services_as_headless():
    """ServiceMonitors would scrape vLLM twice."""
    rendered = with_values(
        commonLabels={HEADLESS: "true"}, monitoring={"monitors": {"kind": "service"}}
    )
    marked = {
        o["metadata"]["name"]
        for o in rendered.all("Service")
        if HEADLESS in o["metadata"]["labels"]
    }
    assert marked == {"a-tandem-trainer", "a-tandem-inference-pods"}


@pytest.mark.parametrize(
    "values", [EVERYTHING, merged(EVERYTHING, SHARED)], ids=["dedicated", "shared"]
)
def test_names_of_long_releases_fit_and_differ(values):
    names = []
    for end in ("one", "two"):
        rendered = charts.render(merged(matrix.BASE, values), release="r" * 50 + end)
        names.append({(o["kind"], o["metadata"]["name"]) for o in rendered.objects})
        check_names(rendered)
    assert not names[0] & names[1]


def test_long_overrides_and_namespaces_fit():
    check_names(with_values(fullnameOverride="x" * 63, nameOverride="y" * 63))
    check_names(charts.render(matrix.BASE, namespace="n" * 63))


def check_names(rendered: charts.Rendered) -> None:
    """Names have at most 63 characters, the limit of Services and labels; schemas check labels and
    StatefulSets."""
    for obj in rendered.objects:
        assert schemas.validate(obj, NEWEST) == []
        assert obj["kind"] == "ConfigMap" or len(obj["metadata"]["name"]) <= 63
