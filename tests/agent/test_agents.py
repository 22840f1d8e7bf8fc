"""Agents of two hosts under a real runner, with ranks that misbehave on demand. The job ends
exactly once, whichever process is killed or frozen. An attempt that has ended no longer changes the
job."""

import signal
import time
from collections.abc import Iterator

import pytest

from agent.agent_stack import AgentStack
from tandem.system import processes
from tandem.trainer.agent.hosts import DONE, FENCED
from waiting import alive

ORPHAN_SECONDS = 12
KILLS = {False: 3, True: 100}
"""The number of the runner's deaths in one attempt, without and with --all-cases."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentStack]:
    stack = AgentStack(
        tmp_path_factory.mktemp("hosts"),
        TANDEM_LEASE_SECONDS="4",
        TANDEM_ORPHAN_SECONDS=str(ORPHAN_SECONDS),
        TANDEM_START_SECONDS="60",
    )
    try:
        stack.start_agents()
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture
def stack(running: AgentStack) -> Iterator[AgentStack]:
    """A stack with a runner, an agent on each host, and no job."""
    (running.spool.root / "go").unlink(missing_ok=True)
    if running.runner.poll() is not None:
        running.start()
    for host, agent in running.agents.items():
        if agent.poll() is not None:
            running.agents[host] = running.start_agent(host)
    running.forget()
    yield running
    for key in running.spool.jobs.index.running():
        running.spool.queue.cancel(key.id)
        running.wait(key.id)


def ranks_of(stack: AgentStack, host: int) -> list[int]:
    """Pids of the living processes below the children of a host's agent. The children themselves
    are left out, because they stay between attempts."""
    agent = stack.agents[host].pid
    found = processes.descendants(agent)
    return [process.pid for process in found if process.parent != agent and not process.zombie]


@pytest.mark.sample(1, of="hosts and agents that fail")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_notice_neither_killed_runners_nor_a_second_agent(
    stack: AgentStack, request: pytest.FixtureRequest
) -> None:
    run = stack.run("adopted")
    job_id = stack.submit(run, do="wait_for_go", meet=True, deadline=3600)
    stack.until_beating(job_id, ranks=2)
    ranks = [ranks_of(stack, host) for host in range(2)]
    assert all(len(pids) >= 2 for pids in ranks)
    for number in range(KILLS[request.config.option.all_cases]):
        time.sleep(number % 10 / 10)
        stack.kill()
        stack.start()
        stack.until_logged("adopted")
        stack.forget()
        lease = stack.spool.leases.get(job_id)
        stack.until(lambda old=lease: stack.spool.leases.get(job_id) != old, "a new lease")
    second = stack.start_agent(1, "--job", job_id, "--attempt", "1")
    late = stack.start_agent(1, "--job", job_id, "--attempt", "2")
    assert (second.wait(60), late.wait(60)) == (FENCED, FENCED)
    assert [ranks_of(stack, host) for host in range(2)] == ranks
    (stack.spool.root / "go").touch()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1)
    kinds = stack.kinds(job_id)
    assert stack.job_log(job_id).count("rank 0 of 2 says hello") == 1
    assert kinds.count("claimed") == kinds.count("succeeded") == kinds.count("released") == 1


@pytest.mark.sample(1, of="hosts and agents that fail")
@pytest.mark.slow
def test_a_host_that_is_killed_is_named_and_the_next_attempt_succeeds(stack: AgentStack) -> None:
    job_id = stack.submit(stack.run("killed"), do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    stack.signal_host(1, signal.SIGKILL)
    killed = time.monotonic()
    stack.until(lambda: stack.spool.jobs.get(job_id)[1].last_error, "the attempt's end")
    assert time.monotonic() - killed < 30

    def waits() -> bool:
        lease = stack.spool.leases.get(job_id)
        return lease is not None and lease.phase == "waiting: host 1 of 2 has not arrived"

    stack.until(waits, "the missing host's name")
    stack.agents[1] = stack.start_agent(1)
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "host_lost")
    assert "host 1 (" in job.last_error.message
    assert "host 0 (" not in job.last_error.message


@pytest.mark.sample(1, of="hosts and agents that fail")
@pytest.mark.slow
def test_a_host_that_is_frozen_before_its_commit_changes_nothing_when_it_thaws(
    stack: AgentStack,
) -> None:
    """Host 0's processes are stopped after rank 0 has staged the checkpoint, and before rank 0
    renames the checkpoint."""
    job_id = stack.submit(stack.run("zombie"), do="freeze_before_commit", rank=0, until=1)
    stack.until((stack.spool.root / "frozen").exists, "rank 0 before its rename")
    stack.signal_host(0, signal.SIGSTOP)
    frozen = ranks_of(stack, 0)
    zombie, stack.agents[0] = stack.agents[0], stack.start_agent(0)
    try:
        state, job = stack.wait(job_id)
        assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "host_lost")
        events = stack.spool.events.read(job_id)
    finally:
        agent = processes.read_process(zombie.pid)
        for process in [agent, *processes.descendants(zombie.pid)]:
            processes.send(process, signal.SIGCONT)
    stack.until(lambda: not any(map(alive, frozen)), "the end of the zombies")
    zombie.terminate()
    assert zombie.wait(30) == DONE  # an agent with `--follow` ends with the status DONE
    made = stack.spool.checkpoints.path("zombie", 1)
    assert (made / "weights").read_text() == f"{job_id} 2"
    assert stack.spool.checkpoints.steps("zombie") == [0, 1]
    assert stack.spool.events.read(job_id) == events


@pytest.mark.sample(1, of="hosts and agents that fail")
@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_ends_the_ranks_of_the_other_host(
    stack: AgentStack,
) -> None:
    job_id = stack.submit(stack.run("dies"), do="die", rank=1, attempts=1)
    state, job = stack.wait(job_id, 60)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert "rank 1 ended with signal SIGKILL" in job.result.error.message
    assert "[host 1]" in stack.job_log(job_id)
    assert ranks_of(stack, 0) == []


@pytest.mark.slow
def test_a_job_is_cancelled_on_all_hosts(stack: AgentStack) -> None:
    job_id = stack.submit(stack.run("cancelled"), do="wait")
    stack.until_beating(job_id, ranks=2)
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    assert [ranks_of(stack, host) for host in range(2)] == [[], []]


@pytest.mark.slow
def test_ranks_without_a_runner_end_by_themselves(
    stack: AgentStack, request: pytest.FixtureRequest
) -> None:
    """Ranks end by themselves after their runner has died. A later runner puts the job back into
    the queue."""
    if not request.config.option.all_cases:
        pytest.skip("runs with --all-cases; test_one_attempt.py has the agent's part")
    job_id = stack.submit(stack.run("orphans"), do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    stack.kill()
    ranks = [pid for host in range(2) for pid in ranks_of(stack, host)]
    begin = time.monotonic()
    stack.until(lambda: not any(map(alive, ranks)), "the ranks' end")
    assert time.monotonic() - begin < ORPHAN_SECONDS + 10
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "runner_lost")


@pytest.mark.slow
def test_a_stopped_host_does_not_count_and_one_with_other_threads_is_refused(
    stack: AgentStack,
) -> None:
    job_id = stack.submit(stack.run("stopped"), do="wait", attempts=1)
    stack.until_beating(job_id, ranks=2)
    stack.agents[1].terminate()
    assert stack.agents[1].wait(40) == DONE  # an agent with `--follow` ends with the status DONE
    stack.agents[1] = stack.start_agent(1, OMP_NUM_THREADS="2")
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.stopped) == ("failed", 2, 1)
    stopped, refused = job.last_error, job.result.error
    assert (stopped.type, refused.type) == ("preempted", "hosts_differ")
    assert "host 1 (" in stopped.message
    assert "host 0 (" in refused.message
    assert "host 1 (" in refused.message
    assert "OMP_NUM_THREADS=1 and 2" in refused.message
    # only the first attempt's ranks have said hello
    assert stack.job_log(job_id).count("says hello") == 2
