"""The kernel that merges adapters compiles for each generation of GPUs. The compiler needs no
GPU."""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


@pytest.mark.skipif(not PTXAS.exists(), reason="an image for the CPU has no assembler")
@pytest.mark.parametrize("capability", [80, 90, 100, 103, 120])
def test_it_compiles(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tandem.model.transfer import merge_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = merge_kernel.block_rows(capability // 10)
    constants = {"ROWS": rows, "COLUMNS": merge_kernel.COLUMNS, "RANKS": merge_kernel.RANKS}
    types = {"out": "*bf16", "base": "*bf16", "a": "*fp32", "b": "*fp32", "scale": "*fp64"}
    kernel = merge_kernel._merge
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    made = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32)
    )
    assert made.asm["cubin"]
