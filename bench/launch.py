"""The same tiny jobs through the runner under each way to start ranks: where the seconds of a job go.

On the CPU this shows the cost of starting a process (imports), not of a real model; GPUs are measured apart.
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import report
from tandem.data.prepare import prepare_sft
from tandem.data.trajectories import PackingSettings, SFTExample
from tandem.model.arch import read_arch
from tandem.model.identity import write_identity_adapter
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, LoraShape, OptimizerSettings, RunSpec, SFTJob

JOBS = 4
WAYS = ("torchrun", "fork")


def submit(spool: Spool, run: str, job_id: str) -> None:
    """Queue one small SFT job, the same for every run."""
    rng = np.random.default_rng(0)
    examples = [
        SFTExample(token_ids=rng.integers(0, 250, 24).tolist(), trainable=[False] * 12 + [True] * 12) for _ in range(16)
    ]

    def make(name: str, base: int, staged: Path) -> SFTJob:
        data = prepare_sft(
            examples, tokenizer_path="", vocab_size=256, packing=PackingSettings(sequence_length=128), out=staged
        )
        return SFTJob(
            id=name, run=run, base_step=base, created=time.time(), fingerprint=name, data=data,
            optimizer=OptimizerSettings(epochs=2),
        )  # fmt: skip

    spool.jobs.submit(make, run=run, job_id=job_id, fingerprint=job_id, base_step=None)


def measure(way: str, root: Path) -> tuple[list[dict[str, float]], str]:
    """Seconds of each part of each job, and a digest of the last adapter."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import tiny_model

    model = tiny_model.write_tiny_qwen3(root / "models" / "tiny")
    spool, lora = Spool.create(root), LoraShape(rank=8)
    spec = RunSpec(name="bench", base_model="models/tiny", lora=lora, created=time.time())
    arch = read_arch(str(model))
    spool.runs.create(spec, lambda out: write_identity_adapter(out, arch, lora, base_model=spec.base_model, seed=0))
    for i in range(JOBS):
        submit(spool, "bench", f"job-{i}")
    environment = os.environ | {"TANDEM_ROOT": str(root), "TANDEM_DEVICE": "cpu", "TANDEM_LAUNCH": way}
    runner = subprocess.Popen(
        [sys.executable, "-m", "tandem.trainer.runner"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 600
        while any(spool.jobs.get(f"job-{i}")[0] not in TERMINAL for i in range(JOBS)):
            assert time.monotonic() < deadline, "the jobs did not end within 600 s"
            time.sleep(0.1)
    finally:
        runner.send_signal(signal.SIGTERM)
        runner.wait(timeout=60)
    parts = []
    for i in range(JOBS):
        at = {event.type: event.time for event in spool.events.read(f"job-{i}")}
        parts.append(
            {
                "start": at["started"] - at["claimed"],
                "load": at["loaded"] - at["started"],
                "train and save": at["checkpoint"] - at["loaded"],
                "release": at["succeeded"] - at["checkpoint"],
                "job": at["succeeded"] - at["claimed"],
            }
        )
    adapter = spool.checkpoints.path("bench", JOBS) / "adapter_model.safetensors"
    return parts, hashlib.sha256(adapter.read_bytes()).hexdigest()


def main() -> None:
    """Both ways, the same jobs; the adapters must come out the same."""
    rows, digests = [], set()
    for way in WAYS:
        with tempfile.TemporaryDirectory() as directory:
            parts, digest = measure(way, Path(directory))
        digests.add(digest)
        after_first = parts[1:]
        rows.append({"way": way} | {key: statistics.median(p[key] for p in after_first) for key in parts[0]})
    assert len(digests) == 1, f"the ways to start ranks gave different adapters: {digests}"
    report("launch", f"Seconds of a job by the way its ranks start (median of {JOBS - 1}, after the first)", rows)


if __name__ == "__main__":
    main()
