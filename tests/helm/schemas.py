"""Checks whether a Kubernetes of a given version accepts an object: `validate(obj, version)`.

Built-in kinds are checked against Kubernetes' own JSON schemas. The schemas are the strict ones of
the `kubernetes-validate` package, which refuse unknown fields. Custom kinds are checked against
their definitions in `crds/`, without the definitions' CEL rules. A kind without a schema is a
problem too. An API server also refuses objects that all schemas accept, so more is checked: names,
labels, keys given twice, mounts of volumes that the pod lacks, and requests above limits.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from helm.pods import Object, containers, pod_template, quantity

# `kubernetes_validate` reads its definitions, some MB of JSON, for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

CRDS = Path(__file__).parent / "crds"
CRD_GROUPS = {"monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
LABEL = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$")
DNS_NAME = re.compile(r"^[a-z]([-a-z0-9.]*[a-z0-9])?$")
POD_NAME_SUFFIX = 11
"""The pods of a StatefulSet have a label of at most 63 characters. It consists of the StatefulSet's
name, `-` and 10 characters."""
KEYS = {"ports": "name", "volumeMounts": "mountPath"} | dict.fromkeys(
    ("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"
)
"""Name of a list that an API server treats as a map → the field that is the key of an item."""


def validate(obj: Object, version: str) -> list[str]:
    """The object's problems with a version of Kubernetes, such as `1.30` or `1.37.0`."""
    found = [*_of_schema(obj, version), *_naming(obj)]
    if pod := pod_template(obj):
        found += _of_pod(pod)
    return [f"{obj['kind']} {obj['metadata']['name']}: {problem}" for problem in found]


def _of_schema(obj: Object, version: str) -> Iterator[str]:
    if obj["apiVersion"] in CRD_GROUPS:
        checked = {key: obj[key] for key in ("kind", "spec")}
        if error := best_match(_of_crd(obj["kind"].lower()).iter_errors(checked)):
            yield f"{error.json_path}: {error.message}"
        return
    try:
        kubernetes_validate.validate(obj, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield repr(error)


@cache
def _of_crd(kind: str) -> Draft202012Validator:
    return Draft202012Validator(_strict(json.loads((CRDS / f"{kind}.json").read_text())))


def _strict(schema: Any) -> Any:
    """A copy of the schema that refuses unknown fields in each object whose fields the schema
    lists."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    closed = closed and not schema.get("x-kubernetes-preserve-unknown-fields")
    more = {"additionalProperties": False} if closed else {}
    return more | {key: _strict(value) for key, value in schema.items()}


def _naming(obj: Object) -> Iterator[str]:
    name = obj["metadata"]["name"]
    most = {"ConfigMap": 253, "StatefulSet": 63 - POD_NAME_SUFFIX}.get(obj["kind"], 63)
    if len(name) > most or not DNS_NAME.match(name):
        yield f"{name!r} is not a name of at most {most} characters"
    for key, node in walk(obj):
        if key == "labels" and isinstance(node, dict):
            wrong = [value for value in node.values() if not LABEL.match(str(value))]
            yield from (f"{value!r} is not a valid label" for value in wrong)
        if key in KEYS and isinstance(node, list) and all(isinstance(item, dict) for item in node):
            names = [item[KEYS[key]] for item in node if KEYS[key] in item]
            yield from (f"{key}: {one} twice" for one in set(names) if names.count(one) > 1)


def walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Key and value of each entry at any depth of an object. The key of an item of a list is its
    index."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield str(key), value
            yield from walk(value)


def _of_pod(pod: Object) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
    claims = {claim["name"] for claim in pod["spec"].get("resourceClaims", [])}
    for container in containers(pod):
        name, resources = container["name"], container.get("resources", {})
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        claimed = {claim["name"] for claim in resources.get("claims", [])}
        yield from (f"{name}: the pod has no {one}" for one in mounted - volumes | claimed - claims)
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for kind in requests.keys() & limits.keys():
            request, limit = quantity(requests[kind]), quantity(limits[kind])
            if request > limit or ("/" in kind and request != limit):
                yield f"{name}: {kind}: request {requests[kind]} and limit {limits[kind]}"
