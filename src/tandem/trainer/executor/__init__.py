"""The seam between a job's attempt and the processes that run it.

An `Executor` starts an attempt's processes, and its `Execution` says how they are. The runner
decides about the job: when to stop an attempt, why it failed, whether there is another attempt. An
executor writes nothing about the job's state.

`local.py` runs an attempt on the runner's host. `gpus.py` waits for its GPUs and measures what a
job left. `shared_gpus.py` asks the publisher for vLLM's GPUs and gives them back. No torch.

`agents.py` has the code that all executors of several hosts share. On each host an agent
(`trainer/agent`) starts that host's ranks. Runner and agents meet by records in the attempt's
`hosts/`. The ranks outlive their runner, and the next runner adopts the attempt. `hosts.py` has no
engine. `kubernetes.py` makes a Kubernetes Job per attempt: `manifest.py` fills the chart's
template, `cluster.py` calls the API server, `job_state.py` reads its answers. `lingering.py` knows
the Jobs whose pods stay for another attempt. `slurm.py` makes a Slurm job per attempt: `batch.py`
writes its submission, `slurm_state.py` reads its states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType, Job, JobError


@dataclass(frozen=True)
class Waiting:
    """The attempt has no ranks yet: it waits for another system, such as a cluster's queue. No
    bound of the job counts."""

    reason: str


@dataclass(frozen=True)
class Running:
    """The attempt's ranks are started."""

    seconds: float = 0.0
    """How long they have run when the runner first hears of them, which may be a new runner."""


@dataclass(frozen=True)
class Ended:
    """The attempt's processes ended, or never started. It stays so."""

    status: int = 0  # of the ranks' parent (negative: a signal)
    error: JobError | None = None  # why; None: the ranks' files and `status` tell


@dataclass(frozen=True)
class Order:
    """One claimed attempt to run, and the executor's calls to the runner while the attempt runs."""

    job: Job
    files: Attempt
    interrupted: Callable[[], JobError | None]
    """Why the attempt has to end early, if it has to."""
    say: Callable[[str], None]
    """Adds a line to the job's log."""
    tell: Callable[[EventType, dict[str, object]], None]
    """Appends an event; waits for a volume that is gone."""


class Execution(Protocol):
    """The processes of one attempt. The runner polls it until the attempt has ended or has to be
    killed. In both cases the runner then kills the processes that are left, and lets the executor
    give the devices back."""

    def poll(self) -> Waiting | Running | Ended:
        """How the processes are. Doesn't block."""

    def stop(self) -> None:
        """Asks the processes to end."""

    def kill(self) -> None:
        """Ends the processes, in bounded time. Some processes may survive: the fence keeps them
        from the run and the job."""

    def give_back(self) -> list[tuple[EventType, dict[str, object]]]:
        """Gives the devices back. Returns the events about it, in order."""


class Executor(Protocol):
    devices: str
    """The devices that attempts run on, for the log."""
    stays: bool
    """Whether a runner that stops leaves its attempts to the next one."""

    def prepare(self) -> None:
        """Starts processes that can be started ahead of a job. Doesn't block."""

    def wait_until_free(self) -> None:
        """Waits until an attempt can start, or the runner has to stop."""

    def rest(self) -> None:
        """Ends pods or processes that have stayed for their time after a job. The runner calls it
        often, so it returns soon."""

    def adopts(self, attempt: Attempt, /) -> bool:
        """Whether an attempt that an earlier runner started may go on. `start` then finds it."""

    def start(self, order: Order) -> Execution:
        """Starts the attempt, or finds the one that an earlier runner started. If the attempt can't
        start, the returned execution has ended with the reason. Raises errors of the volume or the
        job that another attempt would not change."""

    def close(self) -> None:
        """Ends the processes that stay between jobs."""
