"""One of the ranks that run several jobs in turn: rank_of_jobs.py <spool> <job>=<name in
jobs.TOPOLOGIES> ..."""

import os
import sys
from pathlib import Path

from torch.distributed import TCPStore

sys.path.append(str(Path(__file__).parents[1]))
from rank import jobs
from tandem.model import parallel
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.trainer.rank import entry, train

# The ranks of all jobs connect through one store, as with torchrun's agent.
store = TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0"
)
os.environ |= {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TANDEM_TRAINER_RANKS": os.environ["WORLD_SIZE"],
}
# This stand-in for a GPU makes the ranks call `Policy.rehearse`.
train.device = jobs.gpu_like()  # type: ignore[assignment]
# The ranks of a job also share the reading of the base weights.
parallel.reading_groups = lambda: (parallel.current().data, parallel.current().expert_data)
for argument in sys.argv[2:]:
    job_id, topology = argument.split("=")
    os.environ |= jobs.TOPOLOGIES[topology].variables()
    if status := entry.main(Attempt(Spool(sys.argv[1]), job_id, 1), jobs.settings()):
        sys.exit(status)
