"""A model as one tensor-parallel worker of vLLM holds it: modules with the names and attributes of
vLLM 0.26 and 0.32. This module itself cuts the weights for the worker, and does not use Tandem's
layout of weights. So tests can check Tandem's layout against this module."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from policies import write_random_adapter
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.server.worker import extension
from tandem.inference.server.worker.extension import MergedWorker
from tandem.inference.server.worker.landing import LandingWeights, Source
from tandem.inference.server.worker.model_weights import MergedWeights
from tandem.spool.schema import LORA_TARGETS, LoraShape
from waiting import until

VOCAB_PADDING = 64
LORA = LoraShape(rank=4, alpha=10.0)
SCALE = 2.5  # alpha / rank


class UnquantizedLinearMethod: ...


def layer(kind: str, **parameters: Tensor | None) -> Any:
    """A layer of vLLM's class `kind`."""
    made: Any = type(kind, (nn.Module,), {})()
    made.quant_method = UnquantizedLinearMethod()
    for name, value in parameters.items():
        if value is not None:
            made.register_parameter(
                name, nn.Parameter(value.clone().contiguous(), requires_grad=False)
            )
    return made


class Worker:
    """The modules and tensors of the tensor-parallel rank `rank` of `tp` ranks. The tensors have
    the dtype in which vLLM serves the model."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], tp: int, rank: int
    ) -> None:
        self.tensors, self.config, self.tp, self.rank = tensors, config, tp, rank
        self.model = nn.Module()
        self._put(
            "model.embed_tokens",
            self._vocabulary("VocabParallelEmbedding", "model.embed_tokens.weight"),
        )
        for index in range(config["num_hidden_layers"]):
            self._layer(f"model.layers.{index}")
        self._put("model.norm", layer("RMSNorm", weight=tensors["model.norm.weight"]))
        if config["tie_word_embeddings"]:
            self._put("lm_head", self.model.get_submodule("model.embed_tokens"))
        else:
            self._put("lm_head", self._vocabulary("ParallelLMHead", "lm_head.weight"))

    def _put(self, path: str, module: nn.Module) -> None:
        *parents, name = path.split(".")
        at = self.model
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        at.add_module(name, module)

    def _vocabulary(self, kind: str, name: str) -> Any:
        rows = self.tensors[name]
        padded = -(-len(rows) // (VOCAB_PADDING * self.tp)) * VOCAB_PADDING
        mine = rows[self.rank * padded : (self.rank + 1) * padded]
        made = layer(
            kind, weight=torch.cat([mine, mine.new_zeros(padded - len(mine), rows.shape[1])])
        )
        begin = self.rank * padded
        made.shard_indices = SimpleNamespace(
            org_vocab_start_index=begin, org_vocab_end_index=begin + len(mine)
        )
        return made

    def _layer(self, path: str) -> None:
        t = self.tensors
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
        ):
            if f"{path}.{norm}.weight" in t:
                self._put(f"{path}.{norm}", layer("RMSNorm", weight=t[f"{path}.{norm}.weight"]))
        self._put(f"{path}.self_attn.qkv_proj", self._qkv(f"{path}.self_attn"))
        self._put(f"{path}.self_attn.o_proj", self._row_parallel(f"{path}.self_attn.o_proj.weight"))
        if f"{path}.mlp.gate.weight" in t:
            self._put(
                f"{path}.mlp.gate", layer("ReplicatedLinear", weight=t[f"{path}.mlp.gate.weight"])
            )
            self._put(f"{path}.mlp.experts", self._experts(f"{path}.mlp.experts"))
            return
        gate, up = (
            t[f"{path}.mlp.{name}_proj.weight"].chunk(self.tp)[self.rank] for name in ("gate", "up")
        )
        made = layer("MergedColumnParallelLinear", weight=torch.cat([gate, up]))
        made.tp_rank = self.rank
        self._put(f"{path}.mlp.gate_up_proj", made)
        self._put(f"{path}.mlp.down_proj", self._row_parallel(f"{path}.mlp.down_proj.weight"))

    def _qkv(self, path: str) -> Any:
        heads, kv_heads, size = (
            self.config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
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

        made = layer("QKVParallelLinear", weight=of("weight"), bias=of("bias"))
        made.head_size, made.tp_rank, made.num_kv_head_replicas = size, self.rank, replicas
        made.num_heads, made.num_kv_heads = len(mine), len(mine_kv)
        return made

    def _row_parallel(self, name: str) -> Any:
        made = layer(
            "RowParallelLinear", weight=self.tensors[name].chunk(self.tp, dim=1)[self.rank]
        )
        made.tp_rank = self.rank
        return made

    def _experts(self, path: str) -> Any:
        each = [f"{path}.{expert}." for expert in range(self.config["num_local_experts"])]
        gates, ups = (
            [self.tensors[f"{e}{name}_proj.weight"].chunk(self.tp)[self.rank] for e in each]
            for name in ("gate", "up")
        )
        downs = [
            self.tensors[f"{e}down_proj.weight"].chunk(self.tp, dim=1)[self.rank] for e in each
        ]
        made = layer(
            "FusedMoE",
            w13_weight=torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)]),
            w2_weight=torch.stack(downs),
        )
        parallel = SimpleNamespace(tp_rank=self.rank, use_ep=False, dp_size=1)
        made.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        return made

    def __getitem__(self, path: str) -> Any:
        return self.model.get_submodule(path)

    def weights(self, directory: Path) -> MergedWeights:
        return MergedWeights(self.model, str(directory), "device", frozenset(LORA_TARGETS))

    def bits(self) -> dict[str, bytes]:
        """The bytes of every parameter, by the parameter's name."""
        return {name: bytes_of(value) for name, value in self.model.named_parameters()}


class Model:
    """A model's directory, and its tensors in the dtype that vLLM serves."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.directory = directory
        self.config = json.loads((directory / "config.json").read_text())
        self.dtype = dtype
        self.tensors = {
            name: value.to(dtype)
            for name, value in load_file(directory / "model.safetensors").items()
        }

    def worker(
        self, tp: int = 1, rank: int = 0, tensors: Mapping[str, Tensor] | None = None
    ) -> Worker:
        return Worker(tensors or self.tensors, self.config, tp, rank)

    def merged(self, adapter: Path, scale: float = SCALE) -> dict[str, Tensor]:
        return merged(self.tensors, adapter, scale)

    def adapter(self, path: Path, seed: int, lora: LoraShape = LORA) -> Path:
        return write_random_adapter(path / f"adapter-{seed}", self.directory, lora, seed=seed)


class Workers:
    """The tensor-parallel workers of one server. If `whole` is true, the workers receive whole
    weights. If `whole` is false, the workers merge adapters."""

    def __init__(self, model: Model, tp: int = 1, *, whole: bool = False) -> None:
        self.model = model
        self.each = [model.worker(tp, rank) for rank in range(tp)]
        self.weights: list[Any] = []
        for rank, worker in enumerate(self.each):
            served = worker.model, str(model.directory), "device"
            self.weights.append(
                LandingWeights(*served, (rank, tp)) if whole else worker.weights(model.directory)
            )

    def order(
        self, version: str | Path, source: Source | None = None, scale: float = SCALE
    ) -> None:
        for weights in self.weights:
            weights.stage(str(version), scale, source)

    def stage(self, version: str | Path, source: Source | None = None, scale: float = SCALE) -> str:
        """Orders the workers to get the weights of `version`, and waits until all workers have
        them. Returns the transport by which the weights came, such as `nccl`."""
        self.order(version, source, scale)
        ways: set[str] = set()
        for weights in self.weights:
            ways.add(
                until(f"{version} is here", lambda of=weights: of.staged(str(version)), poll=0.001)
            )
        [way] = ways
        return way

    def serve(self, version: str | Path, source: Source | None = None, scale: float = SCALE) -> str:
        way = self.stage(version, source, scale)
        for weights in self.weights:
            weights.swap(str(version))
        return way

    def check(self, adapter: Path | None, scale: float = SCALE) -> None:
        """Checks every bit of each worker's weights. The expected weights are `merged` with the
        adapter, or the base model's weights if `adapter` is None. Each worker has its part."""
        tensors = self.model.tensors if adapter is None else self.model.merged(adapter, scale)
        for rank, worker in enumerate(self.each):
            assert worker.bits() == self.model.worker(len(self.each), rank, tensors).bits()


class Core:
    """vLLM's engine. The engine calls its workers as vLLM's executor calls them."""

    def __init__(self, workers: Workers) -> None:
        self.workers = [MergedWorker() for _ in workers.each]
        for worker, weights in zip(self.workers, workers.weights, strict=True):
            worker.tandem_weights = weights
        self.scheduler = SimpleNamespace(requests={"a": 1, "b": 2})
        self.aborted: list[str] = []
        self.sleeps = False

    def is_sleeping(self) -> bool:
        return self.sleeps

    def collective_rpc(
        self, method: str, timeout: float | None, args: tuple[Any, ...]
    ) -> list[dict[str, Any]]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def abort_requests(self, requests: list[str]) -> None:
        self.aborted += requests

    def swap(self, version: Path, deadline: float = float("inf")) -> dict[str, Any]:
        return extension.swap(self, Core.collective_rpc, str(version), "run@1", deadline)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def merged(tensors: Mapping[str, Tensor], adapter: Path, scale: float = SCALE) -> dict[str, Tensor]:
    """The whole model's tensors merged with an adapter. The merge is computed by numpy in float64.
    The sums are rounded to float32 and then to the tensors' dtype."""
    result = dict(tensors)
    factors = load_file(adapter / WEIGHTS_FILE)
    for key, a in factors.items():
        if "lora_A" not in key:
            continue
        name = key.removeprefix("base_model.model.").replace("lora_A.", "")
        b = factors[key.replace("lora_A", "lora_B")].numpy().astype(np.float64)
        exact = tensors[name].float().numpy().astype(np.float64) + scale * (
            b @ a.numpy().astype(np.float64)
        )
        result[name] = torch.from_numpy(exact.astype(np.float32)).to(tensors[name].dtype)
    return result
