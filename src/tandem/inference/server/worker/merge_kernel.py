"""`merge` on a GPU, in one pass over the weights."""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 128


@triton.jit
def _merge(
    out, base, a, b, scale, rows, columns, rank,
    out_n, out_r, out_c, base_n, base_r, base_c, a_n, a_k, a_c, b_n, b_r, b_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    block, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r = ((block // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = ((block % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for k in range(rank):
        up = tl.load(b + n * b_n + r * b_r + k * b_k, mask=r < rows, other=0.0).to(tl.float64)
        down = tl.load(a + n * a_n + k * a_k + c * a_c, mask=c < columns, other=0.0).to(tl.float64)
        total += up[:, None] * down[None, :]
    weight = tl.load(base + n * base_n + r[:, None] * base_r + c[None, :] * base_c, mask=inside, other=0.0)
    merged = weight.to(tl.float64) + tl.load(scale) * total
    to = out + n * out_n + r[:, None] * out_r + c[None, :] * out_c
    tl.store(to, merged.to(tl.float32).to(out.dtype.element_ty), mask=inside)


def merge_on_gpu(out: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> None:
    """See `merge`."""
    n, rows, columns = out.shape
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS), n)
    _merge[grid](
        out, base, a, b, scale, rows, columns, a.shape[1],
        *out.stride(), *base.stride(), *a.stride(), *b.stride(), ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
