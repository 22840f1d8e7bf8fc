"""Reads and writes checkpoints of adapters, including the optimizer's state.

`optimizer/adam.safetensors` has the tensors `<PEFT key>.exp_avg` and `<PEFT key>.exp_avg_sq`, in
fp32 and in the full shapes of the adapter's tensors. The file also has `step`, an int64 scalar.
Ranks of any topology can read the file. Step 0 of a run has no `optimizer/adam.safetensors`, unless
the run is a fork of a trained checkpoint. Every other checkpoint has the file.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import CheckpointDamaged
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.families.arch import Arch
from tandem.model.policy import Policy
from tandem.model.weights.checkpoint_tensors import check_adapter, check_tensors, read_tensors
from tandem.model.weights.safetensors_reader import DTYPE_CODES, Piece, StoredTensor
from tandem.spool import Spool, fs
from tandem.spool.schema import LoraShape
from tandem.system.safetensors_header import lay_out
from tandem.training.optimizer import MOMENTS, AdapterOptimizer

OPTIMIZER_FILE = "optimizer/adam.safetensors"
_ORDER = [torch.float32, torch.int64]  # safetensors puts wider types first


@dataclass(frozen=True)
class Contents[T]:
    """The whole tensors (not a rank's parts) of a checkpoint's two files, by name. T is the type of
    a tensor; a StoredTensor is the tensor's place in its file."""

    adapter: dict[str, T]
    optimizer: dict[str, T] | None  # None if the checkpoint was never trained


def check_checkpoint(
    spool: Spool, run: str, step: int, arch: Arch, lora: LoraShape
) -> Contents[StoredTensor]:
    """Verify the hashes of the checkpoint's files, and read the files' headers. The function uses
    no device, and hashing releases the GIL, so other threads can work at the same time.

    Raises CheckpointDamaged if a file is missing, truncated or altered, or if a tensor doesn't fit.
    Also raises CheckpointDamaged if a trained checkpoint has no optimizer state. Raises NotFound if
    the checkpoint does not exist.

    Args:
        arch: the architecture of the run's base model.
        lora: the run's LoRA shape, which together with `arch` gives the tensors' names and shapes.
    """
    manifest = spool.checkpoints.verify(run, step)
    directory = spool.checkpoints.path(run, step)
    adapter = check_adapter(directory, arch, lora)
    if OPTIMIZER_FILE not in manifest.files:
        if step > 0 or (manifest.origin is not None and manifest.origin.step > 0):
            raise CheckpointDamaged(
                f"checkpoint {directory}: {OPTIMIZER_FILE} is missing, and training can't continue"
                " without it; roll the run back to an older step"
            )
        return Contents(adapter, None)
    moments = {
        f"{name}.{moment}": tensor.shape for name, tensor in adapter.items() for moment in MOMENTS
    }
    optimizer = check_tensors(directory / OPTIMIZER_FILE, {**moments, "step": ()})
    for name, tensor in optimizer.items():
        if tensor.dtype != (expected := torch.int64 if name == "step" else torch.float32):
            raise CheckpointDamaged(f"{tensor.path}: {name} is {tensor.dtype}, expected {expected}")
    return Contents(adapter, optimizer)


def load(checked: Contents[StoredTensor], policy: Policy, optimizer: AdapterOptimizer) -> None:
    """Read this rank's part of a checkpoint into policy and optimizer.

    Raises CheckpointDamaged if a tensor contains NaN or infinity.

    Args:
        checked: the result of `check_checkpoint`.
        policy: a policy whose tensors have the shapes of the checkpoint's tensors.
        optimizer: the optimizer of this policy; `load` allocates its state.
    """
    policy.adapter.read(checked.adapter, policy.lora_parameters())
    if (adam := checked.optimizer) is None:
        # The optimizer state is allocated before the first step, because `recompute.fit`
        # distributes the memory that is free when it runs.
        for tensors in optimizer.new_state(0).values():
            for tensor in tensors.values():
                tensor.zero_()
        return
    count = torch.zeros(1, dtype=torch.int64)
    read_tensors(adam["step"].path, {}, [Piece(adam["step"], 0, 1, count)])
    # The number of optimizer steps is 0 after a session has loaded weights without the optimizer's
    # state.
    if (steps := int(count)) < 0:
        raise CheckpointDamaged(f"{adam['step'].path}: step is {steps}, not 0 or more")
    for moment, tensors in optimizer.new_state(steps).items():
        policy.adapter.read(adam, tensors, f".{moment}")


def config_file(spool: Spool, run: str, step: int) -> bytes:
    """The content of a checkpoint's `adapter_config.json`, which is copied to the next checkpoint.
    Raises CheckpointDamaged if the file's hash differs from the hash in the manifest."""
    manifest, path = (
        spool.checkpoints.manifest(run, step),
        spool.checkpoints.path(run, step) / CONFIG_FILE,
    )
    content, entry = fs.read_bytes(path) or b"", manifest.files.get(CONFIG_FILE)
    if entry is None or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointDamaged(
            f"{path} is missing or altered: it is not the file that the manifest names; restore it"
            " from a copy, or roll the run back"
        )
    return content


@torch.no_grad()
def gather_contents(policy: Policy, optimizer: AdapterOptimizer) -> Contents[Tensor]:
    """The adapter and Adam's state on the CPU, gathered from all ranks that together have one copy
    of the model. All ranks must call this function, a collective operation."""
    tensors = {"step": torch.tensor(optimizer.steps, dtype=torch.int64)}
    for moment, shards in optimizer.moments().items():
        tensors |= {f"{key}.{moment}": whole for key, whole in policy.adapter.whole(shards).items()}
    return Contents(policy.adapter_tensors(), tensors)


def write_adapter(saved: Contents[Tensor], config: bytes, directory: Path) -> dict[str, str]:
    """Write a checkpoint's files.

    Returns the files' SHA-256, computed from memory, for the manifest. The files are not read back,
    because a read would only return the content of the page cache. Raises SpoolUnusable if the
    volume refuses the files.

    Args:
        saved: contiguous tensors on the CPU, in fp32 except the int64 scalar `step`.
            `saved.optimizer` must not be None.
        config: the content of `adapter_config.json`.
        directory: the new directory. If `directory` exists, it is removed first. The parent of
            `directory` must exist.
    """
    assert saved.optimizer is not None
    with fs.volume_errors(directory), ThreadPoolExecutor(4) as pool:
        fs.remove_tree(directory)
        # Parent directories are not created, because the directory of an ended attempt must not be
        # created again.
        for made in (directory, (directory / OPTIMIZER_FILE).parent):
            made.mkdir()
        fs.write_atomic(directory / CONFIG_FILE, config)
        files = {WEIGHTS_FILE: _parts(saved.adapter), OPTIMIZER_FILE: _parts(saved.optimizer)}
        hashes = {name: pool.submit(_sha256, parts) for name, parts in files.items()}
        # The files are synced while the ranks still compute, so that `commit` has nothing left to
        # sync.
        list(pool.map(_write_and_sync, (directory / name for name in files), files.values()))
        known = {name: digest.result() for name, digest in hashes.items()}
        return {CONFIG_FILE: hashlib.sha256(config).hexdigest(), **known}


def _parts(tensors: dict[str, Tensor]) -> list[memoryview]:
    """The same bytes as `safetensors.torch.save` returns, but without a copy of the tensors.
    Copying the tensors would take as long as writing the file.

    `tensors` must be contiguous and on the CPU.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-_ORDER.index(item[1].dtype), item[0]))
    header, _ = lay_out({name: (DTYPE_CODES[t.dtype], t.shape) for name, t in ordered})
    data = [
        memoryview(tensor.reshape(-1).numpy()).cast("B") for _, tensor in ordered if tensor.numel()
    ]
    return [memoryview(header), *data]


def _sha256(parts: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _write_and_sync(path: Path, parts: list[memoryview]) -> None:
    with path.open("wb", buffering=0) as file:
        for part in parts:
            fs.write_all(file.fileno(), part)
        os.fsync(file.fileno())
