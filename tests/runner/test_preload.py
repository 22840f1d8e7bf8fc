"""The imports of the fork server make no call to CUDA. A process that has called CUDA can't fork a
child that uses a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A CUDA runtime with one function, which writes a line. Before any other call to CUDA, torch asks
# the runtime for the number of devices. torch asks once and keeps the answer.
RUNTIME = """
#include <stdio.h>
int cudaGetDeviceCount(int *count) { fputs("CUDA is called\\n", stderr); *count = 0; return 100; }
"""
# A program that does the fork server's imports and then calls CUDA. The program patches torch so
# that NVML seems to find a GPU. For a real fork server NVML finds a GPU.
PRELOAD = """
import sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
from tandem.trainer.rank import entry
entry.preload("cuda")
assert "torch._inductor.compile_fx" in sys.modules
asked = torch.utils._triton.has_triton.cache_info().currsize
assert asked == 0, "without a visible GPU it would remember False"
print("preloaded", file=sys.stderr)
torch._C._cuda_getDeviceCount()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.slow
def test_preload_makes_no_call_to_cuda(tmp_path: Path) -> None:
    source, library = tmp_path / "runtime.c", tmp_path / "runtime.so"
    source.write_text(RUNTIME)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "TANDEM_ROOT": str(tmp_path),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", PRELOAD]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in ran.stderr.splitlines() if line in ("preloaded", "CUDA is called")]
    assert lines == ["preloaded", "CUDA is called"], ran.stderr[-3000:]
