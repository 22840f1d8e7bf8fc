"""`merge` on a GPU, in a single pass over the weights."""

import torch
import triton
import triton.language as tl

# COLUMNS is the number of columns of a block. RANKS is the number of the adapter's ranks (rows of
# A) in each step of the product. With blocks of 64 rows, these values of COLUMNS and RANKS were the
# fastest that were tried on an H200.
COLUMNS, RANKS = 64, 16


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    out,
    base,
    a,
    b,
    scale,
    rows,
    columns,
    rank,
    out_n,
    out_r,
    out_c,
    base_n,
    base_r,
    base_c,
    a_n,
    a_k,
    a_c,
    b_n,
    b_r,
    b_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    block, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r = ((block // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = ((block % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for begin in range(0, rank, RANKS):
        k = begin + tl.arange(0, RANKS)
        up_at, down_at = n * b_n + r * b_r + k[None, :] * b_k, n * a_n + k[:, None] * a_k + c * a_c
        up = tl.load(b + up_at, mask=(r < rows) & (k < rank)[None, :], other=0.0).to(tl.float64)
        down = tl.load(a + down_at, mask=(c < columns) & (k < rank)[:, None], other=0.0).to(
            tl.float64
        )
        total = tl.dot(up, down, total, out_dtype=tl.float64)
    inside = (r < rows) & (c < columns)
    weight = tl.load(base + n * base_n + r * base_r + c * base_c, mask=inside, other=0.0)
    merged = weight.to(tl.float64) + tl.load(scale) * total
    tl.store(
        out + n * out_n + r * out_r + c * out_c,
        merged.to(tl.float32).to(out.dtype.element_ty),
        mask=inside,
    )


def block_rows(capability: int) -> int:
    """The number of rows of a block on GPUs of the compute capability `capability`.x."""
    # With 64 rows on GPUs of capability 10 and 11, Triton (3.7) chooses tensor cores that lack
    # float64, and fails to compile.
    return 32 if capability in (10, 11) else 64


def merge_on_gpu(
    out: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor
) -> None:
    """Write `base + scale * b @ a`, computed in float64, into `out`.

    Args:
        out, base: the result and the base weights, [n, rows, columns] of the same dtype.
        a: float32 [n, rank, columns].
        b: float32 [n, rows, rank].
        scale: float64 [1].
    """
    n, rows, columns = out.shape
    rows_per_block = block_rows(torch.cuda.get_device_capability(out.device)[0])
    grid = (triton.cdiv(rows, rows_per_block) * triton.cdiv(columns, COLUMNS), n)
    _merge[grid](
        out,
        base,
        a,
        b,
        scale,
        rows,
        columns,
        a.shape[1],
        *out.stride(),
        *base.stride(),
        *a.stride(),
        *b.stride(),
        ROWS=rows_per_block,
        COLUMNS=COLUMNS,
        RANKS=RANKS,
    )
