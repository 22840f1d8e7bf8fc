"""Functions that render, install and upgrade the chart with the Helm library.

The Helm library has no counterpart of `helm template`. So a render is an installation into an API
server in memory (`helm.kubernetes_api`). The installation ends when Helm records the release. The
record contains the rendered objects. A failed render raises the Helm library's error with Helm's
own message. Helm accepts duplicate keys and two objects with the same name, but this module raises
an error for them.
"""

import asyncio
import atexit
import base64
import gzip
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_sdkpy
import yaml

from helm.kubernetes_api import ApiServer, Object
from helm.pods import pod_template

CHART = Path(__file__).parents[2] / "helm" / "tandem"
OLDEST, NEWEST = "1.30.0", "1.37.0"
"""The oldest and the newest Kubernetes version of the tests."""
NAMESPACE = "ns"
WORK = Path(tempfile.mkdtemp(prefix="tandem-helm-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)


class UniqueKeys(yaml.CSafeLoader):
    """Refuses mappings that contain a key twice. PyYAML itself would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key given twice: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Rendered:
    """The rendered objects of a chart, including hooks, and the rendered notes."""

    objects: list[Object]
    notes: str

    def one(self, kind: str, name_suffix: str = "") -> Object:
        """The only object of the kind `kind` whose name ends with `name_suffix`."""
        (obj,) = self.all(kind, name_suffix)
        return obj

    def all(self, kind: str, suffix: str = "") -> list[Object]:
        """The objects of the kind `kind` whose names end with `suffix`."""
        of_kind = [o for o in self.objects if o["kind"] == kind]
        return [o for o in of_kind if o["metadata"]["name"].endswith(suffix)]

    def pods(self) -> list[Object]:
        """The pods, the pod templates of workloads, and the pod templates of the runner's Jobs."""
        jobs = [json.loads(o["data"]["job.json"]) for o in self.all("ConfigMap", "-job")]
        return [made for obj in self.objects + jobs if (made := pod_template(obj)) is not None]


def merged(old: Any, patch: Any) -> Any:
    """The result of applying the merge patch `patch` to `old` (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    old = old if isinstance(old, dict) else {}
    changed = {key: merged(old.get(key), value) for key, value in patch.items()}
    return {key: value for key, value in {**old, **changed}.items() if value is not None}


def load(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), Loader=UniqueKeys)


DEFAULTS = load(CHART / "values.yaml")


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """The values in nested mappings, by their dotted paths. An empty mapping counts as a value."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    parts = [leaves(value, f"{path}.{key}".lstrip(".")) for key, value in node.items()]
    return {name: value for part in parts for name, value in part.items()}


def at(path: str, value: Any) -> dict[str, Any]:
    """A nested mapping that has `value` at the dotted path: `a.b` and 1 give {"a": {"b": 1}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def rendered(release: Object) -> Rendered:
    """The objects and notes of a release. Refuses two objects with the same name."""
    hooks = [hook["manifest"] for hook in release.get("hooks") or []]
    texts = [release.get("manifest", ""), *hooks]
    objects = [obj for text in texts for obj in yaml.load_all(text, Loader=UniqueKeys) if obj]
    names = [(obj["apiVersion"], obj["kind"], obj["metadata"]["name"]) for obj in objects]
    assert len(names) == len(set(names)), f"an object rendered twice: {sorted(names)}"
    return Rendered(objects, release["info"].get("notes", ""))


def render(
    values: Object, version: str = NEWEST, existing: tuple[Object, ...] = (), **how: Any
) -> Rendered:
    """Renders the chart with these values on a Kubernetes of this version, as the release `a`.

    `existing`: objects that the templates' `lookup` finds; `how`: further arguments of `install`.
    """
    server = shared_server(version)
    server.recorded = {}
    server.reset(*existing)
    try:
        install(server, values, **{"release": "a", **how})
    except helm_sdkpy.InstallError:
        if not server.recorded:
            raise
    record = base64.b64decode(base64.b64decode(server.recorded["data"]["release"]))
    return rendered(json.loads(gzip.decompress(record)))


@cache
def shared_server(version: str = NEWEST) -> ApiServer:
    """An API server for renders. The server records no releases."""
    server = ApiServer(version).__enter__()
    server.records = False
    atexit.register(server.__exit__)
    return server


@cache
def _kubeconfig(port: int, text: str) -> Path:
    # The Helm library throttles its requests after 10 requests if the kubeconfig is a string, and
    # after 100 requests if the kubeconfig is a file.
    path = WORK / f"{port}.kubeconfig"
    path.write_text(text)
    # Helm's Kubernetes client caches the API server's list of resources in this directory, and no
    # setting changes the directory.
    discovery = Path.home() / ".kube/cache/discovery" / f"127.0.0.1_{port}"
    atexit.register(shutil.rmtree, discovery, ignore_errors=True)
    return path


def helm(
    server: ApiServer, action: str, *arguments: Any, namespace: str = NAMESPACE, **options: Any
) -> Any:
    """Runs an action of the Helm library, such as `Lint`. Returns the action's result."""
    kubeconfig = str(_kubeconfig(server.port, server.kubeconfig))
    configured = getattr(helm_sdkpy, action)(helm_sdkpy.Configuration(namespace, kubeconfig))
    return asyncio.run(configured.run(*arguments, **options))


def install(
    server: ApiServer, values: Object, release: str = "t", chart: Path = CHART, **options: Any
) -> Object:
    """Installs a chart as `helm install` does. Returns Helm's description of the release."""
    options |= {"wait": False, "timeout": 60, "server_side_apply": True}
    return helm(server, "Install", release, str(chart), values, **options)


def upgrade(server: ApiServer, values: Object, *, reuse_values: bool = False) -> Object:
    """Upgrades the release `t` as `helm upgrade` does with `--reuse-values` or `--reset-values`."""
    how = {"reuse_values": reuse_values, "reset_values": not reuse_values}
    return helm(server, "Upgrade", "t", str(CHART), values, wait=False, timeout=60, **how)


def other_chart(values: Object) -> Path:
    """Copies the chart, with other defaults. Returns the path of the copy."""
    copy = Path(shutil.copytree(CHART, Path(tempfile.mkdtemp(dir=WORK)) / "tandem"))
    (copy / "values.schema.json").unlink()
    (copy / "values.yaml").write_text(yaml.safe_dump(values))
    return copy
