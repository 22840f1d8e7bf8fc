"""Adam on the LoRA parameters, with Megatron's gradient buffers and optimizer, and our gradient clipping.

The LoRA parameters are fp32 and are cast in use, so they are their own master weights.
"""

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from tandem.errors import TandemError
from tandem.model import parallel
from tandem.model.device.memory import allocate
from tandem.model.device.offload import Offload
from tandem.model.policy import Policy
from tandem.spool.schema import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam has of each parameter, in fp32, as torch and the checkpoints name it."""


class NonFinite(TandemError):
    """A loss or a gradient is NaN or infinite. The step was not applied."""

    code = "non_finite"


@dataclass(frozen=True)
class AdamState:
    """Adam's moments of this rank's shards, fp32, by parameter name; empty before the first step."""

    step: int  # steps taken
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


class AdapterOptimizer:
    """The gradients and Adam's state of this rank's shards of the LoRA parameters.

    Gradients are accumulated over micro steps and *summed* over data-parallel ranks, because losses are divided by a
    global denominator beforehand.
    """

    def __init__(self, policy: Policy, settings: OptimizerSettings) -> None:
        self._policy, self.parameters = policy, policy.lora_parameters()
        policy.config.calculate_per_token_loss = True  # Megatron then sums over data-parallel ranks, without averaging
        self._gradients = DistributedDataParallel(
            policy.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), policy
        )
        self._gradient_memory, self._adam_memory = Offload(contents=False), Offload(contents=True)
        self.reset(settings)

    def reset(self, settings: OptimizerSettings) -> None:
        """Start a new Adam that has taken no step. The gradient buffers stay."""
        self.settings = settings
        config = OptimizerConfig(
            optimizer="adam", lr=settings.learning_rate, min_lr=settings.learning_rate,
            weight_decay=settings.weight_decay, adam_beta1=settings.beta1, adam_beta2=settings.beta2,
            adam_eps=settings.eps, clip_grad=0.0,  # Megatron's clipping takes CUDA tensors only
        )  # fmt: skip
        self._optimizer = get_megatron_optimizer(config, [self._gradients], use_gloo_process_groups=False)
        self._adam_of = {
            parameter: part.optimizer
            for part in self._optimizer.chained_optimizers
            for group in part.param_groups
            for parameter in group["params"]
        }

    def offload(self) -> int:
        """Free the device memory of gradients and Adam's state; returns the number of bytes freed.

        Gradients are offloaded with the optimizer, because publishing weights needs only the parameters (R23).
        """
        self._optimizer.zero_grad()  # drops the parameters' `.grad`, which are views of the buffers
        buffers = self._gradients.buffers + self._gradients.expert_parallel_buffers
        state = self.state()
        return self._gradient_memory.park(buffer.grad_data for buffer in buffers) + self._adam_memory.park(
            [*state.exp_avg.values(), *state.exp_avg_sq.values()]
        )

    def restore(self) -> None:
        """Undo `offload`: Adam's state is as it was, gradients are zero."""
        self._gradient_memory.restore()
        self._adam_memory.restore()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._gradients.zero_grad_buffer()
        self._optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Sum the accumulated gradients over data-parallel ranks, into the parameters' `.grad`."""
        topology = parallel.current()
        if (
            max(topology.data.size(), topology.expert_data.size()) > 1
        ):  # Megatron creates a communicator even for one rank
            self._gradients.finish_grad_sync()
        self._optimizer.prepare_grads()

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient, in which a replicated parameter counts once.

        A collective; all ranks get the same. NaN or infinite if any gradient is.
        """
        topology = parallel.current()
        if self._policy.arch.moe is not None and topology.sizes.experts_apart:
            return self._norm_with_experts(topology)
        square = torch.zeros((), dtype=torch.float64, device=next(iter(self.parameters.values())).device)
        for part in self._optimizer.chained_optimizers:
            for grad in part.get_grads_for_grad_norm():
                square += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        parallel.all_reduce(square, group=topology.tensor)
        square = square.cpu()
        parallel.all_reduce(square, group=topology.pipeline)
        return float(square.sqrt())

    def _norm_with_experts(self, topology: parallel.Topology) -> float:
        """`gradient_norm` where `experts_apart`: the first of the ranks that hold a tensor counts it."""
        place, squares = topology.place, []
        for name, tensor in self._policy.adapter.tensors.items():
            copy = place.data + place.context, place.tensor
            if tensor.experts:
                copy = place.expert_data, place.expert_tensor
            if copy[0] == 0 and (tensor.cut != "whole" or copy[1] == 0):
                grad = self.parameters[name].grad
                assert grad is not None
                squares.append(torch.linalg.vector_norm(grad, dtype=torch.float64).square())
        square = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
        parallel.all_reduce(square)
        return float(square.sqrt())

    def non_finite(self) -> list[str]:
        """Names of this rank's parameters whose gradients hold NaN or infinity."""
        return [name for name, p in self.parameters.items() if p.grad is not None and not p.grad.isfinite().all()]

    def step(self, norm: float, learning_rate: float) -> None:
        """Scale the gradient down to `max_grad_norm` if `norm` is larger, and apply it."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if norm > self.settings.max_grad_norm:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.settings.max_grad_norm / norm)
        self._optimizer.step_with_ready_grads()

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self.state().step

    def state(self) -> AdamState:
        """Adam's state itself, not a copy."""
        exp_avg, exp_avg_sq, steps = {}, {}, {0}
        for name, parameter in self.parameters.items():
            state = self._adam_of[parameter].state[parameter]
            if state:
                exp_avg[name], exp_avg_sq[name] = state["exp_avg"], state["exp_avg_sq"]
                steps.add(int(state["step"]))
        return AdamState(max(steps), exp_avg, exp_avg_sq)

    @torch.no_grad()
    def load_state(self, saved: AdamState) -> None:
        """Continue from a copy of `saved`, this rank's shards of all parameters."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        where = next(iter(self.parameters.values())).device
        moments = {}
        for moment, shards in zip(MOMENTS, (saved.exp_avg, saved.exp_avg_sq), strict=True):
            _, moments[moment] = allocate(shapes, torch.float32, where)
            torch._foreach_copy_(list(moments[moment].values()), [shards[name] for name in shapes])
        for name, parameter in self.parameters.items():
            state = {moment: copies[name] for moment, copies in moments.items()}
            self._adam_of[parameter].state[parameter] = {"step": torch.tensor(float(saved.step)), **state}
