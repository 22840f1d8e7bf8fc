"""Compares the time of a session's calls with the time of a job's optimizer steps. Also measures
the memory that is in use after the session's ranks exit.

    python bench/sessions.py --model DIR [--shape qwen3-8b] [--calls 50] [--row 4096]
                             [--device cuda] [--gpu 0] [--out DIR]

The program starts a runner with one rank, and the run has a LoRA of rank 16. The first part is a
job of `--calls` optimizer steps, each on one row. In the second part a session's client makes
`--calls` calls. A call appends two requests and waits for both results. The first request is a
forward and backward pass over a row of the same size, and the second request is an optimizer step.
When no further call arrives, the ranks exit, and the program reads the GPU's memory. Another call
starts the ranks again. The program prints a line of JSON for each measured figure.

With `--shape` the model's weights are random, and are written to DIR if nothing is there.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tandem.data.datums import Datum, pass_request
from tandem.data.examples import SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.prepare import prepare_sft
from tandem.families.arch import EXPERT_TARGETS
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.spool import Spool
from tandem.spool.schema import (
    LORA_TARGETS,
    TERMINAL,
    LoraShape,
    OptimizerSettings,
    RunSpec,
    SFTJob,
    StepRequest,
)
from tandem.trainer.launch import DEFAULT_ENTRY

IDLE_SECONDS = 5.0
SEQUENCES = 4  # of a row
WARM = 2  # first steps that the medians leave out
RUN = "job"


def token_rows(options: argparse.Namespace, vocabulary: int) -> Iterator[np.ndarray]:
    """Rows of sequences, int32 [SEQUENCES, tokens]. The job and the session get the same rows."""
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, vocabulary, (SEQUENCES, options.row // SEQUENCES)).astype(np.int32)


class Client:
    """A client that appends requests to a session's run, like Tinker's API."""

    def __init__(self, spool: Spool, run: str, options: argparse.Namespace, vocabulary: int):
        self._spool, self._run, self._vocabulary = spool, run, vocabulary
        self._rows, self._seq = token_rows(options, vocabulary), 0

    def call(self) -> float:
        """Appends a forward and backward pass and an optimizer step. Returns the seconds until both
        requests have results."""
        ids = next(self._rows)
        ones = np.ones(ids.shape[1] - 1, np.float32)
        begin = time.perf_counter()
        request, write = pass_request(
            "forward_backward",
            [Datum(tokens[:-1], tokens[1:], ones / ids.size) for tokens in ids],
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


def submit(spool: Spool, options: argparse.Namespace, vocabulary: int) -> None:
    """Queues a job that trains on as many rows as `--calls` calls, with the same tokens."""
    rows = token_rows(options, vocabulary)
    examples = [
        SFTExample(token_ids=tokens.tolist(), trainable=[False] + [True] * (len(tokens) - 1))
        for _ in range(options.calls)
        for tokens in next(rows)
    ]

    def make(name: str, base: int, staged: Path) -> SFTJob:
        data = prepare_sft(
            examples,
            tokenizer_path="",
            vocab_size=vocabulary,
            packing=PackingSettings(sequence_length=options.row),
            out=staged,
        )
        return SFTJob(
            id=name,
            run=RUN,
            base_step=base,
            created=time.time(),
            fingerprint=name,
            data=data,
            optimizer=OptimizerSettings(epochs=1, grad_accumulation_sequences=1),
            max_attempts=1,
        )

    spool.queue.submit(make, run=RUN, job_id=RUN, fingerprint=RUN, base_step=None)


def steps(spool: Spool, job: str) -> tuple[list[float], list[float]]:
    """Two lists over the steps of a job: the time at which each step ended, and the seconds of its
    passes and its optimizer together."""
    events = [event for event in spool.events.read(job) if event.type == "step"]
    computed = [
        sum(
            event.data["metrics"].get(f"seconds_{phase}", 0.0)
            for phase in ("forward_backward", "optimizer")
        )
        for event in events
    ]
    return [event.time for event in events], computed


def ended(spool: Spool, job: str, log: Path) -> float:
    """Waits until the job has succeeded. Returns the time of the job's terminal event."""
    limit = time.monotonic() + 900
    while (state := spool.jobs.get(job)[0]) not in TERMINAL:
        assert time.monotonic() < limit, f"{job} does not end\n{log.read_text()[-3000:]}"
        time.sleep(0.05)
    assert state == "succeeded", f"{job} {state}\n{log.read_text()[-3000:]}"
    return next(event.time for event in spool.events.read(job) if event.type in TERMINAL)


def used(options: argparse.Namespace) -> int:
    """The used memory of the GPU in MiB."""
    if options.device != "cuda":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return int(lines[options.gpu])


def random_model(directory: Path, shape: str, device: str) -> None:
    # If this file is run as a program, Python needs this line to find the package `bench`.
    sys.path.append(str(Path(__file__).parents[1]))
    from bench.restart import make_model

    make_model(directory, shape, device)


def make_runs(spool: Spool, model: Path) -> str:
    """Creates a run for the job and a run for the session. Returns the name of the session's
    run."""
    arch = read_arch(str(model))
    targets = tuple(t for t in LORA_TARGETS if not arch.moe or t not in EXPERT_TARGETS)
    lora = LoraShape(rank=16, alpha=32, targets=targets)
    session = spool.sessions.create().id
    for name, of in ((RUN, None), (spool.sessions.run_name(session, 1), session)):
        spec = RunSpec(name=name, base_model=str(model), lora=lora, created=time.time(), session=of)
        spool.runs.create(
            spec,
            lambda path: write_identity_adapter(path, arch, lora, base_model=str(model), seed=0),
        )
    return spool.sessions.run_name(session, 1)


def measure(options: argparse.Namespace, out: Path) -> Iterator[tuple[str, float, str]]:
    """Yields the name, the value and the unit of each measured figure."""
    model = options.model.absolute()
    spool, vocabulary = Spool.create(out / "spool"), read_arch(str(model)).vocab_size
    run, log = make_runs(spool, model), out / "runner.log"
    client = Client(spool, run, options, vocabulary)
    environment = os.environ | {
        "TANDEM_ROOT": str(spool.root),
        "TANDEM_DEVICE": options.device,
        "TANDEM_TRAINER_DEVICES": str(options.gpu) if options.device == "cuda" else "",
        "TANDEM_SESSION_IDLE_SECONDS": str(IDLE_SECONDS),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TRITON_CACHE_DIR": str(out / "triton"),
    }
    # The container images contain Python bytecode, so the child processes may write bytecode too.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "tandem.trainer.runner", DEFAULT_ENTRY]
    with log.open("wb") as errors:
        runner = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)
        try:
            time.sleep(12)  # meanwhile the fork server finishes its imports
            before = used(options)
            submit(spool, options, vocabulary)
            ended(spool, RUN, log)
            times, computed = steps(spool, RUN)
            assert len(times) == options.calls, times
            own = statistics.median(np.diff(times)[WARM:])
            yield "a job's step", own, "s"
            yield "a job's step, computed", statistics.median(computed[WARM:]), "s"
            waited = [client.call() for _ in range(options.calls)]
            first = spool.jobs.list(run)[0][1].spec.id
            at = ended(spool, first, log)
            times, computed = steps(spool, first)
            overheads = [w - c for w, c in zip(waited, computed, strict=True)][WARM:]
            yield "a session's first call", waited[0], "s"
            yield "a session's call", statistics.median(waited[WARM:]), "s"
            yield "a call beside a job's step", statistics.median(waited[WARM:]) - own, "s"
            yield "a call beside what it computes", statistics.median(overheads), "s"
            yield "a call beside what it computes, at most", max(overheads), "s"
            yield "from the idle time to the end", at - times[-1] - IDLE_SECONDS, "s"
            if options.device == "cuda":
                time.sleep(2)
                yield "left after the end", used(options) - before, "MiB"
            begin = time.time()
            again = client.call()
            second = spool.jobs.list(run, limit=1)[0][1].spec.id
            ended(spool, second, log)
            assert second != first
            yield "a call after the end", again, "s"
            at = {event.type: event.time - begin for event in spool.events.read(second)}
            for kind, words in (
                ("claimed", "the ranks' start"),
                ("started", "the model's loading"),
                ("loaded", "the first step"),
            ):
                yield f"of it until {words} begins", at[kind], "s"
            yield "of it computed", steps(spool, second)[1][0], "s"
        finally:
            runner.send_signal(signal.SIGTERM)
            runner.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", help="of bench/restart.py")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--row", type=int, default=4096, help="slots of a row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keeps the runner's log and the compiled kernels")
    options = parser.parse_args()
    if options.shape:
        random_model(options.model, options.shape, options.device)
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        for figure, value, unit in measure(options, out.absolute()):
            told = {"figure": figure, "value": round(value, 4), "unit": unit}
            print(json.dumps(told | {"calls": options.calls, "row": options.row}), flush=True)


if __name__ == "__main__":
    main()
