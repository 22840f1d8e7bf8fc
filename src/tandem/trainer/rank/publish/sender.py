"""Sends this rank's weights to vLLM's workers, buffer by buffer."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import Store

from tandem.families.parts import Part
from tandem.model.transfer.channel import BUFFERS, STALL_SECONDS, Pending, connect, finish
from tandem.trainer.rank.publish.weights import TrainedWeights


def send(
    way: str, store: Store, rank: int, address: str, weights: TrainedWeights, lists: Sequence[Sequence[Part]],
    beat: Callable[[], None],
) -> tuple[int, float]:  # fmt: skip
    """Send the buffers of `lists` in order; returns their bytes, and how many seconds they were on their way, without
    the time to connect. `rank`: this sender's among the trainer's.

    `beat` is called at each sign of life of vLLM's workers. Raises what torch raises where a worker is gone or stands
    still, and where none comes within STALL_SECONDS.
    """
    workers = int(store.get("workers"))
    beat()
    channel = connect(way, store, f"{rank}", 0, workers + 1, weights.device, address)
    try:
        beat()
        sizes = [sum(part.size for part in parts) for parts in lists]
        memory = [
            torch.empty(max(sizes, default=0), dtype=weights.dtype, device=weights.device) for _ in range(BUFFERS)
        ]
        going, begin = deque[Pending](), time.perf_counter()
        for number, (parts, size) in enumerate(zip(lists, sizes, strict=True)):
            if len(going) == BUFFERS:
                finish(going.popleft())
                beat()
            buffer = memory[number % BUFFERS][:size]
            weights.fill(parts, buffer)
            going.append(channel.broadcast(buffer))
        for pending in going:
            finish(pending)
            beat()
        seconds = time.perf_counter() - begin
        store.set(f"complete/{rank}", "")
        deadline = time.monotonic() + STALL_SECONDS
        while int(store.add("done", 0)) < workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM's workers did not say within {STALL_SECONDS:.0f} s that they have all")
            time.sleep(0.001)
    finally:
        channel.close()
    return sum(sizes) * weights.dtype.itemsize, seconds
