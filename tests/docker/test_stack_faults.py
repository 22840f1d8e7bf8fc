"""Container faults and their consequences, as docs/jobs.md and docs/operations.md describe them.

`tests/stack/test_stack.py` kills single programs. The tests use the stack that `test_running_stack`
left. Each test continues from the state that the test before it left. Some tests inject faults of
the trainer while vLLM restarts after an earlier test.
"""

import time

import httpx
import pytest

from compose_stack import SERVICES, ComposeStack, docker, until
from local_stack import EXAMPLES, seen, succeeded
from tandem.spool.schema import TERMINAL

pytestmark = [
    pytest.mark.sample(1, of="Docker's engine"),
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
RUN = "faulty"
# The longest time of a job with one fault, and the longest time until a step is served, in seconds.
JOB_BOUND, SERVED_BOUND = 120, 240


@pytest.fixture(scope="module", autouse=True)
def run(stack):
    stack.wait_healthy(*SERVICES)
    stack.client.create_run(RUN, lora={"rank": 4, "alpha": 8})
    stack.client.wait_served(RUN, 0, timeout=SERVED_BOUND)


def submit(stack: ComposeStack, epochs: int = 150) -> str:
    return stack.submit(RUN, epochs, max_attempts=3)


def submit_running(stack: ComposeStack) -> str:
    """The id of a job that has made a step."""
    job = submit(stack)
    seen(stack.client, job, "step")
    return job


# Verifies every checkpoint; prints the steps and the jobs' data.
_VERIFY = """
from pathlib import Path
from tandem.spool import Spool
import sys
spool, run = Spool(Path("/data")), sys.argv[1]
for step in spool.checkpoints.steps(run):
    spool.checkpoints.verify(run, step)
print(*spool.checkpoints.steps(run))
print(*Path("/data/jobs").glob("live/*/*/*/data"))
"""


def succeeds(stack: ComposeStack, job: str) -> tuple[int, list[str]]:
    """Wait for the job's success and check the spool. Returns the number of counted attempts, and
    the error types of the failed attempts."""
    status, events = succeeded(stack.client, job, JOB_BOUND)
    errors = [event.data["error"]["type"] for event in events if event.type == "requeued"]
    steps, data = stack.exec("controller", "python", "-c", _VERIFY, RUN).stdout.splitlines()
    steps = [int(step) for step in steps.split()]
    assert steps == list(range(len(steps)))
    assert status.step == steps[-1]
    assert job not in data
    # Ranks have the fork server's command line.
    assert len(stack.pids("trainer", "forkserver")) <= 1
    return status.attempt, errors


def restarts(stack: ComposeStack, service: str) -> int:
    return stack.inspect(service)["RestartCount"]


def restarted(stack: ComposeStack, service: str, before: int) -> None:
    until(f"{service} is started again", lambda: restarts(stack, service) == before + 1)


def exit_status(stack: ComposeStack, service: str, since: float) -> int:
    """Wait until the container that the service has now has ended. Only an end after the time
    `since` counts. Returns the container's exit status."""

    def ended():
        # A single query of events gives the result, because the engine may omit an event from a
        # later query.
        exits = stack.exits(since, stack.container(service))
        return exits if service in exits else None

    return until(f"the end of {service}", ended)[service]


@pytest.mark.sample(1, of="containers that start again")
def test_docker_kill_of_inference(stack):
    job = submit_running(stack)
    stack.kill_container("inference")
    assert succeeds(stack, job) == (1, [])
    time.sleep(1)
    assert stack.status("inference").startswith("exited")
    assert restarts(stack, "inference") == 0
    stack.run("up", "-d", "inference")


@pytest.mark.sample(1, of="ends of the trainer's container")
def test_kill_supervisord(stack):
    """The container ends with status 72 and is started again."""
    before, begin = restarts(stack, "trainer"), time.time()
    job = submit_running(stack)
    stack.kill_program("trainer", "supervisord")
    assert exit_status(stack, "trainer", begin) == 72
    restarted(stack, "trainer", before)
    attempts, errors = succeeds(stack, job)
    # All children of supervisord end at once, in any order.
    assert attempts == 2
    assert errors[0] in ("runner_stopped", "runner_lost", "rank_crashed")
    assert "supervisord ended" in stack.logs("trainer")


@pytest.mark.sample(1, of="ends of the trainer's container")
def test_kill_the_first_process(stack):
    """The first process gets SIGKILL, as from the kernel when memory runs out. The container ends
    with status 137, every process in it is gone, and the container is started again."""
    before, begin = restarts(stack, "trainer"), time.time()
    job = submit_running(stack)
    stack.kill_first("trainer")
    assert exit_status(stack, "trainer", begin) == 137
    restarted(stack, "trainer", before)
    assert succeeds(stack, job) == (2, ["runner_lost"])
    stack.wait_healthy("trainer", timeout=90)


@pytest.mark.sample(1, of="ends of the trainer's container")
def test_docker_kill_of_the_trainer(stack):
    job = submit_running(stack)
    stack.kill_container("trainer")
    time.sleep(1)
    assert stack.status("trainer").startswith("exited")
    assert stack.client.get_job(job).state == "running", (
        "nobody but a runner settles a runner's job"
    )
    stack.run("up", "-d", "trainer")
    assert succeeds(stack, job) == (2, ["runner_lost"])


# Sends SIGTERM, the first signal of `docker stop`, at the moment when the ranks begin to write a
# checkpoint.
_STOP_IN_CHECKPOINT = """
import json, os, signal, sys, time
from pathlib import Path
(work,) = Path("/data/jobs").glob(f"live/*/*/*,{sys.argv[1]}/attempts")
end = time.monotonic() + 60
while time.monotonic() < end:
    for beat in work.glob("*/beat.0"):
        try:
            if json.loads(beat.read_text())["phase"] == "checkpoint":
                os.kill(1, signal.SIGTERM)
                print("in time")
                sys.exit()
        except (OSError, ValueError):
            pass
    time.sleep(0.0005)
sys.exit("no checkpoint was begun")
"""


@pytest.mark.sample(1, of="ends of the trainer's container")
def test_sigterm_during_a_checkpoint(stack):
    """The container's exit status is 0. The checkpoint is complete or does not exist. The job has
    succeeded, or it continues and the interrupted attempt does not count."""
    begin = time.time()
    job = submit(stack, epochs=100)
    done = docker(
        "exec", stack.container("trainer"), "python", "-c", _STOP_IN_CHECKPOINT, job, check=False
    )
    assert "no checkpoint" not in done.stderr
    assert exit_status(stack, "trainer", begin) == 0
    attempts, errors = succeeds(stack, job)
    assert (attempts, errors) in [(1, []), (2, ["runner_stopped"])]


@pytest.mark.sample(1, of="containers that start again")
def test_docker_kill_of_the_controller(stack):
    """A job continues without the controller. A client that repeats its request finds that the job
    has succeeded."""
    job = submit_running(stack)
    stack.kill_container("controller")
    stack.run("up", "-d", "controller")
    assert succeeds(stack, job) == (1, [])


def served(stack: ComposeStack) -> None:
    """Wait until vLLM serves the newest step."""
    step = stack.client.get_run(RUN).newest_step
    stack.client.wait_served(RUN, step, timeout=SERVED_BOUND)
    until(
        f"{RUN}@{step} answers",
        lambda: stack.chat_status(f"{RUN}@{step}") == 200,
        SERVED_BOUND,
        poll=1,
    )


def test_inference_that_was_killed_serves_the_newest_step(stack):
    stack.wait_healthy("inference")
    served(stack)


_FILL = """
with open("/data/filler", "wb", buffering=0) as file:
    for size in (1 << 20, 4096, 1):
        try:
            while True:
                file.write(bytes(size))
        except OSError as error:
            print(error.strerror)
"""


@pytest.mark.sample(1, of="a volume or a program that fails")
def test_a_full_volume(stack):
    """The controller refuses requests with status 503. The running job's attempt fails, or the job
    waits. After space is free, the job succeeds."""
    job = submit(stack, epochs=300)
    seen(stack.client, job, "step")
    assert "No space left" in stack.exec("trainer", "python", "-c", _FILL).stdout
    try:
        request = {"kind": "sft", "examples": EXAMPLES, "packing": {"sequence_length": 128}}
        headers = stack.api_headers
        answer = httpx.post(
            f"{stack.controller_url}/v1/runs/{RUN}/train", json=request, headers=headers, timeout=60
        )
        assert answer.status_code == 503, answer.text
        assert "No space left on device" in answer.text or "the volume is full" in answer.text
        assert (
            httpx.get(
                f"{stack.controller_url}/v1/jobs/{job}", headers=headers, timeout=60
            ).status_code
            == 200
        )
        until("the runner says so", lambda: "the volume is full" in stack.logs("trainer"))
        time.sleep(3)
        assert stack.client.get_job(job).state not in TERMINAL
    finally:
        stack.exec("trainer", "rm", "-f", "/data/filler")
    attempts, _ = succeeds(stack, job)
    assert attempts <= 3
    stack.wait_healthy(*SERVICES)
    served(stack)


@pytest.mark.sample(1, of="a volume or a program that fails")
def test_a_program_that_cannot_be_started(stack):
    """The container ends and starts again and again. `up --wait` ends after a bounded time. The log
    says why the program can't be started."""
    begin = time.time()
    # The exit status of `up --wait` is not checked, because Compose up to 5.5 may report success at
    # the deadline.
    stack.run(
        "up",
        "--wait",
        "--wait-timeout",
        "20",
        "inference",
        TANDEM_VLLM_ARGS="'unbalanced",
        check=False,
    )
    # On a busy machine the failing vLLM runs for a second, so supervisord counts it as started.
    assert exit_status(stack, "inference", begin) in (70, 71)
    assert not stack.healthy("inference")
    assert restarts(stack, "inference") >= 1
    assert "TANDEM_VLLM_ARGS" in stack.logs("inference")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variables", "secret", "words"),
    [
        ({}, "admin_token", "TANDEM_ADMIN_TOKEN"),
        ({"TANDEM_BASE_MODEL": "/models/missing", "HF_HUB_OFFLINE": "1"}, None, "/models/missing"),
    ],
)
def test_what_preflight_refuses_does_not_start(images, tmp_path, variables, secret, words):
    with ComposeStack(tmp_path, **variables) as stack:
        if secret is not None:
            (stack.secrets_dir / secret).write_text("")
        begin = time.monotonic()
        done = stack.run("up", "--wait", "--wait-timeout", "120", check=False, timeout=180)
        assert done.returncode != 0
        assert time.monotonic() - begin < 110
        assert "preflight" in done.stderr
        assert words in stack.logs("preflight")
        for service in SERVICES:
            assert stack.status(service).startswith("created")
