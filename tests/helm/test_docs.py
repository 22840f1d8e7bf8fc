"""The README, the schema and the documents about the chart agree with values.yaml."""

import re
import subprocess
import sys

import pytest
import yaml

from helm import matrix
from helm.charts import CHART
from helm.matrix import documented

ROOT = CHART.parents[1]
DOCUMENT = ROOT / "docs" / "kubernetes.md"
README = CHART / "README.md"
NAMES = {value.name for value in documented()}
INLINE = ("requests", "limits")
"""Keys that the comment above their section explains."""
OTHERS_SAY = {
    "helm install",
    "helm upgrade",
    "helm test",
    "kubectl describe",
    "additional properties 'x' not allowed",
    "failed quota: … must specify limits.cpu",
    "exceeded quota",
    "max limit to request ratio",
    "Pending",
    "Insufficient nvidia.com/gpu",
    "didn't match pod affinity rules",
    "didn't match PersistentVolume's node affinity",
    "had volume node affinity conflict",
    "had untolerated taint",
    "unbound immediate PersistentVolumeClaims",
    "provisioning failed for PVC",
    "SchedulingGated",
    "Init:0/1",
    'secret "tandem" not found',
    "references non-existent secret key",
    "Init:CrashLoopBackOff",
    "Init:Error",
    "ImagePullBackOff",
    "Init:ImagePullBackOff",
    "OOMKilled",
    "Liveness probe failed",
    "Startup probe failed",
    "401",
    "Terminating",
    "NotReady",
}


def test_readme_and_schema_are_made_from_the_values(tmp_path):
    command = [sys.executable, str(matrix.SOURCE), "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `python helm/source`"


def test_every_value_has_a_comment_and_a_section():
    for value in documented():
        if value.path[-1] in INLINE and value.path[-2] == "resources":
            continue
        assert len(value.comment) > 5, value.name
        assert value.comment.endswith((".", ":")), value.name
        assert value.section, value.name


def missing(text: str, before: str) -> list[str]:
    """The dotted names in a text that look like the chart's values but do not exist. `before`: a
    pattern of the text before a name."""
    words = set(re.findall(rf"(?:{before})([a-z][A-Za-z]*(?:\.[A-Za-z]+)+)(?![-/\w])", text))
    return [word for word in words if word.partition(".")[0] in NAMES and not exists(word)]


def exists(name: str) -> bool:
    """Whether a name is a value, or a key in a value that is an empty mapping by default."""
    node = matrix.defaults()
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return node == {}
        node = node[part]
    return True


@pytest.mark.parametrize(
    "path", [DOCUMENT, README, matrix.SOURCE / "readme-head.md"], ids=lambda path: path.name
)
def test_values_that_documents_name_exist(path):
    assert missing(path.read_text(), r"`|--set(?:-string|-file|-json)? +") == []


def test_messages_that_the_document_quotes_exist():
    """Those of Tandem and its chart. OTHERS_SAY are read in the sources of Kubernetes, kubectl and
    Helm."""
    table = DOCUMENT.read_text().partition("| what you see |")[2]
    rows = re.findall(r"^\| (.*?) \| ", table, re.MULTILINE)
    seen = {quoted for row in rows for quoted in re.findall("`(.+?)`", row)}
    ours = "".join(
        p.read_text()
        for d in ("src/tandem", "helm/tandem/templates")
        for p in (ROOT / d).rglob("*.*[ly]")
    )
    assert len(seen - OTHERS_SAY) >= 5
    assert [message for message in seen - OTHERS_SAY if message not in ours] == []
    assert seen >= OTHERS_SAY


def test_yaml_in_the_documents_fits_the_values():
    for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        for name, _ in matrix.leaves(yaml.safe_load(block)):
            if name.partition(".")[0] in matrix.defaults():
                assert exists(name) or "labels" in name or "annotations" in name, name


def test_values_that_comments_name_exist():
    for value in documented():
        assert missing(value.comment, r"(?<![/\w.])") == [], value.name
