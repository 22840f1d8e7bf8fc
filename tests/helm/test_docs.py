"""The README, the schema and the documents about the chart agree with values.yaml."""

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from helm import charts
from helm.charts import CHART

SOURCE, DOCUMENT = CHART.parent / "source", CHART.parents[1] / "docs" / "kubernetes.md"
OTHERS_SAY = re.compile(
    r"helm (install|upgrade|test)|kubectl describe|additional properties 'x' not allowed|401|"
    r"failed quota: … must specify limits.cpu|exceeded quota|max limit to request ratio|Pending|"
    r"Insufficient nvidia.com/gpu|didn't match pod affinity rules|SchedulingGated|Init:.*|"
    r"OOMKilled|"
    r"(didn't match PersistentVolume's|had volume) node affinity( conflict)?|had untolerated taint|"
    r"unbound immediate PersistentVolumeClaims|provisioning failed for PVC|ImagePullBackOff|"
    r'secret "tandem" not found|references non-existent secret key|NotReady|Terminating|'
    r"(Liveness|Startup) probe failed"
)
"""Texts of the document that the programs Kubernetes, kubectl and Helm show. They were read in
these programs' sources."""


def documented() -> list:
    """Every key of values.yaml with its comment, read by helm/source/values.py."""
    spec = importlib.util.spec_from_file_location("tandem_helm_values", SOURCE / "values.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.read((CHART / "values.yaml").read_text())


def test_readme_and_schema_are_made_from_the_values():
    command = [sys.executable, str(SOURCE), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `python helm/source`"


def exists(name: str) -> bool:
    """Whether a dotted name is a value of the chart, or a key in a value that is an empty mapping
    by default."""
    node = charts.defaults()
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return node == {}
        node = node[part]
    return True


def missing(text: str, before: str) -> list[str]:
    """The dotted names in a text that look like values of the chart but are none. `before`: a
    pattern of the text before a name."""
    words = set(re.findall(rf"(?:{before})([a-z][A-Za-z]*(?:\.[A-Za-z]+)+)(?![-/\w])", text))
    known = [word for word in words if word.partition(".")[0] in charts.defaults()]
    return [word for word in known if not exists(word)]


def test_every_value_has_a_comment_that_names_only_values():
    for value in documented():
        if value.path[-2:-1] == ("resources",):
            continue
        assert value.comment.endswith((".", ":")), value.name
        assert value.section, value.name
        assert missing(value.comment, r"(?<![/\w.])") == [], value.name


@pytest.mark.parametrize(
    "path", [DOCUMENT, CHART / "README.md", SOURCE / "readme-head.md"], ids=lambda path: path.name
)
def test_values_that_documents_name_exist(path):
    text = path.read_text()
    assert missing(text, r"`|--set(?:-string|-file|-json)? +") == []
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        for name in charts.leaves(yaml.safe_load(block)):
            ours = name.partition(".")[0] in charts.defaults()
            assert not ours or exists(name) or "labels" in name or "annotations" in name, name


def test_messages_that_the_document_quotes_exist():
    table = DOCUMENT.read_text().partition("| what you see |")[2]
    rows = re.findall(r"^\| (.*?) \| ", table, re.MULTILINE)
    seen = {quoted for row in rows for quoted in re.findall("`(.+?)`", row)}
    roots = (CHART.parents[1] / "src/tandem", CHART / "templates")
    ours = "".join(path.read_text() for root in roots for path in root.rglob("*.*[ly]"))
    messages = [message for message in seen if not OTHERS_SAY.fullmatch(message)]
    assert len(messages) >= 5
    assert [message for message in messages if message not in ours] == []
