"""Who reaches whom: NetworkPolicies evaluated over pods, as their API describes it.

Policies add up; a pod that none selects for a direction is open in that direction; both ends must allow. An address
block contains pods too, which network plugins see differently: the assertions hold for the more open reading.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod, or an address outside of the cluster (`namespace` is empty)."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    address: str = "10.0.0.1"

    @classmethod
    def of(cls, name: str, namespace: str, template: Object) -> Pod:
        """The pod that a template makes."""
        ports = {
            port["name"]: (port["containerPort"], port.get("protocol", "TCP"))
            for container in template["spec"]["containers"]
            for port in container.get("ports", [])
        }
        return cls(name, namespace, template["metadata"]["labels"], ports)


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector takes an object with these labels."""
    if unknown := set(selector) - {"matchLabels", "matchExpressions"}:
        raise ValueError(f"not a LabelSelector: {unknown}")
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or []:
        value, values = labels.get(expression["key"]), expression.get("values", [])
        fits = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not fits[expression["operator"]]:
            return False
    return True


class Network:
    """Namespaces (by their labels) and the policies in them."""

    def __init__(self, policies: Iterable[Object], namespaces: Mapping[str, Mapping[str, str]]) -> None:
        self.policies = list(policies)
        self.namespaces = namespaces

    def reaches(self, source: Pod, destination: Pod, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection from one to a port of the other gets through."""
        return self._allows("Egress", source, destination, destination, port, protocol) and self._allows(
            "Ingress", destination, source, destination, port, protocol
        )

    def _allows(self, direction: str, pod: Pod, peer: Pod, owner: Pod, port: int, protocol: str) -> bool:
        """Whether `pod` lets a connection with `peer` to a port of `owner` pass in this direction."""
        applying = [policy for policy in self.policies if self._applies(policy, direction, pod)]
        key, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
        return not applying or any(
            self._is_peer(rule.get(peers), peer, policy["metadata"]["namespace"])
            and _is_port(rule.get("ports"), owner, port, protocol)
            for policy in applying
            for rule in policy["spec"].get(key) or []
        )

    def _applies(self, policy: Object, direction: str, pod: Pod) -> bool:
        spec = policy["spec"]
        types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
        here = policy["metadata"]["namespace"] == pod.namespace
        return here and direction in types and selects(spec["podSelector"], pod.labels)

    def _is_peer(self, peers: list[Object] | None, pod: Pod, home: str) -> bool:
        if not peers:
            return True
        return any(self._is_one(peer, pod, home) for peer in peers)

    def _is_one(self, peer: Object, pod: Pod, home: str) -> bool:
        if block := peer.get("ipBlock"):
            address = ipaddress.ip_address(pod.address)
            excluded = any(address in ipaddress.ip_network(part) for part in block.get("except", []))
            return address in ipaddress.ip_network(block["cidr"]) and not excluded
        if not pod.namespace:
            return False
        if "namespaceSelector" in peer:
            if not selects(peer["namespaceSelector"], self.namespaces[pod.namespace]):
                return False
        elif pod.namespace != home:
            return False
        return selects(peer.get("podSelector", {}), pod.labels)


def _is_port(ports: list[Object] | None, owner: Pod, port: int, protocol: str) -> bool:
    if not ports:
        return True
    for allowed in ports:
        wanted = allowed.get("port")
        if allowed.get("protocol", "TCP") != protocol:
            continue
        if isinstance(wanted, str):
            if owner.ports.get(wanted) == (port, protocol):
                return True
        elif wanted is None or wanted <= port <= allowed.get("endPort", wanted):
            return True
    return False
