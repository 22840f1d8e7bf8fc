"""Whether an object is one that a Kubernetes of a given version would take: `validate(obj, version)`.

Built-in kinds against Kubernetes' own JSON schemas (the `kubernetes-validate` package, strict: unknown fields are
refused); the kinds in `crds/` against their definitions; and every object against what an API server checks besides:
names, labels, keys that must be unique in a list, selectors, mounts and limits of pods. A kind without a schema is a
problem like any other. The CEL rules of the CRDs aren't evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from helm import pods

CRDS = Path(__file__).parent / "crds"
DEFINITIONS = "/api/_definitions.json"
OBJECT_META = f"{DEFINITIONS}#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
CRD_GROUPS = {"monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}

LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$")
LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
SUBDOMAIN = re.compile(r"^(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
DNS_LABEL = re.compile(r"^(?=.{1,63}$)[a-z]([-a-z0-9]*[a-z0-9])?$")
POD_NAME_SUFFIX = 11
"""`-<10 characters>`: a StatefulSet's pods carry the name of the revision as a label, at most 63 characters."""
UNIQUE = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
}


def validate(obj: dict[str, Any], version: str) -> list[str]:
    """What is wrong with the object for this version of Kubernetes (`1.30`, `1.37.0`); empty if nothing is."""
    try:
        validator = _validator(obj.get("apiVersion", ""), obj.get("kind", ""), ".".join(version.split(".")[:2]))
    except LookupError as error:
        return [f"{_title(obj)}: {error.args[0]}"]
    problems = [_message(error) for error in validator.iter_errors(obj)]
    problems += [*_naming(obj), *_duplicates(obj, "")]
    if not problems:
        problems += pods.problems(obj)
    return [f"{_title(obj)}: {problem}" for problem in problems]


def _title(obj: dict[str, Any]) -> str:
    return f"{obj.get('kind', 'an object without a kind')} {obj.get('metadata', {}).get('name', 'without a name')}"


def _message(error: ValidationError) -> str:
    deepest = best_match([error]) or error
    return f"{'.'.join(str(part) for part in deepest.absolute_path) or 'the object'}: {deepest.message}"


@cache
def _definitions(minor: str) -> tuple[Any, Registry]:
    directory = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{minor}.0-local-strict"
    if not directory.is_dir():
        raise LookupError(f"kubernetes-validate has no schemas of Kubernetes {minor}")
    definitions = json.loads((directory / "_definitions.json").read_text())
    return directory, Registry().with_resource(DEFINITIONS, DRAFT202012.create_resource(definitions)).crawl()


@cache
def _validator(api_version: str, kind: str, minor: str) -> Draft202012Validator:
    directory, registry = _definitions(minor)
    group, _, version = api_version.rpartition("/")
    if api_version in CRD_GROUPS:
        path = CRDS / f"{kind.lower()}.json"
        if not path.is_file():
            raise LookupError(f"no schema of {api_version} {kind} in {CRDS.name}/")
        schema = _strict(json.loads(path.read_text()))
        schema["properties"] |= {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": {"$ref": OBJECT_META},
        }
        schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
        return Draft202012Validator(schema, registry=registry)
    name = f"{kind.lower()}-{group.split('.')[0]}-{version}" if group else f"{kind.lower()}-{version}"
    file = directory / f"{name}.json"
    if not kind or not file.is_file():
        raise LookupError(f"Kubernetes {minor} has no {api_version} {kind}")
    schema = json.loads(file.read_text())
    if {"group": group, "version": version, "kind": kind} not in schema.get("x-kubernetes-group-version-kind", []):
        raise LookupError(f"Kubernetes {minor} has no {api_version} {kind}")
    return Draft202012Validator(schema, registry=registry)


def _strict(schema: Any) -> Any:
    """The schema with unknown fields refused wherever fields are listed."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        result["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    return result


def _naming(obj: dict[str, Any]) -> Iterator[str]:
    """Names and labels, of the object and of the pods it makes."""
    name, kind = obj.get("metadata", {}).get("name", ""), obj.get("kind")
    if not (DNS_LABEL if kind in ("Service", "Namespace") else SUBDOMAIN).match(name):
        yield f"metadata.name: {name!r} is not a valid name"
    if kind == "StatefulSet" and len(name) + POD_NAME_SUFFIX > 63:
        yield f"metadata.name: {name!r} leaves no room for a pod's revision label (63 characters)"
    for path, meta in _metadata(obj, ""):
        for key, value in (meta.get("labels") or {}).items():
            if not LABEL_KEY.match(key) or not LABEL_VALUE.match(str(value)):
                yield f"{path}.labels: {key}: {value!r} is not a valid label"
        for key in meta.get("annotations") or {}:
            if not LABEL_KEY.match(key.lower()):
                yield f"{path}.annotations: {key!r} is not a valid key"


def _metadata(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}".lstrip(".")
            if key == "metadata" and isinstance(value, dict):
                yield here, value
            else:
                yield from _metadata(value, here)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _metadata(value, f"{path}.{index}")


def _duplicates(node: Any, path: str) -> Iterator[str]:
    """Lists that are maps to the API server: a key given twice is refused (or, worse, merged)."""
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from _duplicates(value, f"{path}.{index}")
    elif isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}".lstrip(".")
            yield from _duplicates(value, here)
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                continue
            if key == "ports":
                port = "containerPort" if any("containerPort" in item for item in value) else "port"
                seen = [(item.get(port), item.get("protocol", "TCP")) for item in value]
            elif key in UNIQUE:
                seen = [tuple(item.get(part) for part in UNIQUE[key]) for item in value]
            else:
                continue
            yield from (f"{here}: {item} more than once" for item in sorted(set(seen), key=str) if seen.count(item) > 1)
