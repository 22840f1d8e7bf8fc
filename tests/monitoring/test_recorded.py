"""What rules and dashboards name was really exported: one scrape of each endpoint, kept from a job on two H200s.

`bench/gpu_metrics.py` made them (torch 2.11, vLLM 0.26; the sixth second of a job's life).
"""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from monitoring.test_names import KUBE_STATE_METRICS, PROMETHEUS_OWN, RECORDED, SEEN

EXPORTED = {
    sample.name
    for file in sorted((Path(__file__).parent / "recorded").glob("h200-*.prom"))
    for family in text_string_to_metric_families(file.read_text())
    for sample in family.samples
}
# Not in that scrape, and why.
ELSEWHERE = {
    "tandem_train_kl": "only where a job measures KL to a reference (kl_coef, kl_metric)",
    "tandem_job_gpu_resident_bytes": "only where ranks stay between jobs",
} | {
    f"tandem_torch_memory_phase_{kind}_bytes": "newer than the recording; bench/gpu_metrics.py makes the next one"
    for kind in ("allocated", "reserved", "device_used", "host_pinned")
}


def test_every_metric_of_a_rule_or_a_dashboard_was_exported_by_a_real_job():
    named = SEEN - RECORDED - PROMETHEUS_OWN - KUBE_STATE_METRICS
    assert len(named) > 80
    assert named - EXPORTED == set(ELSEWHERE)
