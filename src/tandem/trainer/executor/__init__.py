"""The interface between a job's attempt and the processes that run the attempt. An `Executor`
starts an attempt's processes and returns an `Execution`, which reports their state. The runner
decides when to stop an attempt, why the attempt failed, and whether there is another attempt. An
executor never writes the job's state.

`local.py` runs an attempt on the runner's host. `gpus.py` waits for that host's GPUs and measures
the memory that a job left in use. `shared_gpus.py` asks the publisher for vLLM's GPUs and gives
them back. No torch.

`agents.py` has the code that all executors of several hosts share. On each host an agent
(`trainer/agent`) starts that host's ranks. Runner and agents communicate through records in the
attempt's directory `hosts/`. Ranks that agents have started outlive the runner, and the next runner
adopts the attempt. `hosts.py` uses agents that already run, so it starts no agents. `kubernetes.py`
makes a Kubernetes Job per attempt. `manifest.py` fills the chart's template for the Job,
`cluster.py` calls the API server, and `job_state.py` reads the server's answers. `lingering.py`
lists the Jobs whose pods stay for another attempt. `slurm.py` makes a Slurm job per attempt.
`batch.py` writes the Slurm job's script and options, and `slurm_state.py` reads the Slurm job's
state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType, Job, JobError


@dataclass(frozen=True)
class Waiting:
    """The attempt has no ranks yet, because it waits for another system, such as a cluster's queue.
    Time in the state `Waiting` does not count towards the job's time limits."""

    reason: str


@dataclass(frozen=True)
class Running:
    """The attempt's ranks have been started."""

    seconds: float = 0.0
    """Seconds for which the ranks have run when this runner first learns of them. More than 0 if an
    earlier runner started the ranks."""


@dataclass(frozen=True)
class Ended:
    """The attempt's processes have ended, or have never started. An attempt that is `Ended` stays
    `Ended`."""

    status: int = 0  # exit status of the ranks' parent; -N: ended by signal N
    error: JobError | None = None  # if None, `status` and the ranks' error files have the reason


@dataclass(frozen=True)
class Order:
    """One claimed attempt, and the functions with which its executor calls the runner."""

    job: Job
    files: Attempt
    interrupted: Callable[[], JobError | None]
    """Returns the reason why the attempt has to end early; None if it may go on."""
    say: Callable[[str], None]
    """Adds a line to the job's log."""
    tell: Callable[[EventType, dict[str, object]], None]
    """Appends an event to the job's events. If the volume is gone, waits until it is back."""


class Execution(Protocol):
    """The processes of one attempt. The runner polls an `Execution` until the attempt has ended or
    has to be killed. After the last poll, the runner kills the processes that are left, and calls
    `give_back`."""

    def poll(self) -> Waiting | Running | Ended:
        """The state of the processes. Doesn't block."""

    def stop(self) -> None:
        """Asks the processes to end."""

    def kill(self) -> None:
        """Kills the processes, within a bounded time. Some processes may survive SIGKILL. The fence
        (`spool/fence.py`) keeps surviving processes from changing the run or the job."""

    def give_back(self) -> list[tuple[EventType, dict[str, object]]]:
        """Gives the attempt's devices back. Returns the events about the devices, in order."""


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
        """Ends pods or processes that stayed after a job, once their time is over. The runner calls
        `rest` often, so `rest` must return soon."""

    def adopts(self, attempt: Attempt, /) -> bool:
        """Whether the attempt may go on. An earlier runner has started the attempt. If the attempt
        may go on, `start` finds its processes."""

    def start(self, order: Order) -> Execution:
        """Starts the attempt's processes, or finds the processes that an earlier runner started. If
        the attempt can't start, returns an execution in the state `Ended`, with the reason. Raises
        an error of the volume or of the job only if the error would also stop another attempt."""

    def close(self) -> None:
        """Ends the processes that stay between jobs."""
