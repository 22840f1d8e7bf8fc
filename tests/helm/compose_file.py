"""The compose files with the defaults of their variables, read without docker."""

import re
from copy import deepcopy
from functools import cache
from typing import Any

import yaml

from helm.charts import CHART

ROOT = CHART.parents[1]
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+])([^{}]*))?\}")
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


class _Loader(yaml.CSafeLoader):
    pass


_Loader.add_constructor("!reset", lambda loader, node: None)


@cache
def services(*names: str) -> dict[str, Any]:
    """The services of these files (`docker-compose.yml`), merged in this order."""
    result: dict[str, Any] = {}
    for name in names:
        for service, content in yaml.load((ROOT / name).read_text(), Loader=_Loader)["services"].items():
            content = _filled(content)
            if extended := content.pop("extends", None):
                content = _over(deepcopy(result[extended["service"]]), content)
            result[service] = _over(result.get(service, {}), content)
    return result


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def _filled(node: Any) -> Any:
    """Replaces `${NAME:-default}` by its default and `${NAME:+text}` by nothing."""
    if isinstance(node, dict):
        return {key: _filled(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value) for value in node]
    if isinstance(node, str):
        return _VARIABLE.sub(lambda match: (match[3] or "") if match[2] == "-" else "", node)
    return node


def size(text: str) -> float:
    """`8g` → bytes."""
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


def seconds(text: str) -> float:
    """`75s` → 75."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


def tmpfs(service: dict[str, Any]) -> dict[str, float]:
    """Mount path → bytes."""
    entries = (entry.partition(":") for entry in service["tmpfs"])
    return {path: size(dict(o.split("=") for o in options.split(","))["size"]) for path, _, options in entries}
