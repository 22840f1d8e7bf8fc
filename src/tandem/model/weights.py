"""Which Hugging Face tensors make up which Megatron parameter, and how each is cut across tensor-parallel ranks.

Megatron fuses q, k and v into `linear_qkv`, whose rows are one block for each group of query heads that share a key
head: that group's query heads, then its key head, then its value head. gate and up are fused into `linear_fc1`, gate
first.
A rank holds whole groups, and for gate and up the same part of each.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from tandem.errors import InvalidInput
from tandem.model.arch import Arch

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


def weight_rules(arch: Arch) -> list[WeightRule]:
    """The rules for every parameter of the model, embedding first."""
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
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
            WeightRule(
                to + "mlp.linear_fc1.weight",
                (of + "mlp.gate_proj.weight", of + "mlp.up_proj.weight"),
                ((ffn, hidden), (ffn, hidden)),
                "rows",
            ),
            WeightRule(to + "mlp.linear_fc2.weight", (of + "mlp.down_proj.weight",), ((hidden, ffn),), "columns"),
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
    return rules


def fuse_qkv(parts: list[torch.Tensor], head_dim: int) -> torch.Tensor:
    """[heads * head_dim, ...] of q, k and v (of whole groups) -> Megatron's rows."""
    groups = parts[1].shape[0] // head_dim
    blocks = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(blocks, dim=1).flatten(0, 1)


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
    directory: Path,
    arch: Arch,
    parameters: dict[str, torch.Tensor],
    *,
    tp: int,
    tp_rank: int,
    threads: int = 8,
) -> None:
    """Fill `parameters` (Megatron name -> this rank's tensor, any dtype and device) from the directory's safetensors.

    Each rank reads just its own part of each tensor. `threads` read at once, since one thread can't keep up with a disk
    whose pages are in memory.

    Raises:
        InvalidInput: a tensor is missing, has another shape than config.json says, or a file can't be read.
        AssertionError: the rules and the model disagree about which parameters there are.
    """
    rules = {rule.parameter: rule for rule in weight_rules(arch)}
    unfilled, unknown = parameters.keys() - rules.keys(), rules.keys() - parameters.keys()
    assert not unfilled, f"no rule fills {sorted(unfilled)}"
    assert not unknown, f"no parameter for {sorted(unknown)}"
    files = _tensor_files(directory)

    def read(name: str, shape: tuple[int, ...], cut: Cut) -> torch.Tensor:
        if name not in files:
            raise InvalidInput(f"{directory} has no tensor {name}", field="base_model")
        try:
            with safe_open(files[name], framework="pt") as file:
                tensor = file.get_slice(name)
                actual = tuple(tensor.get_shape())
                if actual != shape:
                    raise InvalidInput(
                        f"{files[name]}: {name} has the shape {list(actual)}, config.json says {list(shape)}",
                        field="base_model",
                    )
                if cut == "whole" or tp == 1:
                    return tensor[:]
                part = shape[0 if cut == "rows" else 1] // tp
                mine = slice(tp_rank * part, (tp_rank + 1) * part)
                return tensor[mine] if cut == "rows" else tensor[:, mine]
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"{files[name]} can't be read: {error}", field="base_model") from error

    def fill(rule: WeightRule) -> None:
        parts = [read(name, shape, rule.cut) for name, shape in zip(rule.sources, rule.shapes, strict=True)]
        target = parameters[rule.parameter]
        if rule.fusion == "qkv":
            value = fuse_qkv(parts, arch.head_dim)
        else:
            value = torch.cat(parts) if len(parts) > 1 else parts[0]
        assert value.shape == target.shape, f"{rule.parameter}: {value.shape} does not fit {target.shape}"
        with torch.no_grad():
            target.copy_(value)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, rules.values()))  # list: raises the first error


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it, by the index if there is one, else of `model.safetensors`."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        where = index if index.is_file() else single
        raise InvalidInput(f"{where} can't be read: {error}", field="base_model") from error
    raise InvalidInput(f"{directory} has neither {single.name} nor {index.name}", field="base_model")
