"""The tests run `make demo`, and kill one program of the demo's stack after another. Every job ends
as docs/jobs.md says.

All tests share one stack, and each test continues from the state that the test before it left. A
start of vLLM takes most of a minute, so the tests kill vLLM only twice.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import demo
import httpx
import numpy as np
import pytest

from free_ports import free_ports
from listening import LOOPBACK, watched
from local_stack import DEVICES, LocalStack, seen, succeeded, train
from tandem.system import processes
from waiting import answers, until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
RUN = "faulty"
CPU = DEVICES["TANDEM_DEVICE"] == "cpu"
SERVED_BOUND = 180
"""The longest time until a step is served, in seconds."""
SETTINGS = {
    **DEVICES,
    # If a process computes with two threads before it forks, its children wait for a thread that
    # does not exist.
    "OMP_NUM_THREADS": "2",
    "TANDEM_MAX_MODEL_LEN": "4096",  # requests of this length run long enough to be stopped
    "TANDEM_VLLM_STALL_SECONDS": "20",
    "TANDEM_KEEP_SERVED": "30",  # so that every step that survived a fault is verified
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture(scope="module")
def stack(out: Path) -> Iterator[LocalStack]:
    """The stack on which the demo has learned. The stack runs on after the demo's end."""
    stacks: list[LocalStack] = []

    @contextmanager
    def lasting(root: Path, environment: dict[str, str]) -> Iterator[object]:
        variables = {
            name: value for name, value in environment.items() if name.startswith("TANDEM_")
        }
        stack = LocalStack(root, **variables | SETTINGS)
        stack.process = running.enter_context(start(root, stack.environment))
        stacks.append(stack)
        yield stack.process

    controller, inference = map(str, free_ports(2))
    command = [
        "demo.py",
        "--model",
        "tiny",
        "--out",
        str(out),
        "--controller-port",
        controller,
        "--inference-port",
        inference,
    ]
    start = demo.stack
    with ExitStack() as running:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", command),
            mock.patch.object(demo, "stack", lasting),
        ):
            demo.main()
        (stack,) = stacks
        stack.client.create_run(RUN, lora={"rank": 4, "alpha": 8})
        stack.client.wait_served(RUN, 0, timeout=SERVED_BOUND)
        yield stack


def test_the_demo_learns(stack: LocalStack, out: Path) -> None:
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == 200
    assert abs(report["sft_reward"] - 0.75) <= 0.05
    assert report["rl_reward"] >= 0.95
    rewards = [row["reward"] for row in report["steps"]]
    assert rewards[-1] > rewards[0] + 0.1
    assert (out / "reward.png").stat().st_size > 10_000
    # Sampler and trainer are two programs that compute the same log-probs.
    assert max(row["metrics"]["kl_sampler"] for row in report["steps"]) < 1e-3


def test_vllm_serves_the_demos_steps_exactly(stack: LocalStack) -> None:
    """Trainer and vLLM compute in float32, so the error is far below the tolerance, although the
    adapters changed the log-probs a lot."""
    moved = []
    for step in stack.spool.checkpoints.steps(demo.RUN)[1:]:
        manifest = stack.spool.checkpoints.manifest(demo.RUN, step)
        (event,) = (e for e in stack.spool.events.read(str(manifest.job)) if e.type == "served")
        assert event.data["model"] == f"{demo.RUN}@{step}"
        assert event.data["mean_abs_logprob_error"] < (1e-4 if CPU else 0.05)
        now, base = (
            np.concatenate(rows) for rows in (manifest.probe.logprobs, manifest.probe.base)
        )
        moved.append(np.abs(now - base).mean())
    assert min(moved) > 0.5, "adapters that change little prove little"


def submit(stack: LocalStack, epochs: int = 25) -> str:
    return train(stack.client, RUN, epochs, learning_rate=1e-3, max_attempts=3)


def succeeds(stack: LocalStack, job: str) -> int:
    """Wait for the job's success, and check the conditions that hold after each job's end. Returns
    the number of attempts."""
    status, events = succeeded(stack.client, job)
    steps = stack.spool.checkpoints.steps(RUN)
    assert steps == list(range(len(steps)))
    for step in steps:
        stack.spool.checkpoints.verify(RUN, step)
    assert stack.spool.checkpoints.manifest(RUN, status.step).job == job
    assert not stack.spool.paths.data_dir(job).exists()
    pids = {p for e in events if e.type == "started" for p in e.data["pids"]}
    until("no rank is left", lambda: not any(is_rank(pid) for pid in pids))
    return status.attempt


def is_rank(pid: int) -> bool:
    """Whether `pid` is a living process of Tandem, not a later process with the same pid."""
    process = processes.read_process(pid)
    try:
        return (
            process is not None
            and not process.zombie
            and "tandem" in Path(f"/proc/{pid}/cmdline").read_text()
        )
    except OSError:
        return False


def serves_all_steps(stack: LocalStack) -> None:
    """vLLM serves every step of the run, every step is verified, and vLLM answers with the oldest
    and the newest step."""
    steps = stack.spool.checkpoints.steps(RUN)
    stack.client.wait_served(RUN, steps[-1], timeout=SERVED_BOUND)
    models = {f"{RUN}@{step}" for step in steps}
    until("every step is loaded", lambda: models <= listed(stack))
    for step in steps[1:]:
        job = str(stack.spool.checkpoints.manifest(RUN, step).job)
        until(
            f"step {step} is verified",
            lambda j=job: any(e.type == "served" for e in stack.spool.events.read(j)),
        )
    record = stack.spool.served.get(RUN)
    assert (record.step, record.refused_step) == (steps[-1], None)
    assert record.mean_abs_logprob_error <= (0.02 if CPU else 0.05)
    for step in (steps[0], steps[-1]):
        assert ask(stack, f"{RUN}@{step}") == 200


def listed(stack: LocalStack) -> set[str]:
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    answer = httpx.get(
        f"{stack.inference_url}/v1/models", headers=headers, timeout=60
    ).raise_for_status()
    return {model["id"] for model in answer.json()["data"]}


def ask(stack: LocalStack, model: str = "base", tokens: int = 4) -> int | None:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    try:
        return httpx.post(
            f"{stack.inference_url}/v1/completions", json=body, headers=headers, timeout=300
        ).status_code
    except httpx.HTTPError:
        return None


def engine_of(server: int) -> int:
    """The pid of vLLM's engine."""
    pids = [process.pid for process in processes.descendants(server)]
    return next(pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.sample(1)
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_kill_the_publisher(stack: LocalStack, delay: float) -> None:
    job = submit(stack, epochs=2)
    seen(stack.client, job, "checkpoint")
    time.sleep(delay)
    stack.kill("publisher")
    succeeds(stack, job)
    serves_all_steps(stack)


def kill(stack: LocalStack, program: str, job: str) -> None:
    if program != "rank":
        stack.kill(program)
        return
    started = next(e for e in reversed(stack.spool.events.read(job)) if e.type == "started")
    for pid in filter(is_rank, started.data["pids"]):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.sample(1, of="ends of vLLM")
def test_an_engine_that_stops_is_noticed_while_the_trainers_programs_die(stack: LocalStack) -> None:
    """vLLM's engine stops in the middle of a request. The next vLLM serves all steps. `tests/soak`
    kills at many more moments."""
    (server,) = stack.pids("vllm")
    engine = engine_of(server)
    threading.Thread(target=ask, args=(stack, "base", 4000), daemon=True).start()
    metrics = f"{stack.inference_url}/metrics"
    running = 'running{engine="0",model_name="base"} 1.0'
    until("the request runs", lambda: running in httpx.get(metrics, timeout=5).text)
    os.kill(engine, signal.SIGSTOP)
    assert answers(f"{stack.inference_url}/health")
    for program, event in (("rank", "step"), ("rank", "checkpoint"), ("runner", "step")):
        job = submit(stack)
        seen(stack.client, job, event)
        kill(stack, program, job)
        assert succeeds(stack, job) <= 2
    noticed = "has stalled: 1 requests wait, and no token came"
    until(
        "the stall is noticed",
        lambda: noticed in (stack.root / "up.log").read_text(errors="replace"),
    )
    until("another vLLM", lambda: stack.pids("vllm") not in ([], [server]))
    until("the engine ends with its server", lambda: processes.read_process(engine) is None)
    stack.wait_ready()
    serves_all_steps(stack)


@pytest.mark.sample(1, of="ends of vLLM")
def test_vllm_dies_while_it_loads_a_checkpoint(stack: LocalStack) -> None:
    """When vLLM dies, the sessions of the rollout door end too."""
    headers = {"Authorization": f"Bearer {stack.api_key}", "X-Session-ID": "before"}
    door, reward = f"{stack.inference_url}/rollout", {"reward": 1.0}
    asked = {"model": "base", "messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 2}
    httpx.post(
        f"{door}/v1/chat/completions", json=asked, headers=headers, timeout=60
    ).raise_for_status()
    finish = f"{door}/sessions/before/finish"
    kept = httpx.post(finish, json=reward, headers=headers)
    assert len(kept.raise_for_status().json()["turns"]) == 1
    engine = engine_of(stack.pids("vllm")[0])
    job = submit(stack)
    seen(stack.client, job, "checkpoint")
    stack.kill("vllm")
    until("the engine ends with its server", lambda: processes.read_process(engine) is None)
    succeeds(stack, job)
    stack.wait_ready()
    gone = httpx.post(finish, json=reward, headers=headers)
    assert (gone.status_code, "vLLM has started again" in gone.text) == (410, True)
    serves_all_steps(stack)


def test_no_program_listens_for_strangers(stack: LocalStack) -> None:
    """This stack uses adapters. `test_merged_stack.py` tests the other transports, and
    `test_real_ranks.py` the other launchers."""
    with watched(stack.process.pid) as listeners:
        succeeds(stack, submit(stack))
    assert listeners
    assert set(listeners) <= LOOPBACK, listeners


def test_no_secret_is_on_the_spool(stack: LocalStack) -> None:
    text = b"".join(p.read_bytes() for p in (stack.root / "jobs").rglob("*") if p.is_file())
    for secret in ("TANDEM_ADMIN_TOKEN", "TANDEM_API_KEY"):
        assert stack.environment[secret].encode() not in text
