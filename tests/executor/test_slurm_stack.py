"""A real runner, real agents and a real Slurm of two nodes: whatever Slurm, somebody or the
runner's own end does to a Slurm job, the job has one end."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.agent_stack import AgentStack
from executor.slurm_cluster import NODES, SlurmCluster, slurm_cluster
from rank import jobs
from tandem.trainer.launch import DEFAULT_ENTRY

SECRET = "not-for-the-agents"


class SlurmStack(AgentStack):
    def __init__(self, cluster: SlurmCluster, root: Path, **more: str) -> None:
        variables = {"TANDEM_EXECUTOR": "slurm", "SLURM_CONF": str(cluster.conf)}
        super().__init__(root, **variables, **more)
        self.environment["TANDEM_ADMIN_TOKEN"] = SECRET

    def phase(self, job_id: str) -> str:
        lease = self.spool.leases.get(job_id)
        return "" if lease is None else lease.phase

    def until_phase(self, job_id: str, words: str) -> None:
        self.until(lambda: words in self.phase(job_id), f"phase {words!r}")

    def requeues(self, job_id: str) -> list[tuple[Any, bool]]:
        """(type of the error, whether the attempt counts) of each attempt that was requeued."""
        events = self.spool.events.read(job_id)
        return [
            (event.data["error"]["type"], event.data["counts"])
            for event in events
            if event.type == "requeued"
        ]


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
    """With a runner, idle nodes and no job."""
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
            if b"rank-agent" in words and b"srun" not in words and job_id.encode() in words:
                found.append((process / "environ").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_two_nodes_train_what_one_host_trains_while_runners_are_killed(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    model = jobs.make_model(tmp_path / "model")
    sizes = jobs.TOPOLOGIES["dp"].variables()
    stack = SlurmStack(cluster, tmp_path / "spool", entry=DEFAULT_ENTRY, **sizes)
    try:
        for run in ("one", "two"):
            jobs.make_run(stack.spool, model, run)
        jobs.submit_sft(stack.spool, "one", "one", epochs=2)
        alone, _ = jobs.run_two_ranks(stack.spool, {"one": "dp"})["one"]
        jobs.submit_sft(stack.spool, "two", "two", epochs=2)
        stack.start()
        stack.until(lambda: cluster.jobs("tandem-"), "the Slurm job")
        stack.kill()
        stack.start()
        stack.until_beating("two", ranks=2)
        stack.kill()
        stack.start()
        state, job = stack.wait("two")
        assert (state, job.attempt) == ("succeeded", 1), stack.job_log("two")
        assert stack.stop() == 0
        assert jobs.same_bytes(alone, stack.spool.checkpoints.path("two", 1))
        kinds = stack.kinds("two")
        assert [kinds.count(kind) for kind in ("claimed", "succeeded", "released")] == [1, 1, 1]
        assert stack.event("two", "released")["hosts"].keys() == {"0", "1"}
        assert len(cluster.jobs("tandem-")) == 1
    finally:
        stack.close()


@pytest.mark.slow
def test_a_slurm_job_that_somebody_cancels_is_submitted_again(
    stack: SlurmStack, cluster: SlurmCluster
) -> None:
    job_id = stack.submit(stack.run("cancelled-by-hand"), do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    environments = agents(job_id)
    assert len(environments) == 2
    assert not any(SECRET.encode() in environment for environment in environments)
    cluster.run("scancel", f"--user={os.getuid()}")
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2)
    assert stack.requeues(job_id) == [("job_deleted", False)]
    assert "somebody cancelled Slurm job" in job.last_error.message
    assert "on node[0-1]" in job.last_error.message


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
    stack.until(lambda: cluster.jobs("tandem-")[-1][1] == "CANCELLED", "the Slurm job's end")
    assert "hello" not in stack.job_log(job_id)


@pytest.mark.slow
def test_jobs_that_lose_a_node_or_are_preempted_do_not_count(
    stack: SlurmStack, cluster: SlurmCluster
) -> None:
    job_id = stack.submit(stack.run("node"), do="wait", until=2, attempts=1)
    stack.until_beating(job_id, ranks=2)
    cluster.update_node(NODES[1], "down")
    stack.until(lambda: stack.requeues(job_id), "the attempt's end")
    cluster.update_node(NODES[1], "resume")
    stack.until_beating(job_id, attempt=2, ranks=2)
    script = ["--wrap=sleep 1", "--output=/dev/null"]
    cluster.run("sbatch", "--partition=urgent", "--job-name=urgent", *script)
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.stopped) == ("succeeded", 3, 2)
    assert stack.requeues(job_id) == [("preempted", False)] * 2
    assert "was preempted" in job.last_error.message


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
def test_the_time_limit_and_preemption_with_a_grace_time(
    cluster: SlurmCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.option.all_cases:
        pytest.skip("runs with --all-cases")
    arguments = "--time=1 --partition=graceful"
    stack = SlurmStack(cluster, tmp_path, TANDEM_SLURM_ARGS=arguments)
    try:
        stack.start()
        job_id = stack.submit(stack.run("graceful"), do="wait", until=2, attempts=2)
        stack.until_beating(job_id, ranks=2)
        script = ["--wrap=sleep 1", "--output=/dev/null"]
        cluster.run("sbatch", "--partition=urgent", "--job-name=urgent", *script)
        stack.until(lambda: stack.requeues(job_id), "the attempt's end")
        begin = time.monotonic()
        state, job = stack.wait(job_id)
        assert time.monotonic() - begin < 120
        assert (state, job.attempt) == ("succeeded", 3)
        assert stack.requeues(job_id) == [("preempted", False), ("deadline", True)]
        assert "reached Slurm's time limit" in job.last_error.message
    finally:
        stack.close()
