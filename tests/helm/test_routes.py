"""Ingress and HTTPRoute lead to the public paths of the two APIs, and to no others."""

from collections.abc import Iterator

import pytest

from helm.charts import Object
from helm.matrix import CASES, HOSTS
from helm.renders import case, value
from tandem.vllm_client.names import PUBLIC_PATHS, ROLLOUT_PATHS

KINDS = {"Ingress": "ingress", "HTTPRoute": "gateway"}
ROLE_OF = {HOSTS[f"{role}Host"]: role for role in ("controller", "inference")}
"""Host → the role that answers there."""


def prefixes(route: Object) -> Iterator[tuple[str, str, str]]:
    """(host, path prefix, Service) of everything that an Ingress or an HTTPRoute lets in."""
    for rule in route["spec"]["rules"]:
        if route["kind"] == "Ingress":
            for path in rule["http"]["paths"]:
                assert path["pathType"] == "Prefix"
                yield rule["host"], path["path"], path["backend"]["service"]["name"]
            continue
        (host,), (backend,) = route["spec"]["hostnames"], rule["backendRefs"]
        for match in rule["matches"]:
            assert set(match) == {"path"}
            assert match["path"]["type"] == "PathPrefix"
            yield host, match["path"]["value"], backend["name"]


def leads(path: str, prefix: str) -> bool:
    """Whether a prefix matches a path. Ingress and Gateway API both compare whole path elements."""
    return f"{path}/".startswith(f"{prefix}/")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_only_public_paths_are_routed(name, kind):
    found = [entry for route in case(name).all(kind) for entry in prefixes(route)]
    if not value(name, f"{KINDS[kind]}.enabled"):
        assert found == []
        return
    assert {service for _, _, service in found} == {"a-tandem-controller", "a-tandem-inference"}
    assert all(service == f"a-tandem-{ROLE_OF[host]}" for host, _, service in found)
    routed = {
        role: {prefix for host, prefix, _ in found if ROLE_OF[host] == role}
        for role in ROLE_OF.values()
    }
    assert routed["controller"] == {"/v1", "/api/v1"}

    def reached(path: str) -> bool:
        return any(leads(path, prefix) for prefix in routed["inference"])

    public = {path for path in PUBLIC_PATHS if path.startswith("/v1/")} | ROLLOUT_PATHS
    assert len(public) >= 7
    assert [path for path in public if not reached(path)] == []
    closed = (
        "/",
        "/metrics",
        "/metrics/",
        "/pause",
        "/tokenize",
        "/detokenize",
        "/update_weights",
        "/rollouts",
        "/v2",
    )
    assert [path for path in closed if reached(path)] == []
