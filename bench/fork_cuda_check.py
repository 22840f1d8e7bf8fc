"""Does the fork launcher's parent stay free of CUDA, and can a child it forks use the GPU? Exit
status 0 if so."""

import os
import subprocess
import sys
import time

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from tandem.trainer.rank.entry import preload


def main() -> int:
    """Preload, fork, train's first CUDA calls in the child; the parent must never appear on the
    device."""
    begin = time.perf_counter()
    preload("cuda")
    print(f"preload: {time.perf_counter() - begin:.2f} s")
    import torch

    from tandem.model.attention import block_mask, flex

    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        torch.use_deterministic_algorithms(True, warn_only=True)
        value = float(
            (torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")).sum()
        )
        print(f"child: matrix product after {time.perf_counter() - begin:.2f} s", flush=True)
        # What torch.compile brings with it was imported by the parent.
        query, key = (
            torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        mask = block_mask(torch.arange(256) + 1, query.device)
        compiled = flex(query, key, key, 1.0, None, None, None, None, *mask)
        worst = float((compiled - key).abs().max())  # each slot sees itself alone
        print(f"child: compiled attention after {time.perf_counter() - begin:.2f} s", flush=True)
        os._exit(0 if value == 512.0**3 and worst < 1e-2 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    left = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    print(
        f"child's status {status}; parent has CUDA: {torch.cuda.is_initialized()}; on the device:"
        f" {left or 'nobody'}"
    )
    return int(status != 0 or torch.cuda.is_initialized() or bool(left))


if __name__ == "__main__":
    sys.exit(main())
