"""Measures the effect of a new checkpoint on sampling clients: the stall of running requests, and
the time until the checkpoint is served.

    python -m bench.swap [--shape qwen3-8b] [--ways merge-device nccl-device adapter] [--requests
    64] [--swaps 8]
                         [--gpus 0] [--trainer-gpus 1] [--publications 500]

vLLM runs with Tandem's settings. The base model and the adapters have random weights. An adapter
has rank 16 and is on all linear layers. In a mixture of experts an adapter is on attention only.
Throughout the measurement vLLM answers `--requests` requests as streams. The program commits a
checkpoint, and Tandem's publisher copies, loads, verifies and announces the checkpoint. The stall
of a swap is the longest gap between two tokens of a request during the swap, minus the median gap
before the swap. With the transport nccl a trainer's ranks send whole weights, and with the
transport volume these ranks write whole weights. The ranks do not train, and their adapters are the
random adapters. `sent` is the time to connect and to send the weights. `sending` is the time to
send the weights, without the time to connect. The transports nccl and volume are measured with the
same vLLM process. Both vLLM and the trainer have one tensor-parallel rank per GPU. After the swaps,
`--many` requests without streaming measure the throughput of the newest checkpoint, from the start
of the first request to the end of the last request. Each checkpoint has a probe, whose reference
log-probs come from vLLM itself. With `--publications N`, N more checkpoints are published one after
another while no client samples. The memory of vLLM's processes is read after the 10th publication
and after every 50th.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from safetensors.numpy import load_file, save_file

from bench.random_model import write_random_model
from bench.report import report
from bench.restart import host_memory
from bench.senders import Senders
from bench.shared import write_tokenizer
from bench.topologies import MODELS
from tandem.config import Settings
from tandem.families.adapter import WEIGHTS_FILE, default_targets
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.inference.publisher.publisher import Publisher
from tandem.spool import Spool
from tandem.spool.schema import LoraShape, Probe, RunSpec
from tandem.system import ports, processes
from tandem.vllm_client.client import VllmClient

WHOLE = ("nccl", "volume")
"""Ways in which whole weights travel."""
WAYS = (
    "adapter",
    *(f"{way}-{copy}" for way in ("merge", *WHOLE) for copy in ("device", "host", "auto")),
)
GROUP = 8
"""Requests of the throughput that share a prompt."""
PROMPTS = [list(range(100, 164)), list(range(400, 448))]


@dataclass
class Server:
    """A running vLLM, its settings, and a publisher that has seen vLLM start. A publisher that has
    not seen vLLM start would flush the prefix cache for each adapter (before vLLM 0.32)."""

    settings: Settings
    variables: dict[str, str]
    pid: int
    publisher: Publisher


@contextlib.contextmanager
def server(
    name: str, transport: str, copy: str, model: Path, options: argparse.Namespace
) -> Iterator[Server]:
    """Starts vLLM with these settings; vLLM's log is <logs>/vllm.<name>.log. `copy`: the place of
    the second copy of the weights (`device` or `host`). If `copy` is empty, vLLM serves
    adapters."""
    with ports.reserve() as reserved:
        port = str(reserved.port)
    variables = {
        "ROOT": str(options.out / f"spool.{name}"),
        "BASE_MODEL": str(model),
        "DEVICE": options.device,
        "INFERENCE_DEVICES": ",".join(map(str, options.gpus)) if options.device == "cuda" else "",
        "INFERENCE_TENSOR_PARALLEL": str(len(options.gpus)),
        "WEIGHTS": "merged" if copy else "adapter",
        "TRANSPORT": transport if copy else "auto",
        "SECOND_COPY": copy or "auto",
        "INFERENCE_PORT": port,
        "API_KEY": secrets.token_hex(8),
        "ADMIN_TOKEN": secrets.token_hex(8),
        "MAX_MODEL_LEN": str(options.prompt + options.tokens + 64),
        "MAX_LORA_RANK": "16",
        "GPU_MEMORY_UTILIZATION": str(options.utilization),
        "ENFORCE_EAGER": str(int(options.enforce_eager)),
        "DTYPE": options.dtype,
    }
    Spool.create(Path(variables["ROOT"]))
    settings = Settings.model_validate({key.lower(): value for key, value in variables.items()})
    variables = {f"TANDEM_{key}": value for key, value in variables.items()}
    file = options.logs / f"vllm.{name}.log"
    client = VllmClient(settings)
    publisher = Publisher(settings, client)
    publisher.once()
    with file.open("wb") as log:
        command = [sys.executable, "-m", "tandem.inference.server.serve"]
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env=os.environ | variables
        )
        try:
            end = time.monotonic() + 420
            while not client.healthy():
                text = file.read_text(errors="replace")
                assert process.poll() is None, text[-3000:]
                assert time.monotonic() < end, text[-3000:]
                time.sleep(0.5)
            yield Server(settings, variables, process.pid, publisher)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def new_session() -> aiohttp.ClientSession:
    """A session without limits on the number of concurrent requests and on their time."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
    )


def completion(
    settings: Settings, model: str, prompt: list[int], tokens: int, *, stream: bool
) -> dict[str, Any]:
    """The arguments of a POST request to vLLM for exactly `tokens` new tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
        "temperature": 1.0,
    }
    url = f"{settings.resolved_inference_url}/v1/completions"
    return {
        "url": url,
        "json": body,
        "headers": {"Authorization": f"Bearer {settings.inference_key}"},
    }


class Streams(threading.Thread):
    """A thread with `--requests` concurrent streams. Each stream sends streaming requests for
    `--tokens` new tokens, one after another. `times` has a list of the tokens' times for each
    request."""

    def __init__(self, settings: Settings, model: str, options: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self._settings, self.model, self._options = settings, model, options
        self.times: list[list[float]] = []
        self.errors: list[str] = []
        self._ended = threading.Event()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        async with new_session() as session:
            await asyncio.gather(
                *(self._stream(session, number) for number in range(self._options.requests))
            )

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        generator, whole = np.random.default_rng(number), self._options.tokens
        # The first requests have different lengths, so that the streams' later requests begin at
        # different times.
        first = max(1, whole * (number + 1) // self._options.requests)
        for tokens in itertools.chain([first], itertools.repeat(whole)):
            if self._ended.is_set():
                return
            prompt = generator.integers(2, self._options.vocabulary, self._options.prompt).tolist()
            mine: list[float] = []
            self.times.append(mine)
            request = completion(self._settings, self.model, prompt, tokens, stream=True)
            async with session.post(**request) as answer:
                if answer.status != 200:
                    self.errors.append(f"{answer.status} {(await answer.text())[:200]}")
                    await asyncio.sleep(0.05)
                    continue
                async for _ in answer.content.iter_any():
                    mine.append(time.time())
                    if self._ended.is_set():
                        return

    def stop(self) -> None:
        self._ended.set()
        self.join(30)

    def stall(self, begin: float, end: float) -> float:
        """The longest gap between two tokens of a request that overlaps [begin, end], minus the
        median gap in the second before `begin`."""
        gaps, before = [0.0], []
        for times in list(self.times):
            for first, second in itertools.pairwise(times):
                if second > begin and first < end:
                    gaps.append(second - first)
                elif begin - 1 < first and second < begin:
                    before.append(second - first)
        return max(gaps) - statistics.median(before)


def device_memory(pid: int) -> int:
    """The GPU memory in MiB that a process and its descendants use."""
    members = {pid, *(process.pid for process in processes.descendants(pid))}
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(
        int(size) for user, size in (line.split(",") for line in lines) if int(user) in members
    )


def write_adapter(directory: Path, seed: int, arch: Any, lora: LoraShape, model: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_identity_adapter(directory, arch, lora, base_model=str(model), seed=0)
    generator = np.random.default_rng(seed)
    file = directory / WEIGHTS_FILE
    weights = {
        name: (
            generator.standard_normal(value.shape, np.float32) * 1e-3 if "lora_B" in name else value
        )
        for name, value in load_file(file).items()
    }
    save_file(weights, file)


class Bench:
    """Publishes checkpoints to one vLLM and measures the publications."""

    def __init__(self, name: str, vllm: Server, model: Path, options: argparse.Namespace) -> None:
        self._name, self._vllm, self._options = name, vllm, options
        self._settings = settings = vllm.settings
        self._spool, self._client = Spool(settings.root), VllmClient(settings)
        arch = read_arch(str(model))
        lora = LoraShape(rank=16, alpha=32, targets=default_targets(arch))
        spec = RunSpec(
            name="bench",
            base_model=str(model),
            lora=lora,
            weights=settings.weights,
            created=time.time(),
        )
        self._spool.runs.create(spec, lambda out: write_adapter(out, 0, arch, lora, model))
        self._adapters = [options.out / f"adapter.{name}.{seed}" for seed in (1, 2)]
        for seed, adapter in enumerate(self._adapters, 1):
            write_adapter(adapter, seed, arch, lora, model)
        self._logprobs = [
            _scores(self._client, settings.weights, adapter, lora) for adapter in self._adapters
        ]
        self._publisher = vllm.publisher
        self._step = 0

    def _commit(self, senders: Senders | None) -> None:
        step = self._step
        job = senders.offer(self._adapters[step % 2]) if senders else None
        staged = self._settings.root / "jobs" / "work" / f"staged-{step}"
        staged.mkdir(parents=True)
        for file in self._adapters[step % 2].iterdir():
            os.link(file, staged / file.name)
        now, other = self._logprobs[step % 2], self._logprobs[(step + 1) % 2]
        probe = Probe(tokens=PROMPTS, logprobs=now, previous=other, base=other)
        self._spool.checkpoints.commit(staged, "bench", step, job, probe=probe)

    def publish(self, transport: str, senders: Senders | None) -> tuple[float, float]:
        """Commits the next step and publishes it. Returns the times of the commit and of the
        announcement."""
        self._step += 1
        self._commit(senders)
        begin = time.time()
        if senders:
            senders.send(self._step)
        while (served := self._spool.served.get("bench")) is None or served.step != self._step:
            self._publisher.once()
            assert served is None or served.refused_step is None, served
        assert served.transport == transport, served
        return begin, time.time()

    @property
    def model(self) -> str:
        return "bench" if self._settings.weights == "merged" else f"bench@{self._step}"

    def swaps(self, way: str, senders: Senders | None) -> dict[str, Any]:
        """Publishes checkpoints while the streams run. Returns medians and maxima of the parts of a
        publication."""
        options, transport = self._options, {"adapter": "lora"}.get(way, way.partition("-")[0])
        self.publish(transport, senders)
        if senders:
            senders.sent()
        rows = []
        with self._load() as streams:
            for _ in range(options.swaps):
                begin, end = self.publish(transport, senders)
                streams.model = self.model
                time.sleep(1.5)
                seconds = self._publisher._loader._served[f"bench@{self._step}"].record.seconds
                rows.append(
                    {"stall": streams.stall(begin, end + 0.2), "served": end - begin, **seconds}
                )
                if senders:
                    sent = senders.sent()
                    sending = sent.get("sending_seconds", 0.0)
                    rows[-1] |= {
                        "sent": sent["seconds"],
                        "sending": sending,
                        "GB": sent["bytes"] / 1e9,
                    }
                    rows[-1] |= {"GB/s": sent["bytes"] / 1e9 / sending} if sending else {}
                print(json.dumps({"way": way, "step": self._step, **rows[-1]}), flush=True)
        return {"way": way, "swaps": len(rows)} | _summary(rows)

    def throughput(self) -> dict[str, float]:
        """New tokens per second of `--many` requests, from the start of the first request to the
        end of the last request. Returns the median, the lowest and the highest of `--rounds`
        rounds. GROUP requests have the same prompt, as in RL."""
        rates = sorted(asyncio.run(self._round(number)) for number in range(self._options.rounds))
        return {
            "tokens/s": statistics.median(rates),
            "tokens/s min": rates[0],
            "tokens/s max": rates[-1],
        }

    async def _round(self, number: int) -> float:
        options, generator = self._options, np.random.default_rng(number)
        prompts = generator.integers(
            2, options.vocabulary, (-(-options.many // GROUP), options.prompt)
        ).tolist()

        async def post(prompt: list[int]) -> int:
            async with session.post(
                **completion(self._settings, self.model, prompt, options.many_tokens, stream=False)
            ) as answer:
                answer.raise_for_status()
                return int((await answer.json())["usage"]["completion_tokens"])

        async with new_session() as session:
            begin = time.monotonic()
            tokens = await asyncio.gather(
                *(post(prompts[index // GROUP]) for index in range(options.many))
            )
            return sum(tokens) / (time.monotonic() - begin)

    @contextlib.contextmanager
    def _load(self) -> Iterator[Streams]:
        """Streams that have run for `--warm` seconds when the block begins. Raises AssertionError
        if a stream's request failed."""
        streams = Streams(self._settings, self.model, self._options)
        streams.start()
        time.sleep(self._options.warm)
        try:
            yield streams
        finally:
            streams.stop()
        assert not streams.errors, streams.errors[:3]

    def growth(self, way: str) -> list[dict[str, Any]]:
        """Publishes checkpoints while no client samples. Returns the memory after the 10th
        publication, and after every 50th."""
        rows, begin = [], time.monotonic()
        for number in range(1, self._options.publications + 1):
            self.publish(way, None)
            if number == 10 or number % 50 == 0:
                memory = host_memory(self._vllm.pid)
                row = {
                    "publications": number,
                    "seconds": time.monotonic() - begin,
                    "host MiB": memory["host MiB"],
                }
                row |= {
                    "device MiB": (
                        device_memory(self._vllm.pid) if self._options.device == "cuda" else 0
                    )
                }
                rows.append(row | {"open files": memory["open files"]})
                print(json.dumps(rows[-1]), flush=True)
        return rows


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and maximum of each figure."""
    result = {}
    for key in rows[0]:
        values = [row[key] for row in rows if key in row]
        result |= {key: statistics.median(values), f"{key} max": max(values)}
    return result


def measure(ways: list[str], model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures serving in each of the `ways`. One vLLM process serves all of them."""
    name, (transport, _, copy) = "+".join(ways), ways[0].partition("-")
    started, rows = time.monotonic(), []
    with server(name, transport, copy, model, options) as vllm:
        ready = time.monotonic() - started
        bench = Bench(name, vllm, model, options)
        for way in ways:
            transport = way.partition("-")[0]
            senders: contextlib.AbstractContextManager[Senders | None] = contextlib.nullcontext()
            if transport in WHOLE:
                variables = vllm.variables | {
                    "TANDEM_TRANSPORT": transport,
                    "CUDA_VISIBLE_DEVICES": ",".join(map(str, options.trainer_gpus)),
                }
                directory, spool, ranks = (
                    options.out / f"ranks.{way}",
                    Spool(vllm.settings.root),
                    options.trainer_gpus,
                )
                senders = Senders(directory, spool, len(ranks), options.vocabulary, variables)
            with senders as started:
                rows.append({**bench.swaps(way, started), "ready": ready})
        if options.many:
            rates = bench.throughput()
            rows[-1] |= rates
            print(json.dumps({"way": ways[-1], **rates}), flush=True)
        if options.publications:
            title = f"{options.publications} publications by {ways[-1]}, {options.shape}"
            report(
                f"{options.name}-growth",
                title,
                bench.growth("lora" if transport == "adapter" else "merge"),
            )
    return rows


def _scores(client: VllmClient, weights: str, adapter: Path, lora: LoraShape) -> list[list[float]]:
    if weights == "adapter":
        client.load_lora(adapter.name, str(adapter))
        scores = client.prompt_logprobs(adapter.name, *PROMPTS)
        client.unload_lora(adapter.name)
        return scores
    client.swap_merged(f"{adapter.name}@0", str(adapter), lora.alpha / lora.rank, "keep", 300)
    return client.prompt_logprobs(f"{adapter.name}@0", *PROMPTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(MODELS), default="8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["merge-device", "merge-host", "adapter"]
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--many", type=int, default=256, help="requests at once for the throughput")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=2000, help="new tokens of a request")
    parser.add_argument("--many-tokens", type=int, default=512, help="the same, for the throughput")
    parser.add_argument("--publications", type=int, default=0)
    parser.add_argument("--gpus", nargs="+", type=int, default=[0], help="vLLM's")
    parser.add_argument(
        "--trainer-gpus",
        nargs="+",
        type=int,
        default=[1],
        help="of the ranks that send whole weights",
    )
    parser.add_argument(
        "--utilization", type=float, default=0.85, help="of the GPU's memory, by vLLM"
    )
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument(
        "--warm", type=float, default=8.0, help="seconds before anything is measured"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None, help="vLLM's; default: --out")
    parser.add_argument(
        "--name", default=None, help="of the file under bench/results; default: swap-SHAPE"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SystemExit ends vLLM and the ranks too
    options.out = options.out or Path(tempfile.mkdtemp(prefix="tandem-swap-"))
    options.logs, options.name = (
        options.logs or options.out,
        options.name or f"swap-{options.shape}",
    )
    for directory in (options.out, options.logs):
        directory.mkdir(parents=True, exist_ok=True)
    model = write_random_model(options.out / options.shape, MODELS[options.shape], options.device)
    options.vocabulary = read_arch(str(model)).vocab_size
    write_tokenizer(model, options.vocabulary)
    rows = list[dict[str, Any]]()
    of_server = itertools.groupby(
        options.ways, key=lambda way: re.sub(f"^({'|'.join(WHOLE)})-", "whole-", way)
    )
    for _, ways in of_server:
        rows += measure(list(ways), model, options)
    columns = {key: None for row in rows for key in row}
    rows = [{key: row.get(key) for key in columns} for row in rows]
    report(
        options.name,
        f"{options.shape}: a new checkpoint under {options.requests} requests, seconds",
        rows,
    )


if __name__ == "__main__":
    main()
