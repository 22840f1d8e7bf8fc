"""Which Hugging Face tensors make up which Megatron parameter, and how each is cut across tensor-parallel ranks.

Megatron fuses q, k and v into `linear_qkv`, whose rows are one block for each group of query heads that share a key
head: that group's query heads, then its key head, then its value head. gate and up are fused into `linear_fc1`, gate
first. Experts are stacked, each with gate before up.
A rank holds whole groups, and for gate and up the same part of each.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.model import device, parallel
from tandem.model.device import ipc
from tandem.model.device.allocation import allocate
from tandem.model.weights import stream

SEGMENT = 2 * 2**20  # bytes that all base weights are a multiple of, so that nothing else is put beside them

Cut = Literal["whole", "rows", "columns"]
"""Along which dimension of the Hugging Face tensor ranks take equal consecutive parts; `whole`: all have all of it."""

Fusion = Literal["stack", "qkv"]
"""How a parameter is made of its sources: one after the other (or just one), or as above."""


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter."""

    parameter: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the sources, uncut
    cut: Cut
    fusion: Fusion = "stack"
    experts: int | None = None  # that it has, each with as many of the sources, one expert after the other

    def shape(self, tp: int) -> tuple[int, ...]:
        """Of the parameter, on each of `tp` ranks: [rows, columns], [experts, rows, columns] or [rows]."""
        rows, rest = sum(shape[0] for shape in self.shapes), self.shapes[0][1:]
        if self.cut == "rows":
            rows //= tp
        if self.cut == "columns":
            rest = (rest[0] // tp,)
        return (rows, *rest) if self.experts is None else (self.experts, rows // self.experts, *rest)


@functools.lru_cache(2)
def weight_rules(arch: Arch) -> tuple[WeightRule, ...]:
    """The rules for every parameter of the model, embedding first."""
    hidden = arch.hidden_size
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    embedding = (arch.vocab_size, hidden)
    rules = [
        WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (embedding,), "rows"),
        WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), "whole"),
    ]
    if not arch.tie_embeddings:
        rules.append(WeightRule("output_layer.weight", ("lm_head.weight",), (embedding,), "rows"))
    for index in range(arch.num_layers):
        to, of = f"decoder.layers.{index}.", f"model.layers.{index}."
        attention = of + "self_attn."
        qkv_proj = tuple(attention + name for name in ("q_proj", "k_proj", "v_proj"))
        rules += [
            WeightRule(to + "input_layernorm.weight", (of + "input_layernorm.weight",), ((hidden,),), "whole"),
            WeightRule(
                to + "self_attention.linear_qkv.weight",
                tuple(name + ".weight" for name in qkv_proj),
                ((q, hidden), (kv, hidden), (kv, hidden)),
                "rows",
                "qkv",
            ),
            WeightRule(
                to + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), ((hidden, q),), "columns"
            ),
            WeightRule(
                to + "pre_mlp_layernorm.weight", (of + "post_attention_layernorm.weight",), ((hidden,),), "whole"
            ),
            *_mlp_rules(arch, to + "mlp.", of + "mlp."),
        ]
        if arch.qkv_bias:
            sources = tuple(name + ".bias" for name in qkv_proj)
            rules.append(
                WeightRule(to + "self_attention.linear_qkv.bias", sources, ((q,), (kv,), (kv,)), "rows", "qkv")
            )
        if arch.qk_norm:
            for letter in "qk":
                source = (f"{attention}{letter}_norm.weight",)
                target = f"{to}self_attention.{letter}_layernorm.weight"
                rules.append(WeightRule(target, source, ((arch.head_dim,),), "whole"))
    return tuple(rules)


def _mlp_rules(arch: Arch, to: str, of: str) -> list[WeightRule]:
    hidden = arch.hidden_size
    if arch.moe is None:
        ffn = arch.ffn_hidden_size
        halves = (of + "gate_proj.weight", of + "up_proj.weight")
        return [
            WeightRule(to + "linear_fc1.weight", halves, ((ffn, hidden),) * 2, "rows"),
            WeightRule(to + "linear_fc2.weight", (of + "down_proj.weight",), ((hidden, ffn),), "columns"),
        ]
    experts, ffn = arch.moe.num_experts, arch.moe.ffn_hidden_size
    each = [f"{of}experts.{expert}." for expert in range(experts)]
    gates_and_ups = tuple(f"{expert}{half}_proj.weight" for expert in each for half in ("gate", "up"))
    downs = tuple(f"{expert}down_proj.weight" for expert in each)
    return [
        WeightRule(to + "router.weight", (of + "gate.weight",), ((experts, hidden),), "whole"),
        WeightRule(to + "experts.fc1", gates_and_ups, ((ffn, hidden),) * 2 * experts, "whole", experts=experts),
        WeightRule(to + "experts.fc2", downs, ((hidden, ffn),) * experts, "whole", experts=experts),
    ]


def check_cut(arch: Arch, tp: int) -> None:
    """Raise InvalidInput where the model can't be cut for `tp` tensor-parallel ranks."""
    for what, size in (
        ("key/value heads", arch.num_kv_heads),
        ("MLP features", arch.ffn_hidden_size),
        ("vocabulary entries", arch.vocab_size),
    ):
        if size % tp:
            raise InvalidInput(f"{size} {what} don't divide over {tp} tensor-parallel ranks", field="tensor_parallel")
    if arch.moe and tp > 1:
        raise InvalidInput(
            f"{arch.model_type} is not cut over tensor-parallel ranks yet, and there are {tp}: set "
            "TANDEM_TENSOR_PARALLEL=1 and use the GPUs for data parallelism",
            field="tensor_parallel",
        )


class BaseWeights:
    """Memory on this process's device for a rank's base weights, uninitialised, in one allocation; and who of a group
    of ranks with the same weights reads which."""

    def __init__(self, arch: Arch, dtype: torch.dtype, *, tp: int, group: dist.ProcessGroup | None = None) -> None:
        """`group`: ranks that share the reading; None: this one reads all. Raises InvalidInput where the model can't be
        cut for `tp` tensor-parallel ranks."""
        check_cut(arch, tp)
        shapes = {rule.parameter: rule.shape(tp) for rule in weight_rules(arch)}
        self.group = group
        self._others: contextlib.ExitStack | None = None  # holds the other ranks' memory, where this one may have it
        self._copies: list[Callable[[], None]] | None = None  # from there; None: not connected
        self._memory, self.parameters = allocate(shapes, dtype, device.device(), multiple=SEGMENT)

    def share(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank reads: about as many bytes as each other rank's, side by side."""
        return self.parameters if self.group is None else self._shares()[self.group.rank()]

    def connect(self) -> None:
        """Let the group's other ranks copy from this one's memory, and see whether this one may from theirs: what
        `exchange` does first, and may be done while shares are read. Both are collectives of the group's ranks."""
        if self.group is None:
            return
        exports = parallel.gather_objects(ipc.exported(self._memory), self.group)
        self._others, self._copies = None, []
        with contextlib.ExitStack() as others, contextlib.suppress(ipc.NotShared):
            for rank, share in self._of_others().items():
                copy, part = others.enter_context(ipc.imported(exports[rank])), self._range(list(share.values()))
                self._copies.append(partial(copy, part, int(part.storage_offset()) * part.element_size()))
            self._others = others.pop_all()

    def exchange(self) -> dict[str, torch.Tensor]:
        """When this rank has read its share: get the others'. What is left for this rank to read, which is nothing, or
        where GPUs can't share memory, all that it has not read.

        Each copies from the others' memory itself: to connect NCCL takes longer than to read half of 16 GB.
        """
        if self.group is None:
            return {}
        if self._copies is None:
            self.connect()
        copies, self._copies = self._copies or [], None  # the next time memory may be elsewhere
        with self._others or contextlib.nullcontext():
            if all(parallel.gather_objects(self._others is not None, self.group)):  # and all have read theirs
                for copy in copies:
                    copy()
                device.synchronize()
                parallel.gather_objects(None, self.group)  # nobody gives back what others still copy
                return {}
        left = self._of_others()
        self.group = None  # from now on each reads all
        return {name: parameter for share in left.values() for name, parameter in share.items()}

    def _of_others(self) -> dict[int, dict[str, torch.Tensor]]:
        """The shares of the other ranks that have any."""
        assert self.group is not None
        return {rank: share for rank, share in enumerate(self._shares()) if share and rank != self.group.rank()}

    def _shares(self) -> list[dict[str, torch.Tensor]]:
        """By rank: the parameters whose middle is in its part of the whole."""
        assert self.group is not None
        shares: list[dict[str, torch.Tensor]] = [{} for _ in range(self.group.size())]
        size = len(self._range(list(self.parameters.values())))
        for name, parameter in self.parameters.items():
            middle = parameter.storage_offset() + parameter.numel() / 2
            shares[int(middle * len(shares) / size)][name] = parameter
        return shares

    def _range(self, side_by_side: list[torch.Tensor]) -> torch.Tensor:
        """The part of the whole that these parameters are."""
        end = side_by_side[-1].storage_offset() + side_by_side[-1].numel()
        return self._memory[side_by_side[0].storage_offset() : end]


def model_directory(model: str) -> Path:
    """Where the weights of `model` are: itself if it is a directory, else the hub's snapshot (downloaded once)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # late: a local directory needs no hub client

    try:
        return Path(snapshot_download(model, allow_patterns=["config.json", "model*.safetensors*"]))
    except Exception as error:  # the client raises a dozen types: bad names, no access, no network, no such file
        raise InvalidInput(
            f"{model!r} is neither a directory nor a model the hub gives us: {error}", field="base_model"
        ) from error


def load_weights(
    directory: Path, arch: Arch, parameters: Callable[[], Mapping[str, torch.Tensor]], *, tp: int, tp_rank: int
) -> None:
    """Fill `parameters()` (Megatron name -> this rank's tensor, any dtype and device), all of the model's or some, from
    the directory's safetensors. It is asked when it is known what is in the files.

    Each rank puts just its own part of each tensor on its device, and reads no more than the rows that hold it.

    Raises:
        InvalidInput: a tensor is missing, has another shape than config.json says, or a file can't be read.
        AssertionError: a parameter is not the model's, or not of its shape.
    """
    rules, stored = weight_rules(arch), stream.headers(_files(directory))
    for rule in rules:
        for name, shape in zip(rule.sources, rule.shapes, strict=True):
            if name not in stored:
                raise InvalidInput(f"{directory} has no tensor {name}", field="base_model")
            if stored[name].shape != shape:
                raise InvalidInput(
                    f"{stored[name].path}: {name} has the shape {list(stored[name].shape)}, config.json says "
                    f"{list(shape)}",
                    field="base_model",
                )
    targets = parameters()
    known = {rule.parameter: rule for rule in rules}
    for name, target in targets.items():
        assert target.shape == known[name].shape(tp), f"{name} is {target.shape}, not {known[name].shape(tp)}"
    stream.fill(
        piece
        for name, target in targets.items()
        for piece in _pieces(known[name], [stored[n] for n in known[name].sources], target, arch, tp, tp_rank)
    )


def _pieces(
    rule: WeightRule, sources: list[stream.Stored], target: torch.Tensor, arch: Arch, tp: int, tp_rank: int
) -> Iterator[stream.Piece]:
    """This rank's part of each source, and the part of `target` it belongs to."""
    if rule.cut == "columns" and tp > 1:
        (source,) = sources
        columns = source.shape[1]
        mine = columns // tp
        yield stream.Piece(source, 0, columns, target, slice(tp_rank * mine, (tp_rank + 1) * mine))
        return
    if rule.experts is not None:
        target = target.view(-1, *target.shape[2:])
    parts = tp if rule.cut == "rows" else 1
    heights = [source.shape[0] // parts for source in sources]
    # qkv: one block of rows per group of heads, see above.
    groups = heights[1] // arch.head_dim if rule.fusion == "qkv" else 1
    blocks = target.view(groups, -1, *target.shape[1:])
    at = 0
    for source, height in zip(sources, heights, strict=True):
        width = math.prod(source.shape[1:])
        block = blocks[:, at : at + height // groups]
        at += height // groups
        first = tp_rank * height * width if parts > 1 else 0
        if groups == 1:
            yield stream.Piece(source, first, width, block[0])
        else:
            yield stream.Piece(source, first, height // groups * width, block)


def _files(directory: Path) -> list[Path]:
    """The safetensors files that hold the model: those the index names if there is one, else `model.safetensors`."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{index} can't be read: {error}", field="base_model") from error
    if single.is_file():
        return [single]
    raise InvalidInput(f"{directory} has neither {single.name} nor {index.name}", field="base_model")
