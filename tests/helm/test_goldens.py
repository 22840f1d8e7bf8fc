"""The chart renders the content of its goldens. Kubernetes accepts all rendered objects. Every
value of the chart is changed in a golden."""

import helm_sdkpy
import pytest

from helm import charts, goldens, schemas
from helm.charts import NEWEST, OLDEST, leaves
from helm.goldens import COMMAND, NAMES

UNUSED = {"global"}
"""Values that change nothing. The chart accepts `global` because a parent chart may set it."""


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_renders_the_golden(name):
    golden = goldens.DIRECTORY / f"{name}.yaml"
    assert goldens.text(name) == golden.read_text(), f"`{COMMAND}`, and read what git diff says"


def test_each_golden_has_values():
    files = {path.stem for path in goldens.DIRECTORY.glob("*.yaml")}
    assert {name for name in files if not name.endswith(".values")} == set(NAMES)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_accepts_every_object(name, version):
    objects = goldens.rendered(name, version=version).objects
    assert [problem for obj in objects for problem in schemas.validate(obj, version)] == []


VALUES = leaves(charts.defaults())


def changing(path: str) -> list[str]:
    """The names of the goldens in which the value at `path` differs from the default."""
    return [name for name in NAMES if goldens.value(name, path) != VALUES[path]]


def test_every_value_is_in_a_golden():
    assert [path for path in VALUES if not changing(path)] == sorted(UNUSED)


@pytest.mark.sample(24)
@pytest.mark.parametrize("path", [path for path in VALUES if path not in UNUSED])
def test_a_value_changes_what_is_rendered(path):
    def is_changed(name: str) -> bool:
        values = charts.merged(goldens.values(name), charts.at(path, None))
        try:
            return charts.render(values, existing=(goldens.SECRET,)) != goldens.rendered(name)
        except helm_sdkpy.InstallError:
            return True

    assert any(map(is_changed, changing(path)))


def test_lint_finds_nothing():
    assert charts.lint() == []


def test_the_package_has_the_targets_of_links(tmp_path):
    packaged = charts.render(goldens.values("4+4"), chart=charts.package(tmp_path))
    assert packaged.objects == goldens.rendered("4+4").objects
