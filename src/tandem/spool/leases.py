"""Leases: who runs a job, `jobs/leases/<id>.json`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.errors import Conflict
from tandem.spool import fs
from tandem.spool.schema import Job, Lease, RankProcess

if TYPE_CHECKING:
    from tandem.spool import Spool


class Leases:
    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def get(self, job_id: str) -> Lease | None:
        """The job's lease; None if nobody runs the job."""
        return fs.read_record(self._spool.paths.lease_file(job_id), Lease)

    def renew(self, job_id: str, runner: str, phase: str, ranks: Sequence[RankProcess] | None = None) -> Lease:
        """The runner's heartbeat; `ranks` None keeps the recorded ones.

        Conflict (field `id`) if the job is not running, or another runner runs it.
        """
        with self._spool.job_lock(job_id):
            located = self._spool.jobs.locate(job_id)
            if located is None or located[0] != "running" or located[1].result is not None:
                raise Conflict(f"job {job_id!r} is not running, so its lease can't be renewed", field="id")
            lease = self.get(job_id)
            if lease is not None and lease.runner != runner:
                raise Conflict(f"job {job_id!r} is run by {lease.runner} on {lease.host}, not by {runner}", field="id")
            if ranks is None:
                ranks = () if lease is None else lease.ranks
            return self.write(located[1], runner, phase, ranks)

    def write(self, job: Job, runner: str, phase: str, ranks: Sequence[RankProcess]) -> Lease:
        """Replaces the lease, under the job's lock."""
        lease = Lease(
            job=job.spec.id,
            runner=runner,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=job.attempt,
            phase=phase,
            beat=time.time(),
            ranks=[*ranks],
        )
        fs.write_json_atomic(self._spool.paths.lease_file(job.spec.id), lease)
        return lease
