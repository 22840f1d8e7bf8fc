"""Sends hidden states to the next pipeline stage, and the gradients of hidden states back.

Stages exchange tensors within the policy's own forward and backward passes. So the loop of a
training step is the same on every stage. `Pipeline.backward` follows the schedule 1F1B of
PipeDream-Flush (Narayanan et al., 2021, arXiv:2006.09503).
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tandem.model.parallel import Topology


class _Lane:
    """Sends tensors one after another to the rank that is `step` stages further. The receiving rank
    gets the tensors in the order in which they were sent.

    The two directions (forward and backward) have separate process groups. NCCL runs the operations
    of a group in order. With a single group, a send operation that waits for its receiver would
    block the other direction.
    """

    def __init__(self, group: dist.ProcessGroup, step: int) -> None:
        self._group, self._step = group, step
        # The running send operation, and the tensors that must stay alive until the operation is
        # done.
        self._sending: tuple[Any, torch.Tensor] | None = None

    def send(self, tensor: torch.Tensor) -> None:
        self.finish()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=self._group.rank() + self._step)
        self._sending = work, tensor

    def finish(self) -> None:
        """Wait until everything is sent, and free the tensors."""
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=where)
        dist.recv(tensor, group=self._group, group_src=self._group.rank() - self._step)
        return tensor


class Pipeline:
    """This rank's stage of the pipeline, and its exchange with the neighbouring stages."""

    def __init__(self, topology: Topology, num_layers: int) -> None:
        stage, stages = topology.place.pipeline, topology.sizes.pipeline
        self.layers = topology.sizes.layers(num_layers, stage)
        self.first, self.last = stage == 0, stage == stages - 1
        self.ahead = stages - 1 - stage
        """The number of later stages. This stage computes `ahead` losses before its first backward
        pass."""
        self._group = topology.pipeline
        self._forward, self._backward = _Lane(topology.forward, 1), _Lane(topology.backward, -1)

    def backward(self, losses: Iterable[torch.Tensor]) -> None:
        """Run the backward pass of each loss, in the order in which `losses` yields the losses.
        To give the later stages work, `ahead` losses are computed before the first backward pass.
        One further loss is computed before each backward pass.
        """
        waiting = deque[torch.Tensor]()
        for loss in losses:
            waiting.append(loss)
            if len(waiting) > self.ahead:
                waiting.popleft().backward()
        while waiting:
            waiting.popleft().backward()

    def finish(self) -> None:
        """Free the sent tensors once the other stages have received them."""
        self._forward.finish()
        self._backward.finish()

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device
    ) -> torch.Tensor:
        """The hidden states that the previous stage sends. In the backward pass, the previous stage
        gets the gradient of the received hidden states.

        Args:
            shape, dtype: the shape and dtype of the hidden states; the previous stage does not send
                shape and dtype.
            where: the device of the result.
        """
        hidden = self._forward.receive(shape, dtype, where)
        if not torch.is_grad_enabled():
            return hidden
        leaf: torch.Tensor = _Receive.apply(hidden.requires_grad_(), self._backward)
        return leaf

    def send(self, hidden: torch.Tensor, items: int) -> torch.Tensor:
        """Send hidden states to the next stage. Returns zeros [items], fp32, as this stage's
        outputs. The backward pass of the zeros ignores their gradient, and receives the gradient of
        `hidden` from the next stage instead."""
        zeros: torch.Tensor = _Send.apply(hidden, items, self._forward, self._backward)
        return zeros

    def from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the last stage's `values` on every stage. `values` must have the same shape on
        all stages. The values are exchanged through host memory."""
        if self.first and self.last:
            return values
        shared = values.detach().cpu()
        dist.broadcast(shared, group=self._group, group_src=self._group.size() - 1)
        return shared.to(values.device)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, back: _Lane) -> torch.Tensor:
        ctx.back = back
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.back.send(gradient)
        return None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, items: int, there: _Lane, back: _Lane
    ) -> torch.Tensor:
        there.send(hidden)
        ctx.back, ctx.like = back, (tuple(hidden.shape), hidden.dtype, hidden.device)
        return torch.zeros(items, dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        return ctx.back.receive(*ctx.like), None, None, None
