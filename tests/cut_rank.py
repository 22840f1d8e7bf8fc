"""The ranks that tests/model/test_topologies.py starts: python cut_rank.py ORDERS.

ORDERS is a JSON file, {directory: {world: {number: topology}}}. A topology is `Sizes`' fields, or such with `break`,
the name of a deliberate mistake. For each in turn the ranks compute rows of <directory>/model with <directory>/adapter,
and leave the results in <directory>/<world>.<number>.<rank>.pt.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from policies import make_policy
from ranks import fork_ranks
from tandem.families.parts import buffers
from tandem.families.registry import read_arch
from tandem.families.topology import Sizes
from tandem.model import context, device, parallel
from tandem.model.experts import Experts
from tandem.model.layer.moe_block import MoeBlock, SharedExpert
from tandem.model.lora import LoraLinear
from tandem.model.pipeline import _Received
from tandem.model.policy import Policy, _AllTokens
from tandem.model.rows import RowTensors
from tandem.spool.schema import LoraShape, OptimizerSettings
from tandem.trainer.rank.publication import TrainedWeights
from tandem.training.optimizer import AdapterOptimizer


def lora(family: str) -> LoraShape:
    if family == "gpt_oss":
        return LoraShape(rank=4, alpha=2.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    return LoraShape(rank=4, alpha=2.0 if family == "glm4_moe" else 10.0)


ROWS = 4
SLOTS = 261  # which divide over no ranks
SETTINGS = OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.5)


ENDS = torch.tensor([180] * 70 + [130] * 60 + [180] * 50 + [SLOTS] * (SLOTS - 180))
POSITIONS = torch.tensor([*range(130), *range(70, 120), *range(SLOTS - 180)])
SOURCES = torch.tensor([*range(129), 69, *range(130, 179), *range(180, SLOTS - 1)])


def row(number: int, arch) -> RowTensors:
    """A tree of two branches and a sequence; some slots of a mixture come with the experts that the sampler chose."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, arch.vocab_size, (SLOTS,), generator=generator)
    targets = torch.tensor([*range(1, 180), *range(181, SLOTS)])
    experts = None
    if arch.moe is not None:
        experts = torch.full((SLOTS, arch.num_layers, arch.moe.experts_per_token), -1, dtype=torch.int16)
        for slot in range(0, SLOTS, 20):
            for layer in range(arch.num_layers):
                chosen = torch.randperm(arch.moe.num_experts, generator=generator)
                experts[slot, layer] = chosen[: arch.moe.experts_per_token].short()
    return RowTensors(tokens, POSITIONS, ENDS, SOURCES, tokens[targets], experts)


def compute(policy: Policy) -> dict[str, object]:
    """Two optimizer steps on ROWS rows. The same on any topology: gradients and moments are gathered."""
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
                losses[number] = loss.item() if topology.place.context == 0 and policy.stage.last else 0.0
                yield loss

        policy.stage.backward(of_rows())
        for group in (topology.data, topology.pipeline):
            parallel.all_reduce(losses, group=group)
        optimizer.reduce_gradients()
        gradients = policy.adapter.whole({name: parameter.grad for name, parameter in policy.lora_parameters().items()})
        norm = optimizer.gradient_norm()
        result |= {f"loss{step}": losses, f"norm{step}": norm, f"gradients{step}": gradients}
        optimizer.step(norm, SETTINGS.learning_rate)
    return result | {"adapter": policy.adapter_tensors()}


def _no_sum(tensor, *_arguments, **_options):
    return tensor


def _own_part(tensor, group):
    return tensor.chunk(group.size())[group.rank()].clone()


SUM, BLOCK_SUM, ADAPTER_GRADIENTS, PRODUCT = (
    parallel.all_reduce, MoeBlock._sum, Experts.parameter_gradients, LoraLinear._product,
)  # fmt: skip
NORM, SHARED_BACKWARD = AdapterOptimizer.gradient_norm, SharedExpert.backward


def _summed_backward(ctx, gradient):
    gradient = gradient.clone()
    SUM(gradient, group=ctx.group)
    return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def _without_sum(original):
    def call(*arguments, **options):
        with mock.patch.object(parallel, "all_reduce", _no_sum):
            return original(*arguments, **options)

    return call


def _residual_twice(self, rows, routing, plus):
    return BLOCK_SUM(self, rows, routing, plus) + (plus if self._group.rank() else 0)


def _summed_twice(self, part, *arguments):
    gradients = ADAPTER_GRADIENTS(self, part, *arguments)
    for gradient in gradients:
        SUM(gradient, group=self.topology.expert_tensor)
    return gradients


def _counted_on_every_rank(self, _topology):
    square = sum(parameter.grad.double().square().sum() for parameter in self.parameters.values())
    SUM(square)
    return float(square.sqrt())


def _biased_before_the_sum(self, x):
    output = PRODUCT(self, x)
    return output if self.column or self.base.bias is None else output + self.base.bias


def _no_gradient_of_tokens(self, gradient, x):
    of_x, of_parameters = SHARED_BACKWARD(self, gradient, x)
    return torch.zeros_like(of_x), of_parameters


def _gradient_of_all(ctx, gradient):
    SUM(gradient := gradient.clone(), group=parallel.current().context)
    return gradient[ctx.items], None


def _no_gradient_back(ctx, gradient):
    ctx.back.send(torch.zeros_like(gradient))
    return None, None


def _norm_of_one_stage(self):
    def of_stage(tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        if group is not parallel.current().pipeline:
            SUM(tensor, op, group)

    with mock.patch.object(parallel, "all_reduce", of_stage):
        return NORM(self)


BREAKS = {
    "cp: no sum of keys' gradients": (parallel, "scatter_sum", _own_part),
    "cp: the loss counts on every rank": (context._Together, "backward", staticmethod(_gradient_of_all)),
    "cp: no sum of the adapters' gradients": (
        AdapterOptimizer, "reduce_gradients", lambda self: self._optimizer.prepare_grads(),
    ),
    "pp: the stage before gets no gradient": (_Received, "backward", staticmethod(_no_gradient_back)),
    "pp: the norm is of one stage": (AdapterOptimizer, "gradient_norm", _norm_of_one_stage),
    "sp: no sum of the adapters' gradients": (
        LoraLinear, "parameter_gradients", _without_sum(LoraLinear.parameter_gradients),
    ),
    "sp: the gradient of gathered tokens is summed": (_AllTokens, "backward", staticmethod(_summed_backward)),
    "etp: no sum of the adapters' gradients": (Experts, "parameter_gradients", _without_sum(ADAPTER_GRADIENTS)),
    "etp: cut gradients are summed too": (Experts, "parameter_gradients", _summed_twice),
    "ep: ranks' sums of a token are not added": (parallel, "scatter_sum", _own_part),
    "ep: experts' gradients are summed over data ranks": (Sizes, "experts_apart", property(lambda _self: False)),
    "the residual counts on two ranks": (MoeBlock, "_sum", _residual_twice),
    "bias of o_proj on every rank": (LoraLinear, "_product", _biased_before_the_sum),
    "shared expert: no gradient of its tokens": (SharedExpert, "backward", _no_gradient_of_tokens),
    "the norm counts copies": (AdapterOptimizer, "_norm_with_experts", _counted_on_every_rank),
}  # fmt: skip
"""Name -> what is replaced, and by what: mistakes of gradients, norms and sums that are small or of some ranks."""


def sent(policy: Policy) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """What this rank sends of the whole weights."""
    sizes, weights = policy.topology.sizes, TrainedWeights(policy)
    found = []
    for parts in buffers(policy.arch, None, sizes=sizes, rank=policy.topology.rank, most=5000):
        buffer = torch.full((sum(part.size for part in parts),), torch.nan)
        weights.fill(parts, buffer)
        values = buffer.split([part.size for part in parts])
        found += [(part.name, part.of, value.view(part.shape)) for part, value in zip(parts, values, strict=True)]
    return found


def run(rank: int, world: int, port: int, directory: Path, topologies: dict[str, dict[str, object]]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device.activate("cpu")
    for number, fields in topologies.items():
        mistake = fields.pop("break", None)
        with ExitStack() as broken:
            if mistake is not None:
                broken.enter_context(mock.patch.object(*BREAKS[mistake]))
            parallel.init_parallel(Sizes(**fields), timeout_seconds=300)
            family = read_arch(str(directory / "model")).model_type
            policy = make_policy(directory / "model", lora(family), directory / "adapter")
            result: dict[str, object] = {"loaded": policy.adapter_tensors()}
            if mistake is None and family != "gpt_oss":
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
