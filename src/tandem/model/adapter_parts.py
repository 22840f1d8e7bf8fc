"""Joins the ranks' parts of an adapter to whole tensors, and cuts each rank's part out of whole
tensors."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from tandem.families.adapter import adapter_shapes, layer_of, peft_keys, stacked_name
from tandem.families.arch import Arch
from tandem.families.weight_rules import Cut
from tandem.model.device.memory import allocate
from tandem.model.lora import Adapters, LoraTensor
from tandem.model.mcore import GPTModel
from tandem.model.parallel import Topology
from tandem.model.weights.checkpoint_tensors import read_tensors
from tandem.model.weights.safetensors_reader import Piece, StoredTensor
from tandem.spool.schema import LoraShape

_BLOCKS = {
    "self_attention.": "self_attn",
    "linear_attention.": "linear_attn",
    "mlp.": "mlp",
}
"""Megatron's name of a layer's module -> Hugging Face's name of the module."""


class AdapterParts:
    """This rank's parts of the adapter in `gpt`.

    Args:
        gpt: this rank's stage of the model, which has the LoRA parameters.
        lora: the adapter's shape; None: there is no adapter.
        layers: the layers of this rank's pipeline stage, counted over all stages.
    """

    def __init__(
        self, gpt: GPTModel, arch: Arch, lora: LoraShape | None, topology: Topology, layers: range
    ) -> None:
        self._topology, self._num_layers = topology, arch.num_layers
        self._shapes = adapter_shapes(arch, lora) if lora else {}
        # LoRA parameter -> PEFT keys of the tensors that are stacked in the parameter
        self._keys: dict[str, list[str]] = {}
        for key in self._shapes:
            if layer_of(key) in layers:
                self._keys.setdefault(stacked_name(key), []).append(key)
        whole_tensors = _tensors(gpt, arch, layers)
        self.tensors = {name: whole_tensors[name] for name in self._keys}
        """This rank's parts by name (`stacked_name`), with the cut that gives each part. The order
        is the same on all ranks of a stage."""

    def whole(self, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A mapping from PEFT keys to whole fp32 tensors on the CPU. Every rank gets the tensors of
        all stages. A whole tensor is joined from every rank's `local`, which maps LoRA parameters
        to tensors. The call is a collective operation of all ranks that hold one copy of the
        model."""
        whole_tensors: dict[str, torch.Tensor] = {}
        for name, tensor in local.items():
            whole_tensors |= self.gather(name, tensor)
        sizes = self._topology.sizes
        for stage in range(sizes.pipeline if sizes.pipeline > 1 else 0):
            layers = sizes.layers(self._num_layers, stage)
            stage_shapes = {
                key: shape for key, shape in self._shapes.items() if layer_of(key) in layers
            }
            memory, views = allocate(stage_shapes, torch.float32, torch.device("cpu"))
            if stage == self._topology.place.pipeline:
                for key, view in views.items():
                    view.copy_(whole_tensors[key])
            dist.broadcast(memory, group=self._topology.pipeline, group_src=stage)
            whole_tensors |= views
        return {key: whole_tensors[key] for key in self._shapes}

    def gather(self, name: str, local: torch.Tensor) -> dict[str, torch.Tensor]:
        """A mapping from PEFT keys to whole tensors on the CPU, joined from every rank's `local`.
        `local` has the shape of the LoRA parameter `name`, and may be an Adam moment of this
        parameter. The call is a collective operation of the tensor-parallel ranks. All ranks call
        `gather` in the same order.
        """
        tensor, sizes = self.tensors[name], self._topology.sizes
        group = self._topology.expert_group if tensor.stacked else self._topology.tensor
        local = local.detach().contiguous()
        if group.size() == 1 or (tensor.cut == "whole" and not tensor.stacked):
            whole = local.to("cpu", copy=True)
        else:
            parts = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(parts, local, group=group)
            # The number of ranks that hold parts of the same matrices.
            each = sizes.expert_tensor if tensor.stacked else group.size()
            several = [parts[start : start + each] for start in range(0, len(parts), each)]
            whole = torch.cat([_join(row_parts, tensor) for row_parts in several]).cpu()
        keys = self._keys[name]
        return {name: whole} if keys == [name] else dict(zip(keys, whole.unbind(), strict=True))

    @torch.no_grad()
    def read(
        self,
        stored: Mapping[str, StoredTensor],
        local: Mapping[str, torch.Tensor],
        suffix: str = "",
    ) -> None:
        """Fill `local` from whole tensors in a file: the inverse of `whole`. Reads only the bytes
        of this rank's parts. Raises the errors of `read_tensors`.

        Args:
            stored: the whole tensors of one file, by name.
            local: the tensors to fill, as a mapping from LoRA parameters to this rank's parts.
            suffix: a tensor's name in the file is `<PEFT key><suffix>`.
        """
        pieces = [
            piece
            for name, part in local.items()
            for piece in self._pieces(name, stored, part, suffix)
        ]
        read_tensors(
            next(iter(stored.values())).path,
            {name + suffix: part for name, part in local.items()},
            pieces,
        )

    def _pieces(
        self, name: str, stored: Mapping[str, StoredTensor], local: torch.Tensor, suffix: str
    ) -> Iterator[Piece]:
        keys, cut, sizes, place = (
            self._keys[name],
            self.tensors[name].cut,
            self._topology.sizes,
            self._topology.place,
        )
        if self.tensors[name].stacked:
            count = len(keys) // sizes.expert
            rank_keys = keys[place.expert * count : (place.expert + 1) * count]
            for key, matrix in zip(rank_keys, local, strict=True):
                yield _piece(stored[key + suffix], cut, place.expert_tensor, matrix)
        elif sections := self.tensors[name].sections:
            parts = local.split([size // sizes.tensor for size in sections])
            begin = 0
            for size, part in zip(sections, parts, strict=True):
                yield _piece(stored[name + suffix], cut, place.tensor, part, begin)
                begin += size
        else:
            yield _piece(stored[name + suffix], cut, place.tensor, local)


def _tensors(gpt: GPTModel, arch: Arch, layers: range) -> dict[str, LoraTensor]:
    """The LoRA tensors of all adapted modules of this rank's `layers`, by name (`stacked_name`)."""
    shared = {"mlp.shared_experts.": f"mlp.{arch.moe.shared_name}"} if arch.moe else {}
    blocks, tensors = shared | _BLOCKS, dict[str, LoraTensor]()
    for index, layer in zip(layers, gpt.decoder.layers, strict=True):
        for name, module in layer.named_modules():
            if not isinstance(module, Adapters):
                continue
            block = next(path for start, path in blocks.items() if name.startswith(start))
            path = f"{arch.weight_prefix}layers.{index}.{block}"
            path += ".experts.*" if module.stacked else ""
            for target, a_and_b in module.lora_tensors().items():
                tensors.update(zip(peft_keys(f"{path}.{target}"), a_and_b, strict=True))
    return tensors


def _join(parts: list[torch.Tensor], tensor: LoraTensor) -> torch.Tensor:
    """The whole tensor, joined from its parts or taken from equal copies."""
    if tensor.cut == "whole":
        return parts[0]
    if tensor.sections:
        sizes = [size // len(parts) for size in tensor.sections]
        sections = zip(*(part.split(sizes, -2) for part in parts), strict=True)
        parts = [piece for section in sections for piece in section]
    return torch.cat(parts, dim=-2 if tensor.cut == "rows" else -1)


def _piece(
    stored: StoredTensor, cut: Cut, part: int, target: torch.Tensor, begin: int = 0
) -> Piece:
    """The piece of a stored tensor that fills `target`. The stored tensor, or its section that
    begins at row `begin`, is divided into equal parts. `target` has the shape of the part with the
    number `part`."""
    rows, columns = target.shape
    if cut == "columns":
        return Piece(
            stored, 0, stored.shape[1], target, slice(part * columns, (part + 1) * columns)
        )
    first = begin + part * rows if cut == "rows" else begin
    return Piece(stored, first * columns, columns, target)
