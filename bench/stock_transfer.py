"""vLLM's own transfer of weights by NCCL, as its examples drive it: what `bench.swap` compares
with.

    python -m bench.stock_transfer MODEL URL PORT     (in vLLM 0.26's API; vLLM 0.32 has moved it)

CLEAR_CACHE=true leaves the pause's default: vLLM drops the KV cache, and running requests are
computed again.

The process holds the model's weights on its GPU. For each line of its standard input it pauses
vLLM, sends all weights, packed, and resumes; it answers with a line of JSON: the seconds of each
part and the bytes.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tandem.system import ports


@contextlib.contextmanager
def sender(model: Path, url: str, admin: dict[str, str], log: Path, gpu: int) -> Iterator[Any]:
    """A function that transfers the weights once and returns the process's answer."""
    with ports.reserve() as reserved:
        port = str(reserved.port)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "ADMIN": json.dumps(admin)}
    command = [sys.executable, "-m", "bench.stock_transfer", str(model), url, port]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stderr=errors, env=environment, **pipes) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        pipe_in, pipe_out = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            for line in pipe_out:
                if line.startswith("{"):
                    return dict(json.loads(line))
            raise AssertionError(log.read_text(errors="replace")[-3000:])

        def transfer() -> dict[str, Any]:
            pipe_in.write("go\n")
            pipe_in.flush()
            return answer()

        try:
            answer()
            yield transfer
        finally:
            process.kill()


def main(model: Path, url: str, port: int) -> None:
    import httpx
    import torch
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    weights = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file, device="cuda")
    metadata = {
        "names": list(weights),
        "dtype_names": [str(value.dtype).removeprefix("torch.") for value in weights.values()],
        "shapes": [list(value.shape) for value in weights.values()],
        "packed": True,
    }
    nbytes = sum(value.nbytes for value in weights.values())
    with httpx.Client(base_url=url, headers=json.loads(os.environ["ADMIN"]), timeout=300) as client:

        def call(path: str, **body: Any) -> None:
            client.post(path, json=body).raise_for_status()

        with ThreadPoolExecutor(1) as pool:
            meeting = {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1,
                "world_size": 2,
            }
            joined = pool.submit(call, "/init_weight_transfer_engine", init_info=meeting)
            group = NCCLWeightTransferEngine.trainer_init(meeting)
            joined.result()
            print(json.dumps({"connected": True}), flush=True)
            for _ in sys.stdin:
                begin = time.monotonic()
                call(f"/pause?mode=keep&clear_cache={os.environ.get('CLEAR_CACHE', 'false')}")
                call("/start_weight_update")
                paused = time.monotonic()
                received = pool.submit(call, "/update_weights", update_info=metadata)
                NCCLWeightTransferEngine.trainer_send_weights(
                    iter(weights.items()), {"group": group, "packed": True}
                )
                torch.cuda.synchronize()
                received.result()
                sent = time.monotonic()
                call("/finish_weight_update")
                call("/resume")
                end = time.monotonic()
                told = {
                    "pause": paused - begin,
                    "transfer": sent - paused,
                    "finish": end - sent,
                    "bytes": nbytes,
                }
                print(json.dumps({**told, "served": end - begin}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
