"""The policy, a model that computes packed rows. Either the base model is frozen and has a
trainable adapter, or all of its weights are trained."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.model import device, fp8, gradients, parallel
from tandem.model.adapter_parts import AdapterParts
from tandem.model.attention import (
    Kernel,
    TreeParams,
    rotation,
    tree_params,
    without_rotation,
)
from tandem.model.delta_rule import recurrence
from tandem.model.device.memory import allocate
from tandem.model.device.offload import Offload
from tandem.model.embedding import embed
from tandem.model.logprobs import item_logprobs
from tandem.model.lora import AdapterSwitch, LoraLinear
from tandem.model.mcore import GPTModel
from tandem.model.pipeline import Pipeline
from tandem.model.rows import RowTensors, deal_row, pad_row
from tandem.model.weights.checkpoint_tensors import check_adapter
from tandem.spool.schema import LoraShape

TABLE = "embedding.word_embeddings.weight"
"""The parameter's name in the embedding's `WeightRule`. With `Arch.tie_embeddings`, the rule also
describes the output layer."""


@dataclass(frozen=True)
class ItemOutputs:
    """The log-prob and the entropy of each item of a row, both fp32 [items], in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


class Policy(nn.Module):
    """The model on this rank, built by `tandem.model.build.build_policy`. `config` is Megatron's
    TransformerConfig. With `lora`, only LoRA tensors require gradients. Without `lora`, all weights
    are trained: layers add the weights' gradients to buffers (`tandem.model.gradients`).

    After `backward`, gradients still have to be summed over data-parallel ranks.
    The sums over tensor-parallel ranks, which `tandem.model.lora` describes, are part of the
    backward pass.

    Args:
        gpt: this rank's stage of the model.
        lora: the adapter's shape; None: all weights are trained.
        switch: the switch that the layers' adapters share.
        inv_freq: the radians per position by which RoPE rotates each pair of dimensions (see
            `attention.rotation`); `place` moves this tensor to the device.
    """

    def __init__(
        self,
        gpt: GPTModel,
        arch: Arch,
        lora: LoraShape | None,
        switch: AdapterSwitch,
        stage: Pipeline,
        *,
        inv_freq: torch.Tensor,
    ) -> None:
        super().__init__()
        self.gpt, self.arch, self.lora, self.config = gpt, arch, lora, gpt.config
        # On a GPU, flex is faster than sdpa.
        self.attention_kernel: Kernel = "flex" if device.is_cuda() else "sdpa"
        self._switch, self.stage = switch, stage
        self.topology = parallel.current()
        self._inv_freq = inv_freq
        self.adapter = AdapterParts(gpt, arch, lora, self.topology, stage.layers)
        self._base_memory, self._own_memory = Offload(contents=lora is None), Offload(contents=True)
        self.layer_graphs: Callable[[torch.Tensor, TreeParams], torch.Tensor] | None = None
        """The captured graphs (`tandem.model.graphs`), or None. If gradients are computed, the
        graphs replace the layers' passes."""

    @torch.no_grad()
    def place(self, base: Mapping[str, torch.Tensor]) -> None:
        """Move all parameters to the device. The tensors in `base` (`BaseWeights.parameters`)
        become the base weights. The adapter becomes zero, so the policy computes the same function
        as the base model. Waits until the device has started.
        """
        where, parameters = device.device(), self.base()
        assert base.keys() == parameters.keys(), (
            f"the rules and the model differ in {sorted(base.keys() ^ parameters.keys())}"
        )
        for name, parameter in parameters.items():
            assert parameter.shape == base[name].shape, (
                f"{name} is {parameter.shape}, not {base[name].shape}"
            )
            parameter.data = base[name]
        adapter = self.lora_parameters()
        whole, parts = allocate(
            {name: parameter.shape for name, parameter in adapter.items()}, torch.float32, where
        )
        whole.zero_()
        for name, parameter in adapter.items():
            parameter.data = parts[name]
        self._inv_freq = self._inv_freq.to(where)

    def base(self) -> dict[str, nn.Parameter]:
        """The base weights, keyed by the names of their `WeightRule`s."""
        adapted = {id(tensor.parameter) for tensor in self.adapter.tensors.values()}
        return {
            self._base_name(name): parameter
            for name, parameter in self.gpt.named_parameters()
            if id(parameter) not in adapted
        }

    def _base_name(self, name: str) -> str:
        """The `WeightRule`'s name of this stage's parameter `name`. Megatron's names differ from
        the rules' names. Megatron counts the layers of each stage from 0, and the last stage stores
        a tied embedding table in its output layer."""
        if name == "output_layer.weight" and self.arch.tie_embeddings:
            return TABLE
        head, layers, rest = name.partition("decoder.layers.")
        index, dot, rest = rest.partition(".")
        return (
            f"{head}{layers}{int(index) + self.stage.layers.start}{dot}{rest}" if layers else name
        )

    def train_base(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Make each later backward pass add the gradients of the base weights to `buffers`.
        `buffers`: fp32, with the keys of `base`."""
        for name, parameter in self.base().items():
            gradients.attach_buffer(parameter, buffers[name])
        if not self.stage.last:
            return
        # Megatron computes the last norm, so autograd computes the gradient of the norm's weight.
        last = self.gpt.decoder.final_layernorm.weight.requires_grad_()

        def add(weight: torch.Tensor) -> None:
            assert weight.grad is not None
            gradients.add(weight, weight.grad)
            weight.grad = None

        last.register_post_accumulate_grad_hook(add)

    @torch.no_grad()
    def quantise_base(self) -> None:
        """Quantise the base weights of all linear layers to FP8. Call this function after the
        weights have been read. The original values are overwritten.

        Raises InvalidInput for a model or a GPU that does not support FP8.
        """
        fp8.check_device()
        if self.arch.moe is not None:
            raise InvalidInput(
                f"FP8 is built for dense models, not for {self.arch.model_type}; set"
                " TANDEM_BASE_PRECISION=same",
                field="TANDEM_BASE_PRECISION",
            )
        for layer in self._linear_layers():
            if fp8.fits(layer.weight):
                layer.fp8 = fp8.Fp8Weight(layer.weight.data)

    def _linear_layers(self) -> list[LoraLinear]:
        return [module for module in self.gpt.modules() if isinstance(module, LoraLinear)]

    @property
    def offloaded(self) -> bool:
        return self._own_memory.parked

    def offload(self) -> int:
        """Release the device memory of all parameters. Returns the number of bytes released.

        Trained tensors go to host memory. Frozen base weights are dropped, because they can be read
        from files again. Before the next computation, call `restore` and read the dropped base
        weights again.
        """
        self.stage.finish()
        for layer in self._linear_layers():
            layer.fp8 = None
        trained = [*self.lora_parameters().values(), self._inv_freq]
        return self._base_memory.park(self.base().values()) + self._own_memory.park(trained)

    def restore(self) -> None:
        """The inverse of `offload`: all memory is allocated again, and trained tensors get their
        values back. Frozen base weights stay uninitialised."""
        self._base_memory.restore()
        self._own_memory.restore()

    def load_adapter(self, directory: Path) -> None:
        """Fill the adapter from PEFT's files. Raises the errors of `check_adapter`; after such an
        error the adapter in memory is unchanged. Also raises the errors of `AdapterParts.read`."""
        assert self.lora is not None
        self.adapter.read(check_adapter(directory, self.arch, self.lora), self.lora_parameters())

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's whole tensors by PEFT key, fp32 on the CPU, on every rank. The call is a
        collective operation of all ranks."""
        return self.adapter.whole(
            {name: parameter.data for name, parameter in self.lora_parameters().items()}
        )

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parts of the adapter by name (`stacked_name`), fp32 and trainable. The order
        is the same on all ranks of a stage."""
        return {name: tensor.parameter for name, tensor in self.adapter.tensors.items()}

    @contextlib.contextmanager
    def adapter_fixed(self) -> Iterator[None]:
        """Within the `with` block the adapter must not change. So layers cast the adapter only
        once, for all passes. The adapters of experts are still cast in each pass, because a second
        copy would be too large."""
        layers = {
            str(index): layer for index, layer in enumerate(self._linear_layers()) if layer.targets
        }
        shapes = {
            name + part: shape
            for name, layer in layers.items()
            for part, shape in zip("ab", layer.cast_shapes(), strict=True)
        }
        whole, parts = allocate(shapes, self.config.params_dtype, device.device())
        whole.zero_()
        before = {
            name: layer.hold((parts[name + "a"], parts[name + "b"]))
            for name, layer in layers.items()
        }
        try:
            yield
        finally:
            for name, layer in layers.items():
                layer.hold(before[name])

    @contextlib.contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Within the `with` block the policy computes the base model, without gradients."""
        before, self._switch.on = self._switch.on, False
        try:
            with torch.no_grad():
                yield
        finally:
            self._switch.on = before

    def forward(self, row: RowTensors, temperature: float = 1.0) -> ItemOutputs:
        """The log-prob and the entropy of every item, for logits divided by `temperature`. Logits
        are computed only at the slots from which items are predicted.

        Only the last pipeline stage has the results. On other stages the results are zero.
        `Pipeline.from_last` fetches the last stage's results. `Pipeline.backward` runs a stage's
        backward passes.
        """
        items, row = len(row.item_token), self.lay_out(row)
        hidden, inputs = self.first_hidden(row), self.decoder_inputs(row)
        if self.layer_graphs is not None and torch.is_grad_enabled():
            hidden = self.layer_graphs(hidden, inputs["packed_seq_params"])
            hidden = self.gpt.decoder.final_layernorm(hidden)[:, 0]
        else:
            hidden = self.gpt.decoder(hidden, **inputs)[:, 0]
        if self.stage.last:
            return self._outputs(row, hidden, temperature)
        zeros = self.stage.send(hidden, items)
        return ItemOutputs(zeros, zeros.detach())

    @torch.no_grad()
    def rehearse(self, row: RowTensors) -> None:
        """Load and compile the kernels before the process's first `forward`, so that `forward` does
        not have to load them. Runs a layer of each kind with arbitrary weights, because another
        thread may still be writing the weights. The call is a collective operation of the ranks
        that share layers.
        """
        decoder, row = self.gpt.decoder, self.lay_out(row)
        hidden = self.first_hidden(row) if self.stage.first else self.no_hidden(row)
        first = {layer.kind: layer for layer in reversed(decoder.layers)}
        for layer in first.values():
            hidden, _ = layer(hidden, **self.decoder_inputs(row))
        if self.stage.last:
            self._outputs(
                row, decoder.final_layernorm(hidden)[:, 0], temperature=1.0
            ).logprobs.cpu()

    def _outputs(self, row: RowTensors, hidden: torch.Tensor, temperature: float) -> ItemOutputs:
        """The log-probs and entropies of the items. `hidden`: the final hidden states [S, hidden].
        With sequence parallelism, `hidden` has only the hidden states of this rank's tokens."""
        if self.topology.sizes.sequence:
            hidden = _AllTokens.apply(hidden, self.topology.tensor)
        logprobs, entropy = item_logprobs(
            hidden[row.item_source],
            row.item_token,
            self.head,
            vocab_start=self.topology.place.tensor * len(self.head),
            temperature=temperature,
            group=self.topology.tensor,
            softcap=self.arch.softcap,
        )
        if row.deal is not None:
            logprobs, entropy = row.deal.gather_items(logprobs), row.deal.gather_items(entropy)
        return ItemOutputs(logprobs, entropy)

    def lay_out(self, row: RowTensors) -> RowTensors:
        """This rank's part of the row, padded to a number of slots that tensor-parallel ranks can
        divide. The methods `first_hidden`, `no_hidden` and `decoder_inputs` take a row that
        `lay_out` returned."""
        sizes, row = self.topology.sizes, deal_row(row, self.topology)
        if sizes.sequence and row.deal is None:
            row = pad_row(row, -(-len(row.tokens) // sizes.tensor) * sizes.tensor)
        return row

    def first_hidden(self, row: RowTensors) -> torch.Tensor:
        """The input [S, 1, hidden] of this stage's first layer."""
        if self.stage.first:
            return embed(self.gpt, row.tokens, self.arch, self.topology)
        like = self.no_hidden(row)
        return self.stage.receive(tuple(like.shape), like.dtype, like.device)

    def no_hidden(self, row: RowTensors) -> torch.Tensor:
        """Zeros in the shape of a layer's input."""
        sizes = self.topology.sizes
        slots = len(row.tokens) // (sizes.tensor if sizes.sequence else 1)
        return torch.zeros(
            slots,
            1,
            self.arch.hidden_size,
            dtype=self.config.params_dtype,
            device=row.tokens.device,
        )

    def decoder_inputs(self, row: RowTensors) -> dict[str, Any]:
        """The arguments of the decoder, and of each of its layers, besides the hidden states."""
        sizes, place, dtype = self.topology.sizes, self.topology.place, self.config.params_dtype
        # RoPE in layers with a window is never scaled.
        kinds = zip(
            self._inv_freq, self.arch.rope_sizes, (self.arch.rope_factor, 1.0), strict=False
        )
        rotations = [
            rotation(row.positions, each[: size // 2], dtype, factor)
            for each, size, factor in kinds
        ]
        tree = tree_params(row.subtree_end, self.attention_kernel, rotations[0], deal=row.deal)
        if (window := self.arch.window) is not None:
            tree.windowed = tree_params(
                row.subtree_end, self.attention_kernel, rotations[-1], window.tokens, row.deal
            )
        if self.arch.rope_layers is not None:
            tree.unrotated = without_rotation(tree)
        if (growth := self.arch.query_growth) is not None:
            wraps = (row.positions / growth.positions).floor()
            tree.query_scale = 1 + growth.rate * torch.log1p(wraps)
            if tree.windowed is not None:
                tree.windowed.query_scale = tree.query_scale
        tree.slot_experts = row.slot_experts
        if self.arch.gdn is not None:
            tree.recurrence = recurrence(row.subtree_end, len(row.tokens), row.tokens.device)
        if sizes.sequence and row.slot_experts is not None:
            tree.slot_experts = row.slot_experts.chunk(sizes.tensor)[place.tensor]
        # `tree` is passed as `packed_seq_params`, the only argument of Megatron's decoder that
        # reaches the layers unchanged.
        return {"attention_mask": None, "packed_seq_params": tree}

    @property
    def head(self) -> torch.Tensor:
        """The output layer's weight [vocabulary of this rank, hidden]."""
        tied = self.arch.tie_embeddings
        return (
            self.gpt.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
        )


class _AllTokens(torch.autograd.Function):
    """Gathers the tokens of all ranks, from [S / ranks, hidden] to [S, hidden]. Every rank has the
    whole gradient of the result, so the backward pass sums nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return parallel.gather(hidden, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None
