"""kill -9 of every program at several points of a running stack: every job ends with a reason, nothing is half there.

The bounds asserted here are the ones docs/jobs.md states.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from local_stack import ADMIN_TOKEN, API_KEY, LocalStack, until
from tandem.errors import SpoolUnusable
from tandem.spool.schema import TERMINAL, Event
from tandem.system import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = "faulty"
# Longest a job of this size may take with one crash in it, and until its step is served, in seconds.
JOB_BOUND, SERVED_BOUND = 180, 180
STALL_SECONDS = 20


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    # Long enough for a vLLM that is merely slow here, short enough to wait for; its requests may run as long.
    settings = {"TANDEM_VLLM_STALL_SECONDS": f"{STALL_SECONDS}", "TANDEM_MAX_MODEL_LEN": "4096"}
    with LocalStack(tmp_path_factory.mktemp("spool"), **settings) as stack:
        stack.client.create_run(RUN, lora={"rank": 4, "alpha": 8})
        stack.client.wait_served(RUN, 0, timeout=SERVED_BOUND)
        yield stack


def submit(stack, epochs=25):
    examples = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q in ("Is it?", "Was it?")
        for a in ("yes", "no")
    ]
    job = stack.client.train_sft(
        RUN,
        examples=examples,
        packing={"sequence_length": 128},
        optimizer={"learning_rate": 1e-3, "epochs": epochs},
        max_attempts=3,
    )
    return job.spec.id


def seen(stack, job, type_, count=1) -> list[Event]:
    """The job's events once `count` of `type_` are among them, or once the job has ended."""

    def check():
        events = stack.spool.events.read(job)
        enough = sum(e.type == type_ for e in events) >= count
        return events if enough or any(e.type in TERMINAL for e in events) else None

    return until(f"{count} {type_} events of job {job}", check, JOB_BOUND, poll=0.01)


def ended(stack, job):
    """Wait for the job's end and check everything that must hold after any end."""

    def check():
        state, record = stack.spool.jobs.get(job)
        return (state, record) if state in TERMINAL else None

    state, record = until(f"the end of job {job}", check, JOB_BOUND)
    events = stack.spool.events.read(job)
    assert [e.seq for e in events] == list(range(len(events)))
    assert sum(e.type in TERMINAL for e in events) == 1
    assert record.result is not None
    assert record.result.state == state
    spool = stack.spool
    steps = spool.checkpoints.steps(RUN)
    assert steps == list(range(len(steps)))
    for step in steps:
        spool.checkpoints.verify(RUN, step)
    if state == "succeeded":
        assert record.result.step == record.spec.base_step + 1 == steps[-1]
        assert spool.checkpoints.manifest(RUN, steps[-1]).job == job
    else:
        assert record.result.error is not None
        assert record.result.error.type
        assert record.result.error.message
        assert steps[-1] == record.spec.base_step
    assert not spool.paths.data_dir(job).exists()
    pids = {p for e in events if e.type == "started" for p in e.data["pids"]}
    until("no rank is left", lambda: not any(alive(pid, job) for pid in pids), 30)
    return state, record


def alive(pid: int, job: str) -> bool:
    """Whether `pid` still is a process of this job's ranks, not some later process with its number."""
    try:
        process = Path(f"/proc/{pid}")
        running = (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        return running and "tandem" in (process / "cmdline").read_text()
    except OSError:
        return False


def served(stack):
    newest = stack.spool.checkpoints.newest(RUN)

    def check():
        now = stack.spool.served.get(RUN)
        return now if now is not None and now.step == newest else None

    now = until(f"{RUN}@{newest} is served", check, SERVED_BOUND)
    assert now.mean_abs_logprob_error <= (0.02 if stack.environment["TANDEM_DEVICE"] == "cpu" else 0.05)
    return now


def sample(stack, model):
    def check():
        try:
            response = httpx.post(
                f"{stack.inference_url}/v1/chat/completions",
                headers={"Authorization": f"Bearer {API_KEY}"},
                json={"model": model, "messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 4},
                timeout=60,
            )
        except httpx.TransportError:
            return None
        return response.json() if response.status_code == 200 else None

    return until(f"{model} answers", check, SERVED_BOUND, poll=0.5)


@pytest.mark.parametrize(
    ("event", "count"), [("started", 1), ("loaded", 1), ("step", 1), ("step", 10), ("checkpoint", 1)]
)
def test_kill_a_rank(stack, event, count):
    job = submit(stack)
    events = seen(stack, job, event, count)
    for pid in next(e for e in reversed(events) if e.type == "started").data["pids"]:
        if alive(pid, job):
            os.kill(pid, signal.SIGKILL)
    state, record = ended(stack, job)
    assert state == "succeeded", record.result.error
    served(stack)


@pytest.mark.parametrize(("event", "count"), [("claimed", 1), ("step", 2), ("checkpoint", 1)])
def test_kill_the_runner(stack, event, count):
    job = submit(stack)
    seen(stack, job, event, count)
    stack.kill("runner")
    state, record = ended(stack, job)
    assert state == "succeeded", record.result.error
    assert record.attempt <= 2
    served(stack)


def test_kill_the_fork_server(stack):
    job = submit(stack)
    seen(stack, job, "step", 2)
    stack.kill("forkserver")
    state, record = ended(stack, job)
    assert state == "succeeded", record.result.error
    served(stack)


@pytest.mark.parametrize("delay", [0.0, 0.2, 1.0])
def test_kill_the_publisher(stack, delay):
    job = submit(stack, epochs=2)
    seen(stack, job, "checkpoint")
    time.sleep(delay)
    stack.kill("publisher")
    assert ended(stack, job)[0] == "succeeded"
    sample(stack, served(stack).model)


@pytest.mark.parametrize("event", ["step", "checkpoint"])
def test_kill_vllm(stack, event):
    job = submit(stack)
    seen(stack, job, event)
    stack.kill("vllm")
    assert ended(stack, job)[0] == "succeeded", "training doesn't need vLLM"
    # served.json must not claim what the new vLLM has not been given; what it claims in the end must be true.
    sample(stack, served(stack).model)


def test_kill_vllm_between_jobs_and_the_old_step_comes_back(stack):
    model = served(stack).model
    stack.kill("vllm")
    until("vLLM is gone", lambda: not stack.answers(f"{stack.inference_url}/health"), 30)
    sample(stack, model)


def test_a_stopped_engine_is_noticed_although_health_answers(stack):
    """In the middle of a request: vLLM is killed and started again, and the step comes back."""
    model = served(stack).model
    sample(stack, model)
    (server,) = stack.pids("vllm")
    engine = until("vLLM's engine", lambda: engines(server), 10)[0]
    noticed = "has stalled: 1 requests wait, and no token came"
    before = log(stack).count(noticed)
    threading.Thread(target=ask, args=(stack,), daemon=True).start()
    until("the request runs", lambda: 'running{engine="0",model_name="base"} 1.0' in metrics(stack), 30)
    os.kill(engine, signal.SIGSTOP)
    assert stack.answers(f"{stack.inference_url}/health")
    until("the stall is noticed", lambda: log(stack).count(noticed) > before, STALL_SECONDS + 40)
    until("another vLLM", lambda: stack.pids("vllm") not in ([], [server]), 30)
    assert processes.read(engine) is None
    stack.wait_ready()
    assert ask(stack, tokens=2) == 200
    sample(stack, served(stack).model)


def engines(server: int) -> list[int]:
    found = [process.pid for process in processes.descendants(server)]
    return [pid for pid in found if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def metrics(stack: LocalStack) -> str:
    return httpx.get(f"{stack.inference_url}/metrics", timeout=5).text


def log(stack: LocalStack) -> str:
    return (stack.root / "up.log").read_text(errors="replace")


def ask(stack: LocalStack, tokens: int = 4000) -> int | None:
    body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    try:
        return httpx.post(f"{stack.inference_url}/v1/completions", json=body, headers=headers, timeout=300).status_code
    except httpx.HTTPError:
        return None


def test_kill_the_controller_under_a_follower(stack):
    """The client's event stream goes on where it was, and sees every event once."""
    job = submit(stack)
    got: list[Event] = []
    follower = threading.Thread(target=lambda: got.extend(stack.client.events(job)), daemon=True)
    follower.start()
    seen(stack, job, "step", 3)
    stack.kill("controller")
    state, _ = ended(stack, job)
    assert state == "succeeded"
    follower.join(timeout=60)
    assert not follower.is_alive()
    assert [e.seq for e in got if e.type != "served"] == [
        e.seq for e in stack.spool.events.read(job) if e.type != "served"
    ]


def test_kill_the_controller_under_a_submission(stack):
    """A client that retries its submission after the controller died has submitted one job."""
    before = len(stack.spool.jobs.list(run=RUN))
    killer = threading.Timer(0.02, lambda: stack.kill("controller"))
    killer.start()
    job = submit(stack, epochs=1)
    killer.join()
    assert ended(stack, job)[0] == "succeeded"
    assert len(stack.spool.jobs.list(run=RUN)) == before + 1


def test_admin_routes_stayed_closed_and_the_run_goes_on(stack):
    response = httpx.post(f"{stack.inference_url}/v1/load_lora_adapter", json={}, timeout=10)
    assert response.status_code == 401
    assert ended(stack, submit(stack, epochs=1))[0] == "succeeded"
    served(stack)
    text = b"".join(p.read_bytes() for p in (stack.root / "jobs").rglob("*") if p.is_file())
    assert ADMIN_TOKEN.encode() not in text
    assert API_KEY.encode() not in text


def test_a_second_stack_on_the_same_spool_is_refused(stack):
    with pytest.raises(SpoolUnusable, match="runner"), stack.spool.runner_lock("second"):
        pass
