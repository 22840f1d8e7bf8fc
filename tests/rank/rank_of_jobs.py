"""One rank under torchrun that runs several jobs in turn: rank_of_jobs.py <spool> <job>=<tensor parallel size> ..."""

import os
import sys

from rank import jobs
from tandem.model import parallel
from tandem.trainer.rank import session, worker

session.device = jobs.gpu_like()  # type: ignore[assignment]  # ranks rehearse together
parallel.reading_group = parallel.data_parallel_group  # and share the reading
for argument in sys.argv[2:]:
    job_id, tensor_parallel = argument.split("=")
    os.environ["TANDEM_TENSOR_PARALLEL"] = tensor_parallel
    if status := worker.main(sys.argv[1], job_id, 1):
        sys.exit(status)
