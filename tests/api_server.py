"""A controller on loopback, requests of the controller's clients, and functions that act as the
runner on the controller's spool."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import uvicorn
from tiny_model import write_tiny_qwen3

from spool import volume_tools
from tandem.config import Settings
from tandem.controller.app import create_app
from tandem.spool import Spool
from tandem.spool.schema import Job, JobError, JobResult, Probe, Served
from tandem.system import ports
from tandem.system.http_limits import BoundedHttp
from waiting import answers, until

KEY = "key-one"
BASE_MODEL = "models/tiny"


def make_root(root: Path) -> Path:
    """A spool with a tiny model in it."""
    Spool.create(root)
    write_tiny_qwen3(
        root / BASE_MODEL, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_size=16
    )
    return root


class Server:
    """The application under uvicorn in a thread of this process."""

    def __init__(self, root: Path, **settings: Any) -> None:
        values = {
            "base_model": BASE_MODEL,
            "api_key": f"{KEY}, key-two\nkey-three",
            "max_lora_rank": 16,
        } | settings
        self.settings = Settings(root=root, **values)
        self.app = create_app(self.settings)
        self.spool: Spool = self.app.state.deployment.spool
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                port=0,
                http=BoundedHttp,
                log_level="error",
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        until("the server starts", lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=120)  # a test may have moved the clock of the server's loop
        assert not self._thread.is_alive()

    def http(self, key: str | None = KEY) -> httpx.Client:
        """A plain HTTP client: it shows the headers and bodies that Tandem's own client hides."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("volume") / "spool")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    """One controller for all tests of a file. Each test uses its own runs. The controller ends with
    the file's tests. The controller's threads could disturb later tests that count this process's
    writes."""
    with Server(root) as server:
        yield server


@pytest.fixture(autouse=True)
def no_jobs_left(server: Server) -> Iterator[None]:
    """Cancels the jobs that a test left in the queue, so that the next test claims its own jobs."""
    yield
    for _, job in server.spool.jobs.list(states=("queued", "running")):
        server.spool.queue.cancel(job.spec.id)


class Process:
    """A process of `python -m tandem.controller`."""

    def __init__(self, root: Path, **variables: str) -> None:
        self.held = ports.reserve()
        self.port = self.held.port
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = root.with_name(f"controller-{self.port}.log")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")} | {
            "TANDEM_ROOT": str(root),
            "TANDEM_BASE_MODEL": BASE_MODEL,
            "TANDEM_API_KEY": KEY,
            "TANDEM_CONTROLLER_PORT": str(self.port),
            **variables,
        }
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tandem.controller"]
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> None:
        until(
            "the controller is ready",
            lambda: self.popen.poll() is not None or answers(f"{self.url}/readyz"),
        )
        assert self.popen.poll() is None, self.output()

    def kill_and_restart(self) -> None:
        """Kill the controller with SIGKILL, and start it again as an orchestrator does."""
        self.popen.kill()
        self.popen.wait()
        self.start()
        self.wait_ready()

    def output(self) -> str:
        """The output of all controller processes that this object has started."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        self.held.close()


def turn(prompt: list[int], completion: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "token_ids": completion,
        "logprobs": [-0.5] * len(completion),
    }


def groups(count: int = 1) -> list[dict[str, Any]]:
    """Groups of two trajectories with different rewards."""
    return [
        {
            "trajectories": [
                {"turns": [turn([10 + i, 11], [20 + 10 * j, 21])], "reward": 1.0 - j}
                for j in range(2)
            ]
        }
        for i in range(count)
    ]


def rl_request(**changes: Any) -> dict[str, Any]:
    return {"kind": "rl", "groups": groups(), "packing": {"sequence_length": 64}} | changes


def sft_request(**changes: Any) -> dict[str, Any]:
    """An SFT request with token ids. An example of messages would need transformers, which would
    import torch into the tests' process."""
    example = {"token_ids": [10, 11, 20, 21], "trainable": [False, False, True, True]}
    return {"kind": "sft", "examples": [example], "packing": {"sequence_length": 64}} | changes


def tree(root: Path) -> dict[str, bytes | None]:
    """Path → content of every file on the spool, except the write probe of the metrics
    collector."""
    return {
        path: content
        for path, content in volume_tools.tree(root).items()
        if ".tmp-probe" not in path
    }


def claim(spool: Spool) -> Job:
    job = spool.queue.claim("test-runner")
    assert job is not None
    return job


def work(spool: Spool, job: Job, steps: int = 2) -> None:
    """Write the events, the log and the checkpoint of a healthy attempt."""
    spec = job.spec
    step = spec.base_step + 1

    def event(kind: Any, **data: Any) -> None:
        spool.events.append(spec.id, kind, attempt=job.attempt, **data)

    event("started", device="cpu")
    event("loaded", seconds={"build": 0.1})
    for done in range(1, steps + 1):
        event("step", step=done, steps=steps, metrics={"loss": 1.0 / done})
    spool.paths.log_file(spec.id).write_text(f"rank 0 trains {spec.id}\n")
    commit(spool, job)
    event("checkpoint", step=step)


def commit(spool: Spool, job: Job) -> None:
    """Commit the job's checkpoint."""
    spec = job.spec
    staged = spool.paths.work_dir(spec.id, job.attempt) / "checkpoint"
    (staged / "optimizer").mkdir(parents=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copyfile(spool.checkpoints.path(spec.run, spec.base_step) / name, staged / name)
    (staged / "optimizer" / "adam.safetensors").write_bytes(os.urandom(3000))
    probe = Probe(tokens=[], logprobs=[], previous=[], base=[])
    spool.checkpoints.commit(
        staged, spec.run, spec.base_step + 1, spec.id, metrics={"loss": 0.5}, probe=probe
    )


def succeed(spool: Spool, job: Job) -> None:
    spool.queue.finish(
        job, JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())
    )


def fail(spool: Spool, job: Job, log_tail: str = "Traceback: boom\n") -> None:
    error = JobError(type="rank_crashed", message="rank 0 died of SIGSEGV", log_tail=log_tail)
    spool.queue.finish(job, JobResult(state="failed", error=error, finished=time.time()))


def run_one(spool: Spool) -> Job:
    """Claim the next job and finish it with success."""
    job = claim(spool)
    work(spool, job)
    succeed(spool, job)
    return job


def serve(spool: Spool, run: str, step: int, **refused: Any) -> None:
    """Record that vLLM serves a step."""
    verified: dict[str, Any] = {
        "verified": time.time(),
        "mean_abs_logprob_error": 0.001,
        "allowed_logprob_error": 0.15,
        "tokens_checked": 10,
    }
    verified["checkpoint"] = spool.checkpoints.manifest(run, step).weights_sha256
    verified["manifest"] = spool.checkpoints.manifest_identity(run, step)
    spool.served.put(run, Served(step=step, model=f"{run}@{step}", **verified, **refused))
