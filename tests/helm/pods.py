"""Pods inside objects, and what an API server checks of them that no schema says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
QUANTITY = re.compile(r"^([0-9.]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")
FACTORS = {"": 1, "m": 1e-3} | {s: 1000.0**i for i, s in enumerate("kMGTPE", 1)}
FACTORS |= {f"{s}i": 1024.0**i for i, s in enumerate("KMGTPE", 1)}
PORT_NAME = re.compile(r"^(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$")


def pod_template(obj: Object) -> Object | None:
    """The pod that an object is or makes (`metadata` and `spec`); None where it makes none."""
    if obj["kind"] == "Pod":
        return {"metadata": obj["metadata"], "spec": obj["spec"]}
    if obj["kind"] == "CronJob":
        return obj["spec"]["jobTemplate"]["spec"]["template"]
    if obj["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"):
        return obj["spec"]["template"]
    return None


def quantity(value: str | float) -> float:
    """`2Gi`, `250m`, 4 → a number."""
    found = QUANTITY.match(str(value))
    if not found:
        raise ValueError(f"{value!r} is not a quantity")
    return float(found[1]) * FACTORS[found[2] or ""]


def problems(obj: Object) -> list[str]:
    """What an API server would refuse in the pod of an object that fits its schema."""
    template = pod_template(obj)
    if template is None:
        return []
    return [*_selector(obj, template), *_spec(obj, template["spec"])]


def _selector(obj: Object, template: Object) -> Iterator[str]:
    wanted = obj["spec"].get("selector", {}).get("matchLabels", {}) if obj["kind"] != "Pod" else {}
    labels = template["metadata"].get("labels", {})
    wrong = {key: value for key, value in wanted.items() if labels.get(key) != value}
    if wrong:
        yield f"spec.selector: {wrong} does not match the labels of the template"


def _spec(obj: Object, spec: Object) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    volumes |= {claim["metadata"]["name"] for claim in obj["spec"].get("volumeClaimTemplates", [])}
    claims = {claim["name"] for claim in spec.get("resourceClaims", [])}
    names: list[str] = []
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        name = container["name"]
        names.append(name)
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"container {name}: there is no volume {mount['name']} to mount"
        for port in container.get("ports", []):
            if not PORT_NAME.match(port.get("name", "a")):
                yield f"container {name}: {port['name']!r} is not a valid name of a port"
        for claim in container.get("resources", {}).get("claims", []):
            if claim["name"] not in claims:
                yield f"container {name}: the pod has no resource claim {claim['name']}"
        yield from _resources(name, container.get("resources", {}))
    yield from (f"more than one container is named {name}" for name in sorted(set(names)) if names.count(name) > 1)


def _resources(name: str, resources: Object) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for resource, value in {**requests, **limits}.items():
        try:
            asked, limit = quantity(requests.get(resource, value)), quantity(limits.get(resource, value))
        except ValueError as error:
            yield f"container {name}: {resource}: {error}"
            continue
        if asked > limit:
            yield f"container {name}: {resource}: request {requests[resource]} is above the limit {limits[resource]}"
        if "/" in resource and (resource not in limits or asked != limit or asked % 1):
            yield f"container {name}: {resource}: an extended resource's request and limit are one whole number"
