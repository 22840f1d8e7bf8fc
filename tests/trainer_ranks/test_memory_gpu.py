"""R26, in bytes after each phase: what is allocated is what policy and optimizer hold, and nothing else; a step leaves
nothing behind, nor does a checkpoint, and when the ranks are gone the device is empty.

On a GPU torch's allocator is asked; on the CPU, which has none, what Python can reach takes its place where it can.
`python3 -m pytest -m gpu tests/trainer_ranks/test_memory_gpu.py`
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from safetensors.numpy import load_file

import tandem
from runner.runner_stack import HERE, Stack
from tandem.client.memory import by_attempt
from tandem.config import Settings
from tandem.families.adapter import adapter_shapes
from tandem.families.registry import read_arch
from tandem.model.weights.base_weights import SEGMENT
from tandem.spool import Spool
from tandem.system.gpus import FREE_BYTES, Devices
from trainer_ranks import jobs

GPU = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU")]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=GPU)]
EPOCHS = 4  # of one row each: as many optimizer steps, all alike
ROW = 256
SMALL = {
    "cpu": {"hidden_size": 64, "layers": 2},
    "cuda": {"hidden_size": 1024, "layers": 4, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn_size": 3072},
}
BLOCK = 512  # bytes that torch's allocator rounds up to
LARGE = 2**20  # what is larger may be given up to this much more, where the rest of a block is not worth keeping
FEW = 8 * BLOCK  # Megatron's optimizer has scalars of its own
SCALARS = 64 * 2**10  # torch's own constants and pinned scalars, of which there are a few


@dataclass
class Measured:
    """A fresh run's first job and the one after it, as `memory_of_phases` saw them; the sizes that were expected."""

    device: str
    base: int
    lora: int
    jobs: dict[str, list[dict[str, Any]]]

    def end(self, job: str, phase: str) -> dict[str, Any]:
        """When the phase ended last."""
        return [row for row in self.jobs[job] if row["phase"] == phase][-1]

    def floors(self, job: str) -> list[dict[str, Any]]:
        return [row for row in self.jobs[job] if row["at"] == "floor"]

    def begin(self, job: str, phase: str) -> dict[str, Any]:
        rows = self.jobs[job]
        row = rows[rows.index(self.end(job, phase)) - 1]
        assert row["at"] == "begin"
        return row

    def taken(self, row: dict[str, Any]) -> int:
        """Bytes asked for on the device, as exactly as one can know."""
        return row["stats"]["requested"] if self.device == "cuda" else row["visible"]


def submit(spool: Spool, job_id: str) -> str:
    return jobs.submit_sft(spool, "r", job_id, row=ROW, epochs=EPOCHS)


def write_model(directory: Path, device: str) -> Path:
    return tiny_model.write_tiny_qwen3(directory, **SMALL[device])


def run(spool: Spool, job_id: str, device: str) -> list[dict[str, Any]]:
    """Run the run's next job in a process of its own; what was measured."""
    job, out = jobs.claim(spool, submit(spool, job_id)), spool.root / f"{job_id}.json"
    script = Path(__file__).with_name("memory_of_phases.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(spool.root), job_id, str(out)],
        env=os.environ | {"TANDEM_DEVICE": device}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    jobs.finish(spool, job)
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=DEVICES)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    directory = tmp_path_factory.mktemp(request.param)
    model, spool = write_model(directory / "model", request.param), Spool.create(directory / "spool")
    jobs.make_run(spool, model)
    found = {job_id: run(spool, job_id, request.param) for job_id in ("fresh", "trained")}
    parameters = sum(weight.size for weight in load_file(model / "model.safetensors").values())
    shapes = adapter_shapes(read_arch(str(model)), jobs.LORA)
    base = parameters * (2 if request.param == "cuda" else 4)
    return Measured(request.param, base, 4 * sum(map(prod, shapes.values())), found)


def total(row: dict[str, Any]) -> int:
    return sum(size for kind in row["held"].values() for size in kind)


def holds(row: dict[str, Any], kind: str) -> int:
    return sum(row["held"][kind])


def nothing_else_is_taken(measured: Measured, row: dict[str, Any]) -> None:
    """What policy and optimizer hold; on the CPU what is read for later is reachable too."""
    if measured.device == "cpu":
        assert row["visible"] >= total(row)
        return
    sizes = [size for kind in row["held"].values() for size in kind]
    assert 0 <= row["stats"]["requested"] - sum(sizes) <= FEW
    blocks = sum(-(-size // BLOCK) * BLOCK for size in sizes)
    slack = sum(LARGE for size in sizes if size > LARGE)
    assert blocks <= row["stats"]["allocated"] <= blocks + slack + FEW
    assert 0 <= row["told"]["allocated"] - row["stats"]["allocated"] <= FEW


@pytest.mark.parametrize("job", ["fresh", "trained"])
def test_built_and_loaded_it_is_parameters_and_gradient_buffers(measured: Measured, job: str) -> None:
    if measured.device == "cuda":
        assert measured.end(job, "data")["stats"]["requested"] <= FEW  # nothing before the model
    built, loaded = measured.end(job, "build"), measured.end(job, "state")
    assert (holds(built, "lora"), holds(built, "moments")) == (measured.lora, 0)
    (base,) = built["held"]["base"]
    assert measured.base <= base < measured.base + 2 * SEGMENT
    assert base % SEGMENT == 0
    assert measured.lora <= holds(built, "gradients") <= measured.lora + SCALARS
    assert holds(built, "other") <= SCALARS  # RoPE's frequencies
    assert built["held"] | {"moments": loaded["held"]["moments"], "read": []} == loaded["held"]
    for row in (built, loaded):  # in between, weights are read, through memory of their own
        nothing_else_is_taken(measured, row)
    assert loaded["told"]["host_pinned"] <= SCALARS  # the buffers that files were read into


def test_a_trained_checkpoint_adds_the_moments_and_nothing_else(measured: Measured) -> None:
    fresh, trained = measured.end("fresh", "state"), measured.end("trained", "state")
    assert fresh["held"] == measured.end("fresh", "build")["held"] | {"read": []}
    assert trained["held"] == fresh["held"] | {"moments": trained["held"]["moments"]}
    assert holds(trained, "moments") == 2 * measured.lora
    for row in (fresh, trained):
        nothing_else_is_taken(measured, row)
    if measured.device == "cuda":
        assert trained["stats"]["requested"] - fresh["stats"]["requested"] == 2 * measured.lora


@pytest.mark.parametrize("job", ["fresh", "trained"])
def test_steps_begin_from_the_same_floor(measured: Measured, job: str) -> None:
    """The first one may leave what is made once: moments in a fresh run, constants of compiled kernels."""
    first, second, *later = measured.floors(job)
    assert len(later) == EPOCHS - 2
    for row in later:
        assert measured.taken(row) == measured.taken(second)
        assert row["held"] == second["held"]
    assert holds(first, "moments") == (0 if job == "fresh" else 2 * measured.lora)
    assert holds(second, "moments") == 2 * measured.lora
    if measured.device == "cuda":
        assert 0 <= second["stats"]["requested"] - total(second) <= SCALARS
    ends = [row for row in measured.jobs[job] if row["phase"] == "optimizer"]
    assert len({measured.taken(row) for row in ends[1:]}) == 1


@pytest.mark.parametrize("job", ["fresh", "trained"])
def test_a_checkpoint_leaves_nothing(measured: Measured, job: str) -> None:
    before, after = measured.begin(job, "checkpoint"), measured.end(job, "checkpoint")
    assert before["held"] == after["held"]
    if measured.device == "cuda":
        assert before["stats"]["requested"] == after["stats"]["requested"]
        assert before["stats"]["allocated"] == after["stats"]["allocated"]
    else:  # there the copies that were written are on the same device
        assert 0 <= after["visible"] - before["visible"] <= 3 * measured.lora + SCALARS
    assert after["told"]["host_pinned"] <= SCALARS
    assert before["stats"].get("host_pinned", 0) == after["stats"].get("host_pinned", 0)


@pytest.fixture
def gpu() -> Devices:
    """The first GPU, which nobody uses."""
    device = Devices(Settings(device="cuda", trainer_devices=["0"]), "trainer")
    busy = device.busy()
    assert not busy, f"somebody uses the GPU: {busy}"
    return device


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU")
@pytest.mark.parametrize("launch", ["torchrun", "fork"])
def test_when_the_ranks_are_gone_the_device_is_empty(launch: str, gpu: Devices, tmp_path: Path) -> None:
    """With the fork server still there; and the job's report agrees with nvidia-smi."""
    idle = gpu.used()
    stack = Stack(tmp_path / "spool", launch, entry="tandem.trainer.rank.worker")
    path = [str(Path(tandem.__file__).parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    stack.environment |= {
        "TANDEM_DEVICE": "cuda", "TANDEM_TRAINER_DEVICES": "0", "PYTHONPATH": os.pathsep.join(path),
    }  # fmt: skip
    jobs.make_run(stack.spool, write_model(tmp_path / "model", "cuda"))
    try:
        stack.start()
        for job_id in ("first", "second"):
            state, job = stack.wait(submit(stack.spool, job_id), 400)
            assert state == "succeeded", (job.result, stack.job_log(job_id))
            (attempt,) = by_attempt(stack.spool.events.read(job_id))
            (uuid,) = attempt.left
            assert attempt.left[uuid] < FREE_BYTES
            rank = attempt.ranks[0]
            assert (rank.uuid, list(attempt.ranks)) == (uuid, [0])
            for phase, held in rank.phases.items():
                assert held["allocated"] <= held["reserved"] < held["device_used"] <= attempt.most[uuid], phase
                assert held["allocated"] <= held["peak"], phase
            assert rank.phases["state"]["allocated"] > 50 * 2**20
            assert next(iter(rank.phases)) == "build"  # what came before has not used the device
            assert rank.phases["state"]["host_pinned"] == 0
            # The driver is at it for a moment after the last process is gone.
            end = time.monotonic() + 20
            while (used := gpu.used()) != idle and time.monotonic() < end:
                time.sleep(0.2)
            assert used == idle
        assert stack.stop() == 0
    finally:
        stack.close()
