"""The whole stack in a temporary directory, started by `tandem up`, and the means to kill its
programs."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import tiny_model

from free_ports import free_ports
from inference.vllm_server import SMALL_CACHE
from tandem.client import Event, JobStatus, Tandem
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL
from tandem.system import processes
from waiting import answers, until

API_KEY, ADMIN_TOKEN = "test-api-key", "test-admin-token"
# `TANDEM_TEST_DEVICE=cuda` runs the same tests on two GPUs.
DEVICES = {"TANDEM_DEVICE": "cpu"} | SMALL_CACHE
if os.environ.get("TANDEM_TEST_DEVICE") == "cuda":
    DEVICES = {
        "TANDEM_DEVICE": "cuda",
        "TANDEM_TRAINER_DEVICES": "1",
        "TANDEM_INFERENCE_DEVICES": "0",
        "TANDEM_ENFORCE_EAGER": "1",
    }
# For each program, a word on the command line of its processes.
PROGRAMS = {
    "controller": "tandem.controller",
    "runner": "tandem.trainer.runner",
    "vllm": "vllm.entrypoints.openai.api_server",
    "publisher": "tandem.inference.publisher",
    "exporter": "tandem.metrics.exporter",
    "forkserver": "tandem.trainer.launch.forkserver",
}

EXAMPLES = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
    for q in ("Is it?", "Was it?")
    for a in ("yes", "no")
]


def train(client: Tandem, run: str, epochs: int, *, learning_rate: float, **options: Any) -> str:
    """Submit an SFT job of `epochs` epochs. Returns the job's id."""
    optimizer = {"learning_rate": learning_rate, "epochs": epochs}
    return client.train_sft(
        run, EXAMPLES, packing={"sequence_length": 128}, optimizer=optimizer, **options
    ).spec.id


def seen(client: Tandem, job: str, kind: str, timeout: float = 180) -> None:
    """Wait for an event of the type `kind`. Raises AssertionError if the job ends before the
    event."""

    def check() -> bool:
        kinds = [event.type for event in client.job_events(job)]
        assert kind in kinds or not set(kinds) & set(TERMINAL), (
            f"the job ended before {kind}: {kinds}"
        )
        return kind in kinds

    until(f"{kind} of job {job}", check, timeout, poll=0.02)


def succeeded(client: Tandem, job: str, timeout: float = 180) -> tuple[JobStatus, list[Event]]:
    """Wait for the job's success. Check that no event is missing, and that the job has made the
    step after its base step."""

    def check() -> JobStatus | None:
        status = client.get_job(job)
        return status if status.state in TERMINAL else None

    status = until(f"the end of job {job}", check, timeout)
    assert status.state == "succeeded", status.error
    assert status.step == status.spec.base_step + 1
    events = client.job_events(job)
    assert [event.seq for event in events] == list(range(len(events)))
    assert sum(event.type in TERMINAL for event in events) == 1
    return status, events


class LocalStack:
    """`tandem up` on a tiny model, on ports of its own."""

    def __init__(self, root: Path, **variables: str) -> None:
        self.root = root
        if not (root / "models" / "tiny").exists():
            tiny_model.write_tiny_qwen3(
                root / "models" / "tiny", hidden_size=64, layers=2, heads=2, kv_heads=1
            )
        controller, inference, metrics = map(str, free_ports(3))
        self.environment = os.environ | {
            "TANDEM_ROOT": str(root),
            "TANDEM_BASE_MODEL": "models/tiny",
            **DEVICES,
            "TANDEM_LAUNCH": "fork",
            "TANDEM_API_KEY": API_KEY,
            "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN,
            "TANDEM_CONTROLLER_PORT": controller,
            "TANDEM_INFERENCE_PORT": inference,
            "TANDEM_METRICS_PORT": metrics,
            "TANDEM_MAX_MODEL_LEN": "256",
            "TANDEM_MAX_LORA_RANK": "16",
            "TANDEM_HEARTBEAT_SECONDS": "1",
            "TANDEM_LEASE_SECONDS": "10",
            **variables,
        }
        self.controller_url = f"http://127.0.0.1:{self.environment['TANDEM_CONTROLLER_PORT']}"
        self.inference_url = f"http://127.0.0.1:{self.environment['TANDEM_INFERENCE_PORT']}"
        self.api_key = self.environment["TANDEM_API_KEY"]
        self.client = Tandem(self.controller_url, self.api_key)

    def __enter__(self) -> Self:
        self.log = (self.root / "up.log").open("ab")
        command = [sys.executable, "-m", "tandem", "up"]
        self.process = subprocess.Popen(
            command, env=self.environment, stdout=self.log, stderr=self.log
        )
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=90)
        finally:
            processes.kill_all(lambda: processes.marked("TANDEM_ROOT", str(self.root)), timeout=10)
            self.log.close()

    def wait_ready(self, timeout: float = 240) -> None:
        for url in (f"{self.controller_url}/readyz", f"{self.inference_url}/health"):
            until(f"{url} answers", lambda url=url: answers(url) or self.dead(), timeout, poll=0.5)
        assert not self.dead(), f"tandem up ended with {self.process.returncode}: {self.tail()}"

    def dead(self) -> bool:
        return self.process.poll() is not None

    def tail(self) -> str:
        return (self.root / "up.log").read_text(errors="replace")[-4000:]

    @property
    def spool(self) -> Spool:
        return Spool(self.root)

    def pids(self, program: str) -> list[int]:
        """Living processes of `program` that belong to this stack, oldest first."""
        pids = []
        for process in processes.marked("TANDEM_ROOT", str(self.root)):
            with suppress(OSError):  # the process has ended meanwhile
                if PROGRAMS[program].encode() in Path(
                    f"/proc/{process.pid}/cmdline"
                ).read_bytes().split(b"\0"):
                    pids.append(process.pid)
        return sorted(pids)

    def kill(self, program: str) -> int:
        """kill -9 the oldest process of `program`; returns its pid."""
        pid = until(f"a process of {program}", lambda: self.pids(program))[0]
        os.kill(pid, signal.SIGKILL)
        return pid
