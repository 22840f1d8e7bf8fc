"""A decoder layer for Megatron's GPTModel, with Tandem's parameters, forward and backward
passes."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from tandem.families.arch import Arch, LatentAttention, MoE
from tandem.families.decoder import attention_features
from tandem.model.attention import TreeParams
from tandem.model.experts import ExpertLinear
from tandem.model.layer.experts_beside_mlp import ExpertsBesideMlp
from tandem.model.layer.gated_delta_net import DeltaNetSublayer, DeltaNetWeights
from tandem.model.layer.gated_mlp import GatedMlp
from tandem.model.layer.head_rows import (
    GrowingQueries,
    HeadRows,
    NormalisedValues,
    WideNorm,
)
from tandem.model.layer.heads import HeadShape
from tandem.model.layer.latent_attention import LatentAttentionSublayer, LatentLinears
from tandem.model.layer.moe_sublayer import MoeSublayer
from tandem.model.layer.norm import make_norm
from tandem.model.layer.sublayers import AttentionSublayer, MlpSublayer, Saved, SaveLevel
from tandem.model.lora import AdapterSwitch, LoraLinear
from tandem.model.mcore import MegatronModule, TransformerConfig
from tandem.model.parallel import current
from tandem.spool.schema import LoraShape


class DecoderLayer(MegatronModule):
    """Attention, and an MLP or a mixture of experts. Parameters are uninitialised and have
    Megatron's names.

    Args:
        config: the configuration of Megatron, which contains the parameters' dtype.
        index: the layer's number, counted over all pipeline stages.
        lora: the shape of the adapters; None: the layer has no adapters.
        switch: the switch of the policy's adapters.
    """

    save_level = SaveLevel.ALL

    def __init__(
        self,
        config: TransformerConfig,
        arch: Arch,
        index: int,
        lora: LoraShape | None,
        switch: AdapterSwitch,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        arch = arch.of_layer(index)
        self._arch, self._index, self._dtype = arch, index, config.params_dtype
        self._adapters: dict[str, Any] = {"lora": lora, "switch": switch, "dtype": self._dtype}
        norm = self._norm = partial(make_norm, arch, self._dtype)
        self.input_layernorm = norm() if arch.pre_norms else None
        self.pre_mlp_layernorm = norm() if arch.pre_norms else None
        self.post_self_attn_layernorm = norm() if arch.post_norms else None
        self.post_mlp_layernorm = norm() if arch.post_norms else None
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        mixture = arch.moe is not None and index >= arch.moe.dense_layers
        delta_net = arch.gdn is not None and arch.gdn.layers[index]
        self.scalar = self._vector(1) if arch.layer_scalars else None
        self.kind = (delta_net, arch.head_dim, arch.num_kv_heads)
        """A key that is equal for layers whose attention has the same shape."""
        self.sublayers: list[Any] = [
            self._delta_net_sublayer() if delta_net else self._attention_sublayer(),
            self._moe_sublayer() if mixture else self._mlp_sublayer(),
        ]

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: TreeParams, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """The layer's output, [S, 1, hidden], and None as Megatron's context.

        Args:
            hidden_states: the layer's input, [S, 1, hidden].
            packed_seq_params: the row's parameters. `packed_seq_params` is the only argument of
                Megatron's decoder that reaches the layers unchanged.
            _: ignored.
        """
        tree = packed_seq_params
        x = hidden_states[:, 0]
        if torch.is_grad_enabled():
            # A leaf tensor that requires a gradient makes autograd call `_Sublayers.backward`.
            leaf = torch.empty((), requires_grad=True)
            x = _Sublayers.apply(leaf, x, self, tree)
        else:
            x, _saved = self.compute(x, tree, None)
        return x[:, None], None

    def compute(
        self, x: torch.Tensor, tree: TreeParams, level: SaveLevel | None
    ) -> tuple[torch.Tensor, list[Saved]]:
        """The layer's output for x, both [S, hidden], and the tensors that `go_back` needs.

        Args:
            level: which tensors are saved; None if there is no backward pass.
        """
        kept = []
        for sublayer in self.sublayers:
            x, saved = sublayer.forward(x, tree, level)
            kept.append(saved)
        return self._scaled(x), kept

    def go_back(self, gradient: torch.Tensor, saved: list[Saved], tree: TreeParams) -> torch.Tensor:
        """The gradient of x, [S, hidden]. Also adds the parameters' gradients to their buffers.

        Args:
            gradient: the gradient of `compute`'s output, [S, hidden].
            saved: the second result of `compute`; it can't be used again.
            tree: the argument `tree` of `compute`.
        """
        gradient = self._scaled(gradient)
        for index in reversed(range(len(saved))):
            if saved[index].x is None:
                saved[index].x = self.sublayers[index - 1].recompute_output(saved[index - 1])
            gradient = self.sublayers[index].backward(gradient, saved.pop(), tree)
        return gradient

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.scalar is None else x * self.scalar

    def _attention_sublayer(self) -> AttentionSublayer:
        if self._arch.mla is not None:
            return self._latent_attention_sublayer(self._arch.mla)
        arch, attention, tp = self._arch, self.self_attention, current().sizes.tensor
        qkv = LoraLinear(
            arch.hidden_size,
            attention_features(arch),
            "rows",
            groups=arch.num_kv_heads // tp,
            bias=arch.qkv_bias,
            **self._adapters,
        )
        proj = LoraLinear(
            arch.query_size,
            {"o_proj": arch.hidden_size},
            "columns",
            bias=arch.output_bias,
            **self._adapters,
        )
        attention.linear_qkv, attention.linear_proj = qkv, proj
        sinks = self._vector(arch.num_heads // tp) if arch.sinks else None
        attention.register_parameter("sinks", sinks)
        norms = self._head_norms(attention)
        heads = HeadShape(
            arch.num_kv_heads // tp,
            arch.num_heads // arch.num_kv_heads,
            arch.head_dim,
            arch.rms_norm_eps,
            *((None, None) if arch.wide_qk_norm else norms),
            partial_rope=arch.rotary_size not in (None, arch.head_dim),
            offset_norms=arch.offset_norms,
            output_gate=arch.output_gate,
        )
        windowed = arch.window is not None and arch.window.layers[self._index]
        return AttentionSublayer(
            self.input_layernorm,
            qkv,
            proj,
            heads,
            windowed=windowed,
            scale=arch.attention_scale,
            post_norm=self.post_self_attn_layernorm,
            sinks=sinks,
            rows=self._head_rows(heads, *norms),
            rope=arch.rope_layers is None or arch.rope_layers[self._index],
        )

    def _head_norms(self, attention: nn.Module) -> tuple[Parameter | None, Parameter | None]:
        """The weights of the norms of queries and of keys; None: these heads have no norm."""
        arch, tp = self._arch, current().sizes.tensor
        if not arch.qk_norm:
            return None, None
        sizes = (arch.head_dim, arch.head_dim)
        if arch.wide_qk_norm:
            sizes = (arch.query_size // tp, arch.kv_size // tp)
        attention.q_layernorm, attention.k_layernorm = map(self._norm, sizes)
        return attention.q_layernorm.weight, attention.k_layernorm.weight

    def _head_rows(
        self, heads: HeadShape, q_norm: Parameter | None, k_norm: Parameter | None
    ) -> HeadRows | None:
        """The model family's change of queries, keys and values before they are split into heads;
        None: no change."""
        if self._arch.wide_qk_norm:
            assert q_norm is not None
            assert k_norm is not None
            return WideNorm(heads, q_norm, k_norm, current().tensor)
        if self._arch.value_norm:
            return NormalisedValues(heads, keys_are_values=self._arch.keys_are_values)
        return GrowingQueries(heads) if self._arch.query_growth else None

    def _latent_attention_sublayer(self, mla: LatentAttention) -> LatentAttentionSublayer:
        arch, attention, heads = self._arch, self.self_attention, self._arch.num_heads
        queries = {"q_proj" if mla.q_rank is None else "q_b_proj": arch.query_size}
        down = LoraLinear(arch.hidden_size, mla.down, "whole", **self._adapters)
        q_up = LoraLinear(mla.q_rank or arch.hidden_size, queries, "rows", **self._adapters)
        kv_up = LoraLinear(
            mla.kv_rank, {"kv_b_proj": heads * mla.key_value_size}, "rows", **self._adapters
        )
        proj = LoraLinear(
            heads * mla.value_size, {"o_proj": arch.hidden_size}, "columns", **self._adapters
        )
        attention.linear_down, attention.linear_proj = down, proj
        attention.linear_q_up, attention.linear_kv_up = q_up, kv_up
        q_norm = None if mla.q_rank is None else self._norm(mla.q_rank)
        attention.register_module("q_a_layernorm", q_norm)
        attention.kv_a_layernorm = kv_norm = self._norm(mla.kv_rank)
        shape = HeadShape(
            heads // current().sizes.tensor, 1, arch.head_dim, arch.rms_norm_eps, None, None
        )
        return LatentAttentionSublayer(
            self.input_layernorm,
            LatentLinears(down, q_up, kv_up, q_norm, kv_norm),
            proj,
            mla,
            shape,
            scale=arch.attention_scale,
        )

    def _delta_net_sublayer(self) -> DeltaNetSublayer:
        arch, gdn, net, topology = self._arch, self._arch.gdn, nn.Module(), current()
        assert gdn is not None
        self.linear_attention, parts = net, topology.sizes.tensor
        out_features = {
            "in_proj_qkv": sum(gdn.sections),
            "in_proj_z": gdn.value_size,
            "in_proj_b": gdn.value_heads,
            "in_proj_a": gdn.value_heads,
        }
        net.in_proj = LoraLinear(
            arch.hidden_size,
            out_features,
            "rows",
            sections={"in_proj_qkv": gdn.sections},
            **self._adapters,
        )
        net.out_proj = LoraLinear(
            gdn.value_size, {"out_proj": arch.hidden_size}, "columns", **self._adapters
        )
        net.conv1d = nn.Module()
        net.conv1d.weight = Parameter(
            torch.empty(sum(gdn.sections) // parts, 1, gdn.conv_tokens, dtype=self._dtype)
        )
        net.A_log = Parameter(torch.empty(gdn.value_heads))
        net.dt_bias = Parameter(torch.empty(gdn.value_heads))
        net.norm = nn.Module()
        net.norm.weight = self._vector(gdn.value_head_dim)
        weights = DeltaNetWeights(net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight)
        return DeltaNetSublayer(
            self.input_layernorm,
            net.in_proj,
            net.out_proj,
            weights,
            gdn,
            eps=arch.rms_norm_eps,
            part=topology.place.tensor,
            parts=parts,
        )

    def _mlp_sublayer(self) -> MlpSublayer:
        linears = self._mlp(self.mlp, self._arch.ffn_hidden_size)
        return MlpSublayer(
            self.pre_mlp_layernorm,
            *linears,
            activation=self._arch.activation,
            post_norm=self.post_mlp_layernorm,
        )

    def _mlp(self, mlp: nn.Module, features: int) -> tuple[LoraLinear, LoraLinear]:
        hidden, gate_up = self._arch.hidden_size, {"gate_proj": features, "up_proj": features}
        mlp.linear_fc1 = fc1 = LoraLinear(hidden, gate_up, "rows", **self._adapters)
        mlp.linear_fc2 = fc2 = LoraLinear(
            features, {"down_proj": hidden}, "columns", **self._adapters
        )
        return fc1, fc2

    def _moe_sublayer(self) -> MoeSublayer:
        moe, hidden = self._arch.moe, self._arch.hidden_size
        assert moe is not None
        router = self.mlp.router = nn.Module()
        router.weight = Parameter(torch.empty(moe.num_experts, hidden, dtype=self._dtype))
        router.register_parameter("bias", self._vector(moe.num_experts) if moe.biases else None)
        if moe.router == "sigmoid":
            router.correction_bias = Parameter(torch.empty(moe.num_experts))
        ffn, options = moe.ffn_hidden_size, self._adapters | {"bias": moe.biases}
        gate_up = ExpertLinear(
            moe.num_experts, hidden, {"gate_proj": ffn, "up_proj": ffn}, "rows", **options
        )
        down = ExpertLinear(moe.num_experts, ffn, {"down_proj": hidden}, "columns", **options)
        self.mlp.experts = nn.ModuleDict({"fc1": gate_up, "fc2": down})
        if moe.beside_mlp:
            return self._experts_beside_mlp(moe, router, gate_up, down)
        shared: MlpSublayer | None = None
        if moe.shared_size:
            self.mlp.shared_experts = nn.Module()
            linears = self._mlp(self.mlp.shared_experts, moe.shared_size)
            if moe.shared_gate:
                gate = Parameter(torch.empty(1, hidden, dtype=self._dtype))
                self.mlp.shared_experts.gate_weight = gate
                shared = GatedMlp(self.pre_mlp_layernorm, *linears, gate)
            else:
                shared = MlpSublayer(self.pre_mlp_layernorm, *linears)
        return MoeSublayer(self.pre_mlp_layernorm, router, gate_up, down, moe, self._index, shared)

    def _experts_beside_mlp(
        self, moe: MoE, router: nn.Module, gate_up: ExpertLinear, down: ExpertLinear
    ) -> ExpertsBesideMlp:
        mlp = self.mlp
        router.scale = self._vector(self._arch.hidden_size)
        router.expert_scale = self._vector(moe.num_experts)
        mlp.input_norm, mlp.mlp_norm, mlp.experts_norm = self._norm(), self._norm(), self._norm()
        mlp.shared_experts = nn.Module()
        dense = MlpSublayer(
            self.pre_mlp_layernorm,
            *self._mlp(mlp.shared_experts, moe.shared_size),
            activation=self._arch.activation,
            post_norm=mlp.mlp_norm,
        )
        norms = mlp.input_norm, mlp.experts_norm, self.post_mlp_layernorm
        return ExpertsBesideMlp(norms, router, gate_up, down, moe, self._index, dense)

    def _vector(self, size: int) -> Parameter:
        return Parameter(torch.empty(size, dtype=self._dtype))


class _Sublayers(torch.autograd.Function):
    """A layer as an autograd function with its own backward pass, which adds the parameters'
    gradients to their buffers."""

    @staticmethod
    def forward(
        ctx: Any, _leaf: torch.Tensor, x: torch.Tensor, layer: DecoderLayer, tree: TreeParams
    ) -> torch.Tensor:
        ctx.layer, ctx.tree = layer, tree
        x, ctx.saved = layer.compute(x.detach(), tree, layer.save_level)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, ctx.layer.go_back(gradient.contiguous(), ctx.saved, ctx.tree), None, None
