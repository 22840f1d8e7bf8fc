"""The pods that each selector selects, over all pods of two releases in one namespace; names that don't collide."""

from collections.abc import Iterator

import pytest

from helm import charts, matrix, schemas
from helm.charts import NEWEST, merged
from helm.matrix import CASES, COMPONENT, EVERYTHING, INSTANCE, NAME, ROLES, SHARED
from helm.reachability import selects
from helm.renders import RELEASES, case, component, component_of, with_values

HEADLESS = "tandem-headless"


def taken(name: str, selector: dict) -> set[tuple[str, str]]:
    """The (release, component) of all pods of both releases that a selector selects."""
    pods = [(release, pod) for release in RELEASES for _, pod in case(name, release).pods()]
    return {(release, component(pod)) for release, pod in pods if selects(selector, pod["metadata"]["labels"])}


def identity(release: str, one: str | None = None) -> dict[str, str]:
    """The labels by which a release's pods, or those of one component, are selected."""
    return {NAME: "tandem", INSTANCE: release} | ({COMPONENT: one} if one else {})


def selectors(name: str, release: str) -> Iterator[tuple[str, dict, str]]:
    """(object, selector, component) of every object that selects the pods of one component."""
    for obj in case(name, release).objects:
        kind, own, spec = obj["kind"], obj["metadata"]["name"].removeprefix(f"{release}-tandem-"), obj.get("spec", {})
        role = {"inference-pods": "inference", "vllm": "inference"}.get(own, own)
        if kind in ("Deployment", "StatefulSet"):
            yield f"{kind} {own}", spec["selector"], component(spec["template"])
        elif kind == "Service":
            yield f"{kind} {own}", {"matchLabels": spec["selector"]}, component_of(name, role)
        elif kind == "PodMonitor":
            yield f"{kind} {own}", spec["selector"], component_of(name, role)
        elif kind == "PodDisruptionBudget":
            yield f"{kind} {own}", spec["selector"], own
        elif kind == "NetworkPolicy" and own not in ("default-deny", "within", "outside"):
            yield f"{kind} {own}", spec["podSelector"], own


@pytest.mark.parametrize("name", CASES)
def test_a_selector_selects_only_its_component(name):
    for release in RELEASES:
        found = list(selectors(name, release))
        objects = {where for where, *_ in found}
        assert {"Deployment controller", "Service inference", "NetworkPolicy controller"} <= objects
        for where, selector, expected in found:
            assert taken(name, selector) == {(release, expected)}, where
            assert selector == {"matchLabels": identity(release, expected)}, where


@pytest.mark.parametrize("name", CASES)
def test_policies_for_all_pods_select_all_pods_of_the_release(name):
    workers = {component_of(name, role) for role in ROLES}
    tests = {f"test-{test}" for test in ("reach", "volume-write", "volume-read", "job")}
    for release in RELEASES:
        for policy, components in (
            ("default-deny", workers | tests), ("within", workers | tests), ("outside", workers)
        ):  # fmt: skip
            selector = case(name, release).one("NetworkPolicy", policy)["spec"]["podSelector"]
            assert selector["matchLabels"] == identity(release)
            assert taken(name, selector) == {(release, one) for one in components}, policy


@pytest.mark.parametrize("name", CASES)
def test_affinities_and_peers_of_policies_name_the_release(name):
    for release in RELEASES:
        for obj in case(name, release).objects:
            if obj["kind"] in ("NetworkPolicy", "Deployment", "StatefulSet", "Pod"):
                for selector in (node for _, key, node in schemas.walk(obj) if key in ("podSelector", "labelSelector")):
                    labels = selector.get("matchLabels", {})
                    if labels.get(NAME) == "tandem":
                        assert {r for r, _ in taken(name, selector)} == {release}
                        assert set(labels) <= {NAME, INSTANCE, COMPONENT}


@pytest.mark.parametrize("name", CASES)
def test_users_labels_do_not_replace_those_of_selectors(name):
    for release in RELEASES:
        for obj, pod in case(name, release).pods():
            labels = pod["metadata"]["labels"]
            expected = obj["metadata"]["name"].removeprefix(f"{release}-tandem-")
            assert {key: labels[key] for key in (NAME, INSTANCE, COMPONENT)} == identity(release, expected)
            if "everything" in name:
                assert labels["tandem"] == "mine", "the user's other labels stay"


def test_a_user_cannot_mark_services_as_headless():
    """ServiceMonitors would scrape vLLM twice."""
    rendered = with_values(commonLabels={HEADLESS: "true"}, monitoring={"monitors": {"kind": "service"}})
    marked = {o["metadata"]["name"] for o in rendered.all("Service") if HEADLESS in o["metadata"]["labels"]}
    assert marked == {"a-tandem-trainer", "a-tandem-inference-pods"}


@pytest.mark.parametrize("name", CASES)
def test_names_of_two_releases_differ(name):
    one, two = ({(o["kind"], o["metadata"]["name"]) for o in case(name, release).objects} for release in RELEASES)
    assert not one & two


@pytest.mark.parametrize("values", [EVERYTHING, merged(EVERYTHING, SHARED)], ids=["dedicated", "shared"])
def test_names_of_long_releases_fit_and_differ(values):
    names = []
    for end in ("one", "two"):
        rendered = charts.render(merged(matrix.BASE, values), release="r" * 50 + end)
        names.append({(o["kind"], o["metadata"]["name"]) for o in rendered.objects})
        check_names(rendered)
    assert not names[0] & names[1]


def test_a_long_override_fits():
    check_names(with_values(fullnameOverride="x" * 63, nameOverride="y" * 63))


def check_names(rendered: charts.Rendered) -> None:
    """Names have at most 63 characters, the limit of Services and labels; schemas check labels and StatefulSets."""
    for obj in rendered.objects:
        assert schemas.validate(obj, NEWEST) == []
        assert obj["kind"] == "ConfigMap" or len(obj["metadata"]["name"]) <= 63
