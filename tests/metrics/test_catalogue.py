"""docs/metrics.md lists the catalogue of metrics, each metric has one collector, and a stack has
few series."""

from docs.source.metrics import DOCUMENT, with_new_tables
from images.grafana.vllm_metrics import VLLM_METRICS

from tandem.metrics.catalogue import CATALOGUE
from tandem.metrics.collector import COLLECTORS, Collector, SpoolCollector
from tandem.metrics.policy import PolicyCollector


def test_a_metric_can_be_exported_and_documented():
    """Rules that `promtool check metrics` (tests/monitoring) does not check."""
    for metric in CATALOGUE:
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert metric.help.endswith("."), metric.name
        assert "|" not in metric.help, metric.name
        assert not set(metric.labels) & {"job", "instance", "pod", "role", "namespace"}, metric.name
        assert not metric.perishable or metric.kind == "gauge", metric.name
    names = [metric.name for metric in CATALOGUE + VLLM_METRICS]
    assert len(names) == len(set(names))


def test_every_collector_is_in_the_catalogue():
    made = [*Collector.__subclasses__(), *SpoolCollector.__subclasses__()]
    collectors = [
        one for one in made if one.__module__.startswith("tandem.") and one is not SpoolCollector
    ]
    assert sorted(collector.name for collector in collectors) == sorted(COLLECTORS)
    assert all(metric in CATALOGUE for collector in collectors for metric in collector.metrics)


def test_the_document_is_made_from_the_catalogue():
    text = DOCUMENT.read_text()
    assert text == with_new_tables(text), "run: python -m docs.source.metrics"


def test_a_stacks_series_are_few():
    """With 8 ranks on 8 devices and every metric exported, Prometheus stores less than 1400 series
    of the trainer."""
    total = 0
    for metric in CATALOGUE:
        if "trainer" in metric.exporters:
            size = 1
            for label, values in metric.labels.items():
                open_values = {
                    "uuid": 1 if "rank" in metric.labels else 8,
                    "rank": 8,
                    "run": 20 if metric in PolicyCollector.metrics else 1,  # one job runs
                    "program": 3,
                }
                size *= len(values) or open_values.get(label, 1)
            total += size * (len(metric.buckets) + 3 if metric.kind == "histogram" else 1)
    assert total < 1400
