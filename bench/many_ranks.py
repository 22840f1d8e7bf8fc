"""Compares two readings of many ranks' GPU memory. The exporter and `tandem memory` give the first
reading, and nvidia-smi gives the second. Also checks the memory after `kill -9` of one rank.

    python -m bench.many_ranks [--ranks 4] [--tensor-parallel 2] [--launch fork] [--device cuda]
    [--out DIR]

Controller, runner and exporter run as in their containers, on the machine's first GPUs. The model
has Qwen3-0.6B's layers and a small vocabulary. The first job runs to its end. While the first job
trains, the program checks that each GPU has only the process of its rank. It also checks that the
exporter shows each rank's GPU and the memory of that GPU. After the first job, the program checks
that `tandem memory` lists every rank and that no memory is in use. The second job has one attempt.
The program kills the second job's last rank. All GPUs must be empty within 30 s after the kill
(docs/jobs.md). A third job must succeed. The program keeps the exporter's pages in DIR. With
--device cpu, the program checks ranks and processes, but not memory.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.random_model import write_random_model
from bench.report import report
from bench.shared import write_tokenizer
from bench.topologies import MODELS
from tandem.client import Event, Tandem
from tandem.spool.schema import TERMINAL
from tandem.system import ports, processes

RUN = "ranks"
VOCABULARY = 512
EXAMPLES = [
    {"token_ids": [*range(first, first + 32)], "trainable": [False] * 16 + [True] * 16}
    for first in (10, 20, 30, 40)
]
JOB_SECONDS = 300.0
BOUND = 30.0
"""Seconds from a rank's end until the GPUs are empty: 20 for the other ranks, 10 for the driver."""
SAME = 64 * 2**20
"""Bytes by which two readings of a GPU may differ."""
ROUNDS = 12
"""Comparisons while a job trains. One of them must find no difference; the others may differ,
because memory changes between two readings."""


def until(what: str, check: Callable[[], bool], seconds: float, poll: float = 0.05) -> None:
    """Waits until `check` is true. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(poll)


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def alive(pid: int) -> bool:
    process = processes.read_process(pid)
    return process is not None and not process.zombie


def train(client: Tandem, epochs: int, **options: Any) -> str:
    """Submits a job of one optimizer step per epoch, and returns its id."""
    optimizer = {"learning_rate": 1e-4, "epochs": epochs}
    packing = {"sequence_length": 128}
    return client.train_sft(RUN, EXAMPLES, packing=packing, optimizer=optimizer, **options).spec.id


def first_step(client: Tandem, job: str) -> None:
    """Wait for the first optimizer step of a job. Raises AssertionError if the job ends before this
    step."""

    def stepped() -> bool:
        kinds = {event.type for event in client.job_events(job)}
        assert "step" in kinds or not kinds & set(TERMINAL), f"the job ended: {kinds}"
        return "step" in kinds

    until(f"the first step of {job}", stepped, JOB_SECONDS)


def nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines]


class Gpus:
    """The trainer's GPUs as nvidia-smi shows them, in the order of the ranks. With --device cpu the
    list is empty."""

    def __init__(self, ranks: int, device: str) -> None:
        self.uuids = [row[0] for row in nvidia_smi("gpu=uuid")][:ranks] if device == "cuda" else []

    def used(self) -> dict[str, int]:
        """Bytes of memory in use, by the GPU's UUID."""
        if not self.uuids:
            return {}
        return {
            uuid: int(mib) * 2**20
            for uuid, mib in nvidia_smi("gpu=uuid,memory.used")
            if uuid in self.uuids
        }

    def processes(self) -> dict[str, list[int]]:
        """The pids of the processes with a CUDA context, by the GPU's UUID."""
        found: dict[str, list[int]] = {uuid: [] for uuid in self.uuids}
        for uuid, pid in nvidia_smi("compute-apps=gpu_uuid,pid") if self.uuids else []:
            found.get(uuid, []).append(int(pid))
        return found


class Trainer:
    """Processes of controller, runner and exporter, and a client of the controller."""

    def __init__(self, options: argparse.Namespace) -> None:
        with ports.reserve() as first, ports.reserve() as second:
            controller, metrics = first.port, second.port
        key = secrets.token_urlsafe(16)
        source = str(Path(__file__).parent.parent / "src")
        self.out: Path = options.out
        self.root = options.out / "spool"
        self.environment = os.environ | {
            "TANDEM_ROOT": str(self.root),
            "TANDEM_BASE_MODEL": "models/m",
            "TANDEM_DEVICE": options.device,
            "TANDEM_TRAINER_RANKS": str(options.ranks),
            "TANDEM_TENSOR_PARALLEL": str(options.tensor_parallel),
            "TANDEM_TRAINER_DEVICES": (
                ",".join(map(str, range(options.ranks))) if options.device == "cuda" else ""
            ),
            "TANDEM_LAUNCH": options.launch,
            "TANDEM_API_KEY": key,
            "TANDEM_ADMIN_TOKEN": secrets.token_urlsafe(16),
            "TANDEM_CONTROLLER_PORT": str(controller),
            "TANDEM_METRICS_PORT": str(metrics),
            "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}",
        }
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self.controller_url = f"http://127.0.0.1:{controller}"
        self.client = Tandem(self.controller_url, key)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, *command in (
                ("controller", "controller"),
                ("trainer", "up", "--role", "trainer"),
            ):
                log = stack.enter_context((self.out / f"{name}.log").open("wb"))
                run = [sys.executable, "-m", "tandem", *command]
                stack.callback(
                    _end, subprocess.Popen(run, env=self.environment, stdout=log, stderr=log)
                )
            until("the controller is ready", lambda: answers(f"{self.controller_url}/readyz"), 120)
            until("the exporter answers", lambda: answers(self.metrics_url), 120)
            yield

    def tandem(self, *arguments: str) -> str:
        variables = self.environment | {"TANDEM_URL": self.controller_url}
        command = [sys.executable, "-m", "tandem", *arguments]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, check=True
        ).stdout

    def page(self, name: str) -> dict[str, dict[tuple[str, ...], float]]:
        """The exporter's current page: metric name -> label values -> value. The label values are a
        tuple in the page's order. The page is also written to a file."""
        text = httpx.get(self.metrics_url, timeout=10).raise_for_status().text
        (self.out / f"{name}.prom").write_text(text)
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=90)
    finally:
        process.kill()


def differences(trainer: Trainer, gpus: Gpus, pids: list[int], number: int) -> list[str]:
    """Compares the exporter with nvidia-smi and with the ranks' pids while a job trains. Returns a
    line of text for each difference."""
    before, page, after, of_gpu = (
        gpus.used(),
        trainer.page(f"training-{number}"),
        gpus.used(),
        gpus.processes(),
    )
    ranks, found = {str(rank) for rank in range(len(pids))}, []
    for name in ("tandem_rank_up", "tandem_train_rank_step"):
        if {key[0] for key in page.get(name, {})} != ranks:
            found.append(f"{name} has {page.get(name)}")
    for uuid, pid, rank in zip(gpus.uuids, pids, sorted(ranks, key=int), strict=bool(gpus.uuids)):
        if of_gpu[uuid] != [pid]:
            found.append(f"{uuid} has the processes {of_gpu[uuid]} rather than {pid}, its rank's")
        shown = page["tandem_gpu_memory_used_bytes"].get((uuid,), 0.0)
        if (
            not min(before[uuid], after[uuid]) - SAME
            <= shown
            <= max(before[uuid], after[uuid]) + SAME
        ):
            found.append(
                f"{uuid}: the exporter shows {shown:.0f}, nvidia-smi {before[uuid]} and"
                f" {after[uuid]}"
            )
        reserved = {
            key: value
            for key, value in page["tandem_torch_memory_reserved_bytes"].items()
            if rank in key
        }
        if [set(key) for key in reserved] != [{uuid, rank}] or not 0 < max(
            reserved.values()
        ) < shown + SAME:
            found.append(f"rank {rank} reserves {reserved} of {shown:.0f}")
    return found


def watched_job(trainer: Trainer, gpus: Gpus, epochs: int) -> dict[str, Any]:
    """Runs a job to its end. Returns the number of comparisons without a difference, and the ranks
    and bytes that `tandem memory` shows."""
    empty = gpus.used()
    job = train(trainer.client, epochs)
    first_step(trainer.client, job)
    pids = started(trainer.client, job).data["pids"]
    looks = []
    for number in range(ROUNDS):
        looks.append(differences(trainer, gpus, pids, number))
        if any(event.type == "checkpoint" for event in trainer.client.job_events(job)):
            looks.pop()  # the job ended during this comparison
            break
        time.sleep(0.5)
    agreed = sum(not look for look in looks)
    print(
        json.dumps({"looks": len(looks), "agreed": agreed, "last": looks[-1] if looks else None}),
        flush=True,
    )
    assert agreed, looks
    trainer.client.wait_job(job, JOB_SECONDS)
    [attempt] = json.loads(trainer.tandem("memory", job, "--json"))
    text = trainer.tandem("memory", job)
    (trainer.out / "memory.txt").write_text(text)
    assert [int(rank) for rank in attempt["ranks"]] == list(range(len(pids))), attempt
    phases = {rank: set(memory["phases"]) for rank, memory in attempt["ranks"].items()}
    assert len(set(map(frozenset, phases.values()))) == 1, phases
    assert {memory["uuid"] for memory in attempt["ranks"].values()} == (
        set(gpus.uuids) or {"cpu"}
    ), attempt
    assert set(attempt["left"]) == set(gpus.uuids), attempt
    assert set(attempt["left"].values()) <= {0}, attempt
    assert gpus.used() == empty, f"{empty} before the job, {gpus.used()} after it"
    peaks = [
        max(kinds["device_used"] for kinds in rank["phases"].values()) / 2**30
        for rank in attempt["ranks"].values()
    ]
    return {
        "ranks": len(pids),
        "looks": len(looks),
        "agreed": agreed,
        "GiB most": max(peaks),
        "GiB least": min(peaks),
    }


def killed_job(trainer: Trainer, gpus: Gpus, epochs: int) -> dict[str, Any]:
    """Kills the last rank with SIGKILL in the middle of a job. Returns the seconds until all ranks
    have ended, and the seconds until the GPUs are empty."""
    empty = gpus.used()
    job = train(trainer.client, epochs, max_attempts=1)
    first_step(trainer.client, job)
    pids = started(trainer.client, job).data["pids"]
    os.kill(pids[-1], signal.SIGKILL)
    begin = time.monotonic()
    until("the other ranks end", lambda: not any(map(alive, pids)), BOUND, poll=0.01)
    ended = time.monotonic() - begin
    until("the GPUs are empty", lambda: gpus.used() == empty, BOUND - ended, poll=0.01)
    seconds = time.monotonic() - begin
    until("the job ends", lambda: trainer.client.get_job(job).state in TERMINAL, BOUND)
    status = trainer.client.get_job(job)
    assert status.state == "failed", status
    assert status.error is not None
    [attempt] = json.loads(trainer.tandem("memory", job, "--json"))
    assert set(attempt["left"].values()) <= {0}, attempt
    assert attempt["processes"] == 0, attempt
    page = trainer.page("after")
    for uuid in gpus.uuids:
        assert page["tandem_job_gpu_left_bytes"][uuid,] == 0, page["tandem_job_gpu_left_bytes"]
    failed = sum(page["tandem_job_attempts_failed_total"].values())
    trainer.client.wait_job(train(trainer.client, 2), JOB_SECONDS)
    return {
        "ranks ended": ended,
        "GPUs empty": seconds,
        "error": status.error.type,
        "failed attempts shown": failed,
    }


def started(client: Tandem, job: str) -> Event:
    return next(event for event in client.job_events(job) if event.type == "started")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--launch", choices=["torchrun", "fork", "resident"], default="fork")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--epochs", type=int, default=100, help="of each job, a step each")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    # SIGTERM raises SystemExit, so that the child processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    options.out = options.out or Path(tempfile.mkdtemp(prefix="tandem-many-ranks-"))
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.out / "spool" / "models" / "m"
    on_cpu = MODELS["tiny"] | {"num_key_value_heads": 4}
    shape = on_cpu if options.device == "cpu" else MODELS["0.6b"]
    write_random_model(model, shape | {"vocab_size": VOCABULARY}, options.device)
    write_tokenizer(model, VOCABULARY)
    gpus, trainer = Gpus(options.ranks, options.device), Trainer(options)
    empty = gpus.used()
    try:
        with trainer.running():
            trainer.client.create_run(RUN, lora={"rank": 16, "alpha": 32})
            row = {
                "device": options.device,
                "TP": options.tensor_parallel,
                "launch": options.launch,
            }
            row |= watched_job(trainer, gpus, options.epochs) | killed_job(
                trainer, gpus, options.epochs
            )
    finally:
        processes.kill_all(lambda: processes.marked("TANDEM_ROOT", str(trainer.root)), timeout=10)
    assert gpus.used() == empty, f"{empty} before, {gpus.used()} after the end"
    name = f"many-ranks-{options.ranks}x{options.tensor_parallel}-{options.device}"
    report(name, f"{options.ranks} ranks: exporter, memory and a killed rank", [row])


if __name__ == "__main__":
    main()
