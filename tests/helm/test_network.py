"""Only expected connections are open between the pods of two releases in one namespace and other
pods."""

from functools import cache
from urllib.parse import urlsplit

import pytest

from helm import charts, goldens, schemas
from helm.charts import CHART, NAMESPACE, NEWEST
from helm.goldens import NAMES
from helm.network import Network, Peer, peer_of
from helm.pods import COMPONENT, INSTANCE, NAME, component, containers, environment, pod_template

CLOSED = [name for name in NAMES if goldens.value(name, "networkPolicy.enabled")]
TRAINER_METRICS, INFERENCE_METRICS, NCCL = 9400, 9401, 29517
PORTS = (22, 80, 8000, 8080, TRAINER_METRICS, INFERENCE_METRICS, NCCL)
INTERNET, OUTSIDE = Peer(address="203.0.113.7"), Peer(address="10.9.1.2")
API_SERVER, DNS_OF_THE_NODE = Peer(address="10.0.0.9"), Peer(address="169.254.20.10")
TESTS = {"test-reach", "test-job", "test-volume-write", "test-volume-read"}
SMOKE = {"test-reach", "test-job"}
NAMESPACES = {NAMESPACE: {}, "elsewhere": {"team": "research"}, "kube-system": {}}
_A, _B = ({NAME: "tandem", INSTANCE: release} for release in ("a", "b"))
STRANGERS = {
    "prometheus": Peer(NAMESPACE, {NAME: "prometheus"}),
    "prometheus elsewhere": Peer("elsewhere", {NAME: "prometheus"}),
    "client": Peer(NAMESPACE, {"a-tandem-client": "true"}),
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
FULLNAMES = {"existing": "v123", "every-value": "a-1122"}


class World:
    """The pods and policies of two releases: the golden `name`, and the release `b` with the values
    of the golden `defaults`. `STRANGERS` are pods of neither release."""

    def __init__(self, name: str) -> None:
        releases = goldens.rendered(name), goldens.rendered("defaults", release="b")
        own, others = ({component(pod): peer_of(pod) for pod in r.pods()} for r in releases)
        self.own = {one: peer for one, peer in own.items() if one != "warmup"}
        self.others = {f"b {one}": peer for one, peer in others.items()} | STRANGERS
        if client := FULLNAMES.get(name):
            self.others["client"] = Peer(NAMESPACE, {f"{client}-client": "true"})
        policies = [policy for r in releases for policy in r.all("NetworkPolicy")]
        self.network = Network(policies, NAMESPACES)


world = cache(World)


def expected(name: str, own: set[str]) -> dict[tuple[str, int], set[str]]:
    """All allowed connections: (destination, port) → names of the sources."""
    scrapers = SCRAPERS.get(name, {"prometheus"}) | (SMOKE & own)
    public = scrapers | {"client"} | CLIENTS.get(name, set())
    if "engine" in own:
        found = {("engine", port): scrapers for port in (TRAINER_METRICS, INFERENCE_METRICS)}
        return found | {("controller", 8080): public, ("engine", 8000): public | {"controller"}}
    ranks = {"job"} & own or {"trainer"} & own
    # NCCL chooses its ports, so all ports are open between ranks and vLLM.
    found = {(one, port): {"inference"} for one in ranks for port in PORTS}
    found |= {("inference", port): ranks for port in PORTS} | {("controller", 8080): public}
    found["inference", INFERENCE_METRICS] = scrapers | ranks
    if "trainer" in own:
        found["trainer", TRAINER_METRICS] = scrapers | (
            {"inference"} if ranks == {"trainer"} else set()
        )
    if "proxy" in own:
        found["inference", 8000] = scrapers | ranks | {"proxy"}
        return found | {("proxy", 8000): public | {"controller"}}
    return found | {("inference", 8000): public | {"controller"} | ranks}


@pytest.mark.parametrize("name", CLOSED)
def test_only_expected_connections_are_open(name):
    found = world(name)
    reaches, allowed = found.network.reaches, expected(name, set(found.own))
    everybody = found.own | found.others
    for one, pod in found.own.items():
        for port in PORTS:
            sources = {s for s, peer in everybody.items() if s != one and reaches(peer, pod, port)}
            assert sources == allowed.get((one, port), set()), f"{one}:{port}"
            assert not [s for s, peer in found.others.items() if reaches(pod, peer, port)], one


@pytest.mark.parametrize("name", CLOSED)
def test_pods_reach_names_and_of_the_internet_only_the_hub(name):
    found = world(name)
    reaches = found.network.reaches
    online = goldens.value(name, "networkPolicy.hubEgress")
    online = online and not goldens.value(name, "huggingface.offline")
    jobs = goldens.value(name, "trainer.executor") == "kubernetes"
    for one, pod in found.own.items():
        runner, works = jobs and one == "trainer", one not in TESTS | {"proxy"}
        assert reaches(pod, INTERNET, 443) == (works and (online or runner)), one
        assert reaches(pod, API_SERVER, 6443) == runner, one
        assert not any(reaches(pod, INTERNET, port) for port in (22, 80, 8000, 8443)), one
        assert not reaches(pod, INTERNET, 443, "UDP"), one
        assert reaches(pod, OUTSIDE, 3128) == (works and not runner and name == "everything"), one
        for port, protocol in ((53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP")):
            assert reaches(pod, DNS_OF_THE_NODE, port, protocol), f"{one}: {port}/{protocol}"


@pytest.mark.parametrize("name", CLOSED)
def test_hosts_of_a_job_reach_each_other_and_only_of_their_release(name):
    found = world(name)
    if job := found.own.get("job"):
        assert found.network.reaches(job, job, NCCL)
        assert not found.network.reaches(found.own["trainer"], job, NCCL)


@pytest.mark.parametrize("name", CLOSED)
def test_pods_reach_the_urls_in_their_variables_and_arguments(name):
    rendered, found = goldens.rendered(name), world(name)
    services = {o["metadata"]["name"]: o["spec"] for o in rendered.all("Service")}
    texts = {
        (component(pod), text)
        for pod in rendered.pods()
        for container in containers(pod)
        for text in [*environment(container).values(), *container.get("args", [])]
        if text.startswith("http://") and not text.startswith("http://127.0.0.1:")
    }
    for source, text in texts:
        url = urlsplit(text)
        service, *rest = url.hostname.split(".")
        assert rest == [NAMESPACE, "svc"], text
        spec = services[service]
        destination = found.own[spec["selector"][COMPONENT]]
        (target,) = (port["targetPort"] for port in spec["ports"] if port["port"] == url.port)
        number, _ = destination.ports[target]
        assert spec.get("clusterIP") != "None" or number == url.port, f"{text}: a headless Service"
        quiet = source in {"test-volume-write", "test-volume-read", "warmup"}
        assert quiet or found.network.reaches(found.own[source], destination, number), source + text


def test_the_example_client_reaches_only_the_two_apis():
    example = charts.load(CHART.parent / "example.yaml")
    assert schemas.validate(example, NEWEST) == []
    pod, rendered = (
        pod_template(example),
        charts.render(goldens.values("defaults"), release="tandem"),
    )
    pods = {component(other): peer_of(other) for other in rendered.pods()}
    network, client = Network(rendered.all("NetworkPolicy"), NAMESPACES), peer_of(pod)
    reached = {
        (name, n) for name, p in pods.items() for n in PORTS if network.reaches(client, p, n)
    }
    assert reached == {("controller", 8080), ("inference", 8000)}
    services = {o["metadata"]["name"]: o["spec"] for o in rendered.all("Service")}
    variables = environment(pod["spec"]["containers"][0])
    for url in (urlsplit(variables[name]) for name in ("TANDEM_URL", "TANDEM_INFERENCE_URL")):
        assert url.port in {port["port"] for port in services[url.hostname]["ports"]}
    sources = [s for v in pod["spec"]["volumes"] for s in v.get("projected", {}).get("sources", [])]
    assert [source["secret"]["name"] for source in sources] == ["tandem"]
