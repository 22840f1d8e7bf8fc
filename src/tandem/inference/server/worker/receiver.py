"""Whole weights from the trainer's ranks, buffer by buffer."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tandem.families.arch import Arch
from tandem.families.parts import Part, buffers, layout, senders
from tandem.families.topology import Sizes
from tandem.model.transfer.channel import BUFFER_BYTES, BUFFERS, connect, finish, join_store


def receive(
    source: dict[str, Any], arch: Arch, dtype: torch.dtype, where: torch.device, rank: int, workers: int,
    beat: Callable[[], None],
) -> Iterator[tuple[Part, torch.Tensor]]:  # fmt: skip
    """Each part that the ranks send, and its values, which the next one may overwrite when it is asked for.

    `source`: an offer (`trainer/rank/publication.py`); `rank`: this worker's among the `workers`; `beat` is called
    whenever something has arrived. Raises what torch raises where a rank or another worker is gone, or stands still.
    """
    joined, address = join_store(source["address"], source["port"])
    store = PrefixStore(source["prefix"], joined)
    store.set("workers", str(workers))
    sizes = Sizes(**source["sizes"])
    ranks = senders(sizes)
    lists = [
        list(buffers(arch, source["targets"], sizes=sizes, rank=rank, most=BUFFER_BYTES // dtype.itemsize))
        for rank in ranks
    ]
    for sender, parts_of in zip(ranks, lists, strict=True):
        if (theirs := json.loads(store.get(f"layout/{sender}"))) != layout(parts_of, str(dtype)):
            raise ValueError(f"rank {sender} would send {theirs}, this vLLM expects {layout(parts_of, str(dtype))}")
    beat()
    with ExitStack() as opened:
        channels = []
        for sender in ranks:
            channel = connect(source["way"], store, f"{sender}", rank + 1, workers + 1, where, address)
            opened.callback(channel.close)
            channels.append(channel)
        beat()
        # The ranks send at once, each its own; so they take turns here.
        turns = [turn for of_turn in zip_longest(*lists) for turn in zip(channels, of_turn, strict=True) if turn[1]]
        most = max(sum(part.size for part in parts) for _, parts in turns)
        memory = [torch.empty(most, dtype=dtype, device=where) for _ in range(BUFFERS)]
        coming = deque[tuple[Any, list[Part], torch.Tensor]]()
        for number, (channel, parts) in enumerate(turns):
            if len(coming) == BUFFERS:
                yield from _arrived(*coming.popleft())
                beat()
            buffer = memory[number % BUFFERS][: sum(part.size for part in parts)]
            coming.append((channel.broadcast(buffer), parts, buffer))
        while coming:
            yield from _arrived(*coming.popleft())
            beat()
        if where.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for sender in ranks:
            store.get(f"complete/{sender}")  # NCCL may take a sender's death for the end of a buffer
        store.add("done", 1)


def _arrived(pending: Any, parts: list[Part], buffer: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    finish(pending)
    for part, values in zip(parts, buffer.split([part.size for part in parts]), strict=True):
        yield part, values.view(part.shape)
