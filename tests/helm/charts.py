"""The real Helm library on a chart: render, lint, install, upgrade, test, uninstall.

The library has no `template`: a render is an installation into a cluster in memory (`helm.cluster`) that goes as far as
recording the release, and is read from that record. Errors are the library's, with Helm's own message; a key or an
object's name given twice, which Helm takes silently, is refused here.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_sdkpy
import yaml

from helm.cluster import Cluster
from helm.cluster_http import merged
from helm.cluster_kinds import OPTIONAL_GROUPS
from helm.cluster_store import Object
from helm.pods import pod_template

CHART = Path(__file__).parents[2] / "helm" / "tandem"
OLDEST, NEWEST = "1.30.0", "1.37.0"
"""The Kubernetes versions that every render is tried with."""

WORK = Path(tempfile.mkdtemp(prefix="tandem-helm-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)


Values = Mapping[str, Any] | Path | None
SEVERITIES = {0: "unknown", 1: "info", 2: "warning", 3: "error"}


class UniqueKeys(yaml.CSafeLoader):
    """YAML whose mappings name no key twice (PyYAML would keep the last, silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"keys given twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Rendered:
    """What a chart made of some values."""

    objects: list[Object]
    """Every document, hooks included."""
    notes: str

    def one(self, kind: str, name_suffix: str = "") -> Object:
        """The only object of this kind whose name ends so."""
        found = self.all(kind, name_suffix)
        if len(found) != 1:
            names = [f"{o['kind']}/{o['metadata']['name']}" for o in self.objects]
            raise LookupError(f"{len(found)} objects are a {kind} named *{name_suffix}; rendered: {names}")
        return found[0]

    def all(self, kind: str, name_suffix: str = "") -> list[Object]:
        """The objects of this kind whose names end so."""
        return [o for o in self.objects if o["kind"] == kind and o["metadata"]["name"].endswith(name_suffix)]

    def pods(self) -> list[tuple[Object, Object]]:
        """For every workload and every pod: its object, and the `metadata` and `spec` of the pods it makes."""
        return [(obj, template) for obj in self.objects if (template := pod_template(obj)) is not None]


def load_values(values: Values) -> dict[str, Any]:
    """Values as Helm reads them from a file, or as they are."""
    if isinstance(values, Path):
        return yaml.load(values.read_text(), Loader=UniqueKeys) or {}
    return dict(values or {})


def documents(manifest: str) -> Iterator[Object]:
    """The objects of a rendered stream, empty documents left out."""
    yield from (document for document in yaml.load_all(manifest, Loader=UniqueKeys) if document)


def rendered(release: dict[str, Any]) -> Rendered:
    """What an install or upgrade answered."""
    objects = list(documents(release.get("manifest", "")))
    for hook in release.get("hooks") or []:
        objects += documents(hook["manifest"])
    names = [(obj["apiVersion"], obj["kind"], obj["metadata"]["name"]) for obj in objects]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        # Helm applies the second over the first and says nothing.
        raise ValueError(f"rendered more than once: {sorted(twice)}")
    return Rendered(objects, release["info"].get("notes", ""))


def render(
    values: Values = None,
    *,
    release: str = "t",
    namespace: str = "ns",
    version: str = NEWEST,
    groups: tuple[str, ...] = OPTIONAL_GROUPS,
    existing: tuple[Object, ...] = (),
    chart: Path | str | None = None,
) -> Rendered:
    """The chart with these values on a Kubernetes of this version.

    `groups`: the CRD groups that it has; `existing`: objects that templates may look up.
    """
    cluster = _shared_cluster(version, groups)
    cluster.unrecorded = None
    cluster.reset()
    for obj in existing:
        cluster.put(obj)
    try:
        install(cluster, values, release=release, namespace=namespace, chart=chart)
    except helm_sdkpy.InstallError:
        if cluster.unrecorded is None:
            raise
    record = base64.b64decode(base64.b64decode(cluster.unrecorded["data"]["release"]))
    return rendered(json.loads(gzip.decompress(record)))


@cache
def _shared_cluster(version: str, groups: tuple[str, ...]) -> Cluster:
    cluster = Cluster(version, groups).__enter__()
    cluster.records = False
    atexit.register(cluster.__exit__, None, None, None)
    return cluster


def configuration(cluster: Cluster, namespace: str) -> helm_sdkpy.Configuration:
    """Helm's access to a cluster; the namespace is made where it's missing."""
    if namespace not in [o["metadata"]["name"] for o in cluster.objects("Namespace")]:
        cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    port = cluster.url.rpartition(":")[2]
    # With a kubeconfig as a string the library throttles itself after 10 requests for a kind, with a file after 100.
    path = WORK / f"{port}.kubeconfig"
    if not path.exists():
        path.write_text(cluster.kubeconfig)
        # Helm's Kubernetes client remembers on disk what each server serves, and takes no other directory from here.
        atexit.register(shutil.rmtree, Path.home() / ".kube/cache/discovery" / f"127.0.0.1_{port}", ignore_errors=True)
    return helm_sdkpy.Configuration(namespace, str(path))


def install(
    cluster: Cluster,
    values: Values = None,
    *,
    release: str = "t",
    namespace: str = "ns",
    chart: Path | str | None = None,
    wait: bool = False,
    timeout: int = 60,
) -> dict[str, Any]:
    """`helm install`; the release as the library tells it."""
    action = helm_sdkpy.Install(configuration(cluster, namespace))
    chart = str(chart or CHART)
    options: dict[str, Any] = {"wait": wait, "timeout": timeout, "server_side_apply": True}
    return asyncio.run(action.run(release, chart, load_values(values), **options))


def upgrade(
    cluster: Cluster,
    values: Values = None,
    *,
    release: str = "t",
    namespace: str = "ns",
    chart: Path | str | None = None,
    reuse_values: bool = False,
    wait: bool = False,
    timeout: int = 60,
) -> dict[str, Any]:
    """`helm upgrade`, with `--reuse-values` where asked; else the chart's defaults under the values given."""
    action = helm_sdkpy.Upgrade(configuration(cluster, namespace))
    options: dict[str, Any] = {"reuse_values": reuse_values, "reset_values": not reuse_values, "wait": wait}
    return asyncio.run(
        action.run(
            release, str(chart or CHART), load_values(values), timeout=timeout, server_side_apply="auto", **options
        )
    )


def uninstall(cluster: Cluster, *, release: str = "t", namespace: str = "ns", wait: bool = False) -> dict[str, Any]:
    """`helm uninstall`."""
    return asyncio.run(helm_sdkpy.Uninstall(configuration(cluster, namespace)).run(release, wait=wait, timeout=60))


def run_tests(cluster: Cluster, *, release: str = "t", namespace: str = "ns", timeout: float = 60) -> dict[str, Any]:
    """`helm test`; somebody must end the pods it makes (`cluster.watch`, `cluster.update_status`).

    The library gives a test pod 30 s and takes no other time, so the cluster answers its creation only once it ended
    (or `timeout` is over).
    """
    cluster.hold_pods = timeout
    try:
        return asyncio.run(helm_sdkpy.ReleaseTest(configuration(cluster, namespace)).run(release))
    finally:
        cluster.hold_pods = 0


def package(directory: Path, chart: Path | str | None = None) -> Path:
    """`helm package` into a directory: the path of the archive."""
    config = configuration(_shared_cluster(NEWEST, OPTIONAL_GROUPS), "ns")
    return Path(asyncio.run(helm_sdkpy.Package(config).run(str(chart or CHART), str(directory))))


def lint(values: Values = None, *, chart: Path | str | None = None) -> list[str]:
    """`helm lint` with values: `"error values.yaml"` and the like, informations left out.

    The library takes no values (they are laid over a copy's values.yaml) and loses the messages' texts. Helm's lint
    also makes `fail` do nothing, so what templates refuse is seen by `render` only.
    """
    copy = _copy(Path(chart or CHART))
    original = yaml.safe_load((Path(chart or CHART) / "values.yaml").read_text()) or {}
    (copy / "values.yaml").write_text(yaml.safe_dump(merged(original, load_values(values)), sort_keys=False))
    config = configuration(_shared_cluster(NEWEST, OPTIONAL_GROUPS), "ns")
    result = asyncio.run(helm_sdkpy.Lint(config).run(str(copy)))
    return [f"{SEVERITIES[m['Severity']]} {m['Path']}" for m in result["Messages"] or [] if m["Severity"] != 1]


@cache
def _copy(chart: Path) -> Path:
    """The chart with its links followed, once per process."""
    target = Path(tempfile.mkdtemp(dir=WORK)) / chart.name
    shutil.copytree(chart, target)
    return target
