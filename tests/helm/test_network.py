"""Which pods reach which ports, computed from the NetworkPolicies of two releases in one namespace.

Policies add up. A pod that no policy selects for a direction is open in that direction. Both ends
must allow a connection. An address block contains pods too here, although network plugins differ on
that: the tests assume the more open reading.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Self
from urllib.parse import urlsplit

import pytest
import yaml

from helm import matrix
from helm.charts import CHART, NEWEST, Object, Rendered
from helm.matrix import COMPONENT, INSTANCE, NAME, VALUES
from helm.pods import breaches, containers, pod_template, selects
from helm.renders import NAMESPACE, component, environment, of, with_values
from helm.schemas import validate


@dataclass(frozen=True)
class Pod:
    """A pod, or an address outside the cluster (`namespace` is empty)."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Name → number and protocol."""
    address: str = "10.0.0.1"

    @classmethod
    def of(cls, name: str, namespace: str, template: Object) -> Self:
        """The pod that a template makes."""
        ports = {
            port["name"]: (port["containerPort"], port.get("protocol", "TCP"))
            for container in template["spec"]["containers"]
            for port in container.get("ports", [])
        }
        return cls(name, namespace, template["metadata"]["labels"], ports)


class Network:
    """Namespaces (name → labels) and the policies in them."""

    def __init__(
        self, policies: Iterable[Object], namespaces: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.policies = list(policies)
        self.namespaces = namespaces

    def reaches(self, source: Pod, destination: Pod, port: int, protocol: str = "TCP") -> bool:
        """Whether both ends allow a connection from `source` to a port of `destination`."""

        def allows(direction: str, peers: str, pod: Pod, peer: Pod) -> bool:
            applying = [policy for policy in self.policies if _applies(policy, direction, pod)]
            return not applying or any(
                self._is_peer(rule.get(peers), peer, policy["metadata"]["namespace"])
                and _is_port(rule.get("ports"), destination, port, protocol)
                for policy in applying
                for rule in policy["spec"].get(direction.lower()) or []
            )

        return allows("Egress", "to", source, destination) and allows(
            "Ingress", "from", destination, source
        )

    def _is_peer(self, peers: list[Object] | None, pod: Pod, home: str) -> bool:
        return not peers or any(self._matches(peer, pod, home) for peer in peers)

    def _matches(self, peer: Object, pod: Pod, home: str) -> bool:
        if block := peer.get("ipBlock"):
            assert set(block) == {"cidr"}
            return ipaddress.ip_address(pod.address) in ipaddress.ip_network(block["cidr"])
        if not pod.namespace:
            return False
        if "namespaceSelector" in peer:
            here = selects(peer["namespaceSelector"], self.namespaces[pod.namespace])
        else:
            here = pod.namespace == home
        return here and selects(peer.get("podSelector", {}), pod.labels)


def _applies(policy: Object, direction: str, pod: Pod) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    here = policy["metadata"]["namespace"] == pod.namespace
    return here and direction in types and selects(spec["podSelector"], pod.labels)


def _is_port(ports: list[Object] | None, owner: Pod, port: int, protocol: str) -> bool:
    def matches(entry: Object) -> bool:
        assert set(entry) <= {"port", "protocol"}
        same = entry.get("protocol", "TCP") == protocol
        return same and (
            entry.get("port", port) == port or owner.ports.get(entry["port"]) == (port, protocol)
        )

    return not ports or any(map(matches, ports))


TRAINER_METRICS, INFERENCE_METRICS = 9400, 9401
NCCL = 29517
"""A port that no container declares."""
PORTS = (22, 80, 8000, 8080, TRAINER_METRICS, INFERENCE_METRICS, NCCL)
INTERNET = Pod("internet", address="203.0.113.7")
PROXY_OUTSIDE = Pod("proxy outside", address="10.9.1.2")

_PROMETHEUS = {NAME: "prometheus"}
NAMESPACES = {
    NAMESPACE: {"kubernetes.io/metadata.name": NAMESPACE},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring"},
    "elsewhere": {"team": "research"},
    "kube-system": {},
    "openshift-dns": {},
}
STRANGERS = {
    name: Pod(name, namespace, labels)
    for name, namespace, labels in (
        ("prometheus", "monitoring", _PROMETHEUS),
        ("prometheus here", NAMESPACE, _PROMETHEUS),
        ("client", NAMESPACE, {"a-tandem-client": "true"}),
        ("client of b", NAMESPACE, {"b-tandem-client": "true"}),
        ("client that says no", NAMESPACE, {"a-tandem-client": "false"}),
        ("pod", NAMESPACE, {"app": "web"}),
        ("client elsewhere", "elsewhere", {"a-tandem-client": "true"}),
        ("pod elsewhere", "elsewhere", {"app": "web"}),
        ("proxy elsewhere", "elsewhere", {"app": "proxy"}),
        ("proxy here", NAMESPACE, {"app": "proxy"}),
        ("test of nobody", NAMESPACE, {COMPONENT: "test-reach"}),
        (
            "controller of b elsewhere",
            "elsewhere",
            {NAME: "tandem", INSTANCE: "b", COMPONENT: "controller"},
        ),
        ("trainer elsewhere", "elsewhere", {NAME: "tandem", INSTANCE: "a", COMPONENT: "trainer"}),
    )
} | {"outside": INTERNET}
SCRAPERS = {"prometheus here"}
"""Any pod of any namespace may take the label of a Prometheus."""
SMOKE = {"test-reach", "test-job"}
TESTS = {*SMOKE, "test-volume-write", "test-volume-read"}


class World:
    """The pods and policies of release a, of a release b with the default values, and pods of
    neither release."""

    def __init__(self, rendered: Rendered) -> None:
        other = of(matrix.BASE, release="b")
        self.own = {
            component(pod): Pod.of(component(pod), NAMESPACE, pod) for _, pod in rendered.pods()
        }
        self.others = {
            f"b {component(pod)}": Pod.of(component(pod), NAMESPACE, pod) for _, pod in other.pods()
        }
        self.network = Network(
            [p for r in (rendered, other) for p in r.all("NetworkPolicy")], NAMESPACES
        )

    def reaching(self, destination: str, port: int) -> set[str]:
        """The names of the pods that reach a port of a pod of release a."""
        sources = self.own | self.others | STRANGERS
        return {
            name
            for name, pod in sources.items()
            if name != destination and self.network.reaches(pod, self.own[destination], port)
        }

    def reached(self, source: str, destination: Pod, port: int, protocol: str = "TCP") -> bool:
        return self.network.reaches(self.own[source], destination, port, protocol)


@cache
def world(name: str) -> World:
    return World(of(VALUES[name]))


def changed(**values) -> World:
    return World(with_values(**values))


def expected(components: set[str], clients: set[str]) -> dict[tuple[str, int], set[str]]:
    """All allowed connections: (destination, port) → sources."""
    public = clients | SCRAPERS | SMOKE
    if "engine" in components:
        metrics = {
            ("engine", port): SCRAPERS | SMOKE for port in (TRAINER_METRICS, INFERENCE_METRICS)
        }
        return {("controller", 8080): public, ("engine", 8000): public | {"controller"}, **metrics}
    pair = {
        (a, port): {b}
        for a, b in (("trainer", "inference"), ("inference", "trainer"))
        for port in PORTS
    }
    front = {("inference", 8000): public | {"controller", "trainer"}}
    if "proxy" in components:
        front = {
            ("proxy", 8000): public | {"controller"},
            ("inference", 8000): SCRAPERS | SMOKE | {"proxy", "trainer"},
        }
    return (
        pair
        | front
        | {
            ("controller", 8080): public,
            ("inference", INFERENCE_METRICS): SCRAPERS | SMOKE | {"trainer"},
            ("trainer", TRAINER_METRICS): SCRAPERS | SMOKE | {"inference"},
        }
    )


@pytest.mark.parametrize("name", VALUES)
def test_only_expected_connections_are_open(name):
    found = world(name)
    clients = {"client", "proxy elsewhere"} if "everything" in name else {"client"}
    allowed = expected(set(found.own), clients)
    assert set(found.own) >= TESTS | {"controller"}
    # Kubernetes' DNS pods, those of OpenShift, and a DNS cache on the node.
    dns = (
        (Pod("dns", "kube-system", {"k8s-app": "kube-dns"}), 53),
        (Pod("dns", "openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}), 5353),
        (Pod("dns of the node", address="169.254.20.10"), 53),
    )
    for one in found.own:
        works = one not in TESTS | {"proxy"}
        assert found.reached(one, INTERNET, 443) == works, one
        assert not any(found.reached(one, INTERNET, port) for port in (22, 80, 8000, 8443)), one
        assert not found.reached(one, INTERNET, 443, "UDP")
        assert found.reached(one, PROXY_OUTSIDE, 3128) == (works and "everything" in name)
        for server, port in dns:
            assert all(found.reached(one, server, port, protocol) for protocol in ("UDP", "TCP")), (
                one,
                port,
            )
        for port in PORTS:
            assert found.reaching(one, port) == allowed.get((one, port), set()), f"{one}:{port}"
            assert not [
                s
                for s in (*STRANGERS.values(), *found.others.values())
                if found.reached(one, s, port)
            ], one


def test_an_offline_hub_closes_the_way_to_the_internet():
    for values in ({"huggingface": {"offline": True}}, {"networkPolicy": {"hubEgress": False}}):
        found = changed(**values)
        assert not any(found.reached(source, INTERNET, 443) for source in found.own)
    both = changed(
        huggingface={"offline": True},
        networkPolicy={
            "extraEgress": [
                {"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 443}]}
            ]
        },
    )
    assert both.reached("trainer", INTERNET, 443)
    assert not both.reached("trainer", PROXY_OUTSIDE, 443)


@pytest.mark.parametrize("role", ["controller", "inference"])
@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_notes_warn_of_a_service_for_the_outside_that_the_policies_close(role, kind):
    warning = f"{role}.service.type={kind}, but networkPolicy.clients is empty"
    service = {role: {"service": {"type": kind}}}
    assert (warning in with_values(**service).notes) == (kind != "ClusterIP")
    for policy in ({"clients": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}, {"enabled": False}):
        assert warning not in with_values(**service, networkPolicy=policy).notes


@pytest.mark.parametrize("kind", ["pod", "none"])
def test_the_notes_say_that_a_prometheus_of_another_namespace_is_kept_out(kind):
    warning = "networkPolicy.prometheus names no other namespace"
    monitors = {"monitoring": {"monitors": {"kind": kind, "labels": {"release": "x"}}}}
    assert (warning in with_values(**monitors).notes) == (kind == "pod")
    for policy in ({"prometheus": [{"namespaceSelector": {}}]}, {"enabled": False}):
        assert warning not in with_values(**monitors, networkPolicy=policy).notes


def test_the_scrapers_are_a_value():
    found = changed(
        networkPolicy={"prometheus": [{"podSelector": {"matchLabels": {"app": "web"}}}]}
    )
    assert found.reaching("trainer", TRAINER_METRICS) == {"pod", "inference", *SMOKE}
    elsewhere = {"namespaceSelector": {"matchLabels": NAMESPACES["monitoring"]}}
    elsewhere |= {"podSelector": {"matchLabels": _PROMETHEUS}}
    found = changed(networkPolicy={"prometheus": [elsewhere]})
    assert found.reaching("trainer", TRAINER_METRICS) == {"prometheus", "inference", *SMOKE}
    nobody = changed(networkPolicy={"prometheus": []})
    assert nobody.reaching("trainer", TRAINER_METRICS) == {"inference", *SMOKE}
    assert nobody.reaching("controller", 8080) == {"client", *SMOKE}


@pytest.mark.parametrize("role", matrix.ROLES)
def test_a_client_label_on_a_pod_of_another_release_opens_nothing(role):
    """The other release's policies admit the pod, but its own release's policies don't let it
    out."""
    found = changed(**{role: {"podLabels": {"b-tandem-client": "true", "a-tandem-client": "true"}}})
    for port in PORTS:
        for pod in found.others.values():
            assert not found.network.reaches(found.own[role], pod, port)


def test_without_policies_everything_is_open():
    found = changed(networkPolicy={"enabled": False})
    assert {"pod", "pod elsewhere", "outside"} <= found.reaching("trainer", NCCL)


@pytest.mark.parametrize("name", VALUES)
def test_every_pod_reaches_the_urls_in_its_variables_and_arguments(name):
    rendered, found = of(VALUES[name]), world(name)
    services = {o["metadata"]["name"]: o["spec"] for o in rendered.all("Service")}
    urls = {
        (component(pod), text)
        for _, pod in rendered.pods()
        for container in containers(pod)
        for text in [*environment(container).values(), *container.get("args", [])]
        if text.startswith("http://") and not text.startswith("http://127.0.0.1:")
    }
    assert len(urls) >= 4
    for source, text in urls:
        url = urlsplit(text)
        service, *rest = url.hostname.split(".")
        assert rest == [NAMESPACE, "svc"], text
        spec = services[service]
        destination = found.own[spec["selector"][COMPONENT]]
        (target,) = (port["targetPort"] for port in spec["ports"] if port["port"] == url.port)
        number, protocol = destination.ports[target]
        assert spec.get("clusterIP") != "None" or number == url.port, (
            f"{text}: a headless Service translates no ports"
        )
        reaches = found.reached(source, destination, number, protocol)
        assert reaches or source in ("test-volume-write", "test-volume-read"), f"{source}: {text}"


JOB = yaml.safe_load((CHART.parent / "example.yaml").read_text())
"""A client of a release `tandem` in the same namespace."""


def test_the_example_client_is_restricted_and_reaches_only_the_two_apis():
    pod = pod_template(JOB)
    assert validate(JOB, NEWEST) == breaches(pod) == []
    rendered = of(matrix.BASE, release="tandem")
    services = {o["metadata"]["name"]: o["spec"] for o in rendered.all("Service")}
    pods = {
        component(other): Pod.of(component(other), NAMESPACE, other) for _, other in rendered.pods()
    }
    network = Network(rendered.all("NetworkPolicy"), {NAMESPACE: {}})
    (container,) = pod["spec"]["containers"]
    variables = environment(container)
    reached = set()
    for url in (urlsplit(variables[name]) for name in ("TANDEM_URL", "TANDEM_INFERENCE_URL")):
        service = services[url.hostname]
        (port,) = (p for p in service["ports"] if p["port"] == url.port)
        name = service["selector"][COMPONENT]
        reached.add((name, pods[name].ports[port["targetPort"]][0]))
    client = Pod.of("example", NAMESPACE, pod)
    assert {
        (name, n) for name, p in pods.items() for n in PORTS if network.reaches(client, p, n)
    } == reached
    assert {name for name, _ in reached} == {"controller", "inference"}
    (volume,) = (v for v in pod["spec"]["volumes"] if "projected" in v)
    (source,) = volume["projected"]["sources"]
    assert source["secret"] == {"name": "tandem", "items": [{"key": "api_key", "path": "api_key"}]}
    assert variables["TANDEM_API_KEY_FILE"] == "/etc/tandem/secrets/api_key"
