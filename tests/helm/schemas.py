"""Whether a Kubernetes of a given version accepts an object: `validate(obj, version)`.

Built-in kinds are checked against Kubernetes' own JSON schemas (the strict ones of the
`kubernetes-validate` package, which refuse unknown fields), custom kinds against their definitions
in `crds/`. Every object is checked further as an API server does: names, labels, unique keys in
lists, and the rules of `helm.pods`. A kind without a schema is a problem too. The CEL rules of the
CRDs are not evaluated.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from helm import pods

CRDS = Path(__file__).parent / "crds"
CRD_GROUPS = {"monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}

LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$")
LABEL_KEY = re.compile(
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
SUBDOMAIN = re.compile(
    r"^(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
)
DNS_LABEL = re.compile(r"^(?=.{1,63}$)[a-z]([-a-z0-9]*[a-z0-9])?$")
POD_NAME_SUFFIX = 11
"""A StatefulSet's pods have a label of at most 63 characters: its name, `-` and 10 characters."""
UNIQUE = {
    "ports": lambda item: (
        item.get("containerPort", item.get("port")),
        item.get("protocol", "TCP"),
    ),
    "volumeMounts": lambda item: item.get("mountPath"),
    **dict.fromkeys(
        ("containers", "initContainers", "volumes", "env", "imagePullSecrets"),
        lambda i: i.get("name"),
    ),
}
"""Lists that an API server treats as maps → the key of an item."""


def validate(obj: dict[str, Any], version: str) -> list[str]:
    """The object's problems with this version of Kubernetes (`1.30`, `1.37.0`)."""
    title = f"{obj.get('kind')} {obj.get('metadata', {}).get('name')}"
    return [f"{title}: {problem}" for problem in _problems(json.dumps(obj), version)]


@cache
def _problems(text: str, version: str) -> list[str]:
    obj = json.loads(text)
    problems = [*_of_schema(obj, version), *_naming(obj), *_duplicates(obj)]
    return problems or list(pods.problems(obj))


def _of_schema(obj: dict[str, Any], version: str) -> Iterator[str]:
    if obj["apiVersion"] in CRD_GROUPS:
        path = CRDS / f"{obj['kind'].lower()}.json"
        if not path.is_file():
            yield f"no schema of {obj['apiVersion']} {obj['kind']} in {CRDS.name}/"
        elif error := best_match(
            _of_crd(path).iter_errors({key: obj[key] for key in obj if key in ("kind", "spec")})
        ):
            yield f"{error.json_path}: {error.message}"
        return
    try:
        kubernetes_validate.validate(obj, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield repr(error)


@cache
def _of_crd(path: Path) -> Draft202012Validator:
    return Draft202012Validator(_strict(json.loads(path.read_text())))


def _strict(schema: Any) -> Any:
    """The schema, changed to refuse unknown fields wherever it lists fields."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    more = (
        {"additionalProperties": False}
        if closed and not schema.get("x-kubernetes-preserve-unknown-fields")
        else {}
    )
    return more | {key: _strict(value) for key, value in schema.items()}


def _naming(obj: dict[str, Any]) -> Iterator[str]:
    """Problems with the names and labels of the object and of its pods."""
    name, kind = obj.get("metadata", {}).get("name", ""), obj.get("kind")
    if not (DNS_LABEL if kind in ("Service", "Namespace") else SUBDOMAIN).match(name):
        yield f"metadata.name: {name!r} is not a valid name"
    if kind == "StatefulSet" and len(name) + POD_NAME_SUFFIX > 63:
        yield f"metadata.name: {name!r} leaves no space for a pod's revision label (63 characters)"
    for path, meta in (
        (path, node)
        for path, key, node in walk(obj)
        if key == "metadata" and isinstance(node, dict)
    ):
        for key, value in (meta.get("labels") or {}).items():
            if not LABEL_KEY.match(key) or not LABEL_VALUE.match(str(value)):
                yield f"{path}.labels: {key}: {value!r} is not a valid label"
        for key in meta.get("annotations") or {}:
            if not LABEL_KEY.match(key.lower()):
                yield f"{path}.annotations: {key!r} is not a valid key"


def walk(node: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of everything in an object."""
    for key, value in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        here = f"{path}.{key}".lstrip(".")
        yield here, str(key), value
        yield from walk(value, here)


def _duplicates(obj: dict[str, Any]) -> Iterator[str]:
    """Keys that a list contains twice. An API server refuses or merges such items."""
    for path, name, items in walk(obj):
        if (
            name in UNIQUE
            and isinstance(items, list)
            and all(isinstance(item, dict) for item in items)
        ):
            keys = [UNIQUE[name](item) for item in items]
            yield from (
                f"{path}: {key} more than once"
                for key in sorted(set(keys), key=str)
                if keys.count(key) > 1
            )
