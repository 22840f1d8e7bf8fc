"""Checkpoints, the served steps and the publisher's actions, as collectors read them from a
spool."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

import fake_vllm
from fake_vllm import FakeVllm
from free_ports import free_ports
from metrics.metric_tools import Exported, opener
from spool.spool_tools import run_spec, train_one, write_adapter
from tandem.config import Settings
from tandem.metrics import policy
from tandem.metrics.policy import CheckpointsCollector, PolicyCollector
from tandem.metrics.publish import PHASES, MergedCollector, PublishCollector, ReplicasCollector
from tandem.spool import Spool
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.schema import Job, Replica, ReplicaServed, Served
from tandem.vllm_client.names import MergedPhase as Phase

SECONDS = {"copy": 0.1, "load": 0.2, "swap": 0.15, "verify": 0.3, "since_checkpoint": 2.0}


def serve(spool: Spool, number: int, *, error: float = 0.01, refused: int | None = None) -> None:
    record = Served(
        step=number,
        model=f"r@{number}",
        checkpoint="x",
        verified=time.time(),
        mean_abs_logprob_error=error,
        allowed_logprob_error=0.15,
        tokens_checked=9,
        refused_step=refused,
        seconds=SECONDS,
        weights="merged",
        transport="merge",
        refused_reason=None if refused is None else "differs",
    )
    spool.served.put("r", record)


def append_served(spool: Spool, job: Job) -> None:
    spool.events.append(job.spec.id, "served", step=1, seconds=SECONDS)


def test_the_newest_checkpoint_is_exported(volume: Spool) -> None:
    exported = Exported(CheckpointsCollector(opener(volume)))
    assert exported.collect().get("tandem_checkpoint_size_bytes") is None  # no job made step 0
    train_one(volume)
    manifest = volume.checkpoints.manifest("r", 1)
    size = sum(entry.size for entry in manifest.files.values())
    seen = exported.collect()
    seen.check(
        checkpoint_last_success_timestamp_seconds=manifest.created, checkpoint_size_bytes=size
    )
    volume.checkpoints.rollback("r", 0)
    assert exported.collect().get("tandem_checkpoint_size_bytes") == size


@pytest.mark.parametrize(("side", "step", "refused"), [("trainer", 2, None), ("inference", 1, 1)])
def test_each_role_exports_its_side_of_the_policy(volume: Spool, side, step, refused) -> None:
    for _ in range(2):
        train_one(volume)
    serve(volume, 1, refused=2)
    seen = Exported(PolicyCollector(opener(volume), (side,))).collect()
    assert seen.all("tandem_policy_version") == [{"side": side, "run": "r"}]
    assert seen.get("tandem_policy_version", side=side, run="r") == step
    assert seen.get("tandem_policy_refused", run="r") == refused
    assert seen.by("part", "tandem_publish_seconds") == (SECONDS if side == "inference" else {})
    served = {"run": "r", "weights": "merged", "transport": "merge"}
    assert seen.all("tandem_policy_info") == ([served] if side == "inference" else [])
    assert seen.get("tandem_run_bytes", run="r") == (
        volume.checkpoints.size("r") if side == "trainer" else None
    )


def test_only_the_runs_that_changed_last_are_exported(volume: Spool, monkeypatch) -> None:
    monkeypatch.setattr(policy, "RUNS", 2)
    for name in ("a", "b"):
        volume.runs.create(run_spec(name), write_adapter)
    os.utime(volume.root / "runs/a/checkpoints", (1, 1))
    exported = Exported(PolicyCollector(opener(volume), ("trainer", "inference")))
    assert exported.collect().by("run", "tandem_policy_version").keys() == {"r", "b"}
    train_one(volume, "a")
    runs = exported.collect().by("run", "tandem_policy_version").keys()
    assert len(runs) == 2
    assert "a" in runs


def test_served_and_refused_steps_are_counted_once(volume: Spool) -> None:
    train_one(volume)
    serve(volume, 1, error=0.005)
    exported = Exported(PublishCollector(opener(volume)))
    seen = exported.collect()
    # The step was served before the exporter began.
    assert seen.get("tandem_publish_total", outcome="served") == 0
    assert seen.get("tandem_publish_logprob_error_nats") == 0.005
    assert seen.get("tandem_publish_logprob_error_allowed_nats") == 0.15
    for number in (2, 3):  # two steps are served between two collections
        job = train_one(volume)
        serve(volume, number)
        append_served(volume, job)
    seen = exported.collect()
    assert seen.get("tandem_publish_total", outcome="served") == 2
    assert seen.get("tandem_publish_duration_seconds_count", stage="load") == 2
    assert seen.get("tandem_publish_duration_seconds_sum", stage="since_checkpoint") == 4
    train_one(volume)
    for _ in range(2):  # the publisher tries again, and writes the record of the refused step again
        serve(volume, 3, refused=4)
        assert exported.collect().by("outcome", "tandem_publish_total") == {
            "served": 2,
            "refused": 1,
        }
    job = train_one(volume)
    serve(volume, 5)
    append_served(volume, job)  # after the record
    for _ in range(2):
        seen = exported.collect()
        assert seen.get("tandem_publish_total", outcome="served") == 3
        assert seen.get("tandem_publish_duration_seconds_count", stage="load") == 3


def test_a_damaged_run_is_a_failure_and_the_others_are_exported(volume: Spool) -> None:
    volume.runs.create(run_spec("broken"), write_adapter)
    shutil.rmtree(volume.root / "runs/broken/checkpoints")
    seen = Exported(
        PolicyCollector(opener(volume), ("trainer",)), CheckpointsCollector(opener(volume))
    ).collect()
    assert seen.get("tandem_policy_version", side="trainer", run="r") == 0
    assert seen.get("tandem_collector_success", collector="policy") == 0


def test_the_phase_of_merged_weights_is_what_the_server_says(volume: Spool, tmp_path: Path) -> None:
    assert get_args(Phase) == PHASES
    vllm = FakeVllm()
    vllm.start()
    settings = Settings(
        inference_url=vllm.url, api_key=fake_vllm.API_KEY, admin_token=fake_vllm.ADMIN_TOKEN
    )
    exported = Exported(MergedCollector(opener(volume), settings))
    volume.runs.create(run_spec("whole", weights="merged"), write_adapter)
    for phase in PHASES:
        vllm.merged_phase = phase
        seen = exported.collect()
        assert seen.by("phase", "tandem_merged_phase") == {
            name: float(name == phase) for name in PHASES
        }
        assert seen.get("tandem_merged_runs") == 1
    volume.root.rename(tmp_path / "gone")
    seen = exported.collect()
    assert seen.get("tandem_merged_phase", replica="", phase="torn") == 1, (
        "the volume has no say in it"
    )
    assert seen.get("tandem_collector_success", collector="merged") == 0
    (tmp_path / "gone").rename(volume.root)
    vllm.merged_phase = ""  # as of a vLLM that serves adapters
    assert not exported.works("merged")
    vllm.stop()
    seen = exported.collect()
    assert seen.get("tandem_collector_success", collector="merged") == 1, (
        "vLLM takes minutes to start"
    )
    assert not seen.all("tandem_merged_phase")


def test_each_of_several_servers_is_asked_for_its_phase(volume: Spool) -> None:
    while True:  # three consecutive ports, for the proxy and two servers
        [first] = free_ports(1)
        with suppress(OSError):
            servers = [FakeVllm(), FakeVllm()]
            for number, server in enumerate(servers):
                server.start(first + 1 + number)
            break
    servers[0].merged_phase, servers[1].merged_phase = "served", "torn"
    keys = {"api_key": fake_vllm.API_KEY, "admin_token": fake_vllm.ADMIN_TOKEN}
    settings = Settings(inference_port=first, inference_replicas=2, **keys)
    seen = Exported(MergedCollector(opener(volume), settings)).collect()
    for replica, phase in (("0", "served"), ("1", "torn")):
        assert seen.get("tandem_merged_phase", replica=replica, phase=phase) == 1
    for server in servers:
        server.stop()


def test_records_and_events_that_no_publisher_writes(volume: Spool, monkeypatch) -> None:
    exported = Exported(PublishCollector(opener(volume)))
    exported.collect()
    serve(volume, 0)
    exported.collect()
    job = train_one(volume)
    volume.events.append(job.spec.id, "served", step=1, seconds=[1, 2])
    train_one(volume)
    serve(volume, 2)
    for _ in range(2):
        seen = exported.collect()
        assert seen.get("tandem_publish_total", outcome="served") == 3
        # The event of step 1 has a list in place of the seconds by stage, so step 1 gives no
        # duration.
        assert seen.get("tandem_publish_duration_seconds_count", stage="load") == 2
    asked = []
    manifest = Checkpoints.manifest
    monkeypatch.setattr(
        Checkpoints, "manifest", lambda *step: asked.append(step) or manifest(*step)
    )
    serve(volume, 5000)  # the collector does not look up every step below 5000
    exported.collect()
    assert len(asked) <= 2


def test_each_of_several_inference_servers_is_exported(volume: Spool) -> None:
    for _ in range(2):
        train_one(volume)
    exported = Exported(ReplicasCollector(opener(volume), Settings(inference_replicas=3)))
    assert exported.collect().get("tandem_replicas_wanted") == 3
    serve(volume, 1)
    record = volume.served.get("r")
    assert record is not None
    volume.paths.replicas.mkdir()
    for name, steps, ready, beat in (
        ("a", (record.model_copy(update={"step": 2}), record), True, time.time()),
        ("b", (record,), False, time.time()),
        ("gone", (record,), True, time.time() - 60),
    ):
        volume.replicas.put_serves("r", name, ReplicaServed(steps=steps))
        volume.replicas.put(
            Replica(replica=name, url="u", host="h", pid=1, started=1, beat=beat, ready=ready)
        )
    seen = exported.collect()
    assert seen.by("replica", "tandem_replica_ready") == {"a": 1, "b": 0}
    assert seen.by("replica", "tandem_replica_steps_behind") == {"a": 0, "b": 1}
    seconds = seen.by("replica", "tandem_replica_publish_seconds")
    assert seconds == dict.fromkeys("ab", SECONDS["since_checkpoint"])
