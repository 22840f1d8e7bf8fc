"""Files that the runner and the hosts' agents write to `hosts/` in an attempt's work directory:

order.json          the runner's order to the agents, written before any agent starts
<i>.ticket          the one agent that serves host i; made by `link`
<i>.json            what host i has (`HostRecord`); when all are there, the hosts have met
<i>.beat            host i's agent goes on (`HostBeat`)
<i>.end.json        how host i's ranks ended, and what they left (`HostEnd`)
stop, kill          the runner asks the agents to end the ranks
<i>.launcher.log  <i>.exits.json        of the parent of host i's ranks
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from tandem.config import Settings
from tandem.spool import fence, fs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError, Record
from tandem.trainer.launch import DEFAULT_ENTRY, HOSTS, RankSettings
from tandem.trainer.launch.launcher import threads_per_rank

DONE, FAILED, STOPPED, FENCED, UNUSABLE = 0, 1, 75, 76, 77
"""Exit statuses of an agent: the ranks are done; the ranks failed, or the host was refused; SIGTERM
or the runner stopped the agent; the agent's ticket is taken, the attempt was ended, or the runner
no longer renews the job's lease; the volume is unusable."""


TAKE_SECONDS = 60.0
"""Seconds after the runner's write within which a lingering agent must see the runner's order. A
network file system may show a new file with this delay."""


class AgentOrder(Record):
    """The runner's order to the agents of one attempt."""

    hosts: int
    threads: int  # OMP_NUM_THREADS of each rank; affects the order of sums
    settings: RankSettings
    entry: str = DEFAULT_ENTRY
    orphan_seconds: float = 900.0
    pods: str = Field(default="", exclude_if=lambda pods: not pods)
    """The Kubernetes Job, as <namespace>/<name>, whose pods have stayed from an earlier attempt and
    serve this one. Empty: agents that are started for this attempt serve it."""

    @classmethod
    def of(cls, settings: Settings, entry: str) -> Self:
        return cls(
            hosts=settings.trainer_hosts,
            threads=threads_per_rank(settings),
            settings=RankSettings.of(settings),
            entry=entry,
            orphan_seconds=settings.orphan_seconds,
        )


class HostRecord(BaseModel):
    """One host of an attempt. The host's agent writes the record again when `waits` changes.
    Unknown keys are ignored, so that the record of another version of Tandem can be read."""

    model_config = ConfigDict(frozen=True)

    host: int
    name: str  # of the machine
    pid: int  # of the agent
    address: str = ""
    port: int = 0  # port of the ranks' store, which runs on host 0
    gpus: tuple[str, ...] = ()  # UUIDs
    versions: dict[str, str] = Field(default_factory=dict)
    base_model: str = ""  # the directory
    base_files: str = ""  # digest of the model's files
    threads: int = 0
    waits: str = ""  # what the host waits for before it can start ranks
    refused: JobError | None = None

    def __str__(self) -> str:
        return f"host {self.host} ({self.name}{f', {self.address}' if self.address else ''})"


class HostBeat(Record):
    count: int  # number of beats so far
    seconds: float | None = None  # seconds for which the ranks have run


class HostEnd(Record):
    """The end of one host's ranks, and the processes and device memory that they left."""

    status: int  # the agent's exit status
    error: JobError | None = None  # None: the ranks' own error files have the reason of a failure
    processes: int = 0  # number of processes that survive SIGKILL
    devices: dict[str, int | None] = Field(default_factory=dict)  # bytes in use, by UUID
    seconds: float = 0.0  # seconds until the devices were free
    network: tuple[str, ...] = ()  # connections that lost data before the ranks had to end
    lingers: float = Field(default=0.0, exclude_if=lambda seconds: not seconds)
    """Seconds that the agent stays for another attempt."""


class Meeting:
    """The files of an attempt's hosts. Methods raise OSError and SpoolUnusable if the volume is
    unusable. After the attempt has ended, methods write nothing, because the attempt's directory
    no longer exists."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._work = attempt.work
        self.directory = self._work / HOSTS
        self.lease = self._work.parent.parent / "lease.json"

    # ---- methods for the runner

    def give_order(self, order: AgentOrder) -> None:
        with fs.volume_errors(self.directory):
            self.directory.mkdir(exist_ok=True)
            fs.write_json_atomic(self.directory / "order.json", order)
            fs.fsync_dir(self._work)

    def ask(self, what: str) -> None:
        """Asks the agents to end their ranks; `what` is "stop" or "kill"."""
        with suppress(FileNotFoundError):  # the attempt has ended
            fs.write_atomic(self.directory / what, b"", durable=False)

    # ---- methods for runner and agents

    def order(self) -> AgentOrder | None:
        """The runner's order; None if there is no order yet or the attempt has ended."""
        if not self.is_open():
            return None
        return fs.read_undamaged(self.directory / "order.json", AgentOrder)

    def is_open(self) -> bool:
        """Whether the attempt may still run: its directory exists, without the mark of its end."""
        return fs.exists(self._work) and not fs.exists(fence.mark(self._work))

    def asked(self) -> str:
        """The runner's request to the agents: "stop", "kill", or "" for no request."""
        return next((name for name in ("kill", "stop") if fs.exists(self.directory / name)), "")

    def record(self, host: int) -> HostRecord | None:
        return fs.read_undamaged(self.directory / f"{host}.json", HostRecord)

    def beat(self, host: int) -> HostBeat | None:
        return fs.read_undamaged(self.directory / f"{host}.beat", HostBeat)

    def end(self, host: int) -> HostEnd | None:
        return fs.read_undamaged(self.directory / f"{host}.end.json", HostEnd)

    def has_ticket(self, host: int) -> bool:
        return fs.exists(self._ticket(host))

    # ---- methods for an agent

    def take_ticket(self, host: int, identity: str) -> bool:
        """Takes the host's ticket, which only one agent can get. Returns whether this agent got the
        ticket. The volume's server decides, because `link` succeeds only for the first agent."""
        own = fs.temporary_beside(self._ticket(host))
        try:
            with fs.volume_errors(own):
                own.write_text(identity)
                with suppress(FileExistsError):
                    os.link(own, self._ticket(host))
                # On NFS the answer of `link` may get lost although the link was made. The NFS
                # client then tries `link` again, and this second try fails.
                return fs.read_bytes(self._ticket(host)) == identity.encode()
        except FileNotFoundError:  # the attempt has ended
            return False
        finally:
            with suppress(OSError):
                own.unlink()

    def write(self, host: int, record: HostRecord | HostBeat | HostEnd) -> None:
        """Writes the record to its file. Raises FileNotFoundError if the attempt has ended."""
        names = {HostRecord: f"{host}.json", HostBeat: f"{host}.beat", HostEnd: f"{host}.end.json"}
        fs.write_json_atomic(self.directory / names[type(record)], record, durable=False)

    def _ticket(self, host: int) -> Path:
        return self.directory / f"{host}.ticket"


def misfit(records: Sequence[HostRecord], order: AgentOrder) -> JobError | None:
    """The reason why the hosts that have arrived can't train together; None if they can. The reason
    names the hosts that differ."""
    for record in records:
        if (error := record.refused) is not None:
            return error.model_copy(update={"message": f"{record}: {error.message}"})
    for record in records[1:]:
        if difference := _difference(records[0], record):
            return JobError(
                type="hosts_differ", message=f"{records[0]} and {record} differ: {difference}"
            )
    owners: dict[str, HostRecord] = {}
    for record in records:
        for gpu in record.gpus:
            if (other := owners.setdefault(gpu, record)) is not record:
                message = f"{other} and {record} both have {gpu}; give each host GPUs of its own"
                return JobError(type="hosts_differ", message=message)
    if len(records) == order.hosts and records[0].threads != order.threads:
        problem = f"{records[0]} has OMP_NUM_THREADS={records[0].threads}"
        message = f"{problem}, the runner {order.threads}; set it to one number, or unset it"
        return JobError(type="hosts_differ", message=message)
    return None


def _difference(a: HostRecord, b: HostRecord) -> str:
    for name in sorted(a.versions.keys() | b.versions.keys()):
        if a.versions.get(name) != b.versions.get(name):
            found = f"{a.versions.get(name) or 'none'} and {b.versions.get(name) or 'none'}"
            return f"{name} {found}; use the same image on all hosts"
    if a.base_files != b.base_files:
        return (
            f"the base model's files in {a.base_model} and {b.base_model} are not the same; give"
            " all hosts the same files"
        )
    if len(a.gpus) != len(b.gpus):
        return f"{len(a.gpus)} and {len(b.gpus)} GPUs; give all hosts as many"
    if a.threads != b.threads:
        return f"OMP_NUM_THREADS={a.threads} and {b.threads}; set it on all hosts, or on none"
    return ""
