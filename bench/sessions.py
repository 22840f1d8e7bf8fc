"""The cost of a session's calls beside what they compute, and what its ranks leave.

    python -m bench.sessions [--shape qwen3-8b] [--calls 50] [--device cuda] [--gpu 0] [--out DIR]

A real runner, one rank, a model of random weights, a LoRA of rank 16. The client appends a pass
(four sequences) and an optimizer step, and waits for both results, `--calls` times. A call's
overhead is the seconds until its results are there less those of the phases that the ranks
measured. Then the ranks idle out; the GPU's memory is read; and one more call starts them again.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import report
from bench.restart import LONG_ROW, ROW_LENGTH, SHAPES, make_model, used
from tandem.data.datums import Datum, pass_request
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, LoraShape, RunSpec, StepRequest
from tandem.trainer.launch import DEFAULT_ENTRY

IDLE_SECONDS = 5.0


class Client:
    def __init__(self, spool: Spool, run: str, vocabulary: int, row: int) -> None:
        self._spool, self._run, self._vocabulary, self._row = spool, run, vocabulary, row
        self._rng, self._seq = np.random.default_rng(0), 0

    def call(self) -> float:
        """A pass and a step; seconds until both have results."""
        length = self._row // 4 - 1
        ids = self._rng.integers(0, self._vocabulary, (4, length + 1)).astype(np.int32)
        ones = np.ones(length, np.float32)
        begin = time.perf_counter()
        request, write = pass_request(
            "forward_backward",
            [Datum(tokens[:-1], tokens[1:], ones / self._row) for tokens in ids],
            "cross_entropy",
            {},
            vocab_size=self._vocabulary,
        )
        log = self._spool.requests
        log.append(self._run, self._seq + 1, request, write)
        log.append(self._run, self._seq + 2, StepRequest(learning_rate=1e-4))
        self._seq += 2
        while (result := log.result(self._run, self._seq)) is None:
            time.sleep(0.002)
        assert result.error is None, result.error
        return time.perf_counter() - begin


def computed(spool: Spool, job: str) -> list[float]:
    """Seconds of the phases of each step."""
    return [
        sum(
            event.data["metrics"].get(f"seconds_{phase}", 0.0)
            for phase in ("forward_backward", "optimizer")
        )
        for event in spool.events.read(job)
        if event.type == "step"
    ]


def ended(spool: Spool, job: str) -> float:
    """Waits for the job's end; its time."""
    while spool.jobs.get(job)[0] not in TERMINAL:
        time.sleep(0.05)
    return next(e.time for e in spool.events.read(job) if e.type in TERMINAL)


def measure(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    model = make_model(out / options.shape, options.shape, options.device)
    spool, arch = Spool.create(out / "spool"), read_arch(str(model))
    session, lora = spool.sessions.create().id, LoraShape(rank=16, alpha=32)
    run = spool.sessions.run_name(session, 1)
    spool.runs.create(
        RunSpec(name=run, base_model=str(model), lora=lora, created=time.time(), session=session),
        lambda path: write_identity_adapter(path, arch, lora, base_model=str(model), seed=0),
    )
    client = Client(spool, run, arch.vocab_size, ROW_LENGTH.get(options.shape, LONG_ROW))
    environment = os.environ | {
        "TANDEM_ROOT": str(spool.root),
        "TANDEM_DEVICE": options.device,
        "TANDEM_TRAINER_DEVICES": str(options.gpu) if options.device == "cuda" else "",
        "TANDEM_SESSION_IDLE_SECONDS": str(IDLE_SECONDS),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TRITON_CACHE_DIR": str(out / "triton"),
    }
    before = used([options.gpu], options.device)[0]
    command = [sys.executable, "-m", "tandem.trainer.runner", DEFAULT_ENTRY]
    with (out / "runner.log").open("wb") as log:
        runner = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            time.sleep(12)  # the fork server's imports
            waited = [client.call() for _ in range(options.calls)]
            [(_, first)] = spool.jobs.list(run)
            at = ended(spool, first.spec.id)
            time.sleep(2)
            left = used([options.gpu], options.device)[0] - before
            again = client.call()
            second = spool.jobs.list(run, limit=1)[0][1].spec.id
            ended(spool, second)
        finally:
            runner.send_signal(signal.SIGTERM)
            runner.wait(timeout=60)
    overheads = [w - c for w, c in zip(waited, computed(spool, first.spec.id), strict=True)][2:]
    last_step = [e.time for e in spool.events.read(first.spec.id) if e.type == "step"][-1]
    return {
        "shape": options.shape,
        "calls": options.calls,
        "first call s": waited[0],
        "call s": statistics.median(waited[2:]),
        "overhead ms": 1000 * statistics.median(overheads),
        "overhead max ms": 1000 * max(overheads),
        "idle to end s": at - last_step - IDLE_SECONDS,
        "left MiB": left,
        "again s": again,
        "again, computed s": computed(spool, second)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        row = measure(options, out)
    report(f"sessions-{options.shape}", "Calls of a session", [row])


if __name__ == "__main__":
    main()
