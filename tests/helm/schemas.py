"""Checks whether a Kubernetes of a given version accepts an object: `validate(obj, version)`.

Built-in kinds are checked against Kubernetes' own JSON schemas. The package `kubernetes-validate`
has strict versions of these schemas, which refuse unknown fields. Custom kinds are checked against
their definitions in `crds/`, without the definitions' CEL rules. A kind without a schema counts as
a problem. An API server also refuses some objects that all schemas accept. So this module also
checks names, labels, mounts of volumes that the pod lacks, and requests above limits.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kubernetes_validate
import kubernetes_validate.utils
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from lightkube.utils.quantity import parse_quantity

from helm.pods import Object, containers, pod_template

# Without this cache `kubernetes_validate` reads some MB of JSON definitions for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

CRDS = {
    path.stem: Draft202012Validator(json.loads(path.read_text()))
    for path in (Path(__file__).parent / "crds").glob("*.json")
}
LABEL = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$")
DNS_NAME = re.compile(r"^[a-z]([-a-z0-9.]*[a-z0-9])?$")
# The pods of a StatefulSet have a label that consists of the StatefulSet's name, `-` and 10
# characters. A label has at most 63 characters.
LONGEST_NAME = {"ConfigMap": 253, "StatefulSet": 52}


def validate(obj: Object, version: str) -> list[str]:
    """The reasons for which a Kubernetes of this version, such as `1.30` or `1.37.0`, refuses the
    object."""
    found = [*_of_schema(obj, version), *_naming(obj)]
    if pod := pod_template(obj):
        found += _of_pod(pod)
    return [f"{obj['kind']} {obj['metadata']['name']}: {problem}" for problem in found]


def _of_schema(obj: Object, version: str) -> Iterator[str]:
    if definition := CRDS.get(obj["kind"].lower()):
        if error := best_match(definition.iter_errors(obj)):
            yield f"{error.json_path}: {error.message}"
        return
    try:
        kubernetes_validate.validate(obj, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield repr(error)


def _naming(obj: Object) -> Iterator[str]:
    name, most = obj["metadata"]["name"], LONGEST_NAME.get(obj["kind"], 63)
    if len(name) > most or not DNS_NAME.match(name):
        yield f"{name!r} is not a name of at most {most} characters"
    for metadata in (obj["metadata"], (pod_template(obj) or obj)["metadata"]):
        wrong = [label for label in metadata.get("labels", {}).values() if not LABEL.match(label)]
        yield from (f"{label!r} is not a valid label" for label in wrong)


def _of_pod(pod: Object) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
    claims = {claim["name"] for claim in pod["spec"].get("resourceClaims", [])}
    for container in containers(pod):
        name, resources = container["name"], container.get("resources", {})
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        claimed = {claim["name"] for claim in resources.get("claims", [])}
        yield from (f"{name}: the pod has no {one}" for one in mounts - volumes | claimed - claims)
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for kind in requests.keys() & limits.keys():
            request, limit = (parse_quantity(str(amounts[kind])) for amounts in (requests, limits))
            if request > limit or ("/" in kind and request != limit):
                yield f"{name}: {kind}: request {request} and limit {limit}"
