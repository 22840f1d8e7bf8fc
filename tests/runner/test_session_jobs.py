"""A session under the real runner. The session's ranks stay while calls come, and then leave. A
kill of the ranks or the runner, between or during calls, does not change the answers that a client
gets."""

import os
import signal
import time
from pathlib import Path

import pytest

from rank import sessions
from rank.jobs import make_model
from rank.sessions import Client, differing, outcome, random_data
from runner.runner_stack import Stack

pytestmark = [
    pytest.mark.sample(1, of="processes of jobs"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def stack(tmp_path: Path):
    stack = Stack(tmp_path / "spool", "fork", 1, entry="tandem.trainer.rank.entry")
    stack.environment["TANDEM_SESSION_IDLE_SECONDS"] = "3"
    stack.start()
    try:
        yield stack
    finally:
        stack.close()


def answered(stack: Stack, client: Client, seq: int) -> float:
    """Waits until the request has its result. Returns the seconds of the wait."""
    begin = time.monotonic()
    stack.until(
        lambda: stack.spool.requests.result(client.run, seq), f"the result of request {seq}", 200
    )
    return time.monotonic() - begin


def calls(client: Client):
    """A generator that appends one request at each `next`, and yields the request's number. The
    requests are similar to the requests of `sessions.program`."""
    yield client.compute(random_data(1))
    yield client.compute(random_data(2, sampled=True), "ppo")
    yield client.step()
    yield client.save("a")
    yield client.compute(random_data(3))
    yield client.step(weight_decay=0.1)
    yield client.save("b")
    yield client.compute(random_data(4))
    yield client.step()
    yield client.save("c")


def ids(stack: Stack, client: Client) -> list[str]:
    return [job.spec.id for _, job in stack.spool.jobs.list(client.run)]


def test_ranks_stay_while_calls_come_and_leave_when_none_does(stack: Stack, tmp_path: Path):
    model = make_model(tmp_path / "model")
    client = Client(stack.spool, sessions.open_session(stack.spool, model))
    seconds = [answered(stack, client, seq) for seq in calls(client)]
    print(f"the first call {seconds[0]:.2f} s, others {sorted(seconds[1:])}")
    [job_id] = ids(stack, client)  # One job has computed all calls.
    state, job = stack.wait(job_id, 60)
    assert (state, job.attempt) == ("succeeded", 1), stack.job_log(job_id)
    kinds = stack.kinds(job_id)
    assert kinds[:3] == ["claimed", "started", "loaded"]
    assert kinds[-2:] == ["released", "succeeded"]
    assert (kinds.count("step"), kinds.count("checkpoint")) == (3, 3)
    assert stack.spool.checkpoints.steps(client.run) == [0, 1, 2, 3]
    assert job.result is not None
    assert job.result.step == 3
    assert len(stack.children()) == 1  # Only the fork server is left.
    # The next call starts ranks again.
    again = client.compute(random_data(1))
    assert answered(stack, client, again) < 120
    assert len(ids(stack, client)) == 2


def test_kills_between_calls_leave_no_trace(stack: Stack, tmp_path: Path):
    model = make_model(tmp_path / "model")
    one, two = (Client(stack.spool, sessions.open_session(stack.spool, model)) for _ in range(2))
    of_one = []
    for seq in calls(one):
        answered(stack, one, seq)
        of_one.append(seq)
    of_two = []
    for number, seq in enumerate(calls(two)):
        if number % 3 == 1:  # The ranks are killed while the request waits or is computed.
            time.sleep(0.05 * number)
            ranks = [process for process in stack.children() if process.parent != stack.runner.pid]
            for process in ranks:
                os.kill(process.pid, signal.SIGKILL)
        elif number == 5:
            stack.runner.kill()
            stack.runner.wait()
            stack.start()
        answered(stack, two, seq)
        of_two.append(seq)
    assert of_one == of_two
    assert differing(outcome(one, of_one), outcome(two, of_two)) == []
    attempts = [job.attempt for _, job in stack.spool.jobs.list(two.run)]
    assert sum(attempts) > 2
