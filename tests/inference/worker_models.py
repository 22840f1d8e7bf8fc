"""What one tensor-parallel worker of vLLM holds of a model: modules with the names and attributes that vLLM 0.26 and
0.32 give them, filled by heads, halves and experts, without Tandem's plan."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.server.worker.merged_weights import MergedWeights
from tandem.spool.schema import LORA_TARGETS

VOCAB_PADDING = 64


class UnquantizedLinearMethod: ...


class Layer(nn.Module):
    def __init__(self, **parameters: Tensor | None) -> None:
        super().__init__()
        self.quant_method: Any = UnquantizedLinearMethod()
        for name, value in parameters.items():
            if value is not None:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous(), requires_grad=False))


class QKVParallelLinear(Layer): ...


class MergedColumnParallelLinear(Layer): ...


class RowParallelLinear(Layer): ...


class VocabParallelEmbedding(Layer): ...


class ParallelLMHead(Layer): ...


class ReplicatedLinear(Layer): ...


class RMSNorm(Layer): ...


class FusedMoE(Layer): ...


class Worker:
    """Tensors of rank `rank` of `tp`. `dtype`: in which it serves."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], tp: int, rank: int) -> None:
        self.tensors, self.config, self.tp, self.rank = tensors, config, tp, rank
        self.model = nn.Module()
        self._put("model.embed_tokens", self._vocabulary(VocabParallelEmbedding, "model.embed_tokens.weight"))
        for index in range(config["num_hidden_layers"]):
            self._layer(f"model.layers.{index}")
        self._put("model.norm", RMSNorm(weight=tensors["model.norm.weight"]))
        if config["tie_word_embeddings"]:
            self._put("lm_head", self.model.get_submodule("model.embed_tokens"))
        else:
            self._put("lm_head", self._vocabulary(ParallelLMHead, "lm_head.weight"))

    def _put(self, path: str, module: nn.Module) -> None:
        *parents, name = path.split(".")
        at = self.model
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        at.add_module(name, module)

    def _vocabulary(self, kind: type[Layer], name: str) -> Layer:
        rows = self.tensors[name]
        padded = -(-len(rows) // (VOCAB_PADDING * self.tp)) * VOCAB_PADDING
        mine = rows[self.rank * padded : (self.rank + 1) * padded]
        layer = kind(weight=torch.cat([mine, mine.new_zeros(padded - len(mine), rows.shape[1])]))
        begin = self.rank * padded
        layer.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=begin + len(mine))
        return layer

    def _layer(self, path: str) -> None:
        t = self.tensors
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{path}.{norm}.weight" in t:
                self._put(f"{path}.{norm}", RMSNorm(weight=t[f"{path}.{norm}.weight"]))
        self._put(f"{path}.self_attn.qkv_proj", self._qkv(f"{path}.self_attn"))
        self._put(f"{path}.self_attn.o_proj", self._row_parallel(f"{path}.self_attn.o_proj.weight"))
        if f"{path}.mlp.gate.weight" in t:
            self._put(f"{path}.mlp.gate", ReplicatedLinear(weight=t[f"{path}.mlp.gate.weight"]))
            self._put(f"{path}.mlp.experts", self._experts(f"{path}.mlp.experts"))
            return
        gate, up = (t[f"{path}.mlp.{name}_proj.weight"].chunk(self.tp)[self.rank] for name in ("gate", "up"))
        layer = MergedColumnParallelLinear(weight=torch.cat([gate, up]))
        layer.tp_rank = self.rank
        self._put(f"{path}.mlp.gate_up_proj", layer)
        self._put(f"{path}.mlp.down_proj", self._row_parallel(f"{path}.mlp.down_proj.weight"))

    def _qkv(self, path: str) -> Layer:
        heads, kv_heads, size = (self.config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        replicas = max(1, self.tp // kv_heads)
        mine = range(self.rank * heads // self.tp, (self.rank + 1) * heads // self.tp)
        mine_kv = sorted({head * kv_heads // heads for head in mine})

        def of(kind: str) -> Tensor | None:
            rows = []
            for name, wanted in (("q", mine), ("k", mine_kv), ("v", mine_kv)):
                whole = self.tensors.get(f"{path}.{name}_proj.{kind}")
                if whole is None:
                    return None
                rows += [whole[head * size : (head + 1) * size] for head in wanted]
            return torch.cat(rows)

        layer = QKVParallelLinear(weight=of("weight"), bias=of("bias"))
        layer.head_size, layer.tp_rank, layer.num_kv_head_replicas = size, self.rank, replicas
        layer.num_heads, layer.num_kv_heads = len(mine), len(mine_kv)
        return layer

    def _row_parallel(self, name: str) -> Layer:
        layer = RowParallelLinear(weight=self.tensors[name].chunk(self.tp, dim=1)[self.rank])
        layer.tp_rank = self.rank
        return layer

    def _experts(self, path: str) -> Layer:
        each = [f"{path}.{expert}." for expert in range(self.config["num_local_experts"])]
        gates, ups = (
            [self.tensors[f"{e}{name}_proj.weight"].chunk(self.tp)[self.rank] for e in each] for name in ("gate", "up")
        )
        downs = [self.tensors[f"{e}down_proj.weight"].chunk(self.tp, dim=1)[self.rank] for e in each]
        layer = FusedMoE(
            w13_weight=torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)]),
            w2_weight=torch.stack(downs),
        )
        parallel = SimpleNamespace(tp_rank=self.rank, use_ep=False, dp_size=1)
        layer.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        return layer

    def __getitem__(self, path: str) -> Any:
        return self.model.get_submodule(path)

    def bits(self) -> dict[str, bytes]:
        """Every parameter's bytes."""
        return {name: bytes_of(value) for name, value in self.model.named_parameters()}

    def weights(self, directory: Path) -> MergedWeights:
        return MergedWeights(self.model, str(directory), lambda _: "device", frozenset(LORA_TARGETS))


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def stage(weights: MergedWeights, adapter: Path, scale: float = 2.5) -> str:
    """Stage an adapter under its path, and wait for it."""
    weights.stage(str(adapter), scale)
    deadline = time.monotonic() + 20
    while not weights.staged(str(adapter)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return str(adapter)


def merged(tensors: Mapping[str, Tensor], adapter: Path, scale: float = 2.5) -> dict[str, Tensor]:
    """The whole model's tensors with an adapter, by numpy in float64, rounded to float32 and to the tensors' dtype."""
    result = dict(tensors)
    factors = load_file(adapter / WEIGHTS_FILE)
    for key, a in factors.items():
        if "lora_A" not in key:
            continue
        name = key.removeprefix("base_model.model.").replace("lora_A.", "")
        b = factors[key.replace("lora_A", "lora_B")].numpy().astype(np.float64)
        exact = tensors[name].float().numpy().astype(np.float64) + scale * (b @ a.numpy().astype(np.float64))
        result[name] = torch.from_numpy(exact.astype(np.float32)).to(tensors[name].dtype)
    return result
