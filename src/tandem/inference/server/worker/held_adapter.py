"""Compares a worker's adapter, bit for bit, with the adapter's file.

Log-probs can't prove that the adapter is complete: rounding to bfloat16 changes log-probs more than
a missing layer does. If the names of an adapter's tensors are unexpected, vLLM silently ignores the
tensors.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.inference.server.worker.model_weights import file_tensors
from tandem.system.plain_files import read_plain
from tandem.vllm_client.names import NOT_HELD

EXPERT_BUFFERS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}
CONFIG_BYTES = 2**20
NAMED = 3  # the maximum number of differences that a message lists


class Held(NamedTuple):
    """One matrix of an adapter, with its place in a layer of vLLM. For experts, the matrices of all
    experts of a layer are stacked.

    `name`: the names of module and matrix in the file.

    `buffer`: the tensor [..., rows, columns] in vLLM's slot. If the adapter's rank is below vLLM's
    maximum rank, the buffer is larger than the matrix.

    `matrix`: the file's matrix, which was cast, scaled and cut in the same way as in vLLM. If the
    file lacks the matrix, `matrix` is None and the buffer must be zero.
    """

    name: str
    buffer: torch.Tensor
    matrix: torch.Tensor | None

    def wrong(self) -> str:
        """A message about the difference between `buffer` and `matrix`; empty if they are equal."""
        if self.matrix is None:
            return f"{self.name} is not in the file" if self.buffer.any() else ""
        rows, columns = self.matrix.shape[-2:]
        matrix = self.matrix.to(self.buffer.device)
        equal = torch.equal(self.buffer[..., :rows, :columns], matrix)
        rest = self.buffer[..., rows:, :].any() or self.buffer[..., columns:].any()
        return "" if equal and not rest else f"{self.name} has other values"


def check(worker: Any, request: Any) -> int:
    """Compare an adapter's slot with the adapter's file. The worker has just activated the adapter.

    Args:
        worker: vLLM's `Worker`, of any tensor-parallel rank.
        request: vLLM's `LoRARequest`, whose path is the adapter's directory.

    Returns the number of modules in the file. Raises ValueError that lists the first differences. A
    difference is a module of the file that no layer took, a matrix with other values, or values for
    a matrix that the file lacks.
    """
    directory = Path(request.lora_path)
    config = json.loads(read_plain(directory / CONFIG_FILE, most=CONFIG_BYTES))
    scale = config["lora_alpha"] / config["r"]
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(request.lora_int_id)
    modules = _modules(directory / WEIGHTS_FILE, manager.model)
    wrong: list[str] = []
    taken: set[str] = set()
    for layer_name, layer in manager.modules.items():
        parts = manager.packed_modules.get(layer_name, [layer_name])
        experts = hasattr(layer, "w13_lora_a_stacked")
        if experts and not modules.keys() & set(parts):
            continue  # vLLM does not write this layer's buffers, and does not use them
        taken |= {part for part in parts if part in modules}
        of = _experts if experts else _linear
        wrong += filter(None, (held.wrong() for held in of(layer, slot, parts, modules, scale)))
    # An adapter's module whose matrix B is zero (as at step 0) has no effect.
    ignored = [name for name in modules if name not in taken and modules[name][1].any()]
    wrong = [f"no layer took {name}" for name in ignored] + wrong
    if wrong:
        more = f", and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ValueError(
            f"{NOT_HELD} of {directory}: {'; '.join(wrong[:NAMED])}{more} ({len(taken)} of"
            f" {len(modules)} modules taken). Start vLLM again; if that does not help, this version"
            " of vLLM does not serve adapters of this model right"
        )
    return len(modules)


def _modules(file: Path, model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices A [rank, in] and B [out, rank] of each module in the file, by vLLM's name of the
    module."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    # vLLM 0.26 has only `get_unstacked_mapper`.
    for renames in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, renames):
            mapper = getattr(mapper, renames)()
            break
    matrices: dict[str, dict[bool, torch.Tensor]] = {}
    for key, tensor in file_tensors(file).items():
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
    slices = _slices(layer, parts, modules)
    for matrix, stacked, cut in (
        (0, layer.lora_a_stacked, layer.slice_lora_a),
        (1, layer.lora_b_stacked, layer.slice_lora_b),
    ):
        dtype, factor = stacked[0].dtype, scale if matrix else 1.0
        whole = [
            _served(modules[part][matrix][rows if matrix else slice(None)], dtype, factor)
            if part in modules
            else None
            for part, rows in slices
        ]
        if layer.tp_size > 1 and any(each is not None for each in whole):
            whole = cut(whole) if len(slices) > 1 else [cut(whole[0])]
        for (part, _), buffers, tensor in zip(slices, stacked, whole, strict=True):
            yield Held(f"{part}.lora_{'AB'[matrix]}", buffers[slot, 0], tensor)


def _slices(
    layer: Any, parts: list[str], modules: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[str, slice]]:
    """For each buffer of the layer, the module whose matrix B is in the buffer, and the rows of B
    that the buffer contains. A delta net's `in_proj_qkv` takes three buffers, which come before the
    buffer of `in_proj_z`."""
    buffers = layer.lora_b_stacked
    if len(buffers) == len(parts):
        return [(part, slice(None)) for part in parts]
    found: list[tuple[str, slice]] = []
    for part in parts:
        begin, end = 0, len(modules[part][1]) if part in modules else None
        while len(found) < len(buffers) and (end is None or begin < end):
            rows = buffers[len(found)].shape[-2] * layer.tp_size
            found.append((part, slice(begin, begin := begin + rows)))
    return found


def _experts(
    layer: Any,
    slot: int,
    parts: list[str],
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> Iterator[Held]:
    """The matrices of a mixture's experts. The matrices of all experts for one projection are
    stacked. `parts`: the modules of all experts, in order; vLLM requires that an adapter has all
    these modules."""
    for projection, (weight, index) in EXPERT_BUFFERS.items():
        names = [part for part in parts if part.endswith(f".{projection}")]
        for matrix, letter in enumerate("ab"):
            buffer = getattr(layer, f"{weight}_lora_{letter}_stacked")[index][slot]
            cut = getattr(layer, f"_slice_{weight}_{letter}")
            scaled = scale if matrix else 1.0
            whole = [_served(modules[name][matrix], buffer.dtype, scaled) for name in names]
            name = f"{names[0].rpartition('.experts.')[0]}.experts.*.{projection}"
            yield Held(f"{name}.lora_{letter.upper()}", buffer, cut(torch.stack(whole)))


def _served(matrix: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The matrix in the form in which vLLM stores it: cast to `dtype`, then multiplied by `scale`
    in this dtype (only B has a scale other than 1)."""
    served = matrix.to(dtype, copy=True)
    if scale != 1.0:
        served *= scale
    return served
