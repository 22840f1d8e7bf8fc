"""The dashboards that Grafana loads, and the metrics that PromQL names."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from monitoring.prometheus_tools import ROOT, RULES

GRAFANA = ROOT / "images" / "grafana"
DASHBOARDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((GRAFANA / "dashboards").glob("*.json"))
}

_NOT_METRICS = {
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
    "inf",
    "nan",
}
_LISTS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")


def metrics(expr: str) -> set[str]:
    """The metrics that a PromQL expression names."""
    bare = re.sub(r'"(?:\\.|[^"\\])*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = _LISTS.sub(" ", bare)
    names = re.findall(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)\b(?!\s*\()", bare)
    return {name for name in names if name.lower() not in _NOT_METRICS and not name.startswith("$")}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """(dashboard, panel) of every panel that is not a row."""
    for name, board in DASHBOARDS.items():
        yield from ((name, panel) for panel in board["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    """(where, PromQL with Grafana's variables) of every query and annotation."""
    found = [
        (f"{name}: {panel['title']} {target['refId']}", target["expr"])
        for name, panel in panels()
        for target in panel["targets"]
    ]
    for name, board in DASHBOARDS.items():
        found += [
            (f"{name}: {note['name']}", note["expr"])
            for note in board["annotations"]["list"]
            if "expr" in note
        ]
    return found


def resolved(expr: str, *, window: str = "5m") -> str:
    """The query as Grafana sends it with All chosen in every variable. `window` takes the place of
    ranges that depend on the zoom."""
    for name in ("$__rate_interval", "$__range", "$__interval"):
        expr = expr.replace(name, window)
    return re.sub(r'"\$(?:namespace|pod|role|uuid|model_name)(\|?)"', r'".*\1"', expr)


def rules() -> list[dict[str, Any]]:
    """Every recording and alert rule."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]
