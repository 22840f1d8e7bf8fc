"""One of the ranks that run several jobs in turn: rank_of_jobs.py <spool> <job>=<name in jobs.TOPOLOGIES> ...

`<topology>!<break>` trains all weights with a mistake of `BREAKS`.
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

from torch.distributed import TCPStore

sys.path.append(str(Path(__file__).parents[1]))
from rank import jobs
from tandem.model import parallel
from tandem.trainer.rank import session, worker
from tandem.training.sharded_adam import ShardedAdam

RANGES = ShardedAdam._own_ranges
COUNTS_ALL = "_own_ranges", lambda self: (replace(part, counts=True) for part in RANGES(self))
BREAKS = {
    "no sum over tensor ranks": ("_sum_over_tensor_ranks", lambda _: None),
    "no sum over data ranks": ("reduce_gradients", ShardedAdam._sum_over_tensor_ranks),
    "weights are not sent around": ("_gather", lambda *_: None),
    "every rank counts what all have": COUNTS_ALL,
    "both stages count a tied table": COUNTS_ALL,
    "no sum over stages": ("_sum_over_stages", lambda _: None),
    "experts are summed over the wrong ranks": ("_group", lambda self, _: self._topology.data),
}

# The ranks of all jobs meet in one store, as with torchrun's agent.
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0")
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TANDEM_TRAINER_RANKS": os.environ["WORLD_SIZE"]}
session.device = jobs.gpu_like()  # type: ignore[assignment]  # so that they rehearse
parallel.reading_groups = lambda: (parallel.current().data, parallel.current().expert_data)  # and share the reading
for argument in sys.argv[2:]:
    job_id, topology = argument.split("=")
    topology, _, broken = topology.partition("!")
    os.environ |= jobs.TOPOLOGIES[topology].variables()
    with mock.patch.object(ShardedAdam, *BREAKS[broken]) if broken else nullcontext():
        if status := worker.main(sys.argv[1], job_id, 1):
            sys.exit(status)
