"""Compares the adapter that a worker of vLLM computes with, bit for bit, with the adapter's file.

Log-probs can't prove this: bfloat16's rounding moves them further than a missing layer does. vLLM
loads an adapter whose names it does not know, and ignores it without a word.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE

EXPERT_BUFFERS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}
NAMED = 3  # differences that a message names


class Held(NamedTuple):
    """One matrix of an adapter in a layer of vLLM.

    `name`: the file's module and matrix; `buffer`: [rows, columns] in the slot, larger than the
    matrix where the adapter's rank is below vLLM's largest; `matrix`: the file's, as vLLM casts,
    scales and cuts it.
    """

    name: str
    buffer: torch.Tensor
    matrix: torch.Tensor

    def equal(self) -> bool:
        rows, columns = self.matrix.shape
        rest = self.buffer.clone()
        rest[:rows, :columns] = 0
        matrix = self.matrix.to(self.buffer.device)
        return torch.equal(self.buffer[:rows, :columns], matrix) and not rest.any()


def check(worker: Any, request: Any) -> int:
    """Compare the slot of an adapter that the worker has just activated with the adapter's file.

    Args:
        worker: vLLM's `Worker`, of any tensor parallel rank.
        request: vLLM's `LoRARequest`, whose path is the adapter's directory.

    Returns the number of the file's modules. Raises ValueError with the first differences: a module
    that no layer took, a matrix with other values, or a layer with values that the file lacks.
    """
    directory = Path(request.lora_path)
    config = json.loads((directory / CONFIG_FILE).read_text())
    scale = config["lora_alpha"] / config["r"]
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(request.lora_int_id)
    modules = _modules(directory / WEIGHTS_FILE, manager.model)
    wrong: list[str] = []
    taken: set[str] = set()
    for layer_name, layer in manager.modules.items():
        parts = manager.packed_modules.get(layer_name, [layer_name])
        if hasattr(layer, "w13_lora_a_stacked") and not modules.keys() & set(parts):
            continue
        taken |= {part for part in parts if part in modules}
        held = (
            _experts(layer, slot, parts, modules, scale)
            if hasattr(layer, "w13_lora_a_stacked")
            else _linear(layer, slot, parts, modules, scale)
        )
        wrong += [f"{each.name} has other values" for each in held if not each.equal()]
    wrong = [f"no layer took {name}" for name in modules if name not in taken] + wrong
    if wrong:
        more = f", and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ValueError(
            f"vLLM does not hold the adapter of {directory}: {'; '.join(wrong[:NAMED])}{more}"
            f" ({len(taken)} of {len(modules)} modules taken)"
        )
    return len(modules)


def _modules(file: Path, model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """vLLM's name of a module → A [rank, in] and B [out, rank], as in the file."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    matrices: dict[str, dict[bool, torch.Tensor]] = {}
    for key, tensor in load_file(file).items():
        name, is_a = parse_fine_tuned_lora_name(key, mapper)[:2]
        matrices.setdefault(name, {})[is_a] = tensor
    return {name: (pair[True], pair[False]) for name, pair in matrices.items()}


def _linear(
    layer: Any,
    slot: int,
    parts: list[str],
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> Iterator[Held]:
    """The matrices of a linear layer; `parts`: the modules that vLLM fused into the layer."""
    for matrix, stacked, cut in (
        (0, layer.lora_a_stacked, layer.slice_lora_a),
        (1, layer.lora_b_stacked, layer.slice_lora_b),
    ):
        whole = [
            _served(modules[part][matrix], stacked[0].dtype, scale if matrix else 1.0)
            if part in modules
            else None
            for part in parts
        ]
        if layer.tp_size > 1 and any(each is not None for each in whole):
            whole = cut(whole) if len(parts) > 1 else [cut(whole[0])]
        for part, buffers, tensor in zip(parts, stacked, whole, strict=True):
            buffer = buffers[slot, 0]
            empty = buffer.new_zeros(0, buffer.shape[1])
            yield Held(f"{part}.lora_{'AB'[matrix]}", buffer, empty if tensor is None else tensor)


def _experts(
    layer: Any,
    slot: int,
    parts: list[str],
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> Iterator[Held]:
    """The matrices of a mixture's experts, each kind of projection cut as the layer cuts all of
    its experts. `parts`: the modules of all experts, in their order."""
    count = layer.local_num_experts
    first = layer.ep_rank * count if layer.use_ep else 0
    for projection, (weight, index) in EXPERT_BUFFERS.items():
        names = [part for part in parts if part.endswith(f".{projection}")][first : first + count]
        for matrix, letter in enumerate("ab"):
            stacked = getattr(layer, f"{weight}_lora_{letter}_stacked")[index][slot]
            whole = [
                _served(modules[name][matrix], stacked.dtype, scale if matrix else 1.0)
                for name in names
                if name in modules
            ]
            if len(whole) not in (0, len(names)):
                raise ValueError(f"only {len(whole)} of {len(names)} experts have {projection}")
            cut = getattr(layer, f"_slice_{weight}_{letter}")
            tensors = cut(torch.stack(whole)) if whole else [stacked.new_zeros(0, 0)] * len(names)
            for name, buffer, tensor in zip(names, stacked, tensors, strict=False):
                yield Held(f"{name}.lora_{letter.upper()}", buffer, tensor)


def _served(matrix: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The matrix as vLLM keeps it: cast, then B multiplied by the scale in place."""
    served = matrix.to(dtype, copy=True)
    if scale != 1.0:
        served *= scale
    return served
