"""Tandem's jobs under a real runner. Each attempt is a Kubernetes Job, and the Job's pods are real
agents.

Whatever happens to a Job, its pods, its queue, the API server or the runner, the job ends exactly
once. `test_kubernetes.py` tests a missing image, refusals by admission, and another release's
template. `runner/test_runner_lives.py` tests a second runner. `rank/test_hosts.py` tests a cut
cable, and clocks that differ. `spool/test_spool_fence.py`, `agent/test_one_attempt.py` and
`agent/test_hosts_meet.py` test volumes that are slow or gone.
"""

import re
import time
from pathlib import Path

import pytest

from executor.kubernetes_stack import KubernetesStack
from rank.jobs import make_model, make_run, submit_sft
from runner.runner_stack import Stack

pytestmark = [pytest.mark.sample(1, of="processes of jobs"), pytest.mark.slow]
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
    """A runner that all tests share, and a node with free resources. There are no jobs."""
    (running.spool.root / "go").unlink(missing_ok=True)
    yield running
    running.nodes.full, running.nodes.lost, running.nodes.kueue = "", False, False
    running.api.quota.clear()
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
    # The runner repeats a request whose answer is slow, and then finds the Job.
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
@pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", "PreemptionByScheduler"])
def test_an_evicted_pod_is_another_attempt_that_does_not_count(stack, reason):
    job_id = stack.submit(stack.run(reason.lower()), attempts=1, do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    stack.nodes.evict(reason, message="node-1 is drained")
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    assert stack.counted(job_id) == [("preempted", False)]
    # The runner reads the reason from the pods, or from the Job if the pods have already been
    # deleted.
    why = rf"{reason}: node-1 is drained|has condition DisruptionTarget"
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
    """While the API server is away, the new runner neither starts nor ends anything."""
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
    """The second job of a run waits for the run's first job. One job is cancelled, and the others
    go on."""
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
    """The pods on the lost node stay, and their ranks go on for a while. The ranks on the lost node
    change nothing of the job."""
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


@of_pods
def test_kueue_admits_preempts_and_admits_the_next_job(stack):
    """A waiting job shows the reason that Kueue gives, and may wait for hours. An attempt that
    Kueue preempts does not count."""
    stack.nodes.kueue = True
    job_id = stack.submit(stack.run("queued"), attempts=1, do="wait", until=1)
    stack.until_phase("waiting: its Job is suspended; Kueue has not said why")
    assert stack.nodes.pods() == []
    (first,) = stack.names()
    words = "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu"
    stack.nodes.why_not_admitted(first, words)
    stack.until_phase(f"waiting: Kueue: {words}")
    stack.nodes.admit(first)
    stack.until_beating(job_id, ranks=2)
    stack.nodes.preempt(first)
    stack.until(lambda: first not in stack.names(), "the end of the preempted Job")
    # If the preempted Job stayed, Kueue would admit it again with its pods.
    (second,) = stack.until(stack.names, "the Job of the next attempt")
    assert stack.counted(job_id) == [("preempted", False)]
    assert "Kueue: Preempted to accommodate a workload" in stack.job_log(job_id)
    stack.nodes.admit(second)
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    stack.until_empty()


@of_pods
def test_a_job_that_kueue_admits_again_without_a_runner_trains_nothing(stack):
    """Each host has already taken its only ticket for the attempt, so the Job ends, and the next
    runner makes another Job."""
    stack.nodes.kueue = True
    job_id = stack.submit(stack.run("admitted"), attempts=1, do="wait", until=1)
    (first,) = stack.until(stack.names, "the Job")
    stack.nodes.admit(first)
    stack.until_beating(job_id, ranks=2)
    stack.kill()
    stack.nodes.preempt(first)
    stack.until(lambda: not stack.nodes.pods(), "the end of the pods")
    stack.nodes.admit(first)
    stack.until(lambda: stack.failed(first), "the end of the Job")
    stack.start()
    stack.until(lambda: stack.names() not in ([], [first]), "the Job of the next attempt")
    (second,) = stack.names()
    stack.nodes.admit(second)
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    assert stack.counted(job_id) == [("preempted", False)]
    assert stack.job_log(job_id).count("rank 0 of 2 says hello") == 2, "once by each Job"
    stack.until_empty()


@of_pods
def test_a_quota_that_refuses_the_job_is_waited_for_in_its_words(stack):
    stack.api.quota["count/jobs.batch"] = 0
    job_id = stack.submit(stack.run("quota"), attempts=1)
    stack.until_phase("exceeded quota: of-jobs")
    assert stack.jobs() == []
    stack.api.quota.clear()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1), job.result
    stack.until_empty()


@of_pods
def test_while_the_api_server_is_away_ranks_end_well_and_nothing_starts(stack):
    one = stack.submit(stack.run("one"), attempts=1, do="wait_for_go")
    stack.until_beating(one, ranks=2)
    two = stack.submit(stack.run("two"), attempts=1)
    stack.forget()
    with stack.api.away():
        (stack.spool.root / "go").touch()
        state, job = stack.wait(one)
        assert (state, job.attempt) == ("succeeded", 1), job.result
        stack.until_logged("trying again until it answers")
        assert stack.spool.jobs.get(two)[0] == "queued"
    state, job = stack.wait(two)
    assert (state, job.attempt) == ("succeeded", 1), job.result
    stack.until_empty()


@of_pods
def test_a_job_whose_kubernetes_job_went_with_the_runner_is_begun_again(stack):
    job_id = stack.submit(stack.run("went"), attempts=2, do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    stack.kill()
    stack.delete_jobs()
    stack.until_empty()
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    assert stack.counted(job_id) == [("runner_lost", True)]
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


@pytest.mark.sample(1, of="places that train the same bytes")
def test_pods_make_the_bytes_of_one_host(tmp_path):
    make_model(tmp_path / "model")
    entry = "tandem.trainer.rank.entry"
    local = trained(Stack(tmp_path / "local", "fork", 2, entry), tmp_path / "model")
    assert "adapter_model.safetensors" in local
    pods = KubernetesStack(tmp_path / "pods", entry=entry)
    assert trained(pods, tmp_path / "model") == local
