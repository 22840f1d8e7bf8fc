"""The chart renders the content of its goldens. Kubernetes accepts all rendered objects. Each value
of the chart differs from its default in at least one golden. The chart refuses the values in
`refusals.yaml` with a message that names the refused value."""

from pathlib import Path

import pytest
from helm_sdkpy import InstallError

from helm import charts, goldens, schemas
from helm.charts import DEFAULTS, NEWEST, OLDEST, leaves, merged
from helm.goldens import COMMAND, NAMES

VALUES = leaves(DEFAULTS)
# The chart accepts `global` because a parent chart may set it. It changes nothing.
USED = [path for path in VALUES if path != "global"]
REFUSALS = charts.load(Path(__file__).parent / "refusals.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_renders_the_golden(name):
    golden = goldens.DIRECTORY / f"{name}.yaml"
    assert goldens.text(name) == golden.read_text(), f"`{COMMAND}`, and read what git diff says"


def test_each_golden_has_values():
    files = {path.stem for path in goldens.DIRECTORY.glob("*.yaml")}
    assert {name for name in files if not name.endswith(".values")} == set(NAMES)


@pytest.mark.sample(6)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_accepts_every_object(name, version):
    objects = goldens.rendered(name, version=version).objects
    assert [problem for obj in objects for problem in schemas.validate(obj, version)] == []


def changing(path: str) -> list[str]:
    """The names of the goldens in which the value at `path` differs from the default."""
    return [name for name in NAMES if goldens.value(name, path) != VALUES[path]]


def test_every_value_is_in_a_golden():
    assert [path for path in USED if not changing(path)] == []


@pytest.mark.sample(6)
@pytest.mark.parametrize("path", USED)
def test_a_value_changes_what_is_rendered(path):
    def is_changed(name: str) -> bool:
        values = merged(goldens.values(name), charts.at(path, None))
        try:
            return charts.render(values, existing=(goldens.SECRET,)) != goldens.rendered(name)
        except InstallError:
            return True

    assert any(map(is_changed, changing(path)))


@pytest.mark.parametrize("name", ["", "everything", "jobs", "replicas"])
def test_lint_finds_nothing(name):
    """Lint reads only a chart's own values. With its own values the chart leaves out some
    templates. So the test also lints copies of the chart that have a golden's values as the chart's
    own values."""
    chart = charts.other_chart(merged(DEFAULTS, goldens.values(name))) if name else charts.CHART
    messages = charts.helm(charts.shared_server(), "Lint", str(chart))["Messages"] or []
    assert [message for message in messages if message["Severity"] > 1] == []


@pytest.mark.sample(20)
@pytest.mark.parametrize("case", REFUSALS, ids=[case["says"] for case in REFUSALS])
def test_a_bad_value_is_refused_by_name(case):
    values = merged({"baseModel": "Qwen/Qwen3-8B"}, case["values"])
    with pytest.raises(InstallError, match=case["says"]):
        charts.render(values, case.get("version", NEWEST))
