"""The Helm library on a chart: render, lint, install, upgrade, uninstall.

The library has no `template`. A render is an installation into an API server in memory
(`helm.kubernetes_api`), which ends when Helm records the release; that record contains the objects.
Errors come from the library, with Helm's own message. Helm accepts duplicate keys and duplicate
names of objects; here both are errors.
"""

import asyncio
import atexit
import base64
import gzip
import json
import shutil
import tempfile
from collections.abc import Mapping
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
"""The Kubernetes versions of the tests."""

WORK = Path(tempfile.mkdtemp(prefix="tandem-helm-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)

Values = Mapping[str, Any] | None
SEVERITIES = ("unknown", "info", "warning", "error")


class UniqueKeys(yaml.CSafeLoader):
    """Refuses mappings that contain a key twice. PyYAML keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(
                None, None, f"keys given twice: {twice}", node.start_mark
            )
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Rendered:
    """The objects, hooks included, and the notes that a chart renders."""

    objects: list[Object]
    notes: str

    def one(self, kind: str, name_suffix: str = "") -> Object:
        """The only object of this kind whose name ends with `name_suffix`."""
        (obj,) = self.all(kind, name_suffix)
        return obj

    def all(self, kind: str, name_suffix: str = "") -> list[Object]:
        """The objects of this kind whose names end with `name_suffix`."""
        return [
            o
            for o in self.objects
            if o["kind"] == kind and o["metadata"]["name"].endswith(name_suffix)
        ]

    def pods(self) -> list[tuple[Object, Object]]:
        """Every workload and every pod, each with its pod template."""
        return [
            (obj, template) for obj in self.objects if (template := pod_template(obj)) is not None
        ]


def merged(old: Any, patch: Any) -> Any:
    """`patch` applied to `old`, as in RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def load_values(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), Loader=UniqueKeys) or {}


def rendered(release: dict[str, Any]) -> Rendered:
    """The objects of a release. ValueError if two have one name."""
    manifests = [
        release.get("manifest", ""),
        *(hook["manifest"] for hook in release.get("hooks") or []),
    ]
    objects = [obj for text in manifests for obj in yaml.load_all(text, Loader=UniqueKeys) if obj]
    names = [(obj["apiVersion"], obj["kind"], obj["metadata"]["name"]) for obj in objects]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"rendered more than once: {sorted(twice)}")
    return Rendered(objects, release["info"].get("notes", ""))


def render(
    values: Values = None,
    *,
    version: str = NEWEST,
    existing: tuple[Object, ...] = (),
    **options: Any,
) -> Rendered:
    """The chart with these values on a Kubernetes of this version.

    `existing`: objects for the templates' `lookup`; `options`: options of `install`.
    """
    server = _shared_server(version)
    server.recorded = {}
    server.reset(*existing)
    try:
        install(server, values, **options)
    except helm_sdkpy.InstallError:
        if not server.recorded:
            raise
    record = base64.b64decode(base64.b64decode(server.recorded["data"]["release"]))
    return rendered(json.loads(gzip.decompress(record)))


@cache
def _shared_server(version: str) -> ApiServer:
    server = ApiServer(version).__enter__()
    server.records = False
    atexit.register(server.__exit__)
    return server


@cache
def _kubeconfig(port: int, text: str) -> Path:
    # The library throttles itself after 10 requests with a kubeconfig in a string, after 100 with
    # one in a file.
    path = WORK / f"{port}.kubeconfig"
    path.write_text(text)
    # Helm's Kubernetes client caches discovery here and has no setting for it.
    atexit.register(
        shutil.rmtree,
        Path.home() / ".kube/cache/discovery" / f"127.0.0.1_{port}",
        ignore_errors=True,
    )
    return path


def _configuration(server: ApiServer, namespace: str = "ns") -> helm_sdkpy.Configuration:
    return helm_sdkpy.Configuration(namespace, str(_kubeconfig(server.port, server.kubeconfig)))


def install(
    server: ApiServer,
    values: Values = None,
    *,
    release: str = "t",
    namespace: str = "ns",
    chart: Path = CHART,
) -> dict[str, Any]:
    """`helm install`; the library's release."""
    action = helm_sdkpy.Install(_configuration(server, namespace))
    options: dict[str, Any] = {"wait": False, "timeout": 60, "server_side_apply": True}
    return asyncio.run(action.run(release, str(chart), dict(values or {}), **options))


def upgrade(
    server: ApiServer,
    values: Values = None,
    *,
    release: str = "t",
    chart: Path = CHART,
    reuse_values: bool = False,
) -> dict[str, Any]:
    """`helm upgrade`, with `--reuse-values` or `--reset-values`."""
    action = helm_sdkpy.Upgrade(_configuration(server))
    options: dict[str, Any] = {
        "reuse_values": reuse_values,
        "reset_values": not reuse_values,
        "wait": False,
    }
    return asyncio.run(action.run(release, str(chart), dict(values or {}), timeout=60, **options))


def uninstall(server: ApiServer) -> None:
    """`helm uninstall` of the release `t`."""
    asyncio.run(helm_sdkpy.Uninstall(_configuration(server)).run("t", wait=False, timeout=60))


def package(directory: Path) -> Path:
    """`helm package` into a directory; the path of the archive."""
    config = _configuration(_shared_server(NEWEST))
    return Path(asyncio.run(helm_sdkpy.Package(config).run(str(CHART), str(directory))))


def lint(values: Values = None) -> list[str]:
    """`helm lint` with values: `"error values.yaml"` and the like, without informational messages.

    The library's lint takes no values, so they are merged into the values.yaml of a copy. Helm's
    lint ignores `fail`: only `render` finds what templates refuse.
    """
    original = load_values(CHART / "values.yaml")
    (_lint_copy() / "values.yaml").write_text(
        yaml.safe_dump(merged(original, values or {}), sort_keys=False)
    )
    result = asyncio.run(
        helm_sdkpy.Lint(_configuration(_shared_server(NEWEST))).run(str(_lint_copy()))
    )
    return [
        f"{SEVERITIES[m['Severity']]} {m['Path']}"
        for m in result["Messages"] or []
        if m["Severity"] != 1
    ]


@cache
def _lint_copy() -> Path:
    return Path(shutil.copytree(CHART, Path(tempfile.mkdtemp(dir=WORK)) / CHART.name))


def other_version(directory: Path, version: str, values: dict[str, Any] | None = None) -> Path:
    """A copy of the chart in a new directory below this one, with another version and, if given,
    other defaults."""
    copy = Path(tempfile.mkdtemp(dir=directory)) / "tandem"
    shutil.copytree(CHART, copy)
    text = (copy / "Chart.yaml").read_text()
    assert "\nversion: 0.1.0\n" in text
    (copy / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0\n", f"\nversion: {version}\n"))
    if values is not None:
        (copy / "values.schema.json").unlink()
        (copy / "values.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return copy
