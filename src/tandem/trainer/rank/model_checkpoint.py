"""Reads and writes checkpoints of a run that trains all weights.

The checkpoint's directory is a Hugging Face model that transformers and vLLM can load unchanged.
Each directory `optimizer/<tensor>/` has one tensor per weight, with the weight's name and shape
(`ShardedAdam.tensors`). A directory has one of Adam's moments in fp32 or, for bfloat16 weights, the
int16 remainders of the master values. `optimizer/adam.json` has the number of optimizer steps.
Ranks of any topology can read the checkpoint's files. Step 0 has no files, because it is the base
model.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.arch import Arch
from tandem.model import parallel
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.model.weights.base_weights import load_weights
from tandem.spool import Spool, fs
from tandem.trainer.rank.model_files import ModelFiles, Weights
from tandem.training.sharded_adam import ShardedAdam

STEPS_FILE = "optimizer/adam.json"


@dataclass(frozen=True)
class Found:
    """The checkpoint that a job starts from."""

    directory: Path
    """The directory of a Hugging Face model: the checkpoint's directory, or the base model's for
    step 0."""
    trained: bool
    """Whether the directory contains an optimizer state."""


def check_model(spool: Spool, run: str, step: int) -> Path | None:
    """Verifies the hashes of the checkpoint's files. Returns the checkpoint's directory; None for
    step 0, which is the base model.

    Raises CheckpointDamaged if a file is missing or altered, or if a trained checkpoint has no
    optimizer state. Raises NotFound if the checkpoint does not exist.
    """
    manifest, directory = spool.checkpoints.verify(run, step), spool.checkpoints.path(run, step)
    # A fork's step 0 has the files of the checkpoint from which it was forked. The checkpoint from
    # which a run was forked may itself be step 0 of a fork.
    origin, files = manifest.origin, manifest.weights_files
    trained = step > 0 or bool(files) or (origin is not None and origin.step > 0)
    if trained and (STEPS_FILE not in manifest.files or not files):
        raise CheckpointDamaged(
            f"checkpoint {directory} lacks weights or {STEPS_FILE}; roll the run back to an older"
            " step"
        )
    return directory if trained else None


def find(spool: Spool, run: str, step: int, base_model: Path) -> Found:
    """Checks the checkpoint's files, and returns the directory to load from: the checkpoint, or for
    step 0 the base model. Raises the errors of `check_model`.

    Args:
        base_model: the base model's directory.
    """
    checkpoint = check_model(spool, run, step)
    return Found(checkpoint or base_model, trained=checkpoint is not None)


def load_state(found: Found, arch: Arch, optimizer: ShardedAdam, topology: Topology) -> None:
    """Fill the optimizer's new state from the checkpoint. Raises InvalidInput if the weights were
    trained in another dtype.

    Args:
        found: the checkpoint; if `found.trained` is False, the function reads nothing.
        optimizer: the optimizer whose `tensors` and `steps` are overwritten.
        topology: this rank's place, which decides its part of each tensor.
    """
    if not found.trained:
        return
    directory = found.directory
    names = {path.name for path in (directory / "optimizer").iterdir() if path.is_dir()}
    if names != optimizer.tensors.keys():
        problem = (
            f"{directory} was trained in another dtype: it has {', '.join(sorted(names))} of each"
            " weight"
        )
        raise InvalidInput(
            f"{problem}, not {', '.join(sorted(optimizer.tensors))}", field="TANDEM_DTYPE"
        )
    for name in optimizer.tensors:

        def fill(
            tensors: dict[str, torch.Tensor], source: Path = directory / "optimizer" / name
        ) -> None:
            load_weights(source, arch, lambda: tensors, topology.sizes, topology.place)

        optimizer.load(name, fill)
    steps = fs.read_bytes(directory / STEPS_FILE) or b""
    optimizer.steps = int(json.loads(steps)["steps"])


def write_model(
    directory: Path,
    base_model: Path,
    policy: Policy,
    optimizer: ShardedAdam,
    *,
    beat: Callable[[], None],
) -> None:
    """Write a checkpoint's files into the new `directory`; each rank writes its share. All ranks
    must call this function, a collective operation. Raises SpoolUnusable if the volume refuses the
    files.

    Args:
        base_model: the directory from which the model's other files are copied.
        beat: called regularly while the files are written.
    """
    topology, arch, weights = policy.topology, policy.arch, Weights(policy.base())
    model = ModelFiles(directory, arch, weights.dtype)
    of_state = {
        name: ModelFiles(directory / "optimizer" / name, arch, tensor.dtype)
        for name, tensor in optimizer.tensors.items()
    }
    with fs.volume_errors(directory):
        if topology.rank == 0:
            fs.remove_tree(directory)
            model.create(base_model)
            (directory / STEPS_FILE).parent.mkdir()
            for files in of_state.values():
                files.create()
            (directory / STEPS_FILE).write_text(json.dumps({"steps": optimizer.steps}))
        parallel.gather_objects(None)
        model.write(weights, arch, topology.sizes, topology.rank, beat=beat)
        for name, files in of_state.items():
            files.write(
                Weights(optimizer.whole(name)), arch, topology.sizes, topology.rank, beat=beat
            )
        parallel.gather_objects(None)
