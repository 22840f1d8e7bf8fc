"""The README, the schema and the documents about the chart agree with values.yaml."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import yaml
from jsonschema import Draft7Validator

from helm import charts
from helm.charts import CHART

SOURCE, DOCUMENT = CHART.parent / "source", CHART.parents[1] / "docs" / "kubernetes.md"
SCHEMA = Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
OTHERS_SAY = re.compile(
    r"(Init:)?[A-Z]\w+|Init:0/1|401|helm (install|upgrade|test)|kubectl describe|"
    r"additional properties 'x' not allowed|failed quota: … must specify limits.cpu|exceeded quota|"
    r"max limit to request ratio|Insufficient nvidia.com/gpu|didn't match pod affinity rules|"
    r"(didn't match PersistentVolume's|had volume) node affinity( conflict)?|had untolerated taint|"
    r"unbound immediate PersistentVolumeClaims|provisioning failed for PVC|"
    r'secret "tandem" not found|references non-existent secret key|(Liveness|Startup) probe failed'
)
"""Texts of the document that the programs Kubernetes, kubectl and Helm show. They were read in
these programs' sources."""


def test_readme_and_schema_are_made_from_the_values():
    command = [sys.executable, str(SOURCE), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `python helm/source`"


def unknown(values: dict) -> list[str]:
    """The schema's errors about keys that the chart does not have."""
    errors = SCHEMA.iter_errors(values)
    return [error.message for error in errors if isinstance(error.instance, dict)]


def missing(text: str, before: str) -> list[str]:
    """The dotted names in a text that begin with a key of the chart's values, although the chart
    has no such value. `before`: a pattern of the text before a name."""
    names = set(re.findall(rf"(?:{before})([a-z][A-Za-z]*(?:\.[A-Za-z]+)+)(?![-/\w])", text))
    known = [name for name in names if name.partition(".")[0] in charts.DEFAULTS]
    return [name for name in known if unknown(charts.at(name, None))]


def test_a_misspelt_key_in_any_mapping_is_refused():
    """Some mappings accept any key."""
    sections = {path.rpartition(".")[0] for path in charts.leaves(charts.DEFAULTS)}
    free = {name for name in sections if not unknown(charts.at(f"{name}.keyx".lstrip("."), 1))}
    suffixes = ("resources.requests", "resources.limits", "monitoring.dashboards.labels")
    assert [name for name in free if not name.endswith(suffixes)] == []


def test_every_value_has_a_comment_that_names_only_values():
    read = runpy.run_path(str(SOURCE / "values.py"))["read"]
    for value in read((CHART / "values.yaml").read_text()):
        if value.path[-2:-1] == ("resources",):
            continue
        assert value.comment.endswith((".", ":")), value.name
        assert value.section, value.name
        assert missing(value.comment, r"(?<![/\w.])") == [], value.name
        if value.path[-2:-1] == ("settings",):
            variable = re.sub("[A-Z]", r"_\g<0>", value.path[-1]).upper()
            assert value.comment.startswith(f"TANDEM_{variable}"), value.name


@pytest.mark.parametrize(
    "path", [DOCUMENT, CHART / "README.md", SOURCE / "readme-head.md"], ids=lambda path: path.name
)
def test_values_that_documents_name_exist(path):
    text = path.read_text()
    assert missing(text, r"`|--set(?:-string|-file|-json)? +") == []
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        values = yaml.safe_load(block)
        assert unknown({key: values[key] for key in values.keys() & charts.DEFAULTS}) == []


def test_messages_that_the_document_quotes_exist():
    table = DOCUMENT.read_text().partition("| what you see |")[2]
    rows = re.findall(r"^\| (.*?) \| ", table, re.MULTILINE)
    seen = {quoted for row in rows for quoted in re.findall("`(.+?)`", row)}
    roots = (CHART.parents[1] / "src/tandem", CHART / "templates")
    ours = "".join(path.read_text() for root in roots for path in root.rglob("*.*[ly]"))
    messages = [message for message in seen if not OTHERS_SAY.fullmatch(message)]
    assert len(messages) >= 5
    assert [message for message in messages if message not in ours] == []
