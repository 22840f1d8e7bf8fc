"""The catalogue keeps to Prometheus' rules, is what is documented, and everything of it is really exported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metrics.metric_tools import PROMETHEUS_3, Scraped, fetch, serving
from tandem.metrics import demo
from tandem.metrics.catalogue import CATALOGUE, VLLM_METRICS
from tandem.metrics.document import updated

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
UNITS = {"seconds", "bytes", "ratio", "celsius", "joules", "watts", "nats"}
# They keep the names that Prometheus' own client libraries gave them, or a name from the literature.
OLD_NAMES = re.compile(r"process_\w+|tandem_train_(entropy|kl|kl_sampler|logprob_mismatch|importance_ratio_max)")


def exported_by(exporter: str):
    return [metric for metric in CATALOGUE if exporter in metric.exporters]


def expected(metrics) -> set[str]:
    """Sample names of a scrape that tells everything of these."""
    names = set()
    for metric in metrics:
        parts = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        names |= {f"{metric.name}{part}" for part in parts}
    return names


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_names_and_units_follow_prometheus_rules(metric):
    assert re.fullmatch(r"(tandem|process)(_[a-z0-9]+)+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert not metric.name.endswith(("_bucket", "_count", "_sum", "_created"))
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert len(metric.buckets) <= 13
    assert metric.help.endswith(".")
    assert "|" not in metric.help
    assert metric.exporters
    assert not set(metric.labels) & {"job", "instance", "pod", "role", "namespace", "le", "quantile"}
    base = metric.name.removesuffix("_total")
    assert metric.unit in {"", *UNITS}
    assert not metric.perishable or metric.kind == "gauge"
    if not OLD_NAMES.fullmatch(metric.name):
        assert base.endswith(metric.unit)
        assert metric.unit or base.split("_")[-1] not in UNITS


def test_every_name_occurs_once():
    names = [metric.name for metric in CATALOGUE + VLLM_METRICS]
    assert len(names) == len(set(names))


def test_the_document_is_made_from_the_catalogue():
    text = DOCUMENT.read_text()
    assert text == updated(text), "run: python -m tandem.metrics.document docs/metrics.md"


def test_the_demo_makes_up_every_metric_of_the_catalogue_and_no_other():
    with serving(demo.pages()) as url:
        everything = Scraped(fetch(f"{url}/metrics")[2])
        assert {name for name, _ in everything.samples} == expected(CATALOGUE + VLLM_METRICS)
        for exporter in ("trainer", "inference", "controller"):
            page = Scraped(fetch(f"{url}/metrics/{exporter}")[2])
            assert {name for name, _ in page.samples} == expected(exported_by(exporter))
        vllm = Scraped(fetch(f"{url}/metrics/vllm")[2])
        assert {name for name, _ in vllm.samples} == expected(VLLM_METRICS)


def test_the_demo_has_the_catalogues_types_labels_and_values():
    with serving(demo.pages()) as url:
        status, kind, text = fetch(f"{url}/metrics", PROMETHEUS_3)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in Scraped(text).families}
    for metric in CATALOGUE + VLLM_METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert family.type == metric.kind
        assert family.documentation == metric.help or metric.name.startswith("process_")
        told: dict[str, set[str]] = {}
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == metric.labels.keys(), metric.name
            for label, value in sample.labels.items():
                told.setdefault(label, set()).add(value)
        for label, values in metric.labels.items():
            if values and (metric.kind != "gauge" or label not in ("collector", "phase", "side", "kind")):
                assert told[label] <= set(values), (metric.name, label)


def test_the_demo_lives():
    world = demo.World(1_000_000.0)
    seen = {"held": set(), "jobs": set(), "step": set()}
    energy = []
    for second in range(0, 300, 5):
        world.advance(1_000_000.0 + second)
        gauges = world.gauges("trainer").series
        seen["held"].add(round(gauges["tandem_gpu_memory_used_bytes"][(demo._UUIDS["trainer"],)] / 2**30))
        seen["jobs"] |= set(gauges.get("tandem_job_info", {}))
        seen["step"] |= set(gauges.get("tandem_train_step", {}).values())
        energy.append(world.counts["trainer"].series()["tandem_gpu_energy_joules_total"][(demo._UUIDS["trainer"],)])
    assert max(seen["held"]) - min(seen["held"]) > 60  # GiB, up and down
    assert min(seen["held"]) <= 1
    assert len(seen["jobs"]) >= 2
    assert len(seen["step"]) >= 10
    assert energy == sorted(energy)
    assert energy[-1] > energy[0]


def test_a_stacks_series_are_few():
    """8 ranks on 8 devices, everything told: what Prometheus stores for one stack stays in the low thousands."""
    uuids, ranks = 8, 8
    total = 0
    for metric in exported_by("trainer"):
        size = 1
        for label, values in metric.labels.items():
            open_values = {"uuid": 1 if "rank" in metric.labels else uuids, "rank": ranks, "run": 20, "program": 3}
            size *= len(values) or open_values.get(label, 1)
        total += size * (len(metric.buckets) + 3 if metric.kind == "histogram" else 1)
    assert total < 1500
    with serving(demo.pages()) as url:
        assert len(Scraped(fetch(f"{url}/metrics")[2]).samples) < 1500
