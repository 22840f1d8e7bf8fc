"""The softmax kernels of `logprobs.py` on a GPU. The forward pass and the backward pass each read
the logits once. A Triton program computes a whole row in the forward pass, and a block of a row in
the backward pass."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(
    logits,
    targets,
    largest_out,
    total_out,
    weighted_out,
    target_out,
    columns,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * columns
    largest, total, weighted = -float("inf"), 0.0, 0.0
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        value = tl.load(at + c, mask=c < columns, other=-float("inf")).to(tl.float32) * scale
        new = tl.maximum(largest, tl.max(value, 0))
        # Rescale the running sums of exp(l - m) and exp(l - m) (l - m) to the new maximum m.
        shift = tl.where(largest == -float("inf"), 0.0, largest - new)
        weighted = (weighted + shift * total) * tl.exp(shift)
        total *= tl.exp(shift)
        weights = tl.exp(value - new)
        total += tl.sum(weights, 0)
        weighted += tl.sum(tl.where(weights > 0, weights * (value - new), 0.0), 0)
        largest = new
    tl.store(largest_out + row, largest)
    tl.store(total_out + row, total)
    tl.store(weighted_out + row, weighted)
    target = tl.load(targets + row)
    in_part = (target >= 0) & (target < columns)
    value = tl.load(at + tl.where(in_part, target, 0)).to(tl.float32) * scale
    tl.store(target_out + row, tl.where(in_part, value, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def _logits_gradient(
    logits,
    targets,
    normaliser,
    entropy,
    grad_logprobs,
    grad_entropy,
    columns,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = c < columns, logits + row * columns + c
    log_p = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(normaliser + row)
    grad_logprob, grad_h = tl.load(grad_logprobs + row), tl.load(grad_entropy + row)
    gradient = -tl.exp(log_p) * (grad_logprob + grad_h * (log_p + tl.load(entropy + row)))
    gradient += tl.where(c == tl.load(targets + row), grad_logprob, 0.0)
    tl.store(at, (gradient * scale).to(logits.dtype.element_ty), mask=inside)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    """Four tensors, fp32 [n] each, in the notation of `logprobs._Statistics`: m, Z, sum exp(l - m)
    (l - m), and l of the target. If the target is on another rank, l of the target is 0.

    Args:
        logits: the logits, [n, vocabulary of this rank].
        targets: int64 [n], indices into this rank's vocabulary; a target of another rank is out of
            range.
        temperature: the divisor of the logits: l = logit / temperature.
    """
    out = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    _statistics[(len(logits),)](
        logits, targets, *out, logits.shape[1], 1 / temperature, BLOCK=_BLOCK, num_warps=8
    )
    return tuple(out)


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """The gradient of `logits` (see `logprobs._logits_gradient`). The gradient overwrites `logits`.

    Args:
        logits: the logits, [n, vocabulary of this rank].
        targets: int64 [n], as in `statistics`.
        normaliser: fp32 [n], m + log Z.
        entropy: fp32 [n], in nats.
        grad_logprobs, grad_entropy: fp32 [n], the gradients of log p(target) and of the entropy.
        temperature: the divisor of the logits.
    """
    grid = (len(logits), triton.cdiv(logits.shape[1], _BLOCK))
    _logits_gradient[grid](
        logits,
        targets,
        normaliser,
        entropy,
        grad_logprobs.contiguous(),
        grad_entropy.contiguous(),
        logits.shape[1],
        1 / temperature,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return logits
