"""The policy: a frozen base model and a trainable adapter, for packed rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tandem.families.adapter import adapter_shapes, key_a, key_b, stacked_name
from tandem.families.arch import Arch
from tandem.model import device
from tandem.model.attention import Kernel, rotation, tree_params
from tandem.model.device.allocation import allocate
from tandem.model.device.offload import Offload
from tandem.model.experts import Experts
from tandem.model.logprobs import CHUNK_ELEMENTS, item_logprobs
from tandem.model.lora import LoraLinear, LoraTensor, Switch
from tandem.model.mcore import GPTModel, gather_from_tensor_model_parallel_region, parallel_state
from tandem.model.weights.adapter_files import read_adapter
from tandem.model.weights.base import load_weights, model_directory
from tandem.spool.schema import LoraShape

if TYPE_CHECKING:
    from tandem.data.packed_format import PackedRow


@dataclass(frozen=True)
class RowTensors:
    """What the model needs of a packed row; all int64, and on the device where nothing else is said. Slots are indices
    into the row."""

    tokens: torch.Tensor  # [S]
    positions: torch.Tensor  # [S]
    subtree_end: torch.Tensor  # on the host; [S], or longer: the attention is compiled for rows of that length
    item_source: torch.Tensor  # [items], the slot each item is predicted from
    item_target: torch.Tensor  # [items], the slot of the predicted token


@dataclass(frozen=True)
class ItemOutputs:
    """Per item of a row, fp32 [items], in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


def row_tensors(row: PackedRow, device: torch.device) -> RowTensors:
    """Copies of a packed row's arrays on `device`; none keeps the memory map alive (R18)."""

    def copied(name: str) -> torch.Tensor:
        return torch.tensor(getattr(row, name), dtype=torch.int64)

    return RowTensors(
        tokens=copied("tokens").to(device),
        positions=copied("positions").to(device),
        subtree_end=copied("subtree_end"),
        item_source=copied("item_source").to(device),
        item_target=copied("item_target").to(device),
    )


class Policy(nn.Module):
    """Made by `tandem.model.build.build_policy`.

    `config` is Megatron's TransformerConfig, as its DDP and optimizer expect. Only LoRA tensors require gradients. They
    are fp32, so an fp32 optimizer steps them directly, without a second master copy.

    Gradients after `backward` are complete with regard to tensor parallelism (see `tandem.model.lora`): only the sum
    over data-parallel ranks is left to do. Tensors that are cut over tensor-parallel ranks carry Megatron's attribute
    `tensor_model_parallel=True`: a global norm counts each of their parts, and every other tensor once, not `tp` times.
    """

    def __init__(self, gpt: GPTModel, arch: Arch, lora: LoraShape, switch: Switch, *, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.gpt, self.arch, self.lora, self.config = gpt, arch, lora, gpt.config
        self.attention_kernel: Kernel = device.attention_kernel()
        self.chunk_elements = CHUNK_ELEMENTS
        self._switch = switch
        self._tp_group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self._tp, self._tp_rank = self._tp_group.size(), self._tp_group.rank()
        self._inv_freq = inv_freq
        self._keys: dict[str, list[str]] = {}  # of each LoRA parameter, the PEFT keys of what it holds
        for key in adapter_shapes(arch, lora):
            self._keys.setdefault(stacked_name(key), []).append(key)
        self._lora = self._find_lora()
        self._base_memory, self._own_memory = Offload(contents=False), Offload(contents=True)

    # ------------------------------------------------------------ weights in and out

    @torch.no_grad()
    def place(self, base: Mapping[str, torch.Tensor]) -> None:
        """Give all parameters memory on the device, when it has started: `base` (`BaseWeights.parameters`) the base
        weights, zeros the adapter, which is the base model's own function."""
        where, own = device.device(), self._base()
        assert base.keys() == own.keys(), f"the rules and the model differ in {sorted(base.keys() ^ own.keys())}"
        for name, parameter in own.items():
            assert parameter.shape == base[name].shape, f"{name} is {parameter.shape}, not {base[name].shape}"
            parameter.data = base[name]
        adapter = self.lora_parameters()
        whole, parts = allocate({name: parameter.shape for name, parameter in adapter.items()}, torch.float32, where)
        whole.zero_()
        for name, parameter in adapter.items():
            parameter.data = parts[name]
        self._inv_freq = self._inv_freq.to(where)

    def base(self) -> dict[str, torch.Tensor]:
        """The base weights' memory, by the names that `weights` has for them."""
        return {name: parameter.data for name, parameter in self._base().items()}

    def load_base(self, model: str) -> None:
        """Fill the base weights from a Hugging Face directory or hub name; see `weights.load_weights` for errors."""
        load_weights(model_directory(model), self.arch, self.base, tp=self._tp, tp_rank=self._tp_rank)

    def _base(self) -> dict[str, nn.Parameter]:
        adapted = {id(tensor.parameter) for tensor in self._lora.values()}
        return {
            name.replace(".base.", "."): parameter
            for name, parameter in self.gpt.named_parameters()
            if id(parameter) not in adapted
        }

    @property
    def offloaded(self) -> bool:
        return self._own_memory.parked

    def offload(self) -> int:
        """Give back the device memory of all parameters; the bytes given back. The adapter waits in host memory. The
        base weights are frozen and in files, so they are not copied: see `restore`. Nothing may be computed until then.
        """
        own = [*self.lora_parameters().values(), self._inv_freq]
        return self._base_memory.park(self.base().values()) + self._own_memory.park(own)

    def restore(self) -> None:
        """Undo `offload`: the same memory and the same adapter; the base weights are uninitialised until `load_base`
        has read them again."""
        self._base_memory.restore()
        self._own_memory.restore()

    def load_adapter(self, directory: Path) -> None:
        """Fill the adapter from PEFT's files, all or nothing.

        Raises:
            CheckpointDamaged: see `files.read_adapter`. The adapter in memory is then as it was before.
        """
        self.set_adapter(read_adapter(directory, self.arch, self.lora, device.device()))

    def set_adapter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill the adapter from whole tensors by PEFT key, of any floating dtype and on any device."""
        parameters = self.lora_parameters()
        with torch.no_grad():
            torch._foreach_copy_(
                list(parameters.values()), [self.shard(name, lambda key: tensors[key]) for name in parameters]
            )

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """PEFT key -> whole fp32 tensor on the CPU. A collective of the tensor-parallel ranks; all get all of it."""
        whole: dict[str, torch.Tensor] = {}
        for name, parameter in self.lora_parameters().items():
            whole |= self.gather(name, parameter.data)
        return {key: whole[key] for key in adapter_shapes(self.arch, self.lora)}

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> this rank's part, fp32, trainable; in the same order on all ranks.

        The name is the PEFT key, or for a layer's experts, whose tensors are one parameter [experts, ...], the PEFT key
        with `*` for the expert's number.
        """
        return {name: tensor.parameter for name, tensor in self._lora.items()}

    def gather(self, name: str, local: torch.Tensor) -> dict[str, torch.Tensor]:
        """PEFT key -> the whole, on the CPU, of a tensor shaped like LoRA parameter `name` (Adam's state, say), from
        every rank's part. A collective of the tensor-parallel ranks, in the same order on each."""
        cut = self._lora[name].cut
        local = local.detach().contiguous()
        if cut == "whole" or self._tp == 1:
            whole = local.to("cpu", copy=True)
        else:
            parts = [torch.empty_like(local) for _ in range(self._tp)]
            dist.all_gather(parts, local, group=self._tp_group)
            whole = torch.cat(parts, dim=0 if cut == "rows" else 1).cpu()
        keys = self._keys[name]
        return {name: whole} if keys == [name] else dict(zip(keys, whole.unbind(), strict=True))

    def shard(self, name: str, full: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """This rank's part for LoRA parameter `name` of whole tensors, `full(PEFT key)`; undoes `gather`. Where they
        are, and a view of them where it can be."""
        keys = self._keys[name]
        if keys != [name]:
            return torch.stack([full(key) for key in keys])
        cut = self._lora[name].cut
        if cut == "whole" or self._tp == 1:
            return full(name)
        return full(name).chunk(self._tp, dim=0 if cut == "rows" else 1)[self._tp_rank]

    @contextlib.contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """The base model alone; nothing is trainable in it, so there are no gradients inside."""
        before, self._switch.on = self._switch.on, False
        try:
            with torch.no_grad():
                yield
        finally:
            self._switch.on = before

    # ------------------------------------------------------------ computing

    def forward(self, row: RowTensors, temperature: float = 1.0) -> ItemOutputs:
        """log p and entropy of every item at `temperature`; logits are made at the items' sources only."""
        return self._outputs(row, self._hidden(row.tokens, row.positions, row.subtree_end), temperature)

    @torch.no_grad()
    def rehearse(self, row: RowTensors) -> None:
        """What happens once in a process, in its first `forward`, happens here: kernels are loaded, the attention's
        among them, which may have to be compiled. One layer is enough for that, and whatever is in the weights'
        memory, which may be written meanwhile; all tensor-parallel ranks take part."""
        decoder = self.gpt.decoder
        hidden, _ = decoder.layers[0](**self._decoder_inputs(row.tokens, row.positions, row.subtree_end))
        self._outputs(row, decoder.final_layernorm(hidden)[:, 0], temperature=1.0).logprobs.cpu()

    def _outputs(self, row: RowTensors, hidden: torch.Tensor, temperature: float) -> ItemOutputs:
        vocab = self.arch.vocab_size // self._tp
        logprobs, entropy = item_logprobs(
            hidden[row.item_source],
            row.tokens[row.item_target],
            self._head,
            vocab_start=self._tp_rank * vocab,
            vocab_size=vocab,
            temperature=temperature,
            group=self._tp_group,
            chunk_elements=self.chunk_elements,
        )
        return ItemOutputs(logprobs, entropy)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, subtree_end: torch.Tensor) -> torch.Tensor:
        """All logits of one row, fp32 [S, vocabulary] on every rank; for tests and probes of small rows."""
        local = self._head(self._hidden(tokens, positions, subtree_end))
        return gather_from_tensor_model_parallel_region(local, group=self._tp_group).float()

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, subtree_end: torch.Tensor) -> torch.Tensor:
        """Final hidden states [S, hidden]."""
        return self.gpt.decoder(**self._decoder_inputs(tokens, positions, subtree_end))[:, 0]

    def _decoder_inputs(
        self, tokens: torch.Tensor, positions: torch.Tensor, subtree_end: torch.Tensor
    ) -> dict[str, Any]:
        """What the decoder and each of its layers are called with."""
        embedded = self.gpt.embedding(input_ids=tokens[None], position_ids=None)
        if torch.is_grad_enabled():
            # Under full recompute a layer whose input needs no gradient is run without a graph: with a frozen embedding
            # nothing would be trained, silently.
            embedded = embedded.detach().requires_grad_()
        turns = rotation(positions, self._inv_freq, embedded.dtype)
        return {
            "hidden_states": embedded,
            "attention_mask": None,
            "packed_seq_params": tree_params(subtree_end, self.attention_kernel, turns),
        }

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.gpt.shared_embedding_or_output_weight() if self.arch.tie_embeddings else None
        return self.gpt.output_layer(hidden, weight=weight)[0]

    def _find_lora(self) -> dict[str, LoraTensor]:
        found: dict[str, LoraTensor] = {}
        for index, layer in enumerate(self.gpt.decoder.layers):
            mlp = (
                [("mlp.experts.*", layer.mlp.experts)]
                if self.arch.moe
                else [("mlp", layer.mlp.linear_fc1), ("mlp", layer.mlp.linear_fc2)]
            )
            attention = layer.self_attention
            for block, module in (("self_attn", attention.linear_qkv), ("self_attn", attention.linear_proj), *mlp):
                assert isinstance(module, (LoraLinear, Experts))
                for (target, which), tensor in module.tensors().items():
                    path = f"model.layers.{index}.{block}.{target}"
                    found[key_a(path) if which == "A" else key_b(path)] = tensor
        return {name: found[name] for name in self._keys}
