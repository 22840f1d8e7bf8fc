"""What a new checkpoint costs those who sample: the stall of running requests, and the time until it is served.

    python -m bench.swap [--shape qwen3-8b] [--ways merge-device nccl-device adapter] [--requests 64] [--swaps 8]

vLLM runs with Tandem's settings, the base model and the adapters (rank 16, all linear layers) have random weights.
`--requests` streams run all the time. A checkpoint is committed, and Tandem's publisher copies, loads, verifies and
announces it. The stall of a swap is the longest gap between two tokens of a running request around it, less the
median gap. With nccl, ipc and volume the ranks of a trainer, on GPU 1, send or write whole weights (they don't train:
they have the random adapters); `sent` is how long that takes, `sending` without the time to connect. Then `--many`
requests measure the throughput with the newest checkpoint. The probe is made of vLLM's own log-probs.
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
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from bench.report import report
from bench.restart import SHAPES, make_model
from bench.shared import write_tokenizer
from tandem.config import Settings
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.inference.publisher.publisher import Publisher
from tandem.spool import Spool
from tandem.spool.schema import LORA_TARGETS, LoraShape, Probe, RunSpec
from tandem.system import ports
from tandem.vllm_client.client import VllmClient

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from whole_weights_sender import Senders

WAYS = ("adapter", *(f"{way}-{copy}" for way in ("merge", "nccl", "ipc", "volume") for copy in ("device", "host")))
PROMPTS = [list(range(100, 164)), list(range(400, 448))]


@contextlib.contextmanager
def server(way: str, model: Path, options: argparse.Namespace) -> Iterator[Settings]:
    """vLLM as the settings describe it; its log is <out>/vllm.<way>.log."""
    with ports.reserve() as reserved:
        port = str(reserved.port)
    transport, _, copy = way.partition("-")
    environment = {
        "TANDEM_ROOT": str(options.out / f"spool.{way}"), "TANDEM_BASE_MODEL": str(model),
        "TANDEM_DEVICE": options.device,
        "TANDEM_INFERENCE_DEVICES": "0" if options.device == "cuda" and transport != "merge" else "",
        "TANDEM_WEIGHTS": "merged" if copy else "adapter", "TANDEM_TRANSPORT": transport if copy else "auto",
        "TANDEM_SECOND_COPY": copy or "auto", "TANDEM_INFERENCE_PORT": port,
        "TANDEM_API_KEY": secrets.token_hex(8), "TANDEM_ADMIN_TOKEN": secrets.token_hex(8),
        "TANDEM_MAX_MODEL_LEN": str(options.prompt + options.tokens + 64), "TANDEM_MAX_LORA_RANK": "16",
        "TANDEM_ENFORCE_EAGER": str(int(options.enforce_eager)), "TANDEM_DTYPE": options.dtype,
    }  # fmt: skip
    Spool.create(Path(environment["TANDEM_ROOT"]))
    os.environ.update(environment)
    settings = Settings()
    with (options.out / f"vllm.{way}.log").open("wb") as log:
        command = [sys.executable, "-m", "tandem.inference.server.serve"]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            client, end = VllmClient(settings), time.monotonic() + 420
            while not client.healthy():
                text = (options.out / f"vllm.{way}.log").read_text(errors="replace")
                assert process.poll() is None, text[-3000:]
                assert time.monotonic() < end, text[-3000:]
                time.sleep(0.5)
            yield settings
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


class Streams(threading.Thread):
    """Requests that run all the time, and when each token came."""

    def __init__(
        self, settings: Settings, model: str, count: int, options: argparse.Namespace, vocabulary: int
    ) -> None:
        super().__init__(daemon=True)
        self._settings, self.model, self._count, self._options = settings, model, count, options
        self._vocabulary = vocabulary
        self.times: list[list[float]] = []
        self.errors: list[str] = []
        self._ended = threading.Event()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._stream(session, number) for number in range(self._count)))

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        generator = np.random.default_rng(number)
        while not self._ended.is_set():
            prompt = generator.integers(2, self._vocabulary, self._options.prompt).tolist()
            body = {"model": self.model, "prompt": prompt, "max_tokens": self._options.tokens, "ignore_eos": True,
                    "stream": True, "temperature": 1.0}  # fmt: skip
            mine: list[float] = []
            self.times.append(mine)
            headers = {"Authorization": f"Bearer {self._settings.inference_key}"}
            url = f"{self._settings.resolved_inference_url}/v1/completions"
            async with session.post(url, json=body, headers=headers) as answer:
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
        """The longest gap of a running request around [begin, end], less the median gap of the second before."""
        gaps, before = [0.0], []
        for times in list(self.times):
            for first, second in itertools.pairwise(times):
                if second > begin and first < end:
                    gaps.append(second - first)
                elif begin - 1 < first and second < begin:
                    before.append(second - first)
        return max(gaps) - statistics.median(before)


def generated(settings: Settings) -> float:
    """Tokens that vLLM has generated, by its own count: the streams' chunks may hold several."""
    text = httpx.get(f"{settings.resolved_inference_url}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE))


def write_adapter(directory: Path, seed: int, arch: Any, lora: LoraShape, model: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_identity_adapter(directory, arch, lora, base_model=str(model), seed=0)
    generator = np.random.default_rng(seed)
    file = directory / WEIGHTS_FILE
    weights = {
        name: generator.standard_normal(value.shape, np.float32) * 1e-3 if "lora_B" in name else value
        for name, value in load_file(file).items()
    }
    save_file(weights, file)


def measure(way: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    arch = read_arch(str(model))
    targets = [t for t in LORA_TARGETS if not arch.moe or t not in ("gate_proj", "up_proj", "down_proj")]
    lora = LoraShape(rank=16, alpha=32, targets=tuple(targets))
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(server(way, model, options))
        ready = time.monotonic() - started
        spool, client = Spool(settings.root), VllmClient(settings)
        spec = RunSpec(name="bench", base_model=str(model), lora=lora, weights=settings.weights, created=time.time())
        spool.runs.create(spec, lambda out: write_adapter(out, 0, arch, lora, model))
        adapters = [options.out / f"adapter.{seed}" for seed in (1, 2)]
        for seed, adapter in enumerate(adapters, 1):
            write_adapter(adapter, seed, arch, lora, model)
        logprobs = [_scores(client, way, adapter, lora) for adapter in adapters]
        publisher = Publisher(settings, client)
        senders: Any = None
        if settings.way != "merge":
            ranks = options.out / f"ranks.{way}"
            variables = {"TANDEM_INFERENCE_URL": settings.resolved_inference_url, "CUDA_VISIBLE_DEVICES": "1"}
            senders = stack.enter_context(Senders(ranks, spool, "bench", settings.way, **variables))

        def commit(step: int) -> None:
            job = senders.offer(adapters[step % 2]) if senders else None
            staged = settings.root / "jobs" / "work" / f"staged-{step}"
            staged.mkdir(parents=True)
            for file in adapters[step % 2].iterdir():
                os.link(file, staged / file.name)
            now, other = logprobs[step % 2], logprobs[(step + 1) % 2]
            probe = Probe(tokens=PROMPTS, logprobs=now, previous=other, base=other)
            spool.checkpoints.commit(staged, "bench", step, job, probe=probe)

        def publish(step: int) -> tuple[float, float, float]:
            commit(step)
            begin = time.time()
            if senders:
                senders.send(step)
            while (served := spool.served.get("bench")) is None or served.step != step:
                publisher.once()
                assert served is None or served.refused_step is None, served
            transport = {"adapter": "lora"}.get(way, way.partition("-")[0])
            assert served.transport == transport, served
            return begin, time.time(), served.verified

        publish(1)

        def name(step: int) -> str:
            return "bench" if settings.weights == "merged" else f"bench@{step}"

        streams = Streams(settings, name(1), options.requests, options, arch.vocab_size)
        streams.start()
        time.sleep(options.warm)
        rows = []
        for step in range(2, options.swaps + 2):
            begin, end, _ = publish(step)
            streams.model = name(step)
            time.sleep(1.5)
            seconds = publisher._loader._served[f"bench@{step}"].record.seconds
            rows.append({"stall": streams.stall(begin, end + 0.2), "served": end - begin, **seconds})
            if senders:
                sent = senders.sent()
                rows[-1] |= {
                    "sent": sent["seconds"],
                    "sending": sent.get("sending_seconds", 0.0),
                    "GB": sent["bytes"] / 1e9,
                }
            print(json.dumps({"way": way, "step": step, **rows[-1]}), flush=True)
        streams.stop()
        many = Streams(settings, name(options.swaps + 1), options.many, options, arch.vocab_size)
        many.start()
        time.sleep(options.warm)
        first, begin = generated(settings), time.monotonic()
        time.sleep(options.seconds)
        tokens = (generated(settings) - first) / (time.monotonic() - begin)
        many.stop()
        assert not (streams.errors + many.errors), (streams.errors[:3], many.errors[:3])
    result = {"way": way, "ready": ready, "swaps": len(rows), "tokens/s": tokens}
    for key in rows[0]:
        values = [row[key] for row in rows if key in row]
        result |= {key: statistics.median(values), f"{key} max": max(values)}
    return result


def _scores(client: VllmClient, way: str, adapter: Path, lora: LoraShape) -> list[list[float]]:
    if way == "adapter":
        client.load_lora(adapter.name, str(adapter))
        scores = [client.prompt_logprobs(adapter.name, tokens) for tokens in PROMPTS]
        client.unload_lora(adapter.name)
        return scores
    client.swap_merged(f"{adapter.name}@0", str(adapter), lora.alpha / lora.rank, "keep", 300)
    return [client.prompt_logprobs(f"{adapter.name}@0", tokens) for tokens in PROMPTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["merge-device", "merge-host", "adapter"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--many", type=int, default=256, help="requests at once for the throughput")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=2000, help="new tokens of a request")
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before anything is measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which throughput is measured")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    options.out = options.out or Path(tempfile.mkdtemp(prefix="tandem-swap-"))
    options.out.mkdir(parents=True, exist_ok=True)
    model = make_model(options.out / options.shape, options.shape, options.device)
    write_tokenizer(model, read_arch(str(model)).vocab_size)
    rows = [measure(way, model, options) for way in options.ways]
    report(
        f"swap-{options.shape}", f"{options.shape}: a new checkpoint under {options.requests} requests, seconds", rows
    )


if __name__ == "__main__":
    main()
