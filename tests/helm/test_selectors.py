"""What each selector takes, over all pods of two releases in one namespace; names that don't collide."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helm import charts, matrix
from helm.charts import merged
from helm.reachability import selects
from helm.renders import CASES, COMPONENT, EVERYTHING, INSTANCE, NAME, RELEASES, SHARED, case, component, of

HEADLESS = "tandem-headless"
STATEFULSET_LONGEST = 52
"""A StatefulSet's name: its pods have a label that appends 11 characters, and 63 is the most."""


def everybody(name: str) -> list[tuple[str, dict]]:
    """(release, pod) of both releases."""
    return [(release, template) for release in RELEASES for _, template in case(name, release).pods()]


def taken(name: str, selector: dict) -> set[tuple[str, str]]:
    """The (release, component) of the pods that a selector takes."""
    return {(r, component(pod)) for r, pod in everybody(name) if selects(selector, pod["metadata"]["labels"])}


def identity(release: str, *components: str) -> dict[str, str]:
    """What a selector consists of."""
    return {NAME: "tandem", INSTANCE: release} | dict(zip([COMPONENT], components, strict=False))


def gpu_components(name: str) -> set[str]:
    return {component(pod) for _, pod in everybody(name)} & {"trainer", "inference", "engine"}


def selecting(name: str, release: str) -> Iterator[tuple[str, dict, set[str]]]:
    """(what, its selector, the components it is for) of every object that selects pods of one component."""
    full = f"{release}-tandem-"
    engine = "engine" in gpu_components(name)
    of_role = {"inference": "engine", "inference-pods": "engine"} if engine else {"inference-pods": "inference"}
    for obj in case(name, release).objects:
        kind, own = obj["kind"], obj["metadata"]["name"].removeprefix(full)
        what = f"{kind} {own}"
        if kind in ("Deployment", "StatefulSet"):
            yield what, obj["spec"]["selector"], {component(obj["spec"]["template"])}
        elif kind == "Service":
            yield what, {"matchLabels": obj["spec"]["selector"]}, {of_role.get(own, own)}
        elif kind == "PodDisruptionBudget":
            yield what, obj["spec"]["selector"], {own}
        elif kind == "NetworkPolicy" and own not in ("default-deny", "within", "outside"):
            yield what, obj["spec"]["podSelector"], {own}
        elif kind == "PodMonitor":
            role = {"vllm": "inference"}.get(own, own)
            yield what, obj["spec"]["selector"], {"engine" if engine and role != "controller" else role}


@pytest.mark.parametrize("name", CASES)
def test_a_selector_takes_its_component_and_nothing_else(name):
    for release in RELEASES:
        found = list(selecting(name, release))
        assert {"Deployment controller", "Service inference", "NetworkPolicy controller"} <= {
            what for what, *_ in found
        }
        for what, selector, components in found:
            assert taken(name, selector) == {(release, one) for one in components}, what
            assert selector == {"matchLabels": identity(release, *components)}, what


@pytest.mark.parametrize("name", CASES)
def test_policies_for_all_pods_take_all_of_the_release(name):
    for release in RELEASES:
        mine = {(release, component(pod)) for _, pod in case(name, release).pods()}
        assert {f"test-{test}" for test in ("reach", "volume-write", "volume-read", "job")} < {c for _, c in mine}
        for policy in ("default-deny", "within"):
            selector = case(name, release).one("NetworkPolicy", policy)["spec"]["podSelector"]
            assert selector == {"matchLabels": identity(release)}
            assert taken(name, selector) == mine
        outside = case(name, release).one("NetworkPolicy", "outside")["spec"]["podSelector"]
        assert outside["matchLabels"] == identity(release)
        assert taken(name, outside) == {(release, c) for c in gpu_components(name) | {"controller"}}


@pytest.mark.parametrize("name", [name for name in CASES if "by services" in name])
def test_service_monitors_select_by_one_label_more(name):
    for release in RELEASES:
        for monitor in case(name, release).all("ServiceMonitor"):
            labels = dict(monitor["spec"]["selector"]["matchLabels"])
            headless = labels.pop(HEADLESS, None)
            role = labels[COMPONENT]
            assert labels == identity(release, role)
            assert headless == (None if role == "controller" else "true")


@pytest.mark.parametrize("name", CASES)
def test_what_pods_select_one_another_by_has_the_release_in_it(name):
    """Affinities and the peers of policies."""
    for release in RELEASES:
        for obj in case(name, release).objects:
            if obj["kind"] in ("NetworkPolicy", "Deployment", "StatefulSet", "Pod"):
                for selector in _nested(obj["spec"], ("podSelector", "labelSelector")):
                    if NAME in (labels := selector.get("matchLabels", {})) and labels[NAME] == "tandem":
                        assert {r for r, _ in taken(name, selector)} == {release}
                        assert set(labels) <= {NAME, INSTANCE, COMPONENT}


def _nested(node, keys) -> Iterator[dict]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in keys)
        for value in node.values():
            yield from _nested(value, keys)
    elif isinstance(node, list):
        for value in node:
            yield from _nested(value, keys)


@pytest.mark.parametrize("name", CASES)
def test_pods_carry_what_selects_them_whatever_users_say(name):
    for release in RELEASES:
        for obj, pod in case(name, release).pods():
            labels = pod["metadata"]["labels"]
            expected = obj["metadata"]["name"].removeprefix(f"{release}-tandem-")
            assert {key: labels[key] for key in (NAME, INSTANCE, COMPONENT)} == identity(release, expected)
            if "everything" in name:
                assert labels["tandem"] == "mine", "users' labels are there"


def test_a_user_cannot_mark_services_as_headless():
    """ServiceMonitors would scrape vLLM twice."""
    labels = {HEADLESS: "true"}
    rendered = of(merged(matrix.BASE, {"commonLabels": labels, "monitoring": {"monitors": {"kind": "service"}}}))
    marked = {o["metadata"]["name"] for o in rendered.all("Service") if HEADLESS in o["metadata"]["labels"]}
    assert marked == {"a-tandem-trainer", "a-tandem-inference-pods"}


@pytest.mark.parametrize("name", CASES)
def test_names_of_two_releases_differ(name):
    one, two = ({(o["kind"], o["metadata"]["name"]) for o in case(name, release).objects} for release in RELEASES)
    assert not one & two


LONG = [f"{'r' * 50}{end}" for end in ("one", "two")]


@pytest.mark.parametrize("values", [EVERYTHING, merged(EVERYTHING, SHARED)], ids=["dedicated", "shared"])
def test_names_of_long_releases_fit_and_differ(values):
    names = []
    for release in LONG:
        rendered = charts.render(merged(matrix.BASE, values), release=release)
        names.append({(o["kind"], o["metadata"]["name"]) for o in rendered.objects})
        for obj in rendered.objects:
            limit = {"StatefulSet": STATEFULSET_LONGEST, "ConfigMap": 253}.get(obj["kind"], 63)
            assert len(obj["metadata"]["name"]) <= limit, obj["metadata"]["name"]
            for node in (obj["metadata"], *(pod["metadata"] for _, pod in rendered.pods())):
                assert all(len(value) <= 63 for value in node["labels"].values())
    assert not names[0] & names[1]


def test_a_long_override_fits():
    rendered = charts.render({**matrix.BASE, "fullnameOverride": "x" * 63, "nameOverride": "y" * 63})
    for obj in rendered.objects:
        assert len(obj["metadata"]["name"]) <= (STATEFULSET_LONGEST if obj["kind"] == "StatefulSet" else 63)
