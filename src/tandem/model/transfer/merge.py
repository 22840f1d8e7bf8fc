"""Merges an adapter into weights: `W = base + s B A`. The sum is computed in float64, so that the
order of summation does not affect the rounded result.

The float64 result is rounded to float32 and then to the weights' dtype, as `tensor.to` rounds it.
"""

import torch


def merge(
    out: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor
) -> None:
    """Write `base + scale * b @ a` into `out`, which may be a view of a parameter.

    Args:
        out, base: the result and the base weights, [n, rows, columns] of the same dtype.
        a: float32 [n, rank, columns].
        b: float32 [n, rows, rank].
        scale: float64 [1].
    """
    if out.is_cuda:
        # Triton is imported only if `out` is on a GPU, because vLLM for the CPU comes without
        # Triton.
        from tandem.model.transfer.merge_kernel import merge_on_gpu

        merge_on_gpu(out, base, a, b, scale)
        return
    # Experts are merged one at a time, to limit the memory of float64 copies.
    for to, weight, down, up in zip(out, base, a, b, strict=True):
        to.copy_((weight.double() + scale * (up.double() @ down.double())).float())
