"""The ranks that tests/model/test_topologies.py starts: python cut_rank.py ORDERS.

ORDERS is a JSON file with the object {directory: {world: {number: fields of `Sizes`}}}. `world` is
the number of ranks, and `number` is the number of a topology. The ranks execute the orders one
after another. For each order they compute rows of <directory>/model with <directory>/adapter, and
write the results to <directory>/<world>.<number>.<rank>.pt. `BREAKS` are deliberate mistakes in the
ranks' code. Each mistake must make the results wrong.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from policies import make_policy
from ranks import fork_ranks
from tandem.families.registry import read_arch
from tandem.families.weight_rules import WeightRule
from tandem.model import device, parallel, rows
from tandem.model import policy as policy_module
from tandem.model.experts import ExpertLinear
from tandem.model.layer.moe_sublayer import MoeSublayer
from tandem.model.layer.sublayers import MlpSublayer
from tandem.model.lora import LoraLinear
from tandem.model.pipeline import _Lane, _Receive
from tandem.model.policy import Policy, _AllTokens
from tandem.model.rows import RowTensors
from tandem.model.transfer.parts import buffers
from tandem.spool.schema import (
    DELTA_NET_TARGETS,
    LATENT_TARGETS,
    LORA_TARGETS,
    LoraShape,
    OptimizerSettings,
)
from tandem.topology.sizes import Sizes
from tandem.trainer.rank.publication import TrainedWeights
from tandem.training.optimizer import AdapterOptimizer


def lora(family: str) -> LoraShape:
    if family in ("gpt_oss", "qwen3_vl_moe"):
        return LoraShape(rank=4, alpha=2.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    if family == "gemma4_text":  # Gemma 4's `k_proj` computes keys and values
        targets = tuple(target for target in LORA_TARGETS if target != "k_proj")
        return LoraShape(rank=4, alpha=2.0, targets=targets)
    if family.startswith("qwen3_5"):
        return LoraShape(rank=4, alpha=2.0, targets=LORA_TARGETS + DELTA_NET_TARGETS)
    if family == "glm4_moe_lite":
        return LoraShape(rank=4, alpha=2.0, targets=LATENT_TARGETS + LORA_TARGETS[3:])
    return LoraShape(rank=4, alpha=2.0 if family == "glm4_moe" else 10.0)


ROWS = 4
SLOTS = 261  # 261 slots can't be divided evenly over 2, 4 or 8 ranks
SETTINGS = OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.5)


ENDS = torch.tensor([180] * 70 + [130] * 60 + [180] * 50 + [SLOTS] * (SLOTS - 180))
POSITIONS = torch.tensor([*range(130), *range(70, 120), *range(SLOTS - 180)])
SOURCES = torch.tensor([*range(129), 69, *range(130, 179), *range(180, SLOTS - 1)])


def row(number: int, arch) -> RowTensors:
    """A packed row with a tree of two branches, and with a sequence. If the model is a mixture of
    experts, some slots have the experts that a sampler chose."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, arch.vocab_size, (SLOTS,), generator=generator)
    targets = torch.tensor([*range(1, 180), *range(181, SLOTS)])
    experts = None
    if arch.moe is not None:
        experts = torch.full(
            (SLOTS, arch.num_layers, arch.moe.experts_per_token), -1, dtype=torch.int16
        )
        for slot in range(0, SLOTS, 20):
            for layer in range(arch.num_layers):
                chosen = torch.randperm(arch.moe.num_experts, generator=generator)
                experts[slot, layer] = chosen[: arch.moe.experts_per_token].short()
    return RowTensors(tokens, POSITIONS, ENDS, SOURCES, tokens[targets], experts)


def compute(policy: Policy) -> dict[str, object]:
    """The results of two optimizer steps on ROWS rows in the topology `sizes`. The results are the
    same on any topology, because gradients and moments are gathered."""
    topology, arch = policy.topology, policy.arch
    optimizer = AdapterOptimizer(policy, SETTINGS)
    result: dict[str, object] = {}
    for step in range(2):
        optimizer.zero_grad()
        losses = torch.zeros(ROWS, dtype=torch.float64)

        def of_rows(losses=losses):
            for number in range(topology.place.data, ROWS, topology.sizes.data):
                outputs = policy(row(number, arch), temperature=0.8)
                weights = torch.linspace(-1.0, 2.0, len(outputs.logprobs))
                loss = (outputs.logprobs * weights + 0.1 * outputs.entropy).sum()
                losses[number] = (
                    loss.item() if topology.place.context == 0 and policy.stage.last else 0.0
                )
                yield loss

        policy.stage.backward(of_rows())
        for group in (topology.data, topology.pipeline):
            parallel.all_reduce(losses, group=group)
        optimizer.reduce_gradients()
        gradients = policy.adapter.whole(
            {name: parameter.grad for name, parameter in policy.lora_parameters().items()}
        )
        norm = optimizer.gradient_norm()
        result |= {f"loss{step}": losses, f"norm{step}": norm, f"gradients{step}": gradients}
        optimizer.step(norm, SETTINGS.learning_rate)
    return result | {"adapter": policy.adapter_tensors()}


def _no_sum(tensor, *_arguments, **_options):
    return tensor


def _own_part(tensor, group):
    return tensor.chunk(group.size())[group.rank()].clone()


def _ring(tensor, group):
    """Gathers the ranks' parts in a wrong order."""
    return GATHER(tensor, group).view(group.size(), *tensor.shape).roll(1, 0).flatten(0, 1)


GATHER, SUM, TOKEN_SUM, ADAPTER_GRADIENTS, ADDED, PRODUCT = (
    parallel.gather,
    parallel.all_reduce,
    MoeSublayer._sum_per_token,
    ExpertLinear.add_gradients,
    ExpertLinear._add_gradients,
    LoraLinear._product,
)


def _summed_backward(ctx, gradient):
    gradient = gradient.clone()
    SUM(gradient, group=ctx.group)
    return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def _without_sum(original):
    def call(*arguments, **options):
        with mock.patch.object(parallel, "all_reduce", _no_sum):
            return original(*arguments, **options)

    return call


def _residual_twice(self, values, routing, plus):
    return TOKEN_SUM(self, values, routing, plus) + (plus if self._group.rank() else 0)


def _scaled(self, *arguments):
    """Computes gradients with a wrong scale: the adapter's scale is divided by the number of ranks
    that share an expert."""
    before, self.scale = self.scale, self.scale / self.topology.sizes.expert_tensor
    try:
        return ADAPTER_GRADIENTS(self, *arguments)
    finally:
        self.scale = before


def _summed_twice(self, *arguments):
    with mock.patch.object(ExpertLinear, "_add_gradients", _of_all_ranks):
        ADAPTER_GRADIENTS(self, *arguments)


def _of_all_ranks(self, *of_both):
    for gradient in of_both:
        SUM(gradient, group=self.topology.expert_tensor)
    ADDED(self, *of_both)


def _counted_on_every_rank(self, _topology):
    square = sum(parameter.grad.double().square().sum() for parameter in self.parameters.values())
    SUM(square)
    return float(square.sqrt())


def _biased_before_the_sum(self, x):
    output = PRODUCT(self, x)
    return output if self.column or self.bias is None else output + self.bias


def _no_gradient_of_tokens(self, *arguments):
    return torch.zeros_like(SHARED_BACKWARD(self, *arguments))


def _of_shared_expert(original, attribute, mistake):
    def call(*arguments):
        with mock.patch.object(MlpSublayer, attribute, mistake):
            return original(*arguments)

    return call


def _bias_on_every_rank(self, ends, count):
    return (
        None
        if self.bias is None
        else self.bias[torch.searchsorted(ends, torch.arange(count), right=True)]
    )


def _other_experts(self, sizes, place):
    return (
        0
        if self.num_experts is None
        else (sizes.expert - 1 - place.expert) * (self.num_experts // sizes.expert)
    )


def _own_positions(row, topology):
    row = DEAL_ROW(row, topology)
    return replace(row, positions=torch.arange(len(row.positions))) if row.deal else row


def _first_slots(ends, kernel, rotation, window=None, deal=None):
    return TREE_PARAMS(
        ends, kernel, rotation, window, deal and replace(deal, slots=torch.arange(len(deal.slots)))
    )


def _gradient_of_all(ctx, gradient):
    SUM(gradient := gradient.clone(), group=parallel.current().context)
    return gradient[ctx.items], None


def _other_way(self, count, stage):
    return LAYERS(self, count, self.pipeline - 1 - stage)


def _shifted(self, *arguments):
    return RECEIVE(self, *arguments).roll(1, 0)


def _no_gradient_back(ctx, gradient):
    ctx.back.send(torch.zeros_like(gradient))
    return None, None


def _norm_of_one_stage(self):
    def of_stage(tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        if group is not parallel.current().pipeline:
            SUM(tensor, op, group)

    with mock.patch.object(parallel, "all_reduce", of_stage):
        return NORM(self)


LAYERS, RECEIVE, NORM = Sizes.layers, _Lane.receive, AdapterOptimizer.gradient_norm
DEAL_ROW, TREE_PARAMS = policy_module.deal_row, policy_module.tree_params


def _own_tokens_only(self, *arguments):
    """Computes products of this rank's features, and by mistake does not sum the products over the
    ranks."""
    with mock.patch.object(
        LoraLinear, "_sum_over_ranks", lambda linear, x: _own_part(x, linear.group)
    ):
        return SHARED_FORWARD(self, *arguments)


SHARED_FORWARD, SHARED_BACKWARD = MlpSublayer.add_mlp, MlpSublayer.input_gradient
MOE_FORWARD, MOE_BACKWARD = MoeSublayer.forward, MoeSublayer.backward
BREAKS = {
    "cp: rotations of local positions": (policy_module, "deal_row", _own_positions),
    "cp: the mask of the row's first slots": (policy_module, "tree_params", _first_slots),
    "cp: keys in the ranks' order": (rows, "_reorder", lambda tensor, _order: tensor),
    "cp: no sum of keys' gradients": (parallel, "scatter_sum", _own_part),
    "cp: the loss counts on every rank": (
        rows._GatherItems,
        "backward",
        staticmethod(_gradient_of_all),
    ),
    "cp: no sum of the adapters' gradients": (
        AdapterOptimizer,
        "reduce_gradients",
        lambda _: None,
    ),
    "pp: stages have one another's layers": (Sizes, "layers", _other_way),
    "pp: hidden states come in another order": (_Lane, "receive", _shifted),
    "pp: the stage before gets no gradient": (
        _Receive,
        "backward",
        staticmethod(_no_gradient_back),
    ),
    "pp: the norm is of one stage": (AdapterOptimizer, "gradient_norm", _norm_of_one_stage),
    "sp: no sum of the adapters' gradients": (
        LoraLinear,
        "add_gradients",
        _without_sum(LoraLinear.add_gradients),
    ),
    "sp: the gradient of gathered tokens is summed": (
        _AllTokens,
        "backward",
        staticmethod(_summed_backward),
    ),
    "sp: partial products are cut, not summed": (
        LoraLinear,
        "_sum_over_ranks",
        lambda self, x: _own_part(x, self.group),
    ),
    "tokens are gathered in another order": (parallel, "gather", _ring),
    "etp: no sum of the adapters' gradients": (
        ExpertLinear,
        "add_gradients",
        _without_sum(ADAPTER_GRADIENTS),
    ),
    "etp: cut gradients are summed too": (ExpertLinear, "add_gradients", _summed_twice),
    "etp: the adapters' scale": (ExpertLinear, "add_gradients", _scaled),
    "ep: ranks' sums of a token are not added": (parallel, "scatter_sum", _own_part),
    "ep: another rank's experts are read": (WeightRule, "first_expert", _other_experts),
    "ep: experts' gradients are summed over data ranks": (
        Sizes,
        "experts_apart",
        property(lambda _self: False),
    ),
    "the residual counts on two ranks": (MoeSublayer, "_sum_per_token", _residual_twice),
    "bias of o_proj on every rank": (LoraLinear, "_product", _biased_before_the_sum),
    "biases of experts on every rank": (ExpertLinear, "assignment_biases", _bias_on_every_rank),
    "shared expert: no gradient of its tokens": (
        MoeSublayer,
        "backward",
        _of_shared_expert(MOE_BACKWARD, "input_gradient", _no_gradient_of_tokens),
    ),
    "shared expert: partial products are cut, not summed": (
        MoeSublayer,
        "forward",
        _of_shared_expert(MOE_FORWARD, "add_mlp", _own_tokens_only),
    ),
    "the norm counts copies": (AdapterOptimizer, "_norm_with_experts", _counted_on_every_rank),
}
"""Name of the mistake -> the replaced attribute, and its replacement."""


def sent(policy: Policy) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """The parts that this rank sends. All ranks together send the whole weights."""
    sizes, weights = policy.topology.sizes, TrainedWeights(policy)
    found = []
    for parts in buffers(policy.arch, None, sizes=sizes, rank=policy.topology.rank, most=5000):
        buffer = torch.full((sum(part.size for part in parts),), torch.nan)
        weights.fill(parts, buffer)
        values = buffer.split([part.size for part in parts])
        found += [
            (part.name, part.in_tensor, value.view(part.shape))
            for part, value in zip(parts, values, strict=True)
        ]
    return found


def run(
    rank: int, world: int, port: int, directory: Path, topologies: dict[str, dict[str, object]]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device.activate("cpu")
    for number, fields in topologies.items():
        parallel.init_parallel(Sizes(**fields), timeout_seconds=300)
        family = read_arch(str(directory / "model")).model_type
        policy = make_policy(directory / "model", lora(family), directory / "adapter")
        result: dict[str, object] = {"loaded": policy.adapter_tensors()}
        if family != "gpt_oss":
            result["sent"] = sent(policy)
        torch.save(result | compute(policy), directory / f"{world}.{number}.{rank}.pt")
        parallel.gather_objects(None)
        parallel.parallel_state.destroy_model_parallel()
    parallel.destroy()


def main(orders: dict[str, dict[str, dict[str, dict[str, object]]]]) -> None:
    for directory, by_world in orders.items():
        for world, topologies in by_world.items():
            if topologies:
                fork_ranks(int(world), run, Path(directory), topologies)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
