"""Jobs and their ranks on a real spool, from queued to released, as the exporter shows them."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metrics.metric_tools import Exported, Scraped, opener
from spool.spool_tools import add_run, commit, failed, job_path, submit, succeeded
from spool.volume_tools import full_disk
from tandem.config import Settings
from tandem.metrics import collector, ranks
from tandem.metrics.controller import QueueCollector
from tandem.metrics.exporter import make_collectors
from tandem.metrics.jobs import JobsCollector
from tandem.metrics.ranks import RanksCollector
from tandem.spool import Spool, fs
from tandem.spool.attempt import Attempt
from tandem.spool.jobs import Jobs
from tandem.spool.removal import prune
from tandem.spool.schema import Beat, Job, JobError, RequestResult, StepRequest
from tandem.spool.session_jobs import queue_waiting

GPU = "GPU-5d8f"
RANK_0 = {"uuid": GPU, "rank": "0"}
OPTIMIZER = {"allocated": 12, "reserved": 18, "device_used": 88, "host_pinned": 6, "peak": 14}
STEP = {
    "loss": 0.5,
    "grad_norm": 1.5,
    "learning_rate": 1e-4,
    "entropy": 1.1,
    "tokens": 640.0,
    "trainable_tokens": 320.0,
    "trajectories": 8.0,
    "reward_mean": 0.25,
    "seconds_forward_backward": 4.0,
    "seconds_optimizer": 0.75,
    "sampler_logprob_difference": 0.01,
}


def exported_jobs(spool: Spool, ranks: int = 2) -> Exported:
    return Exported(RanksCollector(opener(spool), ranks), JobsCollector(opener(spool)))


def beat(
    spool: Spool,
    job: Job,
    rank: int,
    step: int = 0,
    *,
    phase: str = "forward_backward",
    **more: Any,
) -> None:
    memory = {
        "allocated": 10,
        "reserved": 20,
        "allocated_peak": 15,
        "reserved_peak": 21,
        "inactive_split": 3,
        "requested": 9,
        "alloc_retries": 0,
        "ooms": 0,
        "host_pinned": 7,
    }
    fields = {
        "uuid": GPU if rank == 0 else f"{GPU}{rank}",
        "steps": 4,
        "step_floor": 8,
        "phases": {"optimizer": OPTIMIZER},
        "device_used": 90,
        "device_used_peak": 95,
        **more,
    }
    fields["memory"] = memory | more.get("memory", {})
    written = Beat(time=time.time(), phase=phase, step=step, **fields)
    fs.write_atomic(
        Attempt(spool, job.spec.id, job.attempt).beat(rank),
        written.model_dump_json().encode(),
    )


def step(spool: Spool, job: Job, number: int) -> None:
    spool.events.append(
        job.spec.id, "step", attempt=job.attempt, step=number, steps=4, metrics=STEP
    )


def release(spool: Spool, job: Job, before: int, left: int | None, **more: Any) -> None:
    spool.events.append(
        job.spec.id,
        "released",
        attempt=job.attempt,
        processes=0,
        before={GPU: before},
        bytes=left,
        devices={GPU: left},
        seconds=1.25,
        **more,
    )


def requeue(spool: Spool, job: Job, kind: str = "rank_crashed", *, retriable: bool = True) -> None:
    spool.queue.requeue(job, JobError(type=kind, message="no", retriable=retriable))


def test_a_job_from_queued_to_released(volume: Spool) -> None:
    exported = exported_jobs(volume)
    seen = exported.collect()
    assert seen.get("tandem_train_active") == 0
    assert seen.get("tandem_jobs_finished_total", outcome="succeeded") == 0
    assert seen.get("tandem_job_attempts_failed_total", error="oom") == 0
    assert seen.get("tandem_job_queue_wait_seconds_count", kind="sft") == 0
    assert not seen.all("tandem_job_info")

    submit(volume, "j1")
    assert exported.collect().get("tandem_train_active") == 0  # it is queued
    job = volume.queue.claim("runner")
    seen = exported.collect()
    assert seen.get("tandem_train_active") == 1
    assert seen.get("tandem_job_info", job_id="j1", run="r", kind="rl") == 1
    assert seen.get("tandem_job_queue_wait_seconds_count", kind="rl") == 1
    assert abs(seen.get("tandem_job_last_progress_timestamp_seconds", run="r") - time.time()) < 20
    # No rank has written a heartbeat, and the attempt has just begun.
    assert not seen.all("tandem_rank_up")
    assert seen.get("tandem_train_last_step_timestamp_seconds", run="r") is None

    volume.events.append(
        "j1", "loaded", attempt=1, seconds={"build": 3.0, "base_weights": 8.0}, memory={}
    )
    beat(volume, job, 0, 1)
    beat(
        volume,
        job,
        1,
        0,
        phase="build",
        phases={"data": {"allocated": 3}, "a_new_one": {"allocated": 4}},
    )
    step(volume, job, 1)
    seen = exported.collect()
    check_running(seen)
    beats = Attempt(volume, "j1", 1).beats()
    assert (
        seen.get("tandem_job_last_progress_timestamp_seconds", run="r")
        == beats[0].time
        < beats[1].time
    )

    step(volume, job, 2)
    volume.events.append("j1", "checkpoint", attempt=1, step=1, sha256="x", bytes=5, seconds=2.5)
    commit(volume, job)
    release(volume, job, 95, 5)
    volume.queue.finish(job, succeeded(job))
    seen = exported.collect()
    assert not seen.names & {
        "tandem_job_info",
        "tandem_rank_up",
        "tandem_torch_memory_allocated_bytes",
        "tandem_train_step",
        "tandem_torch_memory_phase_peak_bytes",
        "tandem_train_last_step_timestamp_seconds",
    }
    seen.check(
        train_active=0,
        train_loss=0.5,
        train_tokens_total=1280,
        job_release_seconds_sum=1.25,
        checkpoint_duration_seconds=2.5,
    )
    seen.check({"uuid": GPU}, job_gpu_released_bytes=90, job_gpu_left_bytes=5)
    assert seen.get("tandem_job_duration_seconds_count", kind="rl") == 1
    for _ in range(2):  # each event is counted once
        assert seen.get("tandem_jobs_finished_total", outcome="succeeded") == 1
        seen = exported.collect()


def check_running(seen: Scraped) -> None:
    """The state after the first step of `test_a_job_from_queued_to_released`."""
    assert seen.by("rank", "tandem_rank_up") == {"0": 1, "1": 1}
    seen.check(
        RANK_0,
        torch_memory_allocated_bytes=10,
        torch_memory_reserved_peak_bytes=21,
        torch_memory_step_floor_bytes=8,
    )
    for kind in ("allocated", "device_used", "peak"):
        assert (
            seen.get(f"tandem_torch_memory_phase_{kind}_bytes", **RANK_0, phase="optimizer")
            == OPTIMIZER[kind]
        )
    assert seen.by("phase", "tandem_torch_memory_phase_allocated_bytes") == {
        "optimizer": 12,
        "data": 3,
    }
    assert seen.get("tandem_torch_host_pinned_bytes", run="r", rank="0") == 7
    assert seen.get("tandem_train_rank_step", run="r", rank="1") == 0
    seen.check({"run": "r"}, train_step=1, train_steps=4)
    # The job has no value for KL.
    seen.check(train_loss=0.5, train_logprob_mismatch=0.01, train_kl=None)
    seen.check(train_tokens_total=640, train_samples_total=8, train_step_duration_seconds_sum=4.75)
    seen.check({"phase": "base_weights"}, train_phase_duration_seconds_sum=8)
    for le, count in (("0.5", 0), ("1.0", 1)):
        seen.check({"phase": "optimizer", "le": le}, train_phase_duration_seconds_bucket=count)
    assert abs(seen.get("tandem_train_last_step_timestamp_seconds", run="r") - time.time()) < 20


@pytest.mark.parametrize(
    ("more", "left", "released"), [({"resident": {GPU: 30}}, 2, 93), ({}, 32, 63)]
)
def test_memory_that_resident_ranks_keep_is_not_left(volume: Spool, more, left, released) -> None:
    exported = exported_jobs(volume)
    exported.collect()
    submit(volume, "j1")
    job = volume.queue.claim("runner")
    release(volume, job, 95, 32, **more)
    requeue(volume, job, "oom", retriable=False)
    seen = exported.collect()
    assert seen.by("uuid", "tandem_job_gpu_resident_bytes") == more.get("resident", {})
    seen.check({"uuid": GPU}, job_gpu_left_bytes=left, job_gpu_released_bytes=released)


def test_failed_attempts_are_counted_by_their_error(volume: Spool) -> None:
    exported = exported_jobs(volume)
    exported.collect()
    submit(volume, "j1", max_attempts=3)
    for kind in ("oom", "rank_hung", "something_new"):
        job = volume.queue.claim("runner")
        release(volume, job, 95, None)
        requeue(volume, job, kind)
    submit(volume, "j2")
    volume.queue.cancel("j2")  # j2 began and ended between two collections
    exported.collect()
    submit(volume, "j3")
    volume.queue.cancel("j3")
    seen = exported.collect()  # this collection lists the finished jobs again
    counts = seen.by("error", "tandem_job_attempts_failed_total")
    assert {error: count for error, count in counts.items() if count} == {
        "oom": 1,
        "rank_hung": 1,
        "other": 1,
    }
    assert seen.by("outcome", "tandem_jobs_finished_total") == {
        "succeeded": 0,
        "failed": 1,
        "cancelled": 2,
    }
    # Only the first claim counts.
    assert seen.get("tandem_job_queue_wait_seconds_count", kind="rl") == 1
    assert seen.get("tandem_job_duration_seconds_count", kind="rl") == 1  # cancelled jobs never ran
    assert not seen.all("tandem_job_gpu_left_bytes")  # the memory could not be measured


def test_events_from_before_the_exporter_are_read_but_not_counted(volume: Spool) -> None:
    submit(volume, "old")
    volume.queue.finish(volume.queue.claim("runner"), failed())
    submit(volume, "j1")
    job = volume.queue.claim("runner")
    step(volume, job, 1)
    exported = exported_jobs(volume)
    seen = exported.collect()
    assert seen.get("tandem_jobs_finished_total", outcome="failed") == 0
    assert seen.get("tandem_train_tokens_total") == 0
    # The first collection exports the loss of a step that was made before the exporter's start.
    assert seen.get("tandem_train_loss") == 0.5
    step(volume, job, 2)
    volume.queue.finish(job, failed())
    seen = exported.collect()
    assert seen.get("tandem_train_tokens_total") == 640
    assert seen.get("tandem_jobs_finished_total", outcome="failed") == 1
    assert seen.get("tandem_job_duration_seconds_count", kind="rl") == 1


def test_old_events_of_a_requeued_job_are_not_counted(volume: Spool) -> None:
    add_run(volume, "other")
    submit(volume, "z", max_attempts=3)
    job = volume.queue.claim("runner")
    step(volume, job, 1)
    requeue(volume, job, "oom")
    submit(volume, "a", run="other")
    other = volume.queue.claim("runner", waiting=[job.spec.id])
    step(volume, other, 1)
    exported = exported_jobs(volume)
    seen = exported.collect()
    assert seen.by("run", "tandem_train_last_step_timestamp_seconds").keys() == {"other"}
    again = volume.queue.claim("runner")
    assert (again.spec.id, again.attempt) == (job.spec.id, 2)
    step(volume, again, 1)
    seen = exported.collect()
    assert seen.get("tandem_job_attempts_failed_total", error="oom") == 0
    assert seen.get("tandem_train_tokens_total") == 640
    requeue(volume, again, "oom")
    assert exported.collect().get("tandem_job_attempts_failed_total", error="oom") == 1


def test_an_exporter_that_begins_within_an_attempt_counts_what_ranks_count_from_then_on(
    volume: Spool,
) -> None:
    submit(volume, "j1", max_attempts=3)
    job = volume.queue.claim("runner")
    beat(volume, job, 0, 0, memory={"ooms": 2})
    exported = exported_jobs(volume)
    assert exported.collect().get("tandem_torch_memory_ooms_total", **RANK_0) == 0
    beat(volume, job, 0, 1, memory={"ooms": 3})
    # Rank 1's first heartbeat comes after the exporter's start.
    beat(volume, job, 1, 1, memory={"ooms": 1})
    seen = exported.collect()
    assert seen.get("tandem_torch_memory_ooms_total", **RANK_0) == 1
    assert seen.get("tandem_torch_memory_ooms_total", uuid=f"{GPU}1", rank="1") == 1
    requeue(volume, job)
    beat(volume, volume.queue.claim("runner"), 0, 0, memory={"ooms": 4})
    assert exported.collect().get("tandem_torch_memory_ooms_total", **RANK_0) == 1 + 4


def test_a_new_exporter_knows_what_idle_resident_ranks_keep(volume: Spool) -> None:
    with volume.runner_lock("old"):
        submit(volume, "j1")
        job = volume.queue.claim("old")
        release(volume, job, 95, 32, resident={GPU: 30})
        step(volume, job, 1)
        volume.queue.finish(job, failed())
        submit(volume, "j0")
        volume.queue.cancel("j0")  # j0 never ran and ended later
    exported = exported_jobs(volume)
    seen = exported.collect()
    assert seen.by("uuid", "tandem_job_gpu_resident_bytes") == {GPU: 30}
    assert seen.get("tandem_train_last_step_timestamp_seconds", run="r") is None
    for _ in range(2):
        assert seen.get("tandem_train_tokens_total") == 0
        assert seen.get("tandem_jobs_finished_total", outcome="failed") == 0
        assert seen.get("tandem_job_release_seconds_count") == 0
        seen = exported.collect()
    with volume.runner_lock("new"):  # the ranks ended with their runner
        pass
    assert not exported_jobs(volume).collect().all("tandem_job_gpu_resident_bytes")


def test_counters_of_ranks_continue_from_attempt_to_attempt(volume: Spool) -> None:
    exported = exported_jobs(volume, ranks=1)
    exported.collect()
    submit(volume, "j1", max_attempts=3)
    for retries in ((2, 3), (1, 1)):
        job = volume.queue.claim("runner")
        for number, count in enumerate(retries):
            beat(volume, job, 0, number, memory={"alloc_retries": count})
            seen = exported.collect()
        requeue(volume, job)
        exported.collect()
    assert seen.get("tandem_torch_memory_alloc_retries_total", **RANK_0) == 3 + 1


def test_a_silent_rank_is_not_up_and_its_memory_is_not_exported(volume: Spool, monkeypatch) -> None:
    submit(volume, "j1")
    job = volume.queue.claim("runner")
    beat(volume, job, 0, 1)
    exported = exported_jobs(volume, ranks=3)
    exported.collect()
    now = time.monotonic()
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now + 61)
    beat(volume, job, 1, 2)
    seen = exported.collect()
    assert seen.by("rank", "tandem_rank_up") == {"0": 0, "1": 1, "2": 0}
    assert seen.by("rank", "tandem_torch_memory_allocated_bytes").keys() == {"1"}
    # rank 0's step is still exported
    assert seen.get("tandem_train_rank_step", run="r", rank="0") == 1


def test_while_an_attempt_waits_no_rank_is_silent(volume: Spool, monkeypatch) -> None:
    """While an attempt waits for hours in a queue, neither TandemRankDown nor TandemJobStuck
    fires."""
    submit(volume, "j1")
    job = volume.queue.claim("runner")
    exported = exported_jobs(volume, ranks=2)
    assert exported.collect().get("tandem_job_waiting_seconds") is None
    begun, now = time.time(), time.monotonic()
    volume.leases.write(job, "runner", "waiting: quota", begun - 7200)
    exported.collect()
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now + 7200)
    monkeypatch.setattr(ranks.time, "time", lambda: begun + 7200)
    seen = exported.collect()
    assert seen.get("tandem_job_waiting_seconds", run="r") == pytest.approx(7200, abs=20)
    assert not seen.all("tandem_rank_up")
    assert seen.get("tandem_job_last_progress_timestamp_seconds", run="r") == begun + 7200
    volume.leases.write(job, "runner", "start 0")
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now + 7200 + 30)
    seen = exported.collect()
    assert seen.get("tandem_job_waiting_seconds", run="r") is None
    assert not seen.all("tandem_rank_up"), "the ranks have had 30 s"
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now + 7200 + 61)
    assert exported.collect().by("rank", "tandem_rank_up") == {"0": 0, "1": 0}


def session_job(spool: Spool) -> Job:
    """A running job of a session's run. The run's first request has no result yet."""
    session = spool.sessions.create()
    run = spool.sessions.run_name(session.id, 0)
    add_run(spool, run, session=session.id)
    spool.requests.append(run, 1, StepRequest(learning_rate=1e-4))
    queue_waiting(spool)
    job = spool.queue.claim("runner")
    assert job is not None
    return job


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Sets the collector's clock to 1000 + `seconds`."""
    monkeypatch.setattr(ranks.time, "monotonic", lambda: 1000 + seconds)


def test_a_session_without_requests_is_idle(volume: Spool, monkeypatch) -> None:
    job = session_job(volume)
    run, exported = job.spec.run, exported_jobs(volume, ranks=1)
    at(monkeypatch, 0)

    def idle() -> float | None:
        beat(volume, job, 0)
        return exported.collect().get("tandem_session_idle_seconds", run=run)

    assert idle() == 0
    at(monkeypatch, 3000)
    assert idle() == 0, "the first request is computed for long"
    volume.requests.answer(run, 1, RequestResult(finished=0.0))
    at(monkeypatch, 3002)
    assert idle() == 2
    volume.sessions.beat(volume.runs.get(run).session or "")
    at(monkeypatch, 5000)
    assert idle() == 2000, "the client's heartbeat is no request"
    volume.requests.append(run, 2, StepRequest(learning_rate=1e-4))
    volume.requests.answer(run, 2, RequestResult(finished=0.0))
    at(monkeypatch, 5010)
    assert idle() == 0, "a request came and was answered between two collections"
    volume.requests.append(run, 4, StepRequest(learning_rate=1e-4))
    at(monkeypatch, 5020)
    assert idle() == 0
    at(monkeypatch, 5080)
    assert idle() == 60, "request 4 can't be computed before request 3"


def test_only_a_session_whose_ranks_run_is_idle(volume: Spool, monkeypatch) -> None:
    job = session_job(volume)
    run, exported = job.spec.run, exported_jobs(volume, ranks=1)
    volume.requests.answer(run, 1, RequestResult(finished=0.0))
    submit(volume, "j1")
    volume.queue.claim("runner")
    at(monkeypatch, 0)
    assert exported.collect().by("run", "tandem_session_idle_seconds") == {run: 0}
    volume.leases.write(job, "runner", "waiting: quota", time.time())
    at(monkeypatch, 7200)
    assert not exported.collect().all("tandem_session_idle_seconds")
    volume.leases.write(job, "runner", "start 0")
    at(monkeypatch, 7210)
    seen = exported.collect()
    assert seen.by("run", "tandem_session_idle_seconds") == {run: 10}, "not since before the wait"
    requeue(volume, job)
    assert not exported.collect().all("tandem_session_idle_seconds")


def test_all_running_jobs_are_exported(volume: Spool) -> None:
    add_run(volume, "s")
    for name, run in (("j1", "r"), ("k1", "s")):
        submit(volume, name, run=run)
    first, second = volume.queue.claim("runner"), volume.queue.claim("runner")
    exported = exported_jobs(volume, ranks=1)
    exported.collect()
    beat(volume, first, 0, 3)
    beat(volume, second, 0, 1, uuid="GPU-other")
    step(volume, first, 3)
    seen = exported.collect()
    assert seen.by("run", "tandem_train_step") == {"r": 3, "s": 1}
    assert seen.by("run", "tandem_rank_up") == {"r": 1, "s": 1}
    assert seen.by("run", "tandem_job_info").keys() == {"r", "s"}
    assert seen.by("run", "tandem_train_last_step_timestamp_seconds").keys() == {"r"}
    assert seen.by("uuid", "tandem_torch_memory_step_floor_bytes").keys() == {GPU, "GPU-other"}
    step(volume, second, 1)
    requeue(volume, first)
    seen = exported.collect()
    assert seen.by("run", "tandem_train_step") == {"s": 1}
    assert seen.by("run", "tandem_train_last_step_timestamp_seconds").keys() == {"s"}
    assert seen.get("tandem_train_active") == 1


def test_a_volume_that_goes_and_comes_back(volume: Spool, tmp_path: Path, monkeypatch) -> None:
    """No event is counted twice, and a measurement is exported only while it is true."""
    submit(volume, "j1")
    job = volume.queue.claim("runner")
    beat(volume, job, 0)
    exported = exported_jobs(volume, ranks=1)
    exported.collect()
    step(volume, job, 1)
    assert exported.collect().get("tandem_train_tokens_total") == 640
    volume.root.rename(tmp_path / "gone")
    volume.root.mkdir()  # a mount point without its volume
    seen = exported.collect()
    assert seen.by("collector", "tandem_collector_success") == {"ranks": 0, "jobs": 0}
    assert seen.all("tandem_torch_memory_allocated_bytes")
    now = time.monotonic()
    monkeypatch.setattr(collector.time, "monotonic", lambda: now + 61)
    seen = exported.scrape()
    monkeypatch.undo()
    assert not seen.names & {"tandem_torch_memory_allocated_bytes", "tandem_rank_up"}
    assert seen.get("tandem_train_rank_step", run="r", rank="0") == 0
    assert seen.get("tandem_train_active") == 1  # alerts about a hang need these three metrics
    assert seen.all("tandem_job_info")
    assert seen.get("tandem_train_last_step_timestamp_seconds", run="r") is not None
    assert seen.get("tandem_train_tokens_total") == 640
    volume.root.rmdir()
    (tmp_path / "gone").rename(volume.root)
    commit(volume, job)
    volume.queue.finish(job, succeeded(job))
    seen = exported.collect()
    assert seen.get("tandem_collector_success", collector="jobs") == 1
    assert seen.get("tandem_jobs_finished_total", outcome="succeeded") == 1
    assert seen.get("tandem_train_tokens_total") == 640


def test_events_of_an_attempt_that_was_ended_are_not_counted(volume: Spool) -> None:
    exported = exported_jobs(volume)
    submit(volume, "j")
    exported.collect()
    job = volume.queue.claim("runner")
    Attempt(volume, "j", 1).event("step", step=1, steps=2, metrics=STEP)
    volume.queue.requeue(job, JobError(type="runner_lost", message="gone", retriable=True))
    late = {"attempt": 1, "step": 2, "steps": 2, "metrics": STEP}
    volume.events.append("j", "step", **late)  # as a process that has lost its file lock may append
    volume.queue.claim("runner")
    volume.events.append("j", "step", **late)
    assert exported.collect().get("tandem_train_tokens_total") == 640
    Attempt(volume, "j", 2).event("step", step=1, steps=2, metrics=STEP)
    assert exported.collect().get("tandem_train_tokens_total") == 1280


def test_damaged_jobs_are_left_out_and_the_others_are_counted(volume: Spool, monkeypatch) -> None:
    exported = exported_jobs(volume)
    submit(volume, "j1")
    submit(volume, "j2")
    volume.queue.claim("runner")
    exported.collect()
    (volume.paths.live / "a-broken.json").write_text("{")
    volume.queue.cancel("j2")
    job_path(volume, "j2").write_text("{")
    volume.queue.finish(volume.jobs.get("j1")[1], failed())
    submit(volume, "j3")
    volume.queue.finish(volume.queue.claim("runner"), failed())
    with monkeypatch.context() as patch:
        patch.setattr(Jobs, "get", full_disk)
        assert not exported.works("jobs")
    seen = exported.collect()  # events that could not be read are counted later
    assert seen.get("tandem_collector_success", collector="jobs") == 1
    assert seen.get("tandem_jobs_finished_total", outcome="failed") == 2
    queue = Exported(QueueCollector(opener(volume))).collect()
    assert {key: queue.get("tandem_spool_damaged", kind=key) for key in ("job", "name", "run")} == {
        "job": 1,
        "name": 1,
        "run": 0,
    }


def test_only_jobs_whose_files_have_not_moved_are_remembered_and_a_used_id_counts_again(
    volume: Spool,
) -> None:
    finish = partial(volume.queue.finish, result=failed())
    submit(volume, "before")
    finish(volume.queue.claim("runner"))
    jobs = JobsCollector(opener(volume))
    exported = Exported(jobs)
    exported.collect()
    # The collector follows two jobs while they run, and finds the two others when they have ended.
    for number in range(4):
        submit(volume, f"j{number}")
        claimed = volume.queue.claim("runner")
        if number % 2:
            exported.collect()
        if number == 3:  # a process dies between the terminal event and the job's move
            volume.events.append("j3", "failed", error=failed().error.model_dump())
            exported.collect()
        finish(claimed)
        assert exported.collect().get("tandem_jobs_finished_total", outcome="failed") == number + 1
    exported.collect()
    assert jobs._followed == {}
    prune(volume, Settings(keep_days=1e-9))
    exported.collect()
    assert not any(jobs._listed.values())
    submit(volume, "before")
    finish(volume.queue.claim("runner"))
    assert exported.collect().get("tandem_jobs_finished_total", outcome="failed") == 5


def test_neither_queued_and_finished_jobs_nor_their_names_are_read_again(
    volume: Spool, monkeypatch
) -> None:
    for job_id in ("j1", "j2"):
        submit(volume, job_id)
    volume.queue.finish(volume.queue.claim("runner"), failed())
    made = make_collectors(Settings(root=volume.root, device="cpu"), ("trainer",))
    exported = Exported(next(collector for collector in made if collector.name == "jobs"))
    exported.collect()
    monkeypatch.setattr(Jobs, "locate", None)
    monkeypatch.setattr("tandem.spool.paths._entry", None)
    assert exported.works("jobs")


@pytest.mark.parametrize("error", ["a text", {"type": ["oom"]}, 10**400])
def test_an_event_that_no_program_writes_spoils_no_other_job(volume: Spool, error: object) -> None:
    collector = JobsCollector(opener(volume))
    exported = Exported(collector)
    exported.collect()
    for job_id in ("bad", "good"):
        submit(volume, job_id)
        job = volume.queue.claim("me")
        if job_id == "bad":
            volume.events.append(job_id, "step", metrics={"loss": error, "tokens": error})
            volume.events.append(job_id, "failed", error=error)
        volume.queue.finish(job, failed())
    assert exported.collect().get("tandem_jobs_finished_total", outcome="failed") == 2
    exported.collect()
    assert not collector._followed
