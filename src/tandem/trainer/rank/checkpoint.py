"""Adapter and optimizer state in and out of checkpoints, always as a pair.

`optimizer/adam.safetensors` holds fp32 `<PEFT key>.exp_avg` and `<PEFT key>.exp_avg_sq` in the full shapes of the
adapter's tensors, and `step` (int64 scalar), so that any topology reads what any other wrote. A checkpoint without that
directory has never been trained: step 0.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from tandem.errors import CheckpointDamaged, InvalidInput, NotFound
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.families.arch import Arch
from tandem.model.device import device
from tandem.model.policy import Policy
from tandem.model.weights import adapter_files
from tandem.model.weights.stream import Stored
from tandem.spool import Spool, fs
from tandem.spool.schema import LoraShape, RLLoss
from tandem.training.optimizer import AdamState, AdapterOptimizer

OPTIMIZER_FILE = "optimizer/adam.safetensors"


@dataclass(frozen=True)
class Checked:
    """A checkpoint whose files are whole and have the right tensors; `optimizer`: None if it was never trained."""

    adapter: dict[str, Stored]
    optimizer: dict[str, Stored] | None


def check(spool: Spool, run: str, step: int, arch: Arch, lora: LoraShape) -> Checked:
    """Hash the files of checkpoint `step` of `run` and read what tensors they hold. Needs no model and no device, so it
    may go on beside their making; what it does at length, hashing, leaves the interpreter to others.

    Raises CheckpointDamaged when a file is missing, truncated or altered (R16), when a tensor doesn't fit, or when a
    trained checkpoint lacks its optimizer state; NotFound when there is no such step.
    """
    manifest = spool.checkpoints.verify(run, step)
    directory = spool.checkpoints.path(run, step)
    trained = step > 0 or (manifest.origin is not None and manifest.origin.step > 0)
    if trained and OPTIMIZER_FILE not in manifest.files:
        raise CheckpointDamaged(f"checkpoint {directory}: {OPTIMIZER_FILE} is missing, and without it the adapter's "
                                "training can't be continued; roll the run back to an older step")  # fmt: skip
    adapter = adapter_files.expect_adapter(directory, arch, lora)
    if OPTIMIZER_FILE not in manifest.files:
        return Checked(adapter, None)
    moments = {f"{name}.{moment}": tensor.shape for name, tensor in adapter.items() for moment in _MOMENTS}
    optimizer = adapter_files.expect(directory / OPTIMIZER_FILE, {**moments, "step": ()})
    for name, tensor in optimizer.items():
        if tensor.dtype != (expected := torch.int64 if name == "step" else torch.float32):
            raise CheckpointDamaged(f"{tensor.path}: {name} is {tensor.dtype}, expected {expected}")
    return Checked(adapter, optimizer)


@dataclass(frozen=True)
class State:
    """What a checkpoint holds: whole tensors, by PEFT key and by the names in its files."""

    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None  # None if it was never trained


@torch.no_grad()
def read(checked: Checked) -> State:
    """A checkpoint's tensors on the device. CheckpointDamaged names one that is not finite."""
    where = device.device()
    adapter = adapter_files.read(checked.adapter, where)
    if checked.optimizer is None:
        return State(adapter, None)
    adam = adapter_files.read(checked.optimizer, where)
    if (step := int(adam["step"])) < 1:
        raise CheckpointDamaged(f"{checked.optimizer['step'].path}: step is {step}, not 1 or more")
    return State(adapter, adam)


@torch.no_grad()
def load(saved: State, policy: Policy, optimizer: AdapterOptimizer) -> None:
    """Put a checkpoint into policy and optimizer, which are of its run."""
    policy.set_adapter(saved.adapter)
    if (adam := saved.optimizer) is not None:

        def shards(moment: str) -> dict[str, Tensor]:
            return {name: policy.shard(name, lambda key: adam[f"{key}.{moment}"]) for name in policy.lora_parameters()}

        optimizer.load_state(AdamState(int(adam["step"]), *map(shards, _MOMENTS)))


@torch.no_grad()
def snapshot(policy: Policy, optimizer: AdapterOptimizer) -> State:
    """Gather adapter and Adam's state from all ranks. Collective: every rank calls it."""
    adam = optimizer.state()
    tensors = {"step": torch.tensor(adam.step, dtype=torch.int64)}
    for moment, shards in zip(_MOMENTS, (adam.exp_avg, adam.exp_avg_sq), strict=True):
        for name, shard in shards.items():
            tensors |= {f"{key}.{moment}": whole for key, whole in policy.gather(name, shard).items()}
    return State(policy.adapter_tensors(), tensors)


def stage(saved: State, previous: Path, directory: Path) -> None:
    """Write a checkpoint's files into the new `directory` and read them back; `previous` is the one before it.

    Raises SpoolUnusable when the volume can't take them, CheckpointDamaged when what was read back is not, bit for bit,
    what was written.
    """
    assert saved.optimizer is not None
    with fs.volume_errors(directory):
        fs.remove_tree(directory)
        (directory / OPTIMIZER_FILE).parent.mkdir(parents=True)
        shutil.copyfile(previous / CONFIG_FILE, directory / CONFIG_FILE)

        def write(name: str, tensors: dict[str, Tensor]) -> None:
            # In memory first: the library's own writer reports a full disk as an error without a number.
            content = save(tensors, metadata={"format": "pt"})
            (directory / name).write_bytes(content)
            # As bytes: its reader keeps a number of every tensor for as long as the process lives (0.8.0).
            if (directory / name).read_bytes() != content:
                raise CheckpointDamaged(f"{directory / name} does not read back as it was written: check the volume")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, (WEIGHTS_FILE, OPTIMIZER_FILE), (saved.adapter, saved.optimizer)))


@contextmanager
def reference_adapter(policy: Policy, directory: Path) -> Iterator[None]:
    """The policy with another checkpoint's adapter in place of its own, which is put back bit for bit."""
    own = {name: parameter.detach().clone() for name, parameter in policy.lora_parameters().items()}
    try:
        policy.load_adapter(directory)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in policy.lora_parameters().items():
                parameter.copy_(own[name])


def reference(spool: Spool, run: str, loss: RLLoss, policy: Policy) -> AbstractContextManager[None]:
    """The policy as the KL's reference: its adapter switched off, or another checkpoint of the run in its place.

    Raises InvalidInput or CheckpointDamaged for a checkpoint that isn't there or isn't whole.
    """
    if loss.kl_reference == "base":
        return policy.adapter_disabled()
    try:
        spool.checkpoints.verify(run, loss.kl_reference)
    except NotFound as error:
        raise InvalidInput(f"{error.message}; take one of those, or 'base'", field="loss.kl_reference") from error
    return reference_adapter(policy, spool.checkpoints.path(run, loss.kl_reference))


_MOMENTS = ("exp_avg", "exp_avg_sq")
