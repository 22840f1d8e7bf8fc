"""Frozen weights in FP8 (e4m3; Micikevicius et al., 2022, arXiv:2209.05433), for GPUs of compute
capability 8.9 or newer.

A weight is quantised once, in two layouts. The layout for the forward product has a scale per row.
The layout for the backward product has a scale per column. Both layouts together take as much
memory as the bfloat16 weight. Activations and gradients are quantised at each product, with a scale
per row.
"""

import torch

from tandem.errors import InvalidInput
from tandem.model import device

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_MULTIPLE = 16  # torch's scaled product requires sizes that are multiples of 16


class Fp8Weight:
    """A quantised weight [out, in]. The two layouts of the quantised weight are stored in the
    memory of the original weight, whose values are overwritten."""

    def __init__(self, weight: torch.Tensor) -> None:
        """`weight`: bfloat16, contiguous, on a GPU. The shape is [out, in]."""
        out_features, in_features = weight.shape
        by_row, self._row_scales = _quantise(weight)
        by_column, self._column_scales = _quantise(weight.t().contiguous())
        memory = weight.view(-1).view(E4M3)
        self._by_row = memory[: weight.numel()].view(out_features, in_features)
        self._by_column = memory[weight.numel() :].view(in_features, out_features)
        self._by_row.copy_(by_row)
        self._by_column.copy_(by_column)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, in] times W^T -> [S, out]; x and the product are bfloat16."""
        return _product(x, self._by_row, self._row_scales)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """gradient [S, out] times W -> [S, in]; gradient and product are bfloat16."""
        return _product(gradient, self._by_column, self._column_scales)


def check_device() -> None:
    """Raise InvalidInput if this process's device has no FP8 products."""
    if device.wait_until_started() == "cpu":
        name = "the CPU"
    elif torch.cuda.get_device_capability() < (8, 9):
        name = torch.cuda.get_device_name()
    else:
        return
    raise InvalidInput(
        f"{name} has no FP8; set TANDEM_BASE_PRECISION=same", field="TANDEM_BASE_PRECISION"
    )


def fits(weight: torch.Tensor) -> bool:
    """Whether torch can multiply a weight of this shape and dtype in FP8."""
    return weight.dtype is torch.bfloat16 and not any(size % _MULTIPLE for size in weight.shape)


def _quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns FP8 values [n, columns] and fp32 scales [n, 1]. The values times the scales are
    approximately `rows`."""
    from tandem.model.layer import triton_kernels

    return triton_kernels.quantise_rows(rows, E4M3, LARGEST)


def _product(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product of `rows` [S, k] and the transpose of `weight` [n, k], whose `scales` are [n, 1]:
    bfloat16 [S, n]."""
    quantised, row_scales = _quantise(rows)
    return torch._scaled_mm(
        quantised,
        weight.t(),
        scale_a=row_scales,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
