"""If an adapter's files are wrong in any way, loading fails with an error that names the problem.
LoRA is never reset silently."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save, save_file
from safetensors.torch import save_file as save_torch_file

from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import arch_from_config
from tandem.model.weights.checkpoint_tensors import check_adapter, read_tensors
from tandem.model.weights.safetensors_reader import Piece
from tandem.spool.schema import LoraShape
from tiny import SHAPE

ARCH = arch_from_config({"model_type": "qwen3", **SHAPE})
LORA = LoraShape(rank=4, alpha=8)
NAME = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.fixture
def adapter(tmp_path):
    write_identity_adapter(tmp_path, ARCH, LORA, base_model="tiny", seed=1)
    return tmp_path


def read(directory, device="cpu"):
    stored = check_adapter(directory, ARCH, LORA)
    tensors = {name: torch.empty(tensor.shape, device=device) for name, tensor in stored.items()}
    pieces = [Piece(stored[name], 0, tensor.shape[1], tensor) for name, tensor in tensors.items()]
    read_tensors(directory / WEIGHTS_FILE, tensors, pieces)
    return tensors


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(NAME), f"lacks the tensor {NAME}"),
        (lambda t: t.update({NAME + ".more": t[NAME]}), f"unexpected tensor {NAME}.more"),
        (
            lambda t: t.update({NAME: t[NAME].T.copy()}),
            f"{NAME} has the shape \\[32, 4\\], expected \\[4, 32\\]",
        ),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_wrong_tensors_are_named(adapter, change, says):
    tensors = load_file(adapter / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS_FILE)
    with pytest.raises(CheckpointDamaged, match=says):
        read(adapter)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, "nan"), (torch.float32, "-inf"), (torch.bfloat16, "inf")]
)
def test_a_tensor_with_one_element_that_is_not_finite_is_named(adapter, value, dtype, device):
    tensors = {name: tensor.to(dtype) for name, tensor in read(adapter).items()}
    tensors[NAME].view(-1)[5] = float(value)
    save_torch_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, adapter / WEIGHTS_FILE
    )
    with pytest.raises(CheckpointDamaged, match=f"{NAME} holds NaN or infinity"):
        read(adapter, device)


def test_a_missing_file_is_named(adapter):
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointDamaged, match=f"{WEIGHTS_FILE} is missing"):
        read(adapter)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.999])
def test_a_truncated_file_is_named(adapter, keep):
    path = adapter / WEIGHTS_FILE
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(CheckpointDamaged, match=WEIGHTS_FILE):
        read(adapter)


def test_a_full_volume_under_an_identity_adapter_is_an_os_error(tmp_path: Path) -> None:
    """The spool turns an OSError into the answer that the volume is full."""
    (tmp_path / WEIGHTS_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_identity_adapter(tmp_path, ARCH, LORA, base_model="tiny", seed=1)


def test_the_identity_adapter_is_pefts_initialisation(adapter, tmp_path_factory):
    of_seed = []
    for seed in (1, 2):
        write_identity_adapter(
            another := tmp_path_factory.mktemp("adapter"), ARCH, LORA, base_model="tiny", seed=seed
        )
        of_seed.append((another / WEIGHTS_FILE).read_bytes())
    assert (adapter / WEIGHTS_FILE).read_bytes() == of_seed[0] != of_seed[1]
    tensors = {name: tensor.numpy() for name, tensor in read(adapter).items()}
    # The file has the bytes that safetensors' own writer makes.
    assert of_seed[0] == save(tensors, metadata={"format": "pt"})
    assert len(tensors) == 2 * 2 * 7
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    assert all((tensor == 0).all() for name, tensor in tensors.items() if "lora_B" in name)
    firsts = [tensor for name, tensor in tensors.items() if "lora_A" in name]
    # No two matrices A have the same numbers.
    assert len({tensor.tobytes() for tensor in firsts}) == len(firsts)
    assert all(abs(tensor).max() <= tensor.shape[1] ** -0.5 for tensor in firsts)
    # U(-1, 1) after scaling: mean 0, standard deviation 1/sqrt(3).
    scaled = np.concatenate([(tensor * tensor.shape[1] ** 0.5).ravel() for tensor in firsts])
    assert abs(scaled.mean()) < 0.05
    assert abs(scaled.std() - 3**-0.5) < 0.02
