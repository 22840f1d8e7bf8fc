"""Writes models of random bf16 weights. If the volume is fast enough, a model of tens of gigabytes
is written in seconds."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tandem.families.registry import read_arch, weight_rules
from tandem.system.safetensors_header import lay_out

SHARD_BYTES = 4 * 2**30
NOISE_ELEMENTS = 2**27
THREADS = 16


def write_random_model(directory: Path, config: dict[str, Any], device: str) -> Path:
    """Writes `config.json` and the weights' shards, unless they exist already. Another process
    writes the shards, so that this process uses no GPU memory."""
    if not (directory / "model.safetensors.index.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-6} | config))
        subprocess.run(
            [sys.executable, "-m", "bench.random_model", str(directory), device], check=True
        )
    return directory


def _write_shards(directory: Path, device: str) -> None:
    """Writes the shards. Each tensor is a part of one block of normal noise, scaled by 1 /
    sqrt(number of input features)."""
    shapes = {
        name: shape
        for rule in weight_rules(read_arch(str(directory)))
        for name, shape in rule.sources.items()
    }
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        size += 2 * torch.Size(shape).numel()
        if shards[-1] and size > SHARD_BYTES:
            shards.append({})
            size = 2 * torch.Size(shape).numel()
        shards[-1][name] = shape
    noise = _Noise(device)
    index = {}
    with ThreadPoolExecutor(THREADS) as pool:
        writes = []
        for number, shard in enumerate(shards, 1):
            file = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
            header, entries = lay_out({name: ("BF16", shape) for name, shape in shard.items()})
            fd = os.open(file, os.O_WRONLY | os.O_CREAT)
            os.truncate(fd, max(entry.end for entry in entries.values()))
            os.pwrite(fd, header, 0)
            for entry in entries.values():
                writes.append(pool.submit(noise.write, fd, entry.begin, len(writes), entry.shape))
            index |= dict.fromkeys(shard, file.name)
        for write in writes:
            write.result()
    listed = {"metadata": {}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(listed))


class _Noise:
    def __init__(self, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._unit = torch.randn(NOISE_ELEMENTS, generator=generator, device=device)
        self._scaled: dict[int, memoryview] = {}

    def write(self, fd: int, at: int, number: int, shape: tuple[int, ...]) -> None:
        """Writes tensor `number` of the model at byte `at` of the file."""
        features = shape[-1] if len(shape) > 1 else 0
        if features not in self._scaled:
            values = 1 + 0.1 * self._unit[: 2**20] if not features else self._unit * features**-0.5
            self._scaled[features] = values.bfloat16().cpu().view(torch.uint8).numpy().data
        block, left = self._scaled[features], 2 * torch.Size(shape).numel()
        begin = number * 2 * 1_000_003 % len(block)
        while left:
            part = block[begin : begin + min(left, 2**26)]
            done = os.pwrite(fd, part, at)
            at, left, begin = at + done, left - done, (begin + done) % len(block)


if __name__ == "__main__":
    _write_shards(Path(sys.argv[1]), sys.argv[2])
