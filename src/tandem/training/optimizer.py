"""Adam on the LoRA parameters: torch's AdamW, with Tandem's own gradient buffers and clipping.

The LoRA parameters are fp32 and are cast where a layer uses them. The LoRA parameters themselves
are Adam's master weights.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.errors import TandemError
from tandem.model import gradients, parallel
from tandem.model.device.memory import allocate
from tandem.model.device.offload import Offload
from tandem.model.lora import LoraTensor
from tandem.model.policy import Policy
from tandem.spool.schema import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of Adam's two moments, fp32 tensors for each parameter. torch and the checkpoints use
these names too."""
type Moments = dict[str, dict[str, Tensor]]
"""Name in `MOMENTS` -> parameter name -> this rank's shard; empty before the first step."""


class NonFinite(TandemError):
    """A loss, a gradient or a log-prob is NaN or infinite. No checkpoint is made."""

    code = "non_finite"


class AdapterOptimizer:
    """The gradients and Adam's state of this rank's shards of the LoRA parameters.

    Gradients are accumulated over micro steps and *summed* over data-parallel ranks, not averaged:
    each loss is already divided by the denominator of all ranks' rows.
    """

    def __init__(self, policy: Policy, settings: OptimizerSettings) -> None:
        self.settings, self._topology, self.parameters = (
            settings,
            parallel.current(),
            policy.lora_parameters(),
        )
        self._tensors = policy.adapter.tensors
        self._experts_apart = policy.arch.moe is not None and self._topology.sizes.experts_apart
        tensors = {tensor.parameter: tensor for tensor in self._tensors.values()}
        self._trained = [
            tensors[parameter] for parameter in policy.parameters() if parameter.requires_grad
        ]
        self._gradients = []
        for apart, group in ((False, self._topology.data), (True, self._topology.expert_data)):
            parameters = [
                tensor.parameter
                for tensor in self._trained
                if (tensor.stacked and self._experts_apart) == apart
            ]
            if parameters:
                self._gradients.append((_gradient_memory(parameters), group))
        self._adam = torch.optim.AdamW(self.parameters.values())
        self._gradient_memory, self._adam_memory = Offload(contents=False), Offload(contents=True)

    def reset(self) -> None:
        """Forget Adam's state, as if no step had been taken."""
        self._adam.state.clear()

    def offload(self) -> int:
        """Free the device memory of gradients and Adam's state. Returns the number of bytes freed.

        Gradients are freed too, because publishing weights needs only the parameters.
        """
        moments = (tensor for tensors in self.moments().values() for tensor in tensors.values())
        return self._gradient_memory.park(
            memory for memory, _ in self._gradients
        ) + self._adam_memory.park(moments)

    def restore(self) -> None:
        """The inverse of `offload`: Adam's state is restored, and all gradients are zero."""
        self._gradient_memory.restore()
        self._adam_memory.restore()
        self.zero_grad()

    def zero_grad(self) -> None:
        for memory, _ in self._gradients:
            memory.zero_()

    def reduce_gradients(self) -> None:
        """Sum the accumulated gradients over the ranks that hold the same parameters."""
        for memory, group in self._gradients:
            parallel.all_reduce(memory, group=group)

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient. A parameter that several ranks hold counts once.

        A collective operation; all ranks get the same value. The result is NaN or infinite if any
        gradient is NaN or infinite.
        """
        topology = self._topology
        if self._experts_apart:
            return self._norm_with_experts(topology)
        square = _square(
            tensor
            for tensor in self._trained
            if tensor.cut != "whole" or topology.place.tensor == 0
        )
        parallel.all_reduce(square, group=topology.tensor)
        square = square.cpu()
        parallel.all_reduce(square, group=topology.pipeline)
        return float(square.sqrt())

    def _norm_with_experts(self, topology: parallel.Topology) -> float:
        """`gradient_norm` for a model whose experts and dense layers are cut over different ranks.
        Only the first of the ranks that hold a tensor counts the tensor."""
        place, counted = topology.place, []
        for tensor in self._tensors.values():
            copy = place.data + place.context, place.tensor
            if tensor.stacked:
                copy = place.expert_data, place.expert_tensor
            if copy[0] == 0 and (tensor.cut != "whole" or copy[1] == 0):
                counted.append(tensor)
        return norm_over_ranks([_square(counted)] if counted else [])

    def non_finite(self) -> list[str]:
        """Names of this rank's parameters whose gradients contain NaN or infinity."""
        return [
            name
            for name, p in self.parameters.items()
            if p.grad is not None and not p.grad.isfinite().all()
        ]

    @torch.no_grad()
    def step(self, norm: float, learning_rate: float) -> None:
        """Take an Adam step. The gradient is first scaled down to the norm `max_grad_norm` if the
        gradient's `norm` is larger."""
        settings, [group] = self.settings, self._adam.param_groups
        group |= {"lr": learning_rate, "weight_decay": settings.weight_decay, "eps": settings.eps}
        group["betas"] = settings.beta1, settings.beta2
        if norm > settings.max_grad_norm:
            for memory, _ in self._gradients:
                memory.mul_(settings.max_grad_norm / norm)
        self._adam.step()

    @property
    def steps(self) -> int:
        """The number of optimizer steps that were taken."""
        return max((int(state["step"]) for state in self._adam.state.values()), default=0)

    def moments(self) -> Moments:
        """Adam's moments of all parameters. The tensors are Adam's own, not copies."""
        states = {
            name: self._adam.state[p]
            for name, p in self.parameters.items()
            if p in self._adam.state
        }
        return {
            moment: {name: state[moment] for name, state in states.items()} for moment in MOMENTS
        }

    def new_state(self, steps: int) -> Moments:
        """Creates Adam's state after `steps` optimizer steps. Returns the state's tensors
        uninitialised, for the caller to fill."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        where = next(iter(self.parameters.values())).device
        moments = {moment: allocate(shapes, torch.float32, where)[1] for moment in MOMENTS}
        for name, parameter in self.parameters.items():
            state = {moment: tensors[name] for moment, tensors in moments.items()}
            self._adam.state[parameter] = {"step": torch.tensor(float(steps)), **state}
        return moments


def norm_over_ranks(squares: list[Tensor]) -> float:
    """The square root of the sum of all ranks' `squares`, float64 scalars. A collective operation
    of all ranks."""
    square = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
    parallel.all_reduce(square)
    return float(square.sqrt())


def _gradient_memory(parameters: list[Parameter]) -> Tensor:
    """Zeroed memory for the gradients of all `parameters`, as one flat tensor. Autograd adds the
    parameters' gradients to the returned tensor."""
    memory = torch.zeros(
        sum(map(Tensor.numel, parameters)), dtype=torch.float32, device=parameters[0].device
    )
    # Megatron's gradient buffers also begin with the last parameter. The order matters, because the
    # result of a sum over ranks depends on a gradient's place in memory.
    last_first = parameters[::-1]
    for parameter, part in zip(
        last_first, memory.split([p.numel() for p in last_first]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    return memory


def _square(tensors: Iterable[LoraTensor]) -> Tensor:
    """Squared norm of the gradients of all `tensors` together, as a float64 scalar."""
    sums = [gradients.accumulator(tensor.parameter) for tensor in tensors]
    return torch.stack(torch._foreach_norm(sums, dtype=torch.float64)).square().sum()
