"""Evaluates NetworkPolicies over pods, as their API describes it.

Policies add up. A pod that no policy selects for a direction is open in that direction. Both ends must allow a
connection. An address block contains pods too here, although network plugins differ on that: it is the more open
reading.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

Object = dict[str, Any]


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


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects an object with these labels. Of the operators the chart has only `In`."""
    expressions = selector.get("matchExpressions", [])
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


class Network:
    """Namespaces (name → labels) and the policies in them."""

    def __init__(self, policies: Iterable[Object], namespaces: Mapping[str, Mapping[str, str]]) -> None:
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

        return allows("Egress", "to", source, destination) and allows("Ingress", "from", destination, source)

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
        return same and (entry.get("port", port) == port or owner.ports.get(entry["port"]) == (port, protocol))

    return not ports or any(map(matches, ports))
