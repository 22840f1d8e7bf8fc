"""The keys of values.yaml, each with the comment above it and with its section."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):(?: (.*))?$")


@dataclass(frozen=True)
class Value:
    path: tuple[str, ...]
    default: Any
    comment: str
    section: str

    @property
    def name(self) -> str:
        return ".".join(self.path)


def read(text: str) -> list[Value]:
    """Every key of the file in order, also the keys whose values are mappings. The keys of a
    mapping on one line ({a: 1}) are not listed."""
    data = yaml.safe_load(text)
    found: list[Value] = []
    comment: list[str] = []
    section = ""
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# @section "):
            section, comment = stripped.removeprefix("# @section "), []
        elif stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
        elif match := _KEY.match(line):
            indent, key = len(match[1]), match[2]
            path = [(at, name) for at, name in path if at < indent] + [(indent, key)]
            names = tuple(name for _, name in path)
            found.append(Value(names, _get(data, names), " ".join(comment), section))
            comment = []
        else:
            comment = []
    return found


def _get(data: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        data = data[name]
    return data
