"""Log-probabilities and entropies of items from hidden states, with the vocabulary cut across tensor-parallel ranks.

[items, vocabulary] never exists as a whole: items are taken in chunks, and with gradients each chunk's logits are
computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tandem.model import parallel
from tandem.model.mcore import reduce_from_tensor_model_parallel_region

# Elements of one chunk's logits on this rank: 256 MiB in fp32, and a few times that while it is worked on.
CHUNK_ELEMENTS = 2**26

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, hidden] -> logits [n, vocabulary of this rank], in the activations' dtype."""


def item_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For p = softmax(logits / temperature): (log p(target), entropy of p in nats), both fp32 [n].

    Args:
        hidden: [n, hidden], the state each item is predicted from.
        targets: int64 [n], token ids.
        vocab_start, vocab_size: this rank has the tokens vocab_start ... vocab_start + vocab_size - 1.
        group: the tensor-parallel ranks; all of them call this with the same arguments.
    """

    def chunk(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden).float() / temperature
        return _softmax_statistics(logits, targets - vocab_start, group)

    size = max(1, chunk_elements // vocab_size)
    logprobs, entropies = [], []
    for start in range(0, len(targets), size):
        arguments = hidden[start : start + size], targets[start : start + size]
        if torch.is_grad_enabled():
            one = checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            one = chunk(*arguments)
        logprobs.append(one[0])
        entropies.append(one[1])
    if not logprobs:
        # Still a function of `hidden`: a rank whose row has no items takes part in the backward pass.
        nothing = hidden.sum(-1).float()
        return nothing, nothing
    return torch.cat(logprobs), torch.cat(entropies)


def _softmax_statistics(
    logits: torch.Tensor, local_targets: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: fp32 [n, vocabulary of this rank]; local_targets: index into it, out of range on all ranks but one."""
    largest = logits.detach().amax(-1)
    parallel.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits = logits - largest[:, None]
    weights = logits.exp()
    mine = (local_targets >= 0) & (local_targets < logits.shape[-1])
    index = torch.where(mine, local_targets, 0)
    target = torch.where(mine, logits.gather(-1, index[:, None]).squeeze(-1), 0.0)
    # One collective for the three sums. Its backward is the identity: every rank computes the same loss from them.
    sums = torch.stack([weights.sum(-1), (weights * logits).sum(-1), target])
    total, weighted, target = reduce_from_tensor_model_parallel_region(sums, group=group)
    log_total = total.log()
    return target - log_total, log_total - weighted / total
