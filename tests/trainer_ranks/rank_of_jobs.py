"""One rank under torchrun that runs several jobs in turn: rank_of_jobs.py <spool> <job> ..."""

import sys

from tandem.trainer import worker

for job_id in sys.argv[2:]:
    if status := worker.main(sys.argv[1], job_id, 1):
        sys.exit(status)
