"""One end of a channel. The arguments are DIRECTORY, the rank, the number of ranks, and the device
(cpu or cuda). Rank 0 sends. Each end stays until all ends have received the values."""

import sys
import time
from pathlib import Path

import torch

from tandem.model.transfer.channel import Channel, finish, join_meeting, make_meeting

directory, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
device = torch.device(sys.argv[4], rank) if sys.argv[4] == "cuda" else torch.device("cpu")
if rank == 0:
    store = make_meeting(directory / "meeting")
else:
    while not (directory / "meeting").exists():
        time.sleep(0.01)
    store = join_meeting(directory / "meeting")
channel = Channel(store, rank, size, device, "127.0.0.1")
values = torch.arange(1 << 20, device=device, dtype=torch.float32)
received = values if rank == 0 else torch.zeros_like(values)
finish(channel.broadcast(received, 0))
assert torch.equal(received, values)
(directory / f"received{rank}").touch()
while len(list(directory.glob("received*"))) < size:
    time.sleep(0.01)
time.sleep(0.5)  # The test's thread looks at this process's sockets every 0.1 s.
channel.close()
