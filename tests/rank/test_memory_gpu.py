"""Bytes of device memory after each phase. A rank allocates exactly the bytes that policy and
optimizer need. A step and a checkpoint leave no bytes behind, and the device is empty after the end
of the ranks.

On a GPU torch's allocator counts the bytes. On the CPU the tests count the bytes of tensors that
Python can reach. `python3 -m pytest -m gpu tests/rank/test_memory_gpu.py` runs the tests on a GPU.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from safetensors.numpy import load_file

import tandem
from rank import jobs
from runner.runner_stack import HERE, Stack
from tandem.client.memory import by_attempt
from tandem.config import Settings
from tandem.families.adapter import adapter_shapes
from tandem.families.registry import read_arch
from tandem.model.weights.base_memory import SEGMENT
from tandem.spool import Spool
from tandem.system.gpus import Devices
from waiting import until

pytestmark = pytest.mark.sample(1, of="processes of jobs")

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
EPOCHS = 4  # Each epoch is one row, so a job has 4 equal optimizer steps.
MODELS = {
    "cpu": {"hidden_size": 64, "layers": 2},
    "cuda": {
        "hidden_size": 1024,
        "layers": 4,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn_size": 3072,
    },
}
BLOCK = 512  # torch's allocator rounds each allocation up to a multiple of BLOCK bytes.
# For a larger allocation, torch's allocator may take up to LARGE bytes more, if the rest of a block
# is too small to be kept.
LARGE = 2**20
FEW = 8 * BLOCK  # Bytes of a few scalars.
SCALARS = 64 * 2**10  # Bytes of torch's own constants and pinned scalars.

Row = dict[str, Any]  # A row that `measured_rank` writes.


@dataclass
class Measured:
    """The measurements of a new run's first and second job, and the sizes of base weights and
    adapter in bytes."""

    device: str
    base: int
    lora: int
    rows: dict[str, list[Row]]

    def end(self, job: str, phase: str) -> Row:
        """The row that was written when `phase` ended for the last time."""
        return [row for row in self.rows[job] if row["phase"] == phase][-1]

    def begin(self, job: str, phase: str) -> Row:
        row = self.rows[job][self.rows[job].index(self.end(job, phase)) - 1]
        assert row["at"] == "begin"
        return row

    def requested(self, row: Row) -> int:
        """Bytes requested on the device. On the CPU only the bytes of tensors that Python can reach
        are known."""
        return row["stats"]["requested"] if self.device == "cuda" else row["visible"]


def submit(spool: Spool, job_id: str) -> str:
    return jobs.submit_sft(spool, "r", job_id, row=256, epochs=EPOCHS)


def run(spool: Spool, job_id: str, device: str) -> list[Row]:
    """Runs the next job of the run `r` in a process of its own. Returns the measurements."""
    job, out = jobs.claim(spool, submit(spool, job_id)), spool.root / f"{job_id}.json"
    script = Path(__file__).with_name("measured_rank.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(spool.root), job_id, str(out)],
        env=os.environ | {"TANDEM_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    jobs.finish(spool, job)
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=DEVICES)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    directory = tmp_path_factory.mktemp(request.param)
    model = tiny_model.write_tiny_qwen3(directory / "model", **MODELS[request.param])
    spool = Spool.create(directory / "spool")
    jobs.make_run(spool, model)
    rows = {job_id: run(spool, job_id, request.param) for job_id in ("fresh", "trained")}
    parameters = sum(weight.size for weight in load_file(model / "model.safetensors").values())
    shapes = adapter_shapes(read_arch(str(model)), jobs.LORA)
    base = parameters * (2 if request.param == "cuda" else 4)
    return Measured(request.param, base, 4 * sum(map(prod, shapes.values())), rows)


def size_of(row: Row, kind: str) -> int:
    return sum(row["sizes"][kind])


def check_nothing_else_is_allocated(measured: Measured, row: Row) -> None:
    sizes = [size for kind in row["sizes"].values() for size in kind]
    if measured.device == "cpu":  # Python can also reach tensors that are read ahead.
        assert row["visible"] >= sum(sizes)
        return
    assert 0 <= row["stats"]["requested"] - sum(sizes) <= FEW
    blocks = sum(-(-size // BLOCK) * BLOCK for size in sizes)
    slack = sum(LARGE for size in sizes if size > LARGE)
    assert blocks <= row["stats"]["allocated"] <= blocks + slack + FEW
    assert 0 <= row["reported"]["allocated"] - row["stats"]["allocated"] <= FEW


@pytest.mark.parametrize("job", ["fresh", "trained"])
def test_a_loaded_model_is_its_parameters_gradient_buffers_and_moments(
    measured: Measured, job: str
) -> None:
    if measured.device == "cuda":
        # No memory is allocated before the model is built.
        assert measured.end(job, "data")["stats"]["requested"] <= FEW
    built, loaded = measured.end(job, "build"), measured.end(job, "state")
    assert (size_of(built, "lora"), size_of(built, "moments")) == (measured.lora, 0)
    (base,) = built["sizes"]["base"]
    assert measured.base <= base < measured.base + 2 * SEGMENT
    assert base % SEGMENT == 0
    assert measured.lora <= size_of(built, "gradients") <= measured.lora + SCALARS
    # The allocations of the kind `other` are RoPE's frequencies.
    assert size_of(built, "other") <= SCALARS
    assert built["sizes"] | {"moments": loaded["sizes"]["moments"]} == loaded["sizes"]
    assert size_of(loaded, "moments") == 2 * measured.lora
    # Between the phases `build` and `state` the rank reads weights through temporary buffers.
    for row in (built, loaded):
        check_nothing_else_is_allocated(measured, row)
    assert loaded["reported"]["host_pinned"] <= SCALARS  # The readers' buffers are freed.


@pytest.mark.parametrize("job", ["fresh", "trained"])
def test_steps_begin_from_the_same_floor(measured: Measured, job: str) -> None:
    """The comparison begins at the second step, because the first step may leave objects that are
    made once, such as constants of compiled kernels."""
    first, second, *later = [row for row in measured.rows[job] if row["at"] == "step"]
    assert len(later) == EPOCHS - 2
    for row in later:
        assert measured.requested(row) == measured.requested(second)
        assert row["sizes"] == second["sizes"]
    assert size_of(first, "moments") == size_of(second, "moments") == 2 * measured.lora
    if measured.device == "cuda":
        assert (
            0 <= second["stats"]["requested"] - sum(map(sum, second["sizes"].values())) <= SCALARS
        )
    ends = [row for row in measured.rows[job] if row["phase"] == "optimizer"]
    assert len({measured.requested(row) for row in ends[1:]}) == 1


@pytest.mark.parametrize("job", ["fresh", "trained"])
def test_a_checkpoint_leaves_nothing(measured: Measured, job: str) -> None:
    before, after = measured.begin(job, "checkpoint"), measured.end(job, "checkpoint")
    assert before["sizes"] == after["sizes"]
    if measured.device == "cuda":
        assert before["stats"]["requested"] == after["stats"]["requested"]
        assert before["stats"]["allocated"] == after["stats"]["allocated"]
    else:  # On the CPU the measured memory contains the copies that are written to the checkpoint.
        assert 0 <= after["visible"] - before["visible"] <= 3 * measured.lora + SCALARS
    assert after["reported"]["host_pinned"] <= SCALARS
    assert before["stats"].get("host_pinned", 0) == after["stats"].get("host_pinned", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["torchrun", "fork"])
def test_when_the_ranks_are_gone_the_device_is_empty(launch: str, tmp_path: Path) -> None:
    """The device is empty although the fork server still runs. The job's report agrees with the
    device's numbers."""
    gpu = Devices(Settings(device="cuda", trainer_devices=["0"]), "trainer")
    busy = gpu.busy({})
    assert not busy, f"another process uses the GPU: {busy}"
    idle = gpu.used()
    stack = Stack(tmp_path / "spool", launch, entry="tandem.trainer.rank.entry")
    path = [
        str(Path(tandem.__file__).parents[1]),
        str(HERE),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    stack.environment |= {
        "TANDEM_DEVICE": "cuda",
        "TANDEM_TRAINER_DEVICES": "0",
        "PYTHONPATH": os.pathsep.join(path),
    }
    jobs.make_run(stack.spool, tiny_model.write_tiny_qwen3(tmp_path / "model", **MODELS["cuda"]))
    try:
        stack.start()
        for job_id in ("first", "second"):
            state, job = stack.wait(submit(stack.spool, job_id), 400)
            assert state == "succeeded", (job.result, stack.job_log(job_id))
            (attempt,) = by_attempt(stack.spool.events.read(job_id))
            (uuid,) = attempt.left
            assert attempt.left[uuid] < gpu.free_bytes
            rank = attempt.ranks[0]
            assert (rank.uuid, list(attempt.ranks)) == (uuid, [0])
            for phase, held in rank.phases.items():
                assert (
                    held["allocated"]
                    <= held["reserved"]
                    < held["device_used"]
                    <= attempt.most[uuid]
                ), phase
                assert held["allocated"] <= held["peak"], phase
            assert rank.phases["state"]["allocated"] > 50 * 2**20
            assert next(iter(rank.phases)) == "build"  # Earlier phases do not use the device.
            assert rank.phases["state"]["host_pinned"] == 0
            # After the end of the last process, the driver needs a moment to free the memory.
            until("the device is empty", lambda: gpu.used() == idle, 20)
        assert stack.stop() == 0
    finally:
        stack.close()
