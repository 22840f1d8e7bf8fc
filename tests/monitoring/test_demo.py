"""The made-up deployment has every metric, with the types, labels and values of the catalogue."""

import pytest
from images.grafana.demo.pages import JOBS, DemoPage
from images.grafana.demo.world import World
from images.grafana.vllm_metrics import VLLM_METRICS
from prometheus_client.exposition import generate_latest

from metrics.metric_tools import Scraped
from monitoring.prometheus_tools import promtool
from monitoring.test_names import exported
from tandem.metrics.catalogue import CATALOGUE


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Prometheus' job -> the job's page of metrics."""
    world = World(8)
    return {job: generate_latest(DemoPage(world, job)).decode() for job in JOBS}


@pytest.mark.parametrize("job", JOBS)
def test_a_page_is_what_the_catalogue_says(texts, job):
    page = Scraped(texts[job])
    of_job = [m for m in CATALOGUE if job.removeprefix("tandem-") in m.exporters] or VLLM_METRICS
    assert page.names == set().union(*(exported(metric) for metric in of_job))
    families = {family.name: family for family in page.families}
    for metric in of_job:
        family = families[
            metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        ]
        assert family.type == metric.kind
        assert family.documentation == metric.help or metric.name.startswith("process_")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == metric.labels.keys(), metric.name
            for label, values in metric.labels.items():
                assert not values or sample.labels[label] in values, (metric.name, label)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "tandem-vllm"])
def test_names_and_units_follow_prometheus_rules(texts, job, tmp_path):
    done = promtool("check", "metrics", cwd=tmp_path, text=texts[job])
    assert done.returncode == 0, done.stdout + done.stderr
