"""The chart refuses wrong values with a message that names them. `refusals.yaml` has the values and
the messages."""

from pathlib import Path

import helm_sdkpy
import pytest

from helm import charts
from helm.charts import at, merged

BASE = {"baseModel": "Qwen/Qwen3-8B"}
REFUSALS = charts.load(Path(__file__).parent / "refusals.yaml")
FREE_KEYS = ("resources.requests", "resources.limits", "monitoring.dashboards.labels")
"""Ends of the paths of mappings that accept any key."""


@pytest.mark.parametrize("case", REFUSALS, ids=[case["says"] for case in REFUSALS])
def test_a_bad_value_is_refused_by_name(case):
    with pytest.raises(helm_sdkpy.InstallError, match=case["says"]):
        charts.render(merged(BASE, case["values"]))


def test_a_kubernetes_that_is_too_old_is_refused():
    with pytest.raises(helm_sdkpy.InstallError, match=r">=1\.30\.0-0 .* v1\.29\.9"):
        charts.render(BASE, "1.29.9")
    with pytest.raises(helm_sdkpy.InstallError, match=r"shared\.via=claim needs Kubernetes 1\.34"):
        charts.render({**BASE, "gpuMode": "shared"}, "1.33.4")


def test_a_misspelt_key_in_any_mapping_is_refused_by_name():
    """A render has a misspelt key in every mapping of values. Helm's message names all these
    keys."""
    values, messages = BASE, []
    for section in {path.rpartition(".")[0] for path in charts.leaves(charts.defaults())}:
        if not section.endswith(FREE_KEYS):
            values = merged(values, at(f"{section}.keyx".lstrip("."), 1))
            place = "".join(f"/{part}" for part in section.split(".") if part)
            messages.append(f"at '{place}': additional properties 'keyx' not allowed")
    with pytest.raises(helm_sdkpy.InstallError) as caught:
        charts.render(values)
    assert len(messages) > 20
    assert [message for message in messages if message not in str(caught.value)] == []
