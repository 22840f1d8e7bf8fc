"""Log-probs and entropies of items from hidden states, with the vocabulary cut over tensor-parallel ranks.

All logits [items, vocabulary] never exist at once: items are computed in chunks, and with gradients each chunk's logits
are computed again in the backward pass.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tandem.model import parallel
from tandem.model.mcore import reduce_from_tensor_model_parallel_region

CHUNK_ELEMENTS = 2**26  # of one chunk's logits on this rank: 256 MiB in fp32, and a few times that in use meanwhile

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target), and the entropy of p in nats, for p = softmax(logits / temperature); both fp32 [n].

    Args:
        hidden: [n, hidden], the state each item is predicted from.
        targets: int64 [n], token ids.
        vocab_start, vocab_size: this rank has the tokens vocab_start ... vocab_start + vocab_size - 1.
        group: the tensor-parallel ranks; all of them call this with the same arguments.
    """

    def chunk(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden).float() / temperature
        return _softmax_statistics(logits, targets - vocab_start, group)

    size = max(1, CHUNK_ELEMENTS // vocab_size)
    logprobs, entropies = [], []
    for start in range(0, len(targets), size):
        arguments = hidden[start : start + size], targets[start : start + size]
        if torch.is_grad_enabled():
            results = checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            results = chunk(*arguments)
        logprobs.append(results[0])
        entropies.append(results[1])
    if not logprobs:
        # Still a function of `hidden`, so that a rank whose row has no items takes part in the backward pass.
        empty = hidden.sum(-1).float()
        return empty, empty
    return torch.cat(logprobs), torch.cat(entropies)


def _softmax_statistics(
    logits: torch.Tensor, local_targets: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy, from logits fp32 [n, vocabulary of this rank] and int64 indices into them, which are
    out of range on all ranks but one."""
    largest = logits.detach().amax(-1)
    parallel.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits = logits - largest[:, None]
    weights = logits.exp()
    mine = (local_targets >= 0) & (local_targets < logits.shape[-1])
    index = torch.where(mine, local_targets, 0)
    target = torch.where(mine, logits.gather(-1, index[:, None]).squeeze(-1), 0.0)
    # One collective for three sums. Its backward is the identity, because every rank computes the same loss from them.
    sums = torch.stack([weights.sum(-1), (weights * logits).sum(-1), target])
    total, weighted, target = reduce_from_tensor_model_parallel_region(sums, group=group)
    log_total = total.log()
    return target - log_total, log_total - weighted / total
