"""The chart's README: an introduction (readme-head.md), and a table of its values."""

import json
from pathlib import Path

import values

_HEAD = (Path(__file__).parent / "readme-head.md").read_text()


def of(text: str) -> str:
    """README.md for a values.yaml. A key without a comment belongs to the nearest key above it that
    has a comment."""
    parts = [_HEAD]
    found = [value for value in values.read(text) if value.comment]
    parents = {value.path[:-1] for value in found}
    section = None
    for value in found:
        if value.section != section:
            section = value.section
            parts.append(f"\n## {section}\n\n| value | default | meaning |\n|---|---|---|\n")
        default = "" if value.path in parents else f"`{json.dumps(value.default)}`"
        meaning = value.comment.replace("|", "\\|")
        parts.append(f"| `{value.name}` | {default} | {meaning} |\n")
    return "".join(parts)
