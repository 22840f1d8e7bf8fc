"""What an API server says it serves: the kinds, their paths, and the discovery documents made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIONAL_GROUPS = ("monitoring.coreos.com", "gateway.networking.k8s.io")
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    """One kind the server stores."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


def _kinds(group: str, version: str, *names: str, namespaced: bool = True) -> list[Kind]:
    return [Kind(group, version, name, _plural(name), namespaced) for name in names]


def _plural(kind: str) -> str:
    lower = kind.lower()
    if lower.endswith("y"):
        return lower[:-1] + "ies"
    if lower.endswith(("s", "ss")):
        return lower if lower == "endpoints" else lower + "es"
    return lower + "s"


KINDS = [
    *_kinds("", "v1", "Pod", "Service", "ConfigMap", "Secret", "PersistentVolumeClaim", "ServiceAccount", "Event"),
    *_kinds("", "v1", "Endpoints", "ReplicationController", "ResourceQuota", "LimitRange", "PodTemplate"),
    *_kinds("", "v1", "Namespace", "Node", "PersistentVolume", namespaced=False),
    *_kinds("apps", "v1", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ControllerRevision"),
    *_kinds("batch", "v1", "Job", "CronJob"),
    *_kinds("networking.k8s.io", "v1", "NetworkPolicy", "Ingress"),
    *_kinds("networking.k8s.io", "v1", "IngressClass", namespaced=False),
    *_kinds("policy", "v1", "PodDisruptionBudget"),
    *_kinds("rbac.authorization.k8s.io", "v1", "Role", "RoleBinding"),
    *_kinds("scheduling.k8s.io", "v1", "PriorityClass", namespaced=False),
    *_kinds("storage.k8s.io", "v1", "StorageClass", namespaced=False),
    *_kinds("resource.k8s.io", "v1", "ResourceClaim", "ResourceClaimTemplate"),
    *_kinds("resource.k8s.io", "v1", "DeviceClass", namespaced=False),
    *_kinds("monitoring.coreos.com", "v1", "PodMonitor", "ServiceMonitor", "PrometheusRule"),
    *_kinds("gateway.networking.k8s.io", "v1", "HTTPRoute"),
]
SINCE = {"resource.k8s.io": (1, 34)}


def minor(version: str) -> tuple[int, int]:
    """`v1.37.0` → (1, 37)."""
    major, minor_ = version.removeprefix("v").split(".")[:2]
    return int(major), int(minor_)


def served(version: str, groups: tuple[str, ...]) -> list[Kind]:
    """The kinds of a Kubernetes of this version with these optional groups installed."""
    return [
        kind
        for kind in KINDS
        if (kind.group not in OPTIONAL_GROUPS or kind.group in groups)
        and minor(version) >= SINCE.get(kind.group, (0, 0))
    ]


def _names(kinds: list[Kind]) -> dict[tuple[str, str], list[Kind]]:
    found: dict[tuple[str, str], list[Kind]] = {}
    for kind in kinds:
        found.setdefault((kind.group, kind.version), []).append(kind)
    return found


def aggregated(kinds: list[Kind], *, core: bool) -> dict[str, Any]:
    """/api (`core`) or /apis as one APIGroupDiscoveryList."""
    items = [
        {
            "metadata": {"name": group} if group else {},
            "versions": [
                {
                    "version": version,
                    "freshness": "Current",
                    "resources": [
                        {
                            "resource": kind.plural,
                            "responseKind": {"group": group, "version": version, "kind": kind.kind},
                            "scope": "Namespaced" if kind.namespaced else "Cluster",
                            "singularResource": kind.kind.lower(),
                            "verbs": VERBS,
                        }
                        for kind in members
                    ],
                }
            ],
        }
        for (group, version), members in _names(kinds).items()
        if core == (group == "")
    ]
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def groups(kinds: list[Kind]) -> dict[str, Any]:
    """/apis for those who don't know the aggregated form."""
    found = [
        {
            "name": group,
            "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
            "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
        }
        for group, version in _names(kinds)
        if group
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


def resources(kinds: list[Kind], group: str, version: str) -> dict[str, Any] | None:
    """/api/v1 or /apis/<group>/<version>, or None where it isn't served."""
    members = _names(kinds).get((group, version))
    if not members:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": members[0].api_version,
        "resources": [
            {
                "name": kind.plural,
                "singularName": kind.kind.lower(),
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": VERBS,
            }
            for kind in members
        ],
    }


def openapi_index(kinds: list[Kind]) -> dict[str, Any]:
    """/openapi/v3."""
    prefixes = [f"apis/{group}/{version}" if group else f"api/{version}" for group, version in _names(kinds)]
    return {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}"} for prefix in prefixes}}


def openapi(kinds: list[Kind], group: str, version: str) -> dict[str, Any]:
    """One group's OpenAPI document: no more than that the server itself checks fields, so that clients needn't."""
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": version},
        "paths": {
            f"/{kind.plural}/{{name}}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "responses": {"200": {"description": "OK"}},
                    "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind.kind},
                }
            }
            for kind in _names(kinds).get((group, version), [])
        },
    }
