"""Jobs under a real runner whose attempts are Kubernetes Jobs; their pods are real agents."""

import re
import time
from pathlib import Path

import pytest

from executor.kubernetes_stack import KubernetesStack
from rank.jobs import make_model, make_run, submit_sft
from runner.runner_stack import Stack

pytestmark = pytest.mark.timeout(300)
of_pods = pytest.mark.sample(1, of="jobs in pods")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    stack = KubernetesStack(tmp_path_factory.mktemp("cluster"))
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture
def stack(running):
    """A runner that goes from test to test, and a node with room, without jobs."""
    (running.spool.root / "go").unlink(missing_ok=True)
    yield running
    running.nodes.full, running.nodes.lost = "", False
    if running.runner.poll() is not None:
        running.start()
    for key in running.spool.jobs.index.running():
        running.spool.queue.cancel(key.id)
        running.wait(key.id, 60)


def test_a_job_trains_in_the_pods_of_one_job(stack):
    stack.until_logged("runner is up")
    assert stack.jobs() == [], "an idle release has no pod with a GPU"
    job_id, state, job = stack.ended("trains", attempts=1)
    assert (state, job.attempt) == ("succeeded", 1), (job.result, stack.job_log(job_id))
    # A slow answer is asked for again, and the Job is found then.
    made = re.findall(r"(?:created|found) Job (\S+)", stack.job_log(job_id))
    assert len(made) == 1
    released = stack.event(job_id, "released")
    assert sorted(released["hosts"]) == ["0", "1"]
    assert "[rank 1] rank 1 of 2 says hello" in stack.job_log(job_id)
    stack.until_empty()


def test_a_job_is_cancelled_while_its_pods_are_pending(stack):
    stack.nodes.full = "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."
    job_id = stack.submit(stack.run("cancelled"))
    stack.until_phase("waiting: pod ")
    stack.until_phase("12 Insufficient nvidia.com/gpu")
    stack.spool.queue.cancel(job_id)
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("cancelled", 1)
    stack.until_empty()
    stack.nodes.full = ""


@of_pods
def test_an_evicted_pod_is_another_attempt_that_does_not_count(stack):
    job_id = stack.submit(stack.run("evicted"), attempts=1, do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    stack.nodes.evict(message="node-1 is drained")
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    assert stack.counted(job_id) == [("preempted", False)]
    # The pods may be gone before the runner sees them; the Job says it, too.
    why = r"EvictionByEvictionAPI: node-1 is drained|has condition DisruptionTarget"
    assert re.search(why, stack.job_log(job_id))
    stack.until_empty()


@of_pods
def test_a_pod_that_somebody_deletes_does_not_count_the_first_time(stack):
    job_id = stack.submit(stack.run("deleted"), attempts=1, do="wait")
    for attempt in (1, 2):
        stack.until_beating(job_id, attempt, ranks=2)
        stack.nodes.delete_pods()
        stack.until(lambda n=attempt: len(stack.counted(job_id)) == n or n == 2, "its end")
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("failed", 2)
    assert job.result.error.type == "job_deleted"
    assert stack.counted(job_id) == [("job_deleted", False)]
    stack.until_empty()


@of_pods
def test_ranks_that_fail_say_why(stack):
    _, state, job = stack.ended("fails", do="fail", rank=1, attempts=3)
    assert (state, job.attempt) == ("failed", 1)
    assert job.result.error.type == "checkpoint_damaged"
    assert "rank 1: adapter_model.safetensors is truncated" in job.result.error.message
    stack.until_empty()


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_next_runner_goes_on_with_the_attempt(stack, how):
    """Also while the API server is away: nobody starts or ends anything then."""
    job_id = stack.submit(stack.run(how), attempts=1, do="wait_for_go")
    stack.until_beating(job_id, ranks=2)
    (made,) = stack.jobs()
    if how == "killed":
        stack.kill()
    else:
        assert stack.stop() == 0
        assert "leaves the attempt to the next runner" in stack.logged()
    assert stack.jobs()[0]["metadata"]["uid"] == made["metadata"]["uid"]
    stack.forget()
    with stack.api.away():
        stack.start()
        stack.until_logged("trying again until it answers")
        time.sleep(0.5)
        assert stack.spool.jobs.get(job_id)[0] == "running"
    stack.until_logged("adopted")
    (stack.spool.root / "go").touch()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1), job.result
    assert stack.kinds(job_id).count("claimed") == 1
    stack.until_empty()


def test_jobs_of_two_runs_train_at_once_and_are_adopted_by_the_next_runner(stack):
    """A run's second job waits for its first; one job is cancelled, and the others go on."""
    stack.kill()
    stack.environment["TANDEM_PARALLEL_JOBS"] = "2"
    try:
        stack.start()
        runs = [stack.run("left"), stack.run("right")]
        first, second = (stack.submit(run, do="wait_for_go") for run in runs)
        third = stack.submit("left", do="wait_for_go")
        for job_id in (first, second):
            stack.until_beating(job_id, ranks=2)
        made = {job["metadata"]["uid"] for job in stack.jobs()}
        assert len(made) == 2
        stack.kill()
        stack.forget()
        stack.start()
        stack.until(lambda: stack.logged().count("adopted") == 2, "both attempts adopted")
        assert {job["metadata"]["uid"] for job in stack.jobs()} == made
        assert stack.spool.jobs.get(third)[0] == "queued"
        stack.spool.queue.cancel(second)
        assert stack.wait(second)[0] == "cancelled"
        assert stack.spool.jobs.get(first)[0] == "running"
        (stack.spool.root / "go").touch()
        for job_id in (first, third):
            state, job = stack.wait(job_id)
            assert (state, job.attempt) == ("succeeded", 1), job.result
        assert stack.spool.checkpoints.steps("left") == [0, 1, 2]
        stack.until_empty()
    finally:
        del stack.environment["TANDEM_PARALLEL_JOBS"]
        stack.stop()


@of_pods
def test_a_node_that_is_lost_keeps_nobody_waiting(stack):
    """Its pods stay, its ranks go on for a while; they change nothing any more."""
    job_id = stack.submit(stack.run("lost"), attempts=2, stall=5, do="hang", until=1)
    stack.until_beating(job_id, ranks=2)
    stack.nodes.lost = True
    (first,) = stack.jobs()
    stack.until(lambda: stack.spool.jobs.get(job_id)[1].attempt == 2, "the next attempt", 60)
    assert first["metadata"]["name"] in {job["metadata"]["name"] for job in stack.jobs()}
    stack.nodes.lost = False
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    stack.until_empty()


def trained(stack: Stack, model: Path) -> dict[str, str]:
    """sha256 of the files of the checkpoint that an SFT job makes."""
    try:
        make_run(stack.spool, model)
        job_id = submit_sft(stack.spool)
        stack.start()
        state, job = stack.wait(job_id, 240)
        assert state == "succeeded", (job.result, stack.job_log(job_id))
        if isinstance(stack, KubernetesStack):
            stack.until_empty()
        files = stack.spool.checkpoints.verify("r", 1).files
        return {name: entry.sha256 for name, entry in files.items()}
    finally:
        stack.close()


@of_pods
def test_pods_make_the_bytes_of_one_host(tmp_path):
    make_model(tmp_path / "model")
    entry = "tandem.trainer.rank.entry"
    local = trained(Stack(tmp_path / "local", "fork", 2, entry), tmp_path / "model")
    assert "adapter_model.safetensors" in local
    pods = KubernetesStack(tmp_path / "pods", entry=entry)
    assert trained(pods, tmp_path / "model") == local
