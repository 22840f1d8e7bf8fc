"""Who reaches whom on which port, computed from the NetworkPolicies of two releases that share a namespace."""

from __future__ import annotations

from functools import cache

import pytest

from helm import matrix
from helm.charts import Rendered, merged
from helm.reachability import Network, Pod
from helm.renders import NAMESPACE, RELEASES, VALUES, component, containers, of

TRAINER_METRICS, INFERENCE_METRICS = 9400, 9401
NCCL = 29517
"""A port that nobody declares."""
PORTS = (22, 8000, 8080, TRAINER_METRICS, INFERENCE_METRICS, NCCL)
INTERNET = Pod("internet", address="203.0.113.7")
PROXY_OUTSIDE = Pod("proxy outside", address="10.9.1.2")

_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
NAMESPACES = {
    NAMESPACE: {"kubernetes.io/metadata.name": NAMESPACE},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring"},
    "elsewhere": {"team": "research"},
    "kube-system": {},
}
STRANGERS = {
    "prometheus": Pod("prometheus", "monitoring", _PROMETHEUS),
    "prometheus here": Pod("prometheus here", NAMESPACE, _PROMETHEUS),
    "client": Pod("client", NAMESPACE, {"a-tandem-client": "true"}),
    "client of b": Pod("client of b", NAMESPACE, {"b-tandem-client": "true"}),
    "client that says no": Pod("client that says no", NAMESPACE, {"a-tandem-client": "false"}),
    "pod": Pod("pod", NAMESPACE, {"app": "web"}),
    "client elsewhere": Pod("client elsewhere", "elsewhere", {"a-tandem-client": "true"}),
    "pod elsewhere": Pod("pod elsewhere", "elsewhere", {"app": "web"}),
    "proxy elsewhere": Pod("proxy elsewhere", "elsewhere", {"app": "proxy"}),
    "proxy here": Pod("proxy here", NAMESPACE, {"app": "proxy"}),
    "trainer elsewhere": Pod("trainer elsewhere", "elsewhere", {
        "app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": "a", "app.kubernetes.io/component": "trainer",
    }),
    "outside": INTERNET,
}  # fmt: skip
SCRAPERS = {"prometheus", "prometheus here"}
SMOKE = {"test-reach", "test-job"}
TESTS = {*SMOKE, "test-volume-write", "test-volume-read"}


class World:
    """Both releases' pods and policies, and others. Release b always has the default values."""

    def __init__(self, *rendered: Rendered) -> None:
        self.own = {component(pod): _pod(pod) for _, pod in rendered[0].pods()}
        self.others = {f"b {component(pod)}": _pod(pod) for _, pod in rendered[1].pods()}
        self.network = Network([p for r in rendered for p in r.all("NetworkPolicy")], NAMESPACES)

    def reaching(self, destination: str, port: int) -> set[str]:
        """Who reaches a port of a pod of release a."""
        sources = self.own | self.others | STRANGERS
        return {
            name
            for name, pod in sources.items()
            if name != destination and self.network.reaches(pod, self.own[destination], port)
        }

    def reached(self, source: str, destination: Pod, port: int, protocol: str = "TCP") -> bool:
        return self.network.reaches(self.own[source], destination, port, protocol)


def _pod(template: dict) -> Pod:
    return Pod.of(component(template), NAMESPACE, template)


@cache
def world(name: str) -> World:
    return World(of(VALUES[name], release="a"), of(matrix.BASE, release="b"))


def changed(**values) -> World:
    return World(of(merged(matrix.BASE, values)), of(matrix.BASE, release="b"))


def expected(components: set[str], clients: set[str]) -> dict[tuple[str, int], set[str]]:
    """Everything that is allowed: (destination, port) → sources. What is not here nobody reaches."""
    public = clients | SCRAPERS | SMOKE
    if "engine" in components:
        metrics = {("engine", port): SCRAPERS | SMOKE for port in (TRAINER_METRICS, INFERENCE_METRICS)}
        return {("controller", 8080): public, ("engine", 8000): public | {"controller"}, **metrics}
    pair = {(a, port): {b} for a, b in (("trainer", "inference"), ("inference", "trainer")) for port in PORTS}
    return pair | {
        ("controller", 8080): public,
        ("inference", 8000): public | {"controller", "trainer"},
        ("inference", INFERENCE_METRICS): SCRAPERS | SMOKE | {"trainer"},
        ("trainer", TRAINER_METRICS): SCRAPERS | SMOKE | {"inference"},
    }


@pytest.mark.parametrize("name", VALUES)
def test_who_reaches_what(name):
    found = world(name)
    clients = {"client", "proxy elsewhere"} if "everything" in name else {"client"}
    allowed = expected(set(found.own), clients)
    assert set(found.own) >= TESTS | {"controller"}
    for destination in found.own:
        for port in PORTS:
            sources = found.reaching(destination, port)
            assert sources == allowed.get((destination, port), set()), f"{destination}:{port}"


@pytest.mark.parametrize("name", VALUES)
def test_who_gets_out(name):
    found = world(name)
    for source in found.own:
        works = source not in TESTS
        assert found.reached(source, INTERNET, 443) == works, source
        assert not any(found.reached(source, INTERNET, port) for port in (22, 80, 8000, 8443)), source
        assert not found.reached(source, INTERNET, 443, "UDP")
        assert found.reached(source, PROXY_OUTSIDE, 3128) == (works and "everything" in name)
        for protocol in ("UDP", "TCP"):
            assert found.reached(source, Pod("dns", "kube-system", {"k8s-app": "kube-dns"}), 53, protocol)
            assert found.reached(source, Pod("dns of the node", address="169.254.20.10"), 53, protocol)
        for stranger in STRANGERS.values():
            for port in PORTS:
                assert not found.reached(source, stranger, port), (source, stranger.name, port)


def test_no_way_out_without_the_hub():
    for values in ({"huggingface": {"offline": True}}, {"networkPolicy": {"hubEgress": False}}):
        found = changed(**values)
        assert not any(found.reached(source, INTERNET, 443) for source in found.own)
    both = changed(
        huggingface={"offline": True},
        networkPolicy={"extraEgress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 443}]}]},
    )
    assert both.reached("trainer", INTERNET, 443)
    assert not both.reached("trainer", PROXY_OUTSIDE, 443)


def test_who_may_scrape_is_a_value():
    found = changed(networkPolicy={"prometheus": [{"podSelector": {"matchLabels": {"app": "web"}}}]})
    assert found.reaching("trainer", TRAINER_METRICS) == {"pod", "inference", *SMOKE}
    nobody = changed(networkPolicy={"prometheus": []})
    assert nobody.reaching("trainer", TRAINER_METRICS) == {"inference", *SMOKE}
    assert nobody.reaching("controller", 8080) == {"client", *SMOKE}


@pytest.mark.parametrize("role", ["controller", "trainer", "inference"])
def test_a_client_label_on_a_pod_of_another_release_opens_nothing(role):
    """It may come in to the other, but its own release doesn't let it out."""
    found = changed(**{role: {"podLabels": {"b-tandem-client": "true", "a-tandem-client": "true"}}})
    for port in PORTS:
        for pod in found.others.values():
            assert not found.network.reaches(found.own[role], pod, port)


def test_the_public_service_may_have_any_port():
    """Policies are about the pods' ports."""
    found = changed(controller={"service": {"port": 80}}, inference={"service": {"port": 80}})
    assert found.reaching("controller", 8080) == expected(set(found.own), {"client"})["controller", 8080]
    assert found.reaching("controller", 80) == set()


def test_without_policies_everything_is_open():
    found = changed(networkPolicy={"enabled": False})
    assert {"pod", "pod elsewhere", "outside"} <= found.reaching("trainer", NCCL)


def test_every_address_that_a_pod_is_told_is_one_that_it_reaches():
    """The URLs in environments and arguments, through the Services that they name."""
    for name in VALUES:
        rendered, found = of(VALUES[name]), world(name)
        services = {o["metadata"]["name"]: o["spec"] for o in rendered.all("Service")}
        asked = 0
        for _, pod in rendered.pods():
            source = component(pod)
            for container in containers(pod):
                texts = [e["value"] for e in container.get("env", [])] + container.get("args", [])
                for text in texts:
                    if not text.startswith("http://") or text.startswith("http://127.0.0.1:"):
                        continue
                    host, _, port = text.removeprefix("http://").partition("/")[0].partition(":")
                    service, *rest = host.split(".")
                    assert rest == [NAMESPACE, "svc"], text
                    spec = services[service]
                    destination = found.own[spec["selector"]["app.kubernetes.io/component"]]
                    target = next(p["targetPort"] for p in spec["ports"] if p["port"] == int(port))
                    number, protocol = destination.ports[target]
                    if spec.get("clusterIP") == "None":
                        assert number == int(port), f"{text}: a headless Service translates no ports"
                    reaches = found.network.reaches(found.own[source], destination, number, protocol)
                    assert reaches or source in ("test-volume-write", "test-volume-read"), f"{source}: {text}"
                    asked += 1
        assert asked >= 6


@pytest.mark.parametrize("release", RELEASES)
def test_policies_are_in_the_namespace_of_what_they_are_about(release):
    for policy in of(VALUES["everything"], release=release).all("NetworkPolicy"):
        assert policy["metadata"]["namespace"] == NAMESPACE
