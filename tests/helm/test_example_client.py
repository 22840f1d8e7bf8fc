"""helm/example.yaml: a client of a release `tandem` in the same namespace."""

from urllib.parse import urlsplit

import yaml

from helm import matrix
from helm.charts import CHART, NEWEST
from helm.matrix import COMPONENT
from helm.pod_security import violations
from helm.pods import pod_template
from helm.reachability import Network, Pod, selects
from helm.renders import NAMESPACE, component, environment, of
from helm.schemas import validate

JOB = yaml.safe_load((CHART.parent / "example.yaml").read_text())


def test_it_is_a_job_that_a_restricted_namespace_accepts():
    assert validate(JOB, NEWEST) == []
    pod = pod_template(JOB)
    assert list(violations(pod)) == []
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["enableServiceLinks"] is False


def test_it_reaches_only_the_two_apis_and_has_only_the_api_key():
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
