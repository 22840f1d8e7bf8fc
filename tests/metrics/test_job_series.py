"""A job's life on a real spool, from queued to released, as the exporter tells it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from metrics.metric_tools import Rig, rig
from spool.spool_tools import commit, failed, run_spec, spool_with_run, submit, succeeded, write_adapter
from tandem.metrics import collector, ranks
from tandem.metrics.jobs import JobsCollector
from tandem.metrics.policy import RUNS, CheckpointsCollector, PolicyCollector, PublishCollector
from tandem.metrics.ranks import RanksCollector
from tandem.spool import Spool, fs
from tandem.spool.paths import beat_file
from tandem.spool.schema import Beat, Job, JobError, Served

GPU = "GPU-5d8f"
OPTIMIZER = {"allocated": 12, "reserved": 18, "device_used": 88, "host_pinned": 6, "peak": 14}
STEP = {
    "loss": 0.5, "grad_norm": 1.5, "learning_rate": 1e-4, "entropy": 1.1, "tokens": 640.0, "trainable_tokens": 320.0,
    "trajectories": 8.0, "reward_mean": 0.25, "seconds_forward_backward": 4.0, "seconds_optimizer": 0.75,
    "sampler_logprob_difference": 0.01,
}  # fmt: skip


@pytest.fixture
def volume(tmp_path: Path) -> Spool:
    return spool_with_run(tmp_path / "spool")


def opener(spool: Spool):
    return lambda: Spool(spool.root, writable=False)


def watching(spool: Spool, count: int = 2):
    return rig(RanksCollector(opener(spool), count), JobsCollector(opener(spool)))


def claim(spool: Spool) -> Job:
    job = spool.queue.claim("runner")
    assert job is not None
    return job


def beat(spool: Spool, job: Job, rank: int, step: int = 0, *, phase: str = "forward_backward", **more) -> None:
    memory = {"allocated": 10, "reserved": 20, "allocated_peak": 15, "reserved_peak": 21, "active": 11,
              "inactive_split": 3, "requested": 9, "alloc_retries": 0, "ooms": 0, "device_allocs": 4, "device_frees": 1,
              "host_pinned": 7}  # fmt: skip
    found = {
        "uuid": GPU if rank == 0 else f"{GPU}{rank}", "steps": 4, "step_floor": 8, "phases": {"optimizer": OPTIMIZER},
        "device_used": 90, "device_used_peak": 95, **more,
    }  # fmt: skip
    found["memory"] = memory | more.get("memory", {})
    told = Beat(time=time.time(), phase=phase, step=step, **found)
    fs.write_atomic(beat_file(spool.paths.work_dir(job.spec.id, job.attempt), rank), told.model_dump_json().encode())


def step(spool: Spool, job: Job, number: int) -> None:
    spool.events.append(job.spec.id, "step", attempt=job.attempt, step=number, steps=4, metrics=STEP)


def release(spool: Spool, job: Job, before: int, left: int | None, **more: Any) -> None:
    spool.events.append(
        job.spec.id, "released", attempt=job.attempt, processes=0, before={GPU: before}, bytes=left,
        devices={GPU: left}, seconds=1.25, **more,
    )  # fmt: skip


def test_what_ranks_keep_that_stay_is_not_left(volume: Spool) -> None:
    with watching(volume) as made:
        made.collect()
        for job_id, more in (("stays", {"resident": {GPU: 30}}), ("goes", {})):
            submit(volume, job_id)
            job = claim(volume)
            release(volume, job, 95, 32, **more)
            volume.queue.requeue(job, JobError(type="oom", message="no", retriable=False))
            seen = made.collect()
            if more:
                assert seen.get("tandem_job_gpu_resident_bytes", uuid=GPU) == 30
                assert seen.get("tandem_job_gpu_left_bytes", uuid=GPU) == 2
                assert seen.get("tandem_job_gpu_released_bytes", uuid=GPU) == 93
            else:
                assert not seen.all("tandem_job_gpu_resident_bytes")
                assert seen.get("tandem_job_gpu_left_bytes", uuid=GPU) == 32


def test_from_queued_to_released(volume: Spool) -> None:
    with watching(volume) as made:
        seen = made.collect()
        assert seen.get("tandem_train_active") == 0
        assert seen.get("tandem_jobs_finished_total", outcome="succeeded") == 0
        assert seen.get("tandem_job_attempts_failed_total", error="oom") == 0
        assert seen.get("tandem_job_queue_wait_seconds_count", kind="sft") == 0
        assert not seen.all("tandem_job_info")

        submit(volume, "j1")
        seen = made.collect()
        assert seen.get("tandem_train_active") == 0  # queued

        job = claim(volume)
        seen = made.collect()
        assert seen.get("tandem_train_active") == 1
        assert seen.get("tandem_job_info", job_id="j1", run="r", kind="rl") == 1
        assert seen.get("tandem_job_queue_wait_seconds_count", kind="rl") == 1
        assert abs(seen.get("tandem_job_last_progress_timestamp_seconds") - time.time()) < 20
        assert not seen.all("tandem_rank_up")  # none has said anything yet, and it is early
        assert seen.get("tandem_train_last_step_timestamp_seconds") is None

        volume.events.append("j1", "loaded", attempt=1, seconds={"build": 3.0, "base_weights": 8.0}, memory={})
        beat(volume, job, 0, 1)
        beat(volume, job, 1, 0, phase="build", phases={"data": {"allocated": 3}, "a_new_one": {"allocated": 4}})
        step(volume, job, 1)
        seen = made.collect()
        where = {"uuid": GPU, "rank": "0"}
        assert seen.get("tandem_rank_up", rank="0") == seen.get("tandem_rank_up", rank="1") == 1
        assert seen.get("tandem_torch_memory_allocated_bytes", **where) == 10
        assert seen.get("tandem_torch_memory_reserved_peak_bytes", **where) == 21
        told = {
            kind: seen.get(f"tandem_torch_memory_phase_{kind}_bytes", **where, phase="optimizer") for kind in OPTIMIZER
        }
        assert told == OPTIMIZER
        other = {"uuid": f"{GPU}1", "rank": "1", "phase": "data"}
        assert seen.get("tandem_torch_memory_phase_allocated_bytes", **other) == 3
        assert len(seen.all("tandem_torch_memory_phase_allocated_bytes")) == 2
        assert seen.get("tandem_torch_memory_step_floor_bytes", **where) == 8
        assert seen.get("tandem_torch_host_pinned_bytes", rank="0") == 7
        assert seen.get("tandem_torch_device_allocs_total", **where) == 4
        assert (seen.get("tandem_train_step"), seen.get("tandem_train_steps")) == (1, 4)
        assert seen.get("tandem_train_rank_step", rank="1") == 0
        assert seen.get("tandem_train_loss") == 0.5
        assert seen.get("tandem_train_logprob_mismatch") == 0.01
        assert seen.get("tandem_train_kl") is None  # none was measured
        assert seen.get("tandem_train_tokens_total") == 640
        assert seen.get("tandem_train_samples_total") == 8
        assert seen.get("tandem_train_step_duration_seconds_sum") == 4.75
        assert seen.get("tandem_train_phase_duration_seconds_sum", phase="base_weights") == 8
        assert seen.get("tandem_train_phase_duration_seconds_bucket", phase="optimizer", le="0.5") == 0
        assert seen.get("tandem_train_phase_duration_seconds_bucket", phase="optimizer", le="1.0") == 1
        assert abs(seen.get("tandem_train_last_step_timestamp_seconds") - time.time()) < 20

        step(volume, job, 2)
        volume.events.append("j1", "checkpoint", attempt=1, step=1, sha256="x", bytes=5, seconds=2.5)
        commit(volume, job)
        release(volume, job, 95, 5)
        volume.queue.finish(job, succeeded(job))
        seen = made.collect()
        assert seen.get("tandem_train_active") == 0
        for gone in ("tandem_job_info", "tandem_rank_up", "tandem_torch_memory_allocated_bytes", "tandem_train_step",
                     "tandem_torch_memory_phase_peak_bytes", "tandem_train_last_step_timestamp_seconds"):  # fmt: skip
            assert not seen.all(gone), gone
        assert seen.get("tandem_train_loss") == 0.5
        assert seen.get("tandem_train_tokens_total") == 1280
        assert seen.get("tandem_jobs_finished_total", outcome="succeeded") == 1
        assert seen.get("tandem_job_duration_seconds_count", kind="rl") == 1
        assert seen.get("tandem_job_gpu_released_bytes", uuid=GPU) == 90
        assert seen.get("tandem_job_gpu_left_bytes", uuid=GPU) == 5
        assert seen.get("tandem_job_release_seconds_sum") == 1.25
        assert seen.get("tandem_checkpoint_duration_seconds") == 2.5
        assert made.collect().samples.keys() == seen.samples.keys()  # and nothing is counted twice
        assert made.collect().get("tandem_jobs_finished_total", outcome="succeeded") == 1


def test_attempts_that_fail_are_counted_by_their_error(volume: Spool) -> None:
    with watching(volume) as made:
        made.collect()
        submit(volume, "j1", max_attempts=3)
        for kind in ("oom", "rank_hung", "something_new"):
            job = claim(volume)
            release(volume, job, 95, None)
            volume.queue.requeue(job, JobError(type=kind, message="no", retriable=True))
        submit(volume, "j2")
        volume.queue.cancel("j2")  # it came and ended between two looks
        made.collect()
        submit(volume, "j3")
        volume.queue.cancel("j3")
        seen = made.collect()  # which lists the finished jobs again
    counted = {e["error"]: seen.get("tandem_job_attempts_failed_total", **e)
               for e in seen.all("tandem_job_attempts_failed_total")}  # fmt: skip
    assert {error for error, count in counted.items() if count} == {"oom", "rank_hung", "other"}
    assert set(counted.values()) == {0, 1}
    assert seen.get("tandem_jobs_finished_total", outcome="failed") == 1
    assert seen.get("tandem_jobs_finished_total", outcome="cancelled") == 2
    assert seen.get("tandem_job_queue_wait_seconds_count", kind="rl") == 1  # the first claim, not each
    assert seen.get("tandem_job_duration_seconds_count", kind="rl") == 1  # the cancelled one never ran
    assert not seen.all("tandem_job_gpu_left_bytes")  # it could not be measured


def test_what_happened_before_the_exporter_is_read_but_not_counted(volume: Spool) -> None:
    submit(volume, "old")
    old = claim(volume)
    volume.queue.finish(old, failed())
    submit(volume, "j1")
    job = claim(volume)
    step(volume, job, 1)
    with watching(volume) as made:
        seen = made.collect()
        assert seen.get("tandem_jobs_finished_total", outcome="failed") == 0
        assert seen.get("tandem_train_tokens_total") == 0
        assert seen.get("tandem_train_loss") == 0.5  # at once, not with the next step
        step(volume, job, 2)
        volume.queue.finish(job, failed())
        seen = made.collect()
        assert seen.get("tandem_train_tokens_total") == 640
        assert seen.get("tandem_jobs_finished_total", outcome="failed") == 1
        assert seen.get("tandem_job_duration_seconds_count", kind="rl") == 1


def test_counters_of_ranks_go_on_from_attempt_to_attempt(volume: Spool) -> None:
    with watching(volume, 1) as made:
        made.collect()
        submit(volume, "j1", max_attempts=3)
        for retries in ((2, 3), (1, 1)):
            job = claim(volume)
            for number, count in enumerate(retries):
                beat(volume, job, 0, number, memory={"alloc_retries": count})
                seen = made.collect()
            volume.queue.requeue(job, JobError(type="rank_crashed", message="no", retriable=True))
            made.collect()
    assert seen.get("tandem_torch_memory_alloc_retries_total", uuid=GPU, rank="0") == 3 + 1


def test_a_silent_rank_is_not_up_and_its_memory_is_not_told(volume: Spool, monkeypatch) -> None:
    submit(volume, "j1")
    job = claim(volume)
    beat(volume, job, 0, 1)
    with watching(volume, 3) as made:
        made.collect()
        now = time.monotonic()
        monkeypatch.setattr(ranks.time, "monotonic", lambda: now + 61)
        beat(volume, job, 1, 2)
        seen = made.collect()
        monkeypatch.undo()
    assert {r["rank"]: seen.get("tandem_rank_up", **r) for r in seen.all("tandem_rank_up")} == {"0": 0, "1": 1, "2": 0}
    assert {labels["rank"] for labels in seen.all("tandem_torch_memory_allocated_bytes")} == {"1"}
    assert seen.get("tandem_train_rank_step", rank="0") == 1  # what it got to stays told


def test_progress_is_that_of_the_rank_that_is_silent_longest(volume: Spool) -> None:
    submit(volume, "j1")
    job = claim(volume)
    beat(volume, job, 0)
    first = volume.jobs.beats("j1", 1)[0].time
    time.sleep(0.05)
    beat(volume, job, 1)
    with watching(volume, 2) as made:
        assert made.collect().get("tandem_job_last_progress_timestamp_seconds") == first


def test_a_volume_that_goes_and_comes_back_counts_nothing_twice(volume: Spool, tmp_path: Path) -> None:
    submit(volume, "j1")
    job = claim(volume)
    beat(volume, job, 0)
    with watching(volume, 1) as made:
        made.collect()
        step(volume, job, 1)
        before = made.collect()
        gone = tmp_path / "gone"
        volume.root.rename(gone)
        volume.root.mkdir()  # a mount point without its volume
        seen = made.collect()
        for name in ("ranks", "jobs"):
            assert seen.get("tandem_collector_success", collector=name) == 0
        assert seen.get("tandem_train_active") == 1  # an alert about a hang needs these
        assert seen.get("tandem_train_last_step_timestamp_seconds") is not None
        assert seen.get("tandem_train_tokens_total") == before.get("tandem_train_tokens_total") == 640
        volume.root.rmdir()
        gone.rename(volume.root)
        commit(volume, job)
        volume.queue.finish(job, succeeded(job))
        seen = made.collect()
    assert seen.get("tandem_collector_success", collector="jobs") == 1
    assert seen.get("tandem_jobs_finished_total", outcome="succeeded") == 1
    assert seen.get("tandem_train_tokens_total") == 640


def test_a_damaged_job_is_a_failure_and_the_others_are_counted(volume: Spool) -> None:
    with watching(volume) as made:
        made.collect()
        broken = volume.paths.state_dir("queued") / "a-broken.json"
        broken.write_text("{")
        seen = made.collect()
        assert seen.get("tandem_collector_success", collector="jobs") == 0
        broken.unlink()
        submit(volume, "j1")
        volume.queue.cancel("j1")
        broken.write_text("{")
        seen = made.collect()
    assert seen.get("tandem_collector_success", collector="jobs") == 0
    assert seen.get("tandem_jobs_finished_total", outcome="cancelled") == 1


def test_thousands_of_finished_jobs_cost_nothing(volume: Spool) -> None:
    submit(volume, "j0")
    job = claim(volume)
    volume.queue.finish(job, failed())
    finished = volume.paths.state_dir("failed")
    content = (finished / "j0.json").read_bytes()
    for number in range(1, 5000):
        (finished / f"j{number}.json").write_bytes(content)
    made = Rig(JobsCollector(opener(volume)))
    made.loops[0].once()
    begin = time.perf_counter()
    for _ in range(20):
        made.loops[0].once()
    assert (time.perf_counter() - begin) / 20 < 0.01
    made.server.server_close()


# ---------------------------------------------------------------- checkpoints, policy, publish


def train(spool: Spool, job_id: str, run: str = "r") -> None:
    submit(spool, job_id, run=run)
    job = claim(spool)
    commit(spool, job, job_id.encode())
    spool.queue.finish(job, succeeded(job))


def serve(spool: Spool, run: str, number: int, *, error: float = 0.01, refused: int | None = None) -> None:
    record = Served(step=number, model=f"{run}@{number}", checkpoint="x", verified=time.time(),
                    mean_abs_logprob_error=error, tokens_checked=9, refused_step=refused,
                    refused_reason=None if refused is None else "differs")  # fmt: skip
    spool.served.put(run, record)


def tell_served(spool: Spool, job_id: str) -> None:
    seconds = {"copy": 0.1, "load": 0.2, "verify": 0.3, "since_checkpoint": 2.0}
    spool.events.append(job_id, "served", step=1, seconds=seconds)


def test_checkpoints_are_found_on_the_volume(volume: Spool) -> None:
    with rig(CheckpointsCollector(opener(volume))) as made:
        assert made.collect().get("tandem_checkpoint_size_bytes") is None  # step 0 was trained by nobody
        train(volume, "j1")
        seen = made.collect()
        manifest = volume.checkpoints.manifest("r", 1)
        assert seen.get("tandem_checkpoint_last_success_timestamp_seconds") == manifest.created
        assert seen.get("tandem_checkpoint_size_bytes") == sum(entry.size for entry in manifest.files.values())
        volume.checkpoints.rollback("r", 0)
        assert made.collect().get("tandem_checkpoint_size_bytes") == seen.get("tandem_checkpoint_size_bytes")


@pytest.mark.parametrize(("sides", "told"), [(("trainer",), {"trainer": 2}), (("inference",), {"inference": 1})])
def test_each_role_tells_its_side_of_the_policy(volume: Spool, sides, told) -> None:
    for job_id in ("j1", "j2"):
        train(volume, job_id)
    serve(volume, "r", 1, refused=2)
    volume.runs.create(run_spec("whole", weights="merged"), write_adapter)  # never served: no lag of anything
    with rig(PolicyCollector(opener(volume), sides)) as made:
        seen = made.collect()
    assert {labels["run"] for labels in seen.all("tandem_policy_version")} == {"r"}
    found = {v["side"]: seen.get("tandem_policy_version", **v) for v in seen.all("tandem_policy_version")}
    assert found == told
    assert seen.get("tandem_policy_refused", run="r") == (1 if sides == ("inference",) else None)


def test_only_the_runs_that_changed_last_are_told(volume: Spool) -> None:
    for number in range(RUNS + 5):
        volume.runs.create(run_spec(f"run-{number:02d}"), write_adapter)
    old = volume.root / "runs/run-07/checkpoints"
    os.utime(old, (1, 1))
    with rig(PolicyCollector(opener(volume), ("trainer", "inference"))) as made:
        told = {labels["run"] for labels in made.collect().all("tandem_policy_version")}
        assert len(told) == RUNS
        assert "run-07" not in told
        train(volume, "j1", "run-07")
        assert "run-07" in {labels["run"] for labels in made.collect().all("tandem_policy_version")}


def test_what_is_served_and_refused_is_counted_once(volume: Spool) -> None:
    train(volume, "j1")
    serve(volume, "r", 1, error=0.005)
    with rig(PublishCollector(opener(volume))) as made:
        seen = made.collect()
        assert seen.get("tandem_publish_total", outcome="served") == 0  # before our time
        assert seen.get("tandem_publish_logprob_error_nats") == 0.005
        for job_id in ("j2", "j3"):  # two steps between two looks
            train(volume, job_id)
            serve(volume, "r", int(job_id[1]))
            tell_served(volume, job_id)
        seen = made.collect()
        assert seen.get("tandem_publish_total", outcome="served") == 2
        assert seen.get("tandem_publish_duration_seconds_count", stage="load") == 2
        assert seen.get("tandem_publish_duration_seconds_sum", stage="since_checkpoint") == 4
        train(volume, "j4")
        serve(volume, "r", 3, refused=4)
        assert made.collect().get("tandem_publish_total", outcome="refused") == 1
        seen = made.collect()
        assert seen.get("tandem_publish_total", outcome="refused") == 1
        assert seen.get("tandem_publish_total", outcome="served") == 2
        train(volume, "j5")
        serve(volume, "r", 5)  # its event comes after the record
        seen = made.collect()
        assert seen.get("tandem_publish_total", outcome="served") == 3
        assert seen.get("tandem_publish_duration_seconds_count", stage="load") == 2
        tell_served(volume, "j5")
        assert made.collect().get("tandem_publish_duration_seconds_count", stage="load") == 3


def test_a_damaged_run_is_a_failure_and_the_others_are_told(volume: Spool) -> None:
    volume.runs.create(run_spec("broken"), write_adapter)
    shutil.rmtree(volume.root / "runs/broken/checkpoints")
    with rig(PolicyCollector(opener(volume), ("trainer",)), CheckpointsCollector(opener(volume))) as made:
        seen = made.collect()
    assert seen.get("tandem_policy_version", side="trainer", run="r") == 0
    assert seen.get("tandem_collector_success", collector="policy") == 0


def test_measurements_are_not_told_for_longer_than_they_are_true(volume: Spool, monkeypatch, tmp_path) -> None:
    submit(volume, "j1")
    beat(volume, claim(volume), 0)
    with watching(volume, 1) as made:
        made.collect()
        volume.root.rename(tmp_path / "gone")
        seen = made.collect()
        assert seen.all("tandem_torch_memory_allocated_bytes")
        now = time.monotonic()
        monkeypatch.setattr(collector.time, "monotonic", lambda: now + 61)
        seen = made.scrape()
        monkeypatch.undo()
    assert not seen.all("tandem_torch_memory_allocated_bytes")
    assert not seen.all("tandem_rank_up")
    assert seen.all("tandem_job_info")
    assert seen.get("tandem_train_rank_step", rank="0") == 0
