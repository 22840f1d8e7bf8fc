"""The chart refuses wrong values with a message that names the values. The chart refuses an old
version of Kubernetes with a message that names the version. `refusals.yaml` has the values and the
messages."""

from pathlib import Path

import pytest
from helm_sdkpy import InstallError

from helm import charts
from helm.charts import NEWEST, at, merged

BASE = {"baseModel": "Qwen/Qwen3-8B"}
REFUSALS = charts.load(Path(__file__).parent / "refusals.yaml")


@pytest.mark.parametrize("case", REFUSALS, ids=[case["says"] for case in REFUSALS])
def test_a_bad_value_is_refused_by_name(case):
    with pytest.raises(InstallError, match=case["says"]):
        charts.render(merged(BASE, case["values"]), case.get("version", NEWEST))


def test_a_misspelt_key_in_any_mapping_is_refused_by_name():
    """Helm's message names the misspelt keys of all mappings. Some mappings accept any key."""
    sections = {path.rpartition(".")[0] for path in charts.leaves(charts.defaults())}
    free = ("resources.requests", "resources.limits", "monitoring.dashboards.labels")
    closed = [section for section in sections if not section.endswith(free)]
    values = BASE
    for section in closed:
        values = merged(values, at(f"{section}.keyx".lstrip("."), 1))
    with pytest.raises(InstallError, match="additional properties") as caught:
        charts.render(values)
    for section in closed:
        place = "".join(f"/{part}" for part in section.split(".") if part)
        assert f"at '{place}': additional properties 'keyx' not allowed" in str(caught.value)
