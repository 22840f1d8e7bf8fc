"""A real runner, real agents and a real Slurm of two nodes. Whatever Slurm or a user does to a
Slurm job, and whenever the runner ends, Tandem's job ends exactly once."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.slurm_cluster import NODES, SlurmCluster, slurm_cluster
from executor.slurm_stack import SECRET, SlurmStack
from spool.spool_tools import spool_with_run, start
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.trainer.executor import Ended, Execution, Order, Running, Waiting, slurm
from tandem.trainer.executor.slurm import POLL_SECONDS, SlurmAway, SlurmExecutor
from tandem.trainer.stop import Stop

pytestmark = pytest.mark.sample(1, of="processes of jobs")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def running(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmStack]:
    stack = SlurmStack(cluster, tmp_path_factory.mktemp("slurm"))
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture
def stack(running: SlurmStack, cluster: SlurmCluster) -> Iterator[SlurmStack]:
    """A stack with a runner, idle nodes and no job."""
    if running.runner.poll() is not None:
        running.start()
    running.forget()
    yield running
    for key in running.spool.jobs.index.running():
        running.spool.queue.cancel(key.id)
        running.wait(key.id)
    cluster.clear()


def agents(job_id: str) -> list[bytes]:
    """The environments of the job's agents."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if f"--job={job_id}".encode() in words:
                found.append((process / "environ").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_slurm_job_that_is_cancelled_by_hand_or_preempted_is_submitted_again(
    stack: SlurmStack, cluster: SlurmCluster
) -> None:
    job_id = stack.submit(stack.run("taken"), do="wait", until=2, attempts=1)
    stack.until_beating(job_id, ranks=2)
    environments = agents(job_id)
    assert len(environments) == 2
    assert not any(SECRET.encode() in environment for environment in environments)
    cluster.run("scancel", f"--user={os.getuid()}")
    stack.until_beating(job_id, attempt=2, ranks=2)
    by_hand = stack.spool.jobs.get(job_id)[1].last_error
    assert by_hand is not None
    assert "somebody cancelled Slurm job" in by_hand.message
    assert "on node[0-1]" in by_hand.message
    cluster.submit_urgent()
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.stopped) == ("succeeded", 3, 2)
    assert stack.requeues(job_id) == [("job_deleted", False), ("preempted", False)]
    assert "on node[0-1] was preempted" in job.last_error.message
    states = ["CANCELLED", "COMPLETED", "PREEMPTED"]
    stack.until(
        lambda: sorted(state for name, state in cluster.jobs() if job_id in name) == states,
        "the Slurm jobs' ends",
    )


@pytest.mark.slow
def test_a_job_waits_in_slurms_words_and_is_cancelled_meanwhile(
    stack: SlurmStack, cluster: SlurmCluster
) -> None:
    cluster.update_node(NODES[1], "drain")
    job_id = stack.submit(stack.run("waits"), do="wait")
    stack.until_phase(job_id, "waiting: Slurm: ")
    stack.until_phase(job_id, "DRAINED")
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    assert [state for name, state in cluster.jobs("tandem-") if job_id in name] == ["CANCELLED"]
    assert "hello" not in stack.job_log(job_id)


@pytest.mark.slow
def test_a_slurm_job_without_a_running_job_is_cancelled(
    stack: SlurmStack, cluster: SlurmCluster
) -> None:
    job_id = stack.submit(stack.run("known"), do="wait")
    stack.until_beating(job_id, ranks=2)
    (name,) = [name for name, state in cluster.jobs("tandem-") if state == "RUNNING"]
    assert stack.stop() == 0
    stray = name.replace(job_id, "stray")
    other = "tandem-deadbeef-stray"
    for one in (stray, other):
        cluster.run("sbatch", f"--job-name={one}", "--hold", "--wrap=true", "--output=/dev/null")
    stack.start()
    stack.until(lambda: (stray, "CANCELLED") in cluster.jobs(), "the stray's end")
    assert (other, "PENDING") in cluster.jobs()
    assert (name, "RUNNING") in cluster.jobs()
    stack.until_logged("adopted")


@pytest.mark.slow
def test_the_time_limit_counts_and_a_lost_node_and_preemption_with_grace_do_not(
    cluster: SlurmCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.option.all_cases:
        pytest.skip("runs with --all-cases")
    arguments = "--time=1 --partition=graceful"
    stack = SlurmStack(cluster, tmp_path, TANDEM_SLURM_ARGS=arguments)
    try:
        stack.start()
        job_id = stack.submit(stack.run("graceful"), do="wait", until=3, attempts=2)
        stack.until_beating(job_id, ranks=2)
        cluster.update_node(NODES[1], "down")
        stack.until(lambda: stack.requeues(job_id), "the attempt's end")
        cluster.update_node(NODES[1], "resume")
        stack.until_beating(job_id, attempt=2, ranks=2)
        cluster.submit_urgent()
        state, job = stack.wait(job_id)
        assert (state, job.attempt) == ("succeeded", 4)
        ends = [("preempted", False), ("preempted", False), ("deadline", True)]
        assert stack.requeues(job_id) == ends
        assert "reached Slurm's time limit" in job.last_error.message
    finally:
        stack.close()


# ---- the runner's side, without agents


def executor_of(
    cluster: SlurmCluster, spool: Spool, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> SlurmExecutor:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    settings = Settings(
        root=spool.root, executor="slurm", device="cpu", start_seconds=60, slurm_args=arguments
    )
    return SlurmExecutor(settings, "fake_rank", Stop(), spool)


def order_of(spool: Spool, said: list[str]) -> Order:
    return Order(
        start(spool, "j"), Attempt(spool, "j", 1), lambda: None, said.append, lambda *_: None
    )


def polled(execution: Execution) -> Waiting | Running | Ended:
    """The execution's state after two queries of Slurm."""
    end = time.monotonic() + 2.5 * POLL_SECONDS
    while time.monotonic() < end and not isinstance(execution.poll(), Ended):
        time.sleep(0.1)
    return execution.poll()


@pytest.mark.slow
def test_jobs_of_two_runs_are_in_slurms_queue_at_once_and_adopted(
    stack: SlurmStack, cluster: SlurmCluster
) -> None:
    stack.kill()
    stack.environment["TANDEM_PARALLEL_JOBS"] = "2"
    try:
        stack.start()
        jobs = [stack.submit(stack.run(name), do="wait_for_go") for name in ("left", "right")]
        third = stack.submit("left", do="wait_for_go")

        def living() -> set[str]:
            known = cluster.jobs("tandem-")
            return {name for name, state in known if state in ("PENDING", "RUNNING")}

        stack.until(lambda: len(living()) == 2, "two Slurm jobs")
        made = living()
        stack.kill()
        stack.forget()
        stack.start()
        stack.until(lambda: stack.logged().count("adopted") == 2, "both attempts adopted")
        assert living() == made
        assert stack.spool.jobs.get(third)[0] == "queued"
        (stack.spool.root / "go").touch()
        for job_id in (*jobs, third):
            state, job = stack.wait(job_id)
            assert (state, job.attempt) == ("succeeded", 1), job.result
    finally:
        del stack.environment["TANDEM_PARALLEL_JOBS"]
        stack.stop()


@pytest.mark.slow
def test_a_runner_that_is_killed_after_the_submission_finds_it(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner was killed before it recorded the submission on the volume."""
    spool = spool_with_run(tmp_path)
    first, second = (executor_of(cluster, spool, monkeypatch, "--hold") for _ in range(2))
    said = list[str]()
    order = order_of(spool, said)
    assert not first.adopts(order.files)
    submitted = first.start(order).poll()
    assert isinstance(submitted, Waiting)
    assert "is submitted" in submitted.reason
    assert second.adopts(order.files)
    found = second.start(order)
    assert polled(found) == Waiting("Slurm: JobHeldUser")
    assert [line.split()[0] for line in said] == ["submitted", "found"]
    name = second.batch.name(order.job)
    assert cluster.jobs(name) == [(name, "PENDING")]
    found.stop()
    ended = polled(found)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.type == "job_deleted"
    assert cluster.jobs(name) == [(name, "CANCELLED")]


def test_what_slurm_refuses_is_told_in_its_words(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = spool_with_run(tmp_path)
    executor = executor_of(cluster, spool, monkeypatch, "--partition=no-such")
    ended = executor.start(order_of(spool, [])).poll()
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert (ended.error.type, ended.error.retriable) == ("launch_failed", False)
    assert "invalid partition specified: no-such" in ended.error.message


@pytest.mark.slow
def test_while_slurm_is_away_an_attempt_waits(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = spool_with_run(tmp_path / "spool")
    executor = executor_of(cluster, spool, monkeypatch, "--hold")
    monkeypatch.setitem(executor.slurm._environment, "SLURM_CONF", str(tmp_path / "none"))
    monkeypatch.setattr(slurm, "TIMEOUT_SECONDS", 1.0)
    execution = executor.start(order_of(spool, []))
    away = "Slurm is away: squeue has not answered for 1 s"
    assert execution.poll() == Waiting(away)
    with pytest.raises(SlurmAway, match=away):
        executor.adopts(Attempt(spool, "j", 1))
    executor.prepare()
    execution.kill()
