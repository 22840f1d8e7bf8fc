"""Two releases are in one namespace, and other pods are in this and other namespaces. Between all
these pods, only the expected connections are open."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address, ip_network
from itertools import product
from urllib.parse import SplitResult, urlsplit

import pytest

from helm import charts, goldens, pods, schemas
from helm.charts import CHART, NAMESPACE, NEWEST, Rendered
from helm.goldens import NAMES
from helm.pods import COMPONENT, INSTANCE, NAME, Object, component, selects

NAMESPACES = {NAMESPACE: {}, "elsewhere": {"team": "research"}, "kube-system": {}}
"""The namespaces of the cluster → their labels."""


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside the cluster. An address outside the cluster has an empty
    `namespace`."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    address: str = "10.0.0.1"


def peer_of(pod: Object) -> Peer:
    return Peer(NAMESPACE, pod["metadata"]["labels"], pods.ports(pod))


CLOSED = pytest.mark.parametrize(
    "name", [name for name in NAMES if goldens.value(name, "networkPolicy.enabled")]
)
TRAINER_METRICS, INFERENCE_METRICS, NCCL = 9400, 9401, 29517
PORTS = (22, 80, 8000, 8080, TRAINER_METRICS, INFERENCE_METRICS, NCCL)
INTERNET, OUTSIDE = Peer(address="203.0.113.7"), Peer(address="10.9.1.2")
API_SERVER, DNS_OF_THE_NODE = Peer(address="10.0.0.9"), Peer(address="169.254.20.10")
SMOKE = {"test-reach", "test-job"}
_A, _B = ({NAME: "tandem", INSTANCE: release} for release in ("a", "b"))
STRANGERS = {
    "prometheus": Peer(NAMESPACE, {NAME: "prometheus"}),
    "prometheus elsewhere": Peer("elsewhere", {NAME: "prometheus"}),
    "client of b": Peer(NAMESPACE, {"b-tandem-client": "true"}),
    "client that says no": Peer(NAMESPACE, {"a-tandem-client": "false"}),
    "client elsewhere": Peer("elsewhere", {"a-tandem-client": "true"}),
    "proxy elsewhere": Peer("elsewhere", {"app": "proxy"}),
    "proxy here": Peer(NAMESPACE, {"app": "proxy"}),
    "numbered client": Peer(NAMESPACE, {"a": "v298"}),
    "numbered prometheus": Peer(NAMESPACE, {"a": "v299"}),
    "test of nobody": Peer(NAMESPACE, {COMPONENT: "test-reach"}),
    "trainer elsewhere": Peer("elsewhere", {**_A, COMPONENT: "trainer"}),
    "controller of b elsewhere": Peer("elsewhere", {**_B, COMPONENT: "controller"}),
    "outside": INTERNET,
}
CLIENTS = {"everything": {"proxy elsewhere"}, "every-value": {"numbered client"}}
SCRAPERS = {"every-value": {"numbered prometheus"}}


class World:
    """The pods and policies of two releases: the release `release`, and a release `b` with the
    values of the golden `defaults`. `STRANGERS` are pods of neither release.

    Policies add up. A pod that no policy selects for a direction is open in that direction. Both
    ends must allow a connection. Network plugins differ on whether an address block contains pods.
    In this model an address block contains pods, because this choice opens more connections.
    """

    def __init__(self, release: Rendered) -> None:
        both = release, goldens.rendered("defaults", release="b")
        own, others = ({component(pod): peer_of(pod) for pod in r.pods()} for r in both)
        self.own = {one: peer for one, peer in own.items() if one != "warmup"}
        self.policies = [policy["spec"] for r in both for policy in r.all("NetworkPolicy")]
        self.services = {o["metadata"]["name"]: o["spec"] for o in release.all("Service")}
        full = release.one("Deployment", "-controller")["metadata"]["name"]
        label = f"{full.removesuffix('-controller')}-client"
        self.others = {f"b {one}": peer for one, peer in others.items()} | STRANGERS
        self.others["client"] = Peer(NAMESPACE, {label: "true"})

    def reaches(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        def has_port(rule: Object) -> bool:
            entries = [{"protocol": "TCP"} | entry for entry in rule.get("ports", [])]
            found = {(target.ports.get(e["port"], e["port"]), e["protocol"]) for e in entries}
            return not entries or (port, protocol) in found

        def allows(direction: str, peers: str, pod: Peer, other: Peer) -> bool:
            of_direction = [p for p in self.policies if direction in p["policyTypes"]]
            applying = [p for p in of_direction if selects(p["podSelector"], pod.labels)]
            if pod.namespace != NAMESPACE or not applying:
                return True
            rules = [rule for p in applying for rule in p.get(direction.lower()) or []]
            selectors = [rule.get(peers) for rule in filter(has_port, rules)]
            return any(not some or any(self._is(other, one) for one in some) for some in selectors)

        return allows("Egress", "to", source, target) and allows("Ingress", "from", target, source)

    def _is(self, peer: Peer, selector: Object) -> bool:
        if block := selector.get("ipBlock"):
            return ip_address(peer.address) in ip_network(block["cidr"])
        if not peer.namespace:
            return False
        here = peer.namespace == NAMESPACE
        if "namespaceSelector" in selector:
            here = selects(selector["namespaceSelector"], NAMESPACES[peer.namespace])
        return here and selects(selector.get("podSelector", {}), peer.labels)

    def behind(self, url: SplitResult) -> tuple[Peer, int]:
        """The pod and the port that get the requests to a URL of a Service."""
        spec = self.services[url.hostname.partition(".")[0]]
        peer = self.own[spec["selector"][COMPONENT]]
        (target,) = (port["targetPort"] for port in spec["ports"] if port["port"] == url.port)
        number = peer.ports[target]
        assert spec.get("clusterIP") != "None" or number == url.port, f"{url}: a headless Service"
        return peer, number


@cache
def world(name: str) -> World:
    return World(goldens.rendered(name))


def expected(name: str, own: set[str]) -> dict[tuple[str, int], set[str]]:
    """All allowed connections: (destination, port) → names of the sources."""
    scrapers = SCRAPERS.get(name, {"prometheus"}) | (SMOKE & own)
    public = scrapers | {"client"} | CLIENTS.get(name, set())
    found = defaultdict(set, {("controller", 8080): public})
    ranks, hosts = own & {"job"} or own & {"trainer"}, own & {"job"}
    # NCCL chooses its ports.
    for one, port in product(ranks, PORTS):
        found[one, port] = {"inference"} | hosts
        found["inference", port] = set(ranks)
    for role, port in (("trainer", TRAINER_METRICS), ("inference", INFERENCE_METRICS)):
        if component := {"engine", role} & own:
            found[component.pop(), port] |= scrapers
    if "proxy" in own:
        found["inference", 8000] |= scrapers | {"proxy"}
    (front,) = own & {"engine", "proxy"} or {"inference"}
    found[front, 8000] |= public | {"controller"}
    return found


@CLOSED
def test_only_expected_connections_are_open(name):
    found = world(name)
    allowed, everybody = expected(name, set(found.own)), found.own | found.others
    for (one, pod), port in product(found.own.items(), PORTS):
        sources = {s for s, peer in everybody.items() if found.reaches(peer, pod, port)}
        assert sources == allowed[one, port], f"{one}:{port}"
        assert not [s for s, peer in found.others.items() if found.reaches(pod, peer, port)], one


@CLOSED
def test_pods_reach_names_and_of_the_internet_only_the_hub(name):
    reaches = world(name).reaches
    online = goldens.value(name, "networkPolicy.hubEgress")
    online = online and not goldens.value(name, "huggingface.offline")
    jobs = goldens.value(name, "trainer.executor") == "kubernetes"
    for one, pod in world(name).own.items():
        runner, works = jobs and one == "trainer", not one.startswith(("test-", "proxy"))
        assert reaches(pod, INTERNET, 443) == (works and (online or runner)), one
        assert reaches(pod, API_SERVER, 6443) == runner, one
        assert not any(reaches(pod, INTERNET, port) for port in (22, 80, 8000, 8443)), one
        assert not reaches(pod, INTERNET, 443, "UDP"), one
        assert reaches(pod, OUTSIDE, 3128) == (works and not runner and name == "everything"), one
        for port, protocol in product((53, 5353), ("UDP", "TCP")):
            assert reaches(pod, DNS_OF_THE_NODE, port, protocol), f"{one}: {port}/{protocol}"


def urls(pod: Object) -> list[SplitResult]:
    """The URLs of Services in the variables and arguments of a pod's containers."""
    texts = {text for c in pods.containers(pod) for text in c.get("args", [])}
    texts |= {text for c in pods.containers(pod) for text in pods.environment(c).values()}
    found = [urlsplit(text) for text in texts if text.startswith("http://")]
    return [url for url in found if url.hostname != "127.0.0.1"]


@CLOSED
def test_pods_reach_the_urls_in_their_variables_and_arguments(name):
    found = world(name)
    for pod in goldens.rendered(name).pods():
        for url in urls(pod):
            assert url.hostname.partition(".")[2] == f"{NAMESPACE}.svc"
            quiet = component(pod) in {"test-volume-write", "test-volume-read"}
            assert quiet or found.reaches(peer_of(pod), *found.behind(url)), url


def test_the_example_client_reaches_only_the_two_apis():
    example = charts.load(CHART.parent / "example.yaml")
    assert schemas.validate(example, NEWEST) == []
    pod = pods.pod_template(example)
    found = World(charts.render(goldens.values("defaults"), release="tandem"))
    reached = {
        (name, port)
        for (name, peer), port in product(found.own.items(), PORTS)
        if found.reaches(peer_of(pod), peer, port)
    }
    assert reached == {("controller", 8080), ("inference", 8000)}
    assert {found.behind(url)[1] for url in urls(pod)} == {8080, 8000}
    (secret,) = pod["spec"]["volumes"][0]["projected"]["sources"]
    assert secret["secret"]["name"] == "tandem"
