"""Which pods reach which ports, computed from the NetworkPolicies of two releases in one namespace."""

from functools import cache
from urllib.parse import urlsplit

import pytest
import yaml

from helm import matrix
from helm.charts import CHART, NEWEST, Rendered
from helm.matrix import COMPONENT, INSTANCE, NAME, VALUES
from helm.pods import breaches, containers, pod_template
from helm.reachability import Network, Pod, selects
from helm.renders import NAMESPACE, component, environment, of, with_values
from helm.schemas import validate

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
}
STRANGERS = {name: Pod(name, namespace, labels) for name, namespace, labels in (
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
    ("trainer elsewhere", "elsewhere", {NAME: "tandem", INSTANCE: "a", COMPONENT: "trainer"}),
)} | {"outside": INTERNET}  # fmt: skip
SCRAPERS = {"prometheus", "prometheus here"}
SMOKE = {"test-reach", "test-job"}
TESTS = {*SMOKE, "test-volume-write", "test-volume-read"}


class World:
    """The pods and policies of release a, of a release b with the default values, and strangers."""

    def __init__(self, rendered: Rendered) -> None:
        other = of(matrix.BASE, release="b")
        self.own = {component(pod): Pod.of(component(pod), NAMESPACE, pod) for _, pod in rendered.pods()}
        self.others = {f"b {component(pod)}": Pod.of(component(pod), NAMESPACE, pod) for _, pod in other.pods()}
        self.network = Network([p for r in (rendered, other) for p in r.all("NetworkPolicy")], NAMESPACES)

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
def test_only_expected_connections_reach_pods(name):
    found = world(name)
    clients = {"client", "proxy elsewhere"} if "everything" in name else {"client"}
    allowed = expected(set(found.own), clients)
    assert set(found.own) >= TESTS | {"controller"}
    for destination in found.own:
        for port in PORTS:
            sources = found.reaching(destination, port)
            assert sources == allowed.get((destination, port), set()), f"{destination}:{port}"


@pytest.mark.parametrize("name", VALUES)
def test_only_expected_connections_leave_the_release(name):
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


def test_an_offline_hub_closes_the_way_to_the_internet():
    for values in ({"huggingface": {"offline": True}}, {"networkPolicy": {"hubEgress": False}}):
        found = changed(**values)
        assert not any(found.reached(source, INTERNET, 443) for source in found.own)
    both = changed(
        huggingface={"offline": True},
        networkPolicy={"extraEgress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 443}]}]},
    )
    assert both.reached("trainer", INTERNET, 443)
    assert not both.reached("trainer", PROXY_OUTSIDE, 443)


def test_the_scrapers_are_a_value():
    found = changed(networkPolicy={"prometheus": [{"podSelector": {"matchLabels": {"app": "web"}}}]})
    assert found.reaching("trainer", TRAINER_METRICS) == {"pod", "inference", *SMOKE}
    nobody = changed(networkPolicy={"prometheus": []})
    assert nobody.reaching("trainer", TRAINER_METRICS) == {"inference", *SMOKE}
    assert nobody.reaching("controller", 8080) == {"client", *SMOKE}


@pytest.mark.parametrize("role", matrix.ROLES)
def test_a_client_label_on_a_pod_of_another_release_opens_nothing(role):
    """The other release lets it in, but its own release doesn't let it out."""
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
        assert spec.get("clusterIP") != "None" or number == url.port, f"{text}: a headless Service translates no ports"
        reaches = found.reached(source, destination, number, protocol)
        assert reaches or source in ("test-volume-write", "test-volume-read"), f"{source}: {text}"


JOB = yaml.safe_load((CHART.parent / "example.yaml").read_text())
"""A client of a release `tandem` in the same namespace."""


def test_the_example_client_is_a_job_that_a_restricted_namespace_accepts():
    assert validate(JOB, NEWEST) == []
    pod = pod_template(JOB)
    assert breaches(pod) == []


def test_the_example_client_reaches_only_the_two_apis_and_has_only_the_api_key():
    rendered, job = of(matrix.BASE, release="tandem"), pod_template(JOB)
    services = {o["metadata"]["name"]: o["spec"] for o in rendered.all("Service")}
    pods = [Pod.of(component(pod), NAMESPACE, pod) for _, pod in rendered.pods()]
    network = Network(rendered.all("NetworkPolicy"), {NAMESPACE: {}})
    client = Pod.of("example", NAMESPACE, job)
    (container,) = job["spec"]["containers"]
    variables = environment(container)
    reached = set()
    for url in (urlsplit(variables[name]) for name in ("TANDEM_URL", "OPENAI_BASE_URL")):
        service = services[url.hostname]
        (port,) = (p for p in service["ports"] if p["port"] == url.port)
        (pod,) = (p for p in pods if selects({"matchLabels": service["selector"]}, p.labels))
        reached.add((pod.name, pod.ports[port["targetPort"]][0]))
    ports = (8000, 8080, 9400, 9401)
    assert {(p.name, n) for p in pods for n in ports if network.reaches(client, p, n)} == reached
    assert {name for name, _ in reached} == {"controller", "inference"}
    for pod in pods:
        assert not selects({"matchLabels": {COMPONENT: pod.name}}, client.labels)
    (volume,) = (v for v in job["spec"]["volumes"] if "projected" in v)
    (source,) = volume["projected"]["sources"]
    assert source["secret"]["name"] == "tandem"
    assert [item["key"] for item in source["secret"]["items"]] == ["api_key"]
    assert variables["TANDEM_API_KEY_FILE"] == "/etc/tandem/secrets/api_key"
