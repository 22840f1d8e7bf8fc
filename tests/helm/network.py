"""Computes from the NetworkPolicies in a cluster whether a pod reaches a port of another pod.

Policies add up. A pod that no policy selects for a direction is open in that direction. Both ends
must allow a connection. Network plugins differ on whether an address block contains pods. In this
module it does, because then more connections are open.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from helm.charts import NAMESPACE
from helm.pods import Object, selects


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside the cluster. An address outside has an empty `namespace`."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Name of a port → its number and protocol."""
    address: str = "10.0.0.1"


def peer_of(pod: Object) -> Peer:
    """The peer for a pod that a template of the chart makes."""
    declared = [port for c in pod["spec"]["containers"] for port in c.get("ports", [])]
    ports = {p["name"]: (p["containerPort"], p.get("protocol", "TCP")) for p in declared}
    return Peer(NAMESPACE, pod["metadata"]["labels"], ports)


class Network:
    """The namespaces of a cluster (name → labels), and the NetworkPolicies of the namespace
    NAMESPACE."""

    def __init__(self, policies: list[Object], namespaces: Mapping[str, Mapping[str, str]]) -> None:
        self.policies = [policy["spec"] for policy in policies]
        self.namespaces = namespaces

    def reaches(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Whether both ends allow a connection from `source` to a port of `target`."""

        def allows(direction: str, peers: str, pod: Peer, other: Peer) -> bool:
            applying = [p for p in self.policies if _applies(p, direction, pod)]
            rules = [rule for policy in applying for rule in policy.get(direction.lower()) or []]
            return not applying or any(
                self._is_peer(rule.get(peers), other)
                and _is_port(rule.get("ports"), target, port, protocol)
                for rule in rules
            )

        return allows("Egress", "to", source, target) and allows("Ingress", "from", target, source)

    def _is_peer(self, selectors: list[Object] | None, pod: Peer) -> bool:
        return not selectors or any(self._matches(selector, pod) for selector in selectors)

    def _matches(self, selector: Object, pod: Peer) -> bool:
        if block := selector.get("ipBlock"):
            return ipaddress.ip_address(pod.address) in ipaddress.ip_network(block["cidr"])
        if not pod.namespace:
            return False
        if "namespaceSelector" in selector:
            here = selects(selector["namespaceSelector"], self.namespaces[pod.namespace])
        else:
            here = pod.namespace == NAMESPACE
        return here and selects(selector.get("podSelector", {}), pod.labels)


def _applies(policy: Object, direction: str, pod: Peer) -> bool:
    here = pod.namespace == NAMESPACE and direction in policy["policyTypes"]
    return here and selects(policy["podSelector"], pod.labels)


def _is_port(ports: list[Object] | None, owner: Peer, port: int, protocol: str) -> bool:
    return not ports or any(
        entry.get("protocol", "TCP") == protocol
        and (entry["port"] == port or owner.ports.get(entry["port"]) == (port, protocol))
        for entry in ports
    )
