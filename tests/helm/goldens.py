"""The chart's output for named values, as files that a reviewer reads.

A golden has a name NAME and values. The values are in `golden/NAME.values.yaml`, or in a file of
the chart itself. `golden/NAME.yaml` has everything that the chart renders with the golden's values.
After a change of the chart, `PYTHONPATH=tests python -m helm.goldens` writes the files
`golden/NAME.yaml` anew. The files `golden/NAME.yaml` leave out the chart's version, digests of
templates, and content that is equal to a file in images/.
"""

import base64
import json
import re
from functools import cache, reduce
from pathlib import Path
from typing import Any

import yaml

from helm import charts
from helm.charts import CHART, NAMESPACE, NEWEST, Object, Rendered, leaves
from monitoring.dashboards import metrics

DIRECTORY = Path(__file__).parent / "golden"
COMMAND = "PYTHONPATH=tests python -m helm.goldens"
FILES = {path.name.removesuffix(".values.yaml"): path for path in DIRECTORY.glob("*.values.yaml")}
FILES |= {path.stem: path for path in (CHART / "examples").glob("*.yaml")}
FILES["cpu"] = CHART / "values-cpu.yaml"
NAMES = sorted(FILES)
IMAGES = CHART.parents[1] / "images"
VERSION = charts.load(CHART / "Chart.yaml")["version"]
SECRETS = {key: f"{key}-9f2b7c4151d0aa87" for key in ("api_key", "admin_token", "hf_token")}
SECRET: Object = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "a-tandem", "namespace": NAMESPACE},
    "data": {key: base64.b64encode(text.encode()).decode() for key, text in SECRETS.items()},
}
"""A Secret that exists in the cluster. Templates may look the Secret up, and must not write its
values into objects."""


class _Texts(yaml.CSafeDumper):
    """Writes YAML without anchors, and texts of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Texts.add_representer(str, _Texts.represent_str)


@cache
def values(name: str) -> dict[str, Any]:
    return charts.load(FILES[name])


@cache
def value(name: str, path: str) -> Any:
    """The value at the dotted path `path` in a golden, or the chart's default if the golden does
    not set this value."""
    everything = charts.merged(charts.DEFAULTS, values(name))
    return reduce(dict.get, path.split("."), everything)


@cache
def rendered(name: str, release: str = "a", version: str = NEWEST) -> Rendered:
    given = values(name)
    if version != NEWEST and given.get("gpuMode") == "shared":
        # The default, `via: claim`, needs Kubernetes 1.34.
        given = charts.merged(given, {"shared": {"via": "resource"}})
    return charts.render(given, version, (SECRET,), release=release)


@cache
def rules() -> dict[str, Object]:
    """Maps the name of each rule in images/ to the rule as the release `a` renders it. The rendered
    rule selects each metric by the release's namespace. The rendered rule also selects metrics of
    kube-state-metrics by the names of the release's pods."""
    own = f'namespace="{NAMESPACE}"'
    tandem, kubernetes = (
        (IMAGES / f"prometheus/rules/{name}.yml").read_text() for name in ("tandem", "kubernetes")
    )
    found = _named(yaml.safe_load(tandem)["groups"])
    for rule in found.values():
        names = "|".join(metrics(rule["expr"]))
        expr = re.sub(rf"(?<![\w:])({names})(?![\w:])", rf"\1{{{own}}}", rule["expr"])
        rule["expr"] = expr.replace(f"{own}}}{{", f"{own},")
    kubernetes = kubernetes.replace('namespace=~".+"', own).replace(
        'pod=~".+-(', 'pod=~"a-tandem-('
    )
    return found | _named(yaml.safe_load(kubernetes)["groups"])


def _named(groups: list[Object]) -> dict[str, Object]:
    return {rule.get("alert") or rule["record"]: rule for g in groups for rule in g["rules"]}


def _differences(groups: list[Object]) -> Object:
    """The rendered values that differ from the rules in images/, by their dotted paths. A value
    that is not rendered is `left out` here."""
    made, known = leaves(_named(groups)), leaves(rules())
    different = sorted({path for path, _ in made.items() ^ known.items()})
    return {path: made.get(path, "left out") for path in different}


def _shown(obj: Object) -> Object:
    """An object as a golden shows it: content that is equal to a file in images/ is left out, and
    JSON in a text is written as YAML."""
    obj = json.loads(json.dumps(obj))
    if obj["kind"] == "PrometheusRule":
        obj["spec"] = {"as images/prometheus/rules, but": _differences(obj["spec"]["groups"])}
    for key, text in obj.get("data", {}).items() if obj["kind"] == "ConfigMap" else ():
        for path in (IMAGES / "grafana/dashboards").glob("*.json"):
            if text.encode() == path.read_bytes():
                obj["data"][key] = f"as {path.relative_to(IMAGES.parent)}"
        if key == "job.json":
            obj["data"][key] = json.loads(text)
    return obj


def text(name: str) -> str:
    """The content of a golden: its objects by kind and name, then the notes."""
    found = rendered(name)
    objects = sorted(map(_shown, found.objects), key=lambda o: (o["kind"], o["metadata"]["name"]))
    documents = [*objects, {"notes": found.notes}]
    how = {"sort_keys": False, "width": 118, "default_flow_style": None}
    made = yaml.dump_all(documents, Dumper=_Texts, **how).replace(VERSION, "VERSION")
    return re.sub(r"(?<=tandem/job-template: )'?\w+'?", "DIGEST", made)


if __name__ == "__main__":
    for name in NAMES:
        (DIRECTORY / f"{name}.yaml").write_text(text(name))
