"""What a process that ranks are forked from imports and sets up: nothing of it may ask CUDA anything, since a process
that has cannot fork one that uses a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# torch asks the runtime how many devices there are before it asks for anything else; once, it keeps the answer.
ASKED = """
#include <stdio.h>
int cudaGetDeviceCount(int *count) { fputs("CUDA is asked\\n", stderr); *count = 0; return 100; }
"""
# A GPU as NVML tells of it: what the fork server sees.
PRELOAD = """
import sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
from tandem.trainer.rank import worker
worker.preload()
assert "torch._inductor.compile_fx" in sys.modules
assert torch.utils._triton.has_triton.cache_info().currsize == 0, "with no GPU to be seen the answer was no"
print("preloaded", file=sys.stderr)
torch._C._cuda_getDeviceCount()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_is_preloaded_asks_cuda_nothing(tmp_path: Path) -> None:
    source, library = tmp_path / "asked.c", tmp_path / "asked.so"
    source.write_text(ASKED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library), "TANDEM_DEVICE": "cuda", "TANDEM_ROOT": str(tmp_path),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", PRELOAD]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    told = [line for line in ran.stderr.splitlines() if line in ("preloaded", "CUDA is asked")]
    assert told == ["preloaded", "CUDA is asked"], ran.stderr[-3000:]
