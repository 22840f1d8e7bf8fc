"""The tests check a collector's thread and the exported page after failures, hangs and old
measurements. The tests also check the counts of histograms."""

import threading

import pytest

from metrics.metric_tools import Exported
from tandem.metrics import collector
from tandem.metrics.collector import Collector
from tandem.metrics.metric import Metric
from waiting import until

USED, FOUND = "tandem_gpu_memory_used_bytes", "tandem_gpu_found"


class Driver(Collector):
    """A stand-in for a device driver that fails and hangs."""

    name = "nvml"
    metrics = (
        Metric(USED, "Measured.", "", labels={"uuid": ()}, perishable=True),
        Metric(FOUND, "Stays.", ""),
        Metric("seconds", "A histogram.", "", "histogram", buckets=(0.1, 20)),
    )
    interval = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.value, self.error = 1.0, None
        self.answers = threading.Event()
        self.answers.set()
        self.waits = threading.Event()

    def collect(self, gauges) -> None:
        if not self.answers.is_set():
            self.waits.set()
        self.answers.wait()
        gauges.set(USED, self.value, uuid="GPU-a")
        gauges.set(FOUND, self.value)
        if isinstance(self.error, str):
            self.errors.append(self.error)
        elif self.error is not None:
            raise self.error


class Other(Collector):
    name, metrics, interval = "volumes", (), 0.05

    def collect(self, gauges) -> None:
        pass


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_hung_collector_delays_neither_the_scrape_nor_other_collectors(
    driver, monkeypatch
) -> None:
    exported, stop = Exported(driver, Other()), threading.Event()

    def last_success(name: str) -> float | None:
        return exported.scrape().get(
            "tandem_collector_last_success_timestamp_seconds", collector=name
        )

    try:
        for made in exported.collectors:
            made.start(stop)
        until("it has collected", lambda: exported.scrape().get(USED, uuid="GPU-a"))
        driver.value = 2.0
        driver.answers.clear()
        assert driver.waits.wait(60)
        hung, other = last_success("nvml"), last_success("volumes")
        until("the other collector goes on", lambda: last_success("volumes") > other)
        seen = exported.scrape()
        assert seen.get(USED, uuid="GPU-a") in (1, 2)
        assert seen.get("tandem_collector_success", collector="nvml") == 1
        now = collector.time.monotonic
        monkeypatch.setattr(collector.time, "monotonic", lambda: now() + 61)
        seen = exported.scrape()
        assert seen.get("tandem_collector_success", collector="nvml") == 0
        # The page leaves out a value that is a minute old, because the value may be wrong.
        assert seen.get(USED, uuid="GPU-a") is None
        assert seen.get(FOUND) is not None
        assert last_success("nvml") == hung
        monkeypatch.undo()
        driver.value = 3.0
        driver.answers.set()
        until("it goes on", lambda: exported.scrape().get(USED, uuid="GPU-a") == 3)
    finally:
        driver.answers.set()
        stop.set()


def test_a_failure_shows_and_what_was_collected_before_stays_for_a_minute(
    driver, caplog, monkeypatch
) -> None:
    caplog.set_level("INFO")
    exported = Exported(driver)

    def after(
        error: Exception | str | None, value: float
    ) -> tuple[float, float | None, float | None]:
        driver.error, driver.value = error, value
        seen = exported.collect()
        success = seen.get("tandem_collector_success", collector="nvml")
        return success, seen.get(USED, uuid="GPU-a"), seen.get(FOUND)

    assert after(None, 1) == (1, 1, 1)
    assert after(RuntimeError("the driver says no"), 2) == (0, 1, 1)
    assert after("one device is lost", 3) == (0, 3, 3)
    assert after(None, 4) == (1, 4, 4)
    assert after(RuntimeError("the driver says no"), 5) == (0, 4, 4)
    now = collector.time.monotonic
    monkeypatch.setattr(collector.time, "monotonic", lambda: now() + 61)
    assert after(RuntimeError("the driver says no"), 6) == (0, None, 4)
    said = [record for record in caplog.records if record.name == "exporter"]
    # The collector logs one line when it begins to fail, and one line when it works again.
    assert len(said) == 3


def test_a_value_on_a_buckets_bound_is_within_it(driver) -> None:
    for value in (0.1, 0.10001, 20, 21):
        driver.counts.observe("seconds", value)
    seen = Exported(driver).scrape()
    assert seen.by("le", "seconds_bucket") == {"0.1": 1, "20.0": 3, "+Inf": 4}
    assert seen.get("seconds_sum") == pytest.approx(41.20001)


@pytest.mark.parametrize(
    ("name", "labels"), [("unknown", {}), (USED, {"uuid": "GPU-a", "rank": "0"}), (USED, {})]
)
def test_a_metric_or_label_that_is_not_declared_is_refused(driver, name, labels) -> None:
    with pytest.raises(KeyError):
        collector.Samples(driver.metrics).set(name, 1, **labels)
