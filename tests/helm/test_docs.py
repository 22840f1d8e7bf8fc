"""What is written about the chart is what the chart has."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from helm import documented, matrix
from helm.charts import CHART

ROOT = CHART.parents[1]
DOCUMENT = ROOT / "docs" / "kubernetes.md"
README = CHART / "README.md"
INLINE = ("requests", "limits")
"""Keys that the comment above them explains."""


def names() -> set[str]:
    return {value.name for value in documented.values()}


def test_readme_and_schema_are_made_from_the_values(tmp_path):
    command = [sys.executable, str(documented.SOURCE), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `python helm/source`"


def test_every_value_has_a_comment_that_says_something():
    for value in documented.values():
        if value.path[-1] in INLINE and value.path[-2] == "resources":
            continue
        assert len(value.comment) > 5, value.name
        assert value.comment.endswith((".", ":")), value.name
        assert value.section, value.name


def test_every_value_is_in_the_readme_and_in_the_schema():
    text = README.read_text()
    for value in documented.values():
        schema = matrix.schema_of(value.name)
        assert schema, value.name
        if value.comment:
            assert f"| `{value.name}` |" in text
            if not isinstance(value.default, dict):
                assert f"`{json.dumps(value.default)}`" in text


def test_the_schema_knows_no_more_than_the_values():
    def walk(schema, path):
        for key, below in schema.get("properties", {}).items():
            name = f"{path}.{key}".lstrip(".")
            if name in known:
                yield name
                yield from walk(below, name)

    known = names()
    tops = set(matrix.schema()["properties"])
    assert tops == {name for name in known if "." not in name}
    assert set(walk(matrix.schema(), "")) >= known - {n for n in known if n.rpartition(".")[2] in INLINE}


def mentioned(text: str, before: str) -> set[str]:
    """The dotted names in a text that begin with a value's; `before`: what must stand before one."""
    tops = {name for name in names() if "." not in name}
    words = re.findall(rf"(?:{before})([a-z][A-Za-z]*(?:\.[A-Za-z]+)+)(?![-/\w])", text)
    return {word for word in words if word.partition(".")[0] in tops}


def exists(name: str) -> bool:
    """Whether it is a value, or a key of one that is a mapping in one line."""
    node = matrix.defaults()
    for part in name.split("."):
        if not isinstance(node, dict):
            return False
        if part not in node:
            return node == {}
        node = node[part]
    return True


@pytest.mark.parametrize("path", [DOCUMENT, README, documented.SOURCE / "readme-head.md"], ids=lambda path: path.name)
def test_values_that_documents_name_exist(path):
    found = mentioned(path.read_text(), r"`|--set(?:-string|-file|-json)? +")
    assert len(found) > 10 or path.name == "readme-head.md"
    assert [name for name in found if not exists(name)] == []


def test_yaml_in_the_documents_fits_the_values():
    for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        for name, _ in matrix.leaves(yaml.safe_load(block)):
            if name.partition(".")[0] in matrix.defaults():
                assert exists(name) or "labels" in name or "annotations" in name, name


def test_values_that_comments_name_exist():
    for value in documented.values():
        for name in mentioned(value.comment, r"(?<![/\w.])"):
            assert exists(name), f"{value.name}: {name}"


@pytest.mark.parametrize("name", ["docs/alerts.md", "docs/settings.md", "docs/kubernetes.md", "values-cpu.yaml"])
def test_files_that_values_name_exist(name):
    assert (ROOT / name).is_file() or (CHART / name).is_file()
