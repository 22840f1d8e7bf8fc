"""What rules and dashboards name was really exported: one scrape of each endpoint, kept from a job on two H200s.

`bench/gpu_metrics.py` made them (torch 2.11, vLLM 0.26; the sixth second of a job's life).
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from monitoring.test_names import KUBE_STATE_METRICS, PROMETHEUS_OWN, RECORDED, SEEN

SAMPLES = [
    sample
    for file in sorted((Path(__file__).parent / "recorded").glob("h200-*.prom"))
    for family in text_string_to_metric_families(file.read_text())
    for sample in family.samples
]
# Not in that scrape, and why.
ELSEWHERE = {
    "tandem_train_kl": "only where a job measures KL to a reference (kl_coef, kl_metric)",
    "tandem_job_gpu_resident_bytes": "only where ranks stay between jobs",
} | {
    f"tandem_torch_memory_phase_{kind}_bytes": "newer than the recording; bench/gpu_metrics.py makes the next one"
    for kind in ("allocated", "reserved", "device_used", "host_pinned")
}


def value(name: str, **labels: str) -> float:
    found = [s.value for s in SAMPLES if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_every_metric_of_a_rule_or_a_dashboard_was_exported_by_a_real_job():
    named = SEEN - RECORDED - PROMETHEUS_OWN - KUBE_STATE_METRICS
    assert len(named) > 80
    assert named - {sample.name for sample in SAMPLES} == set(ELSEWHERE)


def test_device_memory_adds_up_and_ranks_own_less_than_the_device_holds():
    uuids = {s.labels["uuid"] for s in SAMPLES if s.name == "tandem_gpu_info"}
    assert len(uuids) == 2
    for uuid in uuids:
        parts = [value(f"tandem_gpu_memory_{part}_bytes", uuid=uuid) for part in ("used", "free", "reserved")]
        assert sum(parts) == value("tandem_gpu_memory_total_bytes", uuid=uuid)
    (rank,) = [s for s in SAMPLES if s.name == "tandem_torch_memory_reserved_bytes"]
    used = value("tandem_gpu_memory_used_bytes", uuid=rank.labels["uuid"])
    assert 0 < value("tandem_torch_memory_allocated_bytes") <= rank.value < used


def test_a_finished_job_gave_everything_back():
    assert value("tandem_job_gpu_left_bytes") == 0
    assert value("tandem_job_gpu_released_bytes") > 4e9
