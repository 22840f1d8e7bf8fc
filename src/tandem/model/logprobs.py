"""Computes log-probs and entropies of items (predicted tokens) from hidden states. The vocabulary
is cut over tensor-parallel ranks.

The full logits [items, vocabulary] never exist at once: items are computed in chunks, and each
chunk's logits are recomputed in the backward pass.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tandem.model import gradients, parallel
from tandem.planning.memory import CHUNK_ELEMENTS


def item_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor,
    *,
    vocab_start: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target), fp32 [n], and the entropy of p in nats, fp32 [n], for p = softmax(logits /
    temperature).

    Args:
        hidden: for each item, the hidden state from which the item is predicted, [n, hidden].
        targets: int64 [n], token ids.
        weight: the output layer's weight, [vocabulary of this rank, hidden]; logits are `hidden @
            weight.T` in hidden's dtype.
        vocab_start: the first token id of this rank's part.
        group: the tensor-parallel ranks. All ranks of the group call this function with the same
            hidden states and targets. None: this rank has the whole vocabulary.
        softcap: see `Arch.softcap`.
    """
    if not len(targets):
        # The result depends on `hidden`, so that a rank whose row has no items still takes part in
        # the backward pass.
        empty = hidden.sum(-1).float()
        return empty, empty
    logprobs, entropy = _Statistics.apply(
        hidden, targets - vocab_start, weight, temperature, group, softcap
    )
    return logprobs, entropy


def working_bytes(items: int, weight: torch.Tensor) -> int:
    """Temporary memory in bytes of `item_logprobs` and its backward pass on a GPU: one chunk of
    logits, and four tensors of the size of the items' hidden states. `weight`: the output layer's
    weight [vocabulary of this rank, hidden]."""
    vocabulary, hidden = weight.shape
    return (min(items * vocabulary, CHUNK_ELEMENTS) + 4 * items * hidden) * weight.element_size()


class _Statistics(torch.autograd.Function):
    """Log-probs and entropies, with their backward pass.

    With l = logits / temperature, m = max l, Z = sum exp(l - m), entropy H and target t:

        log p = l - m - log Z
        H = log Z - sum exp(l - m) (l - m) / Z
        d log p(t) / d l_j = [j = t] - p_j
        d H / d l_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for chunk in _chunks(len(targets), len(weight), softcap):
            logits = _capped(linear(hidden[chunk], weight), softcap)
            parts.append(_statistics(logits, targets[chunk], temperature, group))
            del logits  # frees the memory before the next chunk's logits exist
        logprobs, entropy, largest, log_total = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, targets, weight, largest + log_total, entropy)
        ctx.temperature, ctx.group, ctx.parameter = temperature, group, weight
        ctx.softcap = softcap
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        hidden, targets, weight, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for chunk in _chunks(len(targets), len(weight), ctx.softcap):
            logits = _capped(linear(hidden[chunk], weight), ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square_()
            grad_logits = _logits_gradient(
                logits,
                targets[chunk],
                normaliser[chunk],
                entropy[chunk],
                grad_logprobs[chunk],
                grad_entropy[chunk],
                ctx.temperature,
            )
            if slope is not None:
                grad_logits = grad_logits.mul_(slope)
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if gradients.has_gradient_buffer(ctx.parameter):
                gradients.add_product(ctx.parameter, grad_logits, hidden[chunk])
            # This chunk's memory is freed before the next chunk's logits are allocated.
            del logits, slope, grad_logits
        if ctx.group is not None:
            parallel.all_reduce(grad_hidden, dist.ReduceOp.SUM, ctx.group)
        return grad_hidden, None, None, None, None, None


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The capped logits softcap * tanh(logits / softcap). The result overwrites `logits`."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _chunks(items: int, vocabulary: int, softcap: float | None) -> list[slice]:
    """The chunks of items. With `softcap`, chunks are half as large, because the backward pass also
    keeps the slope of the cap."""
    size = max(1, CHUNK_ELEMENTS // (1 if softcap is None else 2) // vocabulary)
    return [slice(start, start + size) for start in range(0, items, size)]


def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    """log p(target), entropy, m and log Z, fp32 [n] each, of logits [n, vocabulary of this rank].
    `targets`: int64 [n], indices into this rank's vocabulary. A target is in range on one rank, and
    out of range on all other ranks."""
    if logits.is_cuda:
        from tandem.model.layer import triton_softmax

        largest, total, weighted, target = triton_softmax.statistics(logits, targets, temperature)
    else:
        scaled = logits.float() / temperature
        largest = scaled.amax(-1)
        in_part = (targets >= 0) & (targets < scaled.shape[-1])
        target = torch.where(
            in_part, scaled.gather(-1, torch.where(in_part, targets, 0)[:, None]).squeeze(-1), 0.0
        )
        shifted = scaled - largest[:, None]
        weights = shifted.exp()
        total, weighted = weights.sum(-1), (weights * shifted).sum(-1)
    if group is not None and group.size() > 1:
        local, largest = largest, largest.clone()
        parallel.all_reduce(largest, dist.ReduceOp.MAX, group)
        shift = local - largest
        sums = torch.stack([total * shift.exp(), (weighted + shift * total) * shift.exp(), target])
        parallel.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, target = sums.unbind()
    log_total = total.log()
    return target - largest - log_total, log_total - weighted / total, largest, log_total


def _logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """The gradient of `logits`, in the same dtype. On CUDA the gradient overwrites `logits`.
    `normaliser`: m + log Z."""
    if logits.is_cuda:
        from tandem.model.layer import triton_softmax

        return triton_softmax.logits_gradient(
            logits, targets, normaliser, entropy, grad_logprobs, grad_entropy, temperature
        )
    log_p = logits.float() / temperature - normaliser[:, None]
    gradient = -log_p.exp() * (
        grad_logprobs[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    )
    in_part = (targets >= 0) & (targets < logits.shape[-1])
    rows = torch.arange(len(logits), device=logits.device)
    gradient[rows, torch.where(in_part, targets, 0)] += torch.where(in_part, grad_logprobs, 0.0)
    return (gradient / temperature).to(logits.dtype)
