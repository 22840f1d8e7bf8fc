"""What the dashboards want of vLLM exists in the vLLM that is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from images.grafana.vllm_metrics import VLLM_METRICS

OF_THE_SERVER = "http_requests_total"  # prometheus_fastapi_instrumentator's


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_name_and_label_is_in_vllms_source():
    root = Path(find_spec("vllm").submodule_search_locations[0])
    source = (root / "v1/metrics/loggers.py").read_text()
    for metric in VLLM_METRICS:
        if metric.name == OF_THE_SERVER:
            continue
        # prometheus_client adds a counter's _total itself
        name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        made = re.search(rf"(_\w+_cls)\(\s*name=\"{name}\"|name = \"{name}\"", source)
        assert made, f"vLLM has no {name}"
        assert made[1] is None or made[1] == f"_{metric.kind}_cls", name
        for label in metric.labels:
            known = re.search(rf"\"{label}\"", source) or metric.name == "vllm:cache_config_info"
            assert known, (name, label)
