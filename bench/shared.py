"""Runs trainer and vLLM on one GPU, in cycles of rollout, sleep, training, release and wake-up.
Measures the seconds and the bytes of each part.

    python -m bench.shared [--shape qwen3-8b] [--cycles 10] [--enforce-eager] [--launch fork] [--out
    DIR]

vLLM, publisher and runner are separate processes, as in their containers. The base model has random
weights, the run has a LoRA of rank 16, and each job is two optimizer steps of SFT. The model, the
run and the jobs are those of bench.restart. A rollout samples a fixed number of tokens from the
newest served step. Times come from the job's events and the client's clock, and bytes come from
nvidia-smi. The program fails if the size of vLLM's KV cache changes, or if any program runs out of
memory.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.report import report
from bench.restart import LONG_ROW, ROW_LENGTH, SHAPES, make_model, sampled_memory, submit
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, LoraShape, RunSpec, Served
from tandem.system import ports, processes

RUN = "bench"
GIB = 2**30
READY_SECONDS, JOB_SECONDS, SERVED_SECONDS = 300.0, 240.0, 120.0
_TROUBLE = re.compile(
    r"CUDA out of memory|CUDA error|OutOfMemoryError|EngineDeadError", re.IGNORECASE
)
_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"', re.MULTILINE)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Writes a tokenizer with a token for each id of the model, so that vLLM can convert every
    sampled token to text."""
    tokenizer = Tokenizer(
        models.WordLevel(vocab={f"t{i}": i for i in range(vocabulary)}, unk_token="t0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "t1",
        "pad_token": "t0",
        "unk_token": "t0",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


class Parts:
    """vLLM, publisher and runner, with their logs in one directory. `close` ends all three
    programs."""

    def __init__(self, root: Path, model: Path, options: argparse.Namespace) -> None:
        self.root, self.logs = root, options.out
        self.keys = {
            "TANDEM_API_KEY": secrets.token_hex(16),
            "TANDEM_ADMIN_TOKEN": secrets.token_hex(16),
        }
        with ports.reserve() as port:
            self.url = f"http://127.0.0.1:{port.port}"
            number = str(port.port)
        source = str(Path(__file__).parent.parent / "src")
        self.environment = os.environ | {
            "TANDEM_ROOT": str(root),
            "TANDEM_BASE_MODEL": str(model),
            "TANDEM_DEVICE": "cuda",
            "TANDEM_GPU_MODE": "shared",
            "TANDEM_TRAINER_DEVICES": "0",
            "TANDEM_INFERENCE_DEVICES": "0",
            "TANDEM_LAUNCH": options.launch,
            "TANDEM_INFERENCE_PORT": number,
            "TANDEM_MAX_LORA_RANK": "16",
            "TANDEM_MAX_MODEL_LEN": str(options.max_model_len),
            "TANDEM_MAX_LORAS": "2",
            "TANDEM_DTYPE": "bfloat16",
            "TANDEM_GPU_MEMORY_UTILIZATION": str(options.gpu_memory_utilization),
            "TANDEM_ENFORCE_EAGER": str(int(options.enforce_eager)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
            "TORCHINDUCTOR_CACHE_DIR": str(options.work / "inductor"),
            "TRITON_CACHE_DIR": str(options.work / "triton"),
            **self.keys,
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.client = httpx.Client(
            base_url=self.url,
            timeout=300.0,
            trust_env=False,
            headers={"Authorization": f"Bearer {self.keys['TANDEM_API_KEY']}"},
        )

    def start(self, name: str, module: str) -> None:
        with (self.logs / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", module]
            self._running[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def check(self) -> None:
        """Raises AssertionError with the last lines of a program's log if the program has ended."""
        for name, program in self._running.items():
            code = program.poll()
            assert code is None, f"{name} ended with {code}\n{self.tail(name)}"

    def tail(self, name: str, size: int = 4000) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")[-size:]

    def until(self, what: str, seconds: float, check: Any) -> Any:
        end = time.monotonic() + seconds
        while not (answer := check()):
            self.check()
            ends = "\n".join(f"---- {name}\n{self.tail(name, 2500)}" for name in self._running)
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{ends}"
            time.sleep(0.05)
        return answer

    def healthy(self) -> bool:
        try:
            return self.client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        for name in ("runner", "publisher", "vllm"):
            program = self._running.get(name)
            if program is not None and program.poll() is None:
                program.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(timeout=70 if name == "runner" else 20)
        for program in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        processes.kill_all(lambda: processes.marked("TANDEM_ROOT", str(self.root)), timeout=10)
        self.client.close()


@contextlib.contextmanager
def parts(root: Path, model: Path, options: argparse.Namespace) -> Iterator[Parts]:
    made = Parts(root, model, options)
    try:
        yield made
    finally:
        made.close()


def rollout(
    made: Parts, model: str, options: argparse.Namespace, vocabulary: int, seed: int
) -> float:
    """Sends one request with all prompts, each of which gets the same number of new tokens. Returns
    the new tokens per second."""
    prompts = (
        np.random.default_rng(seed)
        .integers(2, vocabulary, (options.prompts, options.prompt_tokens))
        .tolist()
    )
    begin = time.monotonic()
    answer = made.client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": prompts,
            "max_tokens": options.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
        },
    )
    seconds = time.monotonic() - begin
    assert answer.status_code == 200, (
        f"{answer.status_code}: {answer.text[:2000]}\n{made.tail('vllm')}"
    )
    made_tokens = answer.json()["usage"]["completion_tokens"]
    assert made_tokens == options.prompts * options.output_tokens, (
        f"{made_tokens} tokens, though eos is ignored"
    )
    return float(made_tokens / seconds)


def used() -> int:
    """Bytes in use on the GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return (
        int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
        * 2**20
    )


def available() -> int:
    """Bytes of host memory that are available to programs."""
    (line,) = (
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return int(line.split()[1]) * 1024


def cycle(
    made: Parts, spool: Spool, number: int, options: argparse.Namespace, vocabulary: int
) -> dict[str, Any]:
    """Runs one cycle: rollouts on the newest step, and a job that starts from this step. Returns
    the cycle's row."""
    name = f"{RUN}@{number}"

    def served() -> Served | None:
        found = spool.served.get(RUN)
        assert found is None or found.refused_step != number, (
            f"{name} is refused: {found.refused_reason}"
        )
        return found if found is not None and found.step == number else None

    error = made.until(f"{name} is served", SERVED_SECONDS, served).mean_abs_logprob_error
    # The rollouts before the measurement load the adapter for the first time and compile kernels.
    for warm_up in range(1 if number else 1 + options.rounds):
        rollout(made, name, options, vocabulary, seed=10_000 + 100 * warm_up + number)
    rates = [rollout(made, name, options, vocabulary, seed=1 + r) for r in range(options.rounds)]
    print("tokens/s of each rollout:", *(round(rate) for rate in rates), flush=True)
    made.client.post(
        "/reset_prefix_cache", headers={"x-tandem-admin-token": made.keys["TANDEM_ADMIN_TOKEN"]}
    )
    blocks = _BLOCKS.search(made.client.get("/metrics").text)
    awake = used()
    job = f"job-{number}"
    submit(spool, job, vocabulary, ROW_LENGTH.get(options.shape, LONG_ROW))
    made.until(f"{job} ends", JOB_SECONDS, lambda: spool.jobs.get(job)[0] in TERMINAL)
    after = made.client.get(
        "/is_sleeping", headers={"x-tandem-admin-token": made.keys["TANDEM_ADMIN_TOKEN"]}
    ).json()
    state, record = spool.jobs.get(job)
    log = spool.paths.log_file(job)
    assert state == "succeeded", (
        f"{job} {state}: {record.result}\n{log.read_text()[-3000:]}\n{made.tail('runner')}"
    )
    assert after == {"is_sleeping": False}, "the job had succeeded while vLLM slept"
    events = spool.events.read(job)
    (made.logs / f"events.{number}.jsonl").write_text(
        "\n".join(event.model_dump_json() for event in events)
    )
    at = {event.type: event.time for event in events}
    data = {event.type: event.data for event in events}
    last_step = max(event.time for event in events if event.type == "step")
    return {
        "cycle": number + 1,
        "tokens/s": max(rates),
        "log-prob error": error,
        "sleep": data["slept"]["seconds"],
        "ranks to 1st step": at["loaded"] - at["slept"],
        "steps": last_step - at["loaded"],
        "checkpoint": at["checkpoint"] - last_step,
        "release": at["released"] - at["checkpoint"],
        "wake": data["woken"]["seconds"],
        "vLLM away": at["woken"] - at["claimed"],
        "job": at["succeeded"] - at["claimed"],
        "GiB awake": awake / GIB,
        "GiB asleep": _gib(data["slept"]["devices"]),
        "GiB training": _gib(data["released"]["before"]),
        "GiB released": _gib(data["released"]["devices"]),
        "GiB woken": _gib(data["woken"]["devices"]),
        "left MiB": data["released"]["bytes"] / 2**20,
        "host GiB free": available() / GIB,
        "KV blocks": int(blocks[1]) if blocks else 0,
    }


def _gib(devices: dict[str, int]) -> float:
    return sum(devices.values()) / GIB


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for docs/performance.md. The table has a line for each figure, and columns for the
    first two cycles and the last cycle."""
    chosen = [rows[0], *rows[1:2], *rows[-1:]] if len(rows) > 2 else rows
    lines = [
        "| | " + " | ".join(f"cycle {row['cycle']}" for row in chosen) + " |",
        "|---" * (len(chosen) + 1) + "|",
    ]
    for key in list(rows[0])[1:]:
        values = (
            f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for row in chosen
        )
        lines.append(f"| {key} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def troubles(made: Parts, spool: Spool) -> list[str]:
    """The log lines, from all programs, that report a lack of memory."""
    logs = [*made.logs.glob("*.log"), *spool.paths.jobs.rglob("log")]
    return [
        f"{path.name}: {line.strip()[:300]}"
        for path in logs
        for line in path.read_text(errors="replace").splitlines()
        if _TROUBLE.search(line)
    ]


def main() -> None:
    """Runs all cycles. If a cycle fails, the rows of the cycles before it are still written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--launch", choices=["torchrun", "fork", "resident"], default="fork")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--rounds", type=int, default=4, help="rollouts measured in each cycle; the best one counts"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tandem-shared",
        help="model, spool",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="logs; by default $OUT, else beside the spool"
    )
    options = parser.parse_args()
    options.out = options.out or Path(os.environ.get("OUT") or options.work / "logs")
    for directory in (options.out, options.work):
        directory.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    print(f"before anything runs: {used() >> 20} MiB in use", flush=True)
    model = make_model(options.work / options.shape, options.shape, "cuda")
    arch = read_arch(str(model))
    write_tokenizer(model, arch.vocab_size)
    print(f"model after {time.monotonic() - begin:.0f} s", flush=True)
    root = Path(tempfile.mkdtemp(prefix="spool-", dir=options.work))
    spool, lora = Spool.create(root), LoraShape(rank=16, alpha=32)
    spec = RunSpec(name=RUN, base_model=str(model), lora=lora, created=time.time())
    spool.runs.create(
        spec, lambda out: write_identity_adapter(out, arch, lora, base_model=str(model), seed=0)
    )
    rows: list[dict[str, Any]] = []
    with ExitStack() as held:
        held.enter_context(sampled_memory(options.out / "memory.csv", "cuda"))
        made = held.enter_context(parts(root, model, options))
        for name, module in (
            ("vllm", "tandem.inference.server.serve"),
            ("publisher", "tandem.inference.publisher"),
            ("runner", "tandem.trainer.runner"),
        ):
            made.start(name, module)
        made.until("vLLM is ready", READY_SECONDS, made.healthy)
        print(f"vLLM ready after {time.monotonic() - begin:.0f} s", flush=True)
        try:
            for number in range(options.cycles):
                rows.append(cycle(made, spool, number, options, arch.vocab_size))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            if rows:
                name = f"shared-{options.shape}" + ("-eager" if options.enforce_eager else "")
                name += "" if options.launch == "fork" else f"-{options.launch}"
                report(
                    name,
                    f"{options.shape}, ranks by {options.launch}, one GPU for both: seconds"
                    " and GiB",
                    rows,
                )
                print(markdown(rows), flush=True)
            found = troubles(made, spool)
            print(f"logs with trouble: {found}", flush=True)
    first, last = rows[0], rows[-1]
    ratio = last["tokens/s"] / first["tokens/s"]
    kept = f"KV blocks {first['KV blocks']} and {last['KV blocks']}"
    print(
        f"throughput of the last cycle: {100 * (ratio - 1):+.2f} % of the first; {kept}", flush=True
    )
    print(f"{time.monotonic() - begin:.0f} s in all", flush=True)
    print(f"after the end: {used() >> 20} MiB in use", flush=True)
    assert first["KV blocks"] > 0, "vLLM's /metrics does not tell its KV cache's size"
    assert abs(last["KV blocks"] - first["KV blocks"]) <= 0.01 * first["KV blocks"], (
        "the KV cache has another size"
    )
    assert not found, "something ran out of memory"
    if abs(ratio - 1) > 0.01:
        print("NOT within 1 %: throughput", flush=True)


if __name__ == "__main__":
    main()
