"""Derives the state of an attempt from its Slurm job."""

from dataclasses import dataclass
from typing import Self

from tandem.spool.schema import JobError
from tandem.trainer.agent.hosts import FAILED, STOPPED, UNUSABLE
from tandem.trainer.executor import Ended, Running, Waiting
from tandem.trainer.executor.batch import WARNING_SECONDS

FORMAT = ",".join(
    f"{field}:{width}|"
    for field, width in (
        ("JobID", 20),
        ("Name", 300),
        ("State", 30),
        ("TimeLeft", 30),
        ("PreemptTime", 30),
        ("exit_code", 10),
        ("NodeList", 300),
        ("Reason", 300),
    )
)
"""The value of `squeue --Format`. squeue's JSON output is not used, because its fields change with
each version of Slurm."""

_RUNS = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"})
_PREEMPTED = {
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "got a node that does not start",
    "SUSPENDED": "was suspended",
    "STOPPED": "was stopped",
}
_ENDED = {*_PREEMPTED} | {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "REVOKED",
    "TIMEOUT",
    "DEADLINE",
    "OUT_OF_MEMORY",
}
_WARNED_SECONDS = 2 * WARNING_SECONDS + 10
"""The most seconds that are left of the time limit when Slurm has sent SIGTERM because of the
limit. Slurm sends SIGTERM at most a minute early."""


@dataclass(frozen=True)
class SlurmJob:
    """One line of squeue."""

    id: str
    name: str
    state: str
    seconds_left: float | None  # seconds until the time limit; None: no limit
    preempted: bool
    """Whether Slurm has begun to preempt the job. A job that ends in its grace time has the state
    FAILED."""
    status: int  # exit status of the Slurm job's script
    nodes: str
    reason: str

    @classmethod
    def parse(cls, line: str) -> Self:
        parts = [part.strip() for part in line.split("|", 7)]
        job_id, name, state, left, preempted, code, nodes, reason = parts
        status = int(code) >> 8 if code.isdigit() else 0
        began = preempted not in ("", "N/A", "NONE", "Unknown")
        reason = reason.removesuffix("|").strip()
        return cls(job_id, name, state, _seconds(left), began, status, nodes, reason)

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    def __str__(self) -> str:
        return f"Slurm job {self.id}{f' on {self.nodes}' if self.nodes else ''}"


def read(job: SlurmJob, *, began: bool, printed: str = "") -> Waiting | Running | Ended:
    """The attempt's status, from its Slurm job.

    Args:
        began: whether an agent has written a heartbeat.
        printed: the last lines that the Slurm job printed.
    """
    if job.ended:
        return _why(job, began=began, printed=printed)
    if job.state in _RUNS:
        return Running()
    reason = "" if job.reason in ("None", "(null)") else job.reason
    said = " ".join(filter(None, ("" if job.state == "PENDING" else job.state, reason)))
    return Waiting(f"Slurm: {said or f'job {job.id} is pending'}")


def _why(job: SlurmJob, *, began: bool, printed: str) -> Ended:
    left = job.seconds_left
    if job.state == "COMPLETED":
        return Ended()
    if job.preempted or job.state in _PREEMPTED:
        what = _PREEMPTED.get(job.state, "was preempted")
        said = "" if job.reason in ("", "None") else f": {job.reason}"
        return _ended("preempted", f"{job} {what}{said}")
    warned = job.status == STOPPED and left is not None and left <= _WARNED_SECONDS
    if job.state in ("TIMEOUT", "DEADLINE") or (job.state == "FAILED" and warned):
        remedy = "give --time in TANDEM_SLURM_ARGS, or a partition with more"
        return _ended("deadline", f"{job} reached Slurm's time limit; {remedy}")
    if job.state == "OUT_OF_MEMORY":
        remedy = "give --mem in TANDEM_SLURM_ARGS"
        return _ended("rank_crashed", f"{job} was killed for its memory; {remedy}")
    if job.state != "FAILED":
        return _ended("job_deleted", f"somebody cancelled {job}")
    if job.status == STOPPED:
        return _ended("job_deleted", f"{job} got SIGTERM, and Slurm doesn't say why")
    if job.status == UNUSABLE:
        return _ended("spool_unusable", f"{job}: the volume was unusable there")
    if job.status == FAILED and began:
        return Ended(FAILED)
    message = f"{job} ended with status {job.status} before its agents began: {printed}"
    return _ended("launch_failed", message.removesuffix(": "))


def _ended(kind: str, message: str) -> Ended:
    return Ended(1, JobError(type=kind, message=message, retriable=True))


def _seconds(text: str) -> float | None:
    """Seconds in `[days-][[hours:]minutes:]seconds`; None for words such as UNLIMITED."""
    days, _, rest = text.rpartition("-") if not text.startswith("-") else ("", "", text[1:])
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + int(part)
    seconds += 86400 * int(days) if days.isdigit() else 0
    return -seconds if text.startswith("-") else seconds
