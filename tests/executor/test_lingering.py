"""Pods stay after their attempt (TANDEM_LINGER_SECONDS) and serve the next attempt, under a real
runner with real agents."""

import pytest

from executor.kubernetes_stack import KubernetesStack

pytestmark = [pytest.mark.sample(1, of="processes of jobs"), pytest.mark.slow]
SECONDS = 15


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    stack = KubernetesStack(directory, TANDEM_LINGER_SECONDS=str(SECONDS))
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture
def stack(running):
    """A runner that all tests share, without a Job."""
    running.forget()
    yield running
    if running.runner.poll() is not None:
        running.start()
    running.delete_jobs()
    running.until_empty()


def trained(stack: KubernetesStack, run: str, **order: object) -> str:
    """Trains a job of a new run to its end. Returns the name of the Kubernetes Job, which stays."""
    job_id, state, job = stack.ended(run, **order)
    assert (state, job.attempt) == ("succeeded", 1), (job.result, stack.job_log(job_id))
    assert "released" in stack.kinds(job_id)
    (name,) = stack.names()
    assert f"Job {name}" in stack.job_log(job_id)
    return name


def pods(stack: KubernetesStack) -> set[str]:
    return {pod["metadata"]["uid"] for pod in stack.nodes.pods()}


@pytest.mark.sample(2, of="a job that stays")
def test_a_job_that_stays_serves_attempts_of_all_runs_and_goes_after_its_time(stack):
    name = trained(stack, "first")
    made = pods(stack)
    assert len(made) == 2

    # Each pod has an agent and the agent's fork server, but no rank and no parent of ranks.
    stack.until(lambda: len(stack.nodes.left()) == 4, "pods without ranks")
    assert trained(stack, "second") == name
    assert trained(stack, "third") == name
    assert pods(stack) == made
    stack.until_empty()
    assert "deleting a Job whose pods stayed and got no attempt" in stack.logged()


@pytest.mark.sample(2, of="a job that stays")
def test_ranks_that_fail_in_pods_that_stayed_end_the_job(stack):
    name = trained(stack, "good")
    stack.run("bad")
    bad = stack.submit("bad", do="raise", attempts=2, until=1)
    state, job = stack.wait(bad)
    assert (state, job.attempt) == ("succeeded", 2), job.result
    assert stack.counted(bad) == [("rank_crashed", True)]
    assert f"goes to Job {name}" in stack.job_log(bad)
    assert stack.names() != [name]


@pytest.mark.sample(2, of="a job that stays")
@pytest.mark.parametrize("how", ["evicted", "preempted by Kueue", "deleted"])
def test_pods_that_end_while_they_wait_are_no_attempt(stack, how):
    name = trained(stack, f"before-{how[:7]}")
    if how == "evicted":
        stack.nodes.evict()
        stack.until(lambda: stack.failed(name), "the end of the Job")
    elif how == "deleted":
        stack.nodes.delete_pods()
    else:
        stack.nodes.preempt(name)
    assert trained(stack, f"after-{how[:7]}") != name


@pytest.mark.sample(2, of="a job that stays")
def test_the_runner_is_killed_while_a_job_stays_and_the_next_one_finds_it(stack):
    name = trained(stack, "one")
    stack.kill()
    stack.start()
    stack.until_logged("found a Job whose pods may have stayed")
    assert trained(stack, "two") == name
    stack.kill()
    stack.start()
    stack.until_empty()
    assert "deleting a Job that no running job has" not in stack.logged()


@pytest.mark.sample(2, of="a job that stays")
def test_the_runner_is_killed_during_an_attempt_in_pods_that_stayed(stack):
    (stack.spool.root / "go").unlink(missing_ok=True)
    name = trained(stack, "calm")
    job_id = stack.submit(stack.run("killed"), do="wait_for_go", attempts=1)
    stack.until_beating(job_id, ranks=2)
    stack.kill()
    stack.start()
    stack.until_logged("adopted")
    (stack.spool.root / "go").touch()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1), job.result
    assert stack.names() == [name]
