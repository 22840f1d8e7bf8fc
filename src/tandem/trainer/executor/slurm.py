"""Attempts under Slurm. Each attempt is a Slurm job that runs an agent on each of its nodes.

Slurm queues the Slurm jobs and chooses their nodes. A Slurm job's name contains the attempt's
number. A restarted runner finds an attempt's Slurm job by its name, and never submits a second
Slurm job for the attempt.
"""

import os
import shutil
import subprocess
import time
from functools import partial

from tandem.config import Settings
from tandem.errors import InvalidInput, TandemError
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job, JobError
from tandem.system.logs import Log
from tandem.system.tail import last_lines
from tandem.trainer.agent.hosts import AgentOrder
from tandem.trainer.executor import Ended, Order, Running, Waiting
from tandem.trainer.executor.agents import EngineExecution, EngineExecutor
from tandem.trainer.executor.batch import Batch, output_path
from tandem.trainer.executor.slurm_state import FORMAT, SlurmJob, read
from tandem.trainer.stop import Stop

log = Log("runner")

PROGRAMS = ("sbatch", "squeue", "scancel")
POLL_SECONDS = 2.0
AWAY_POLL_SECONDS = 10.0
TIMEOUT_SECONDS = 15.0
"""Time limit of one call. It is short because nobody renews the job's lease during a call."""
SETTLE_SECONDS = 5.0
"""Seconds between the Slurm job's end and the decision about it, because the agents' last records
may become visible later than the Slurm job's end."""
FINISH_SECONDS = 60.0
"""Seconds that a Slurm job may take to end after its last agent has ended."""
EXPLAIN_SECONDS = 30.0
"""Seconds that Slurm may take to report why it stopped agents."""
_AWAY = (
    "contact",
    "timed out",
    "Connection",
    "connection",
    "Zero Bytes",
    "standby",
    "temporarily",
    "authentication",
)
"""Words in error messages which mean that Slurm is away, not that the submission is wrong."""
_LIMIT = "accounting/QOS policy"
"""Words in a refusal that only lasts until the user has fewer jobs."""


class SlurmAway(TandemError, code="slurm_away", http_status=503, retriable=True):
    """Slurm does not answer."""


class SlurmRefused(TandemError, code="slurm_refused"):
    """Slurm refuses a submission."""


class Slurm:
    """The calls of Slurm's client programs. Raises InvalidInput if a program is missing."""

    def __init__(self) -> None:
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise InvalidInput(
                f"slurm needs {' and '.join(missing)} on the PATH; install them (Debian:"
                " apt-get install slurm-client) with the cluster's slurm.conf and munge.key",
                field="TANDEM_EXECUTOR",
            )
        # If the runner itself is in a Slurm job, Slurm has set variables whose names begin with a
        # prefix in `own`.
        own = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_")
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name == "SLURM_CONF" or not name.startswith(own)
        }

    def jobs(self, name: str | None = None) -> list[SlurmJob]:
        """This user's Slurm jobs, including ended jobs that Slurm still remembers. With `name`,
        returns only the jobs of this name."""
        words = [f"--user={os.getuid()}", "--states=all", f"--Format={FORMAT}"]
        words += [f"--name={name}"] if name is not None else []
        lines = self._call("squeue", "--noheader", *words).splitlines()
        return [SlurmJob.parse(line) for line in lines if line.count("|") >= 7]

    def submit(self, words: list[str], script: str, variables: dict[str, str]) -> str:
        """Submits a Slurm job. Returns its id. Raises SlurmRefused if Slurm refuses the submission,
        and SlurmAway if Slurm does not answer.

        Args:
            words: sbatch's arguments.
            script: the batch script, which sbatch reads from stdin.
            variables: environment variables for sbatch.
        """
        return self._call("sbatch", *words, given=script, variables=variables).strip()

    def cancel(self, name: str) -> None:
        """Ends all of this user's Slurm jobs with this name."""
        self._call("scancel", f"--user={os.getuid()}", f"--name={name}")

    def _call(
        self, program: str, *words: str, given: str = "", variables: dict[str, str] | None = None
    ) -> str:
        try:
            done = subprocess.run(
                [program, *words],
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_SECONDS,
                check=False,
                env=self._environment | (variables or {}),
            )
        except subprocess.TimeoutExpired as error:
            problem = f"{program} has not answered for {TIMEOUT_SECONDS:g} s"
            raise SlurmAway(f"Slurm is away: {problem}") from error
        if done.returncode == 0:
            return done.stdout
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        if program != "sbatch" or any(word in said for word in _AWAY):
            raise SlurmAway(f"Slurm is away: {said}")
        raise SlurmRefused(said)


class SlurmExecutor(EngineExecutor):
    """An `Executor`."""

    engine, jobs, away = "Slurm", "Slurm jobs", SlurmAway

    def __init__(self, settings: Settings, entry: str, stop: Stop, spool: Spool) -> None:
        """Raises InvalidInput if TANDEM_SLURM_ARGS can't be used, or Slurm's programs are
        missing."""
        super().__init__(settings, entry, stop, spool)
        self.slurm, self.batch = Slurm(), Batch(settings, os.environ)
        # Maps a Slurm job's name to the monotonic time until which the Slurm job may end by itself.
        self._finishing: dict[str, float] = {}
        self.devices += " under Slurm"

    def find(self, job: Job) -> SlurmJob | None:
        """The Slurm job of the job's current attempt."""
        found = self.ask(partial(self.slurm.jobs, self.batch.name(job)))
        return min(found, key=lambda one: one.ended, default=None)

    def lets_finish(self, job: Job) -> None:
        """Records that the agents of the job's current attempt are done. The attempt's Slurm job
        then has FINISH_SECONDS to end by itself."""
        self._finishing[self.batch.name(job)] = time.monotonic() + FINISH_SECONDS

    def _sweep(self) -> None:
        running = self._spool.jobs.index.running()
        names = {self.batch.name(self._spool.jobs.get(key.id)[1]) for key in running}
        now = time.monotonic()
        for name, end in list(self._finishing.items()):  # copied, as other threads add entries
            if end > now:
                names.add(name)
            else:
                del self._finishing[name]
        for one in self.ask(self.slurm.jobs):
            if one.name.startswith(self.batch.prefix) and one.name not in names and not one.ended:
                log.warning("cancelling a Slurm job that no running job has", job=one.name)
                self.ask(partial(self.slurm.cancel, one.name))

    def adopts(self, attempt: Attempt, /) -> bool:
        """As in `Executor`. Raises SlurmAway while Slurm does not answer."""
        if not super().adopts(attempt):
            return False
        return self.find(self._spool.jobs.get(attempt.job)[1]) is not None

    def start(self, order: Order) -> "SlurmExecution":
        execution = SlurmExecution(order, self._settings, self._plan, self._stop, self)
        execution.start()
        return execution


class SlurmExecution(EngineExecution):
    """An `Execution`."""

    def __init__(
        self,
        order: Order,
        settings: Settings,
        plan: AgentOrder,
        stop: Stop,
        executor: SlurmExecutor,
    ) -> None:
        super().__init__(order, settings, plan, stop)
        self._executor, self._slurm, self._batch = executor, executor.slurm, executor.batch
        self._engine: Waiting | Running | Ended = Waiting("Slurm")
        self._seen: SlurmJob | None = None
        self._submitted = False
        self._next_ask = 0.0
        self._ended_since: float | None = None
        self._unexplained_since: float | None = None

    def _ask_engine(self) -> Waiting | Running | Ended:
        now = time.monotonic()
        if isinstance(self._engine, Ended) or now < self._next_ask:
            return self._engine
        self._next_ask = now + POLL_SECONDS
        try:
            self._engine = self._read(now)
        except SlurmAway as error:
            # While Slurm does not answer, a running attempt keeps its last known state. Heartbeats
            # show whether the attempt's ranks still run.
            self._next_ask = time.monotonic() + AWAY_POLL_SECONDS
            if not isinstance(self._engine, Running):
                self._engine = Waiting(str(error))
        except SlurmRefused as refusal:
            if _LIMIT in str(refusal):
                self._next_ask = time.monotonic() + AWAY_POLL_SECONDS
                self._engine = Waiting(f"Slurm: {refusal}")
            else:
                message = f"Slurm refuses the job: {refusal}"
                self._engine = Ended(1, JobError(type="launch_failed", message=message))
        return self._engine

    def _read(self, now: float) -> Waiting | Running | Ended:
        found = self._look_at_job()
        if found is None and not self._submitted:
            return self._submit()
        state = Ended(1, self._gone()) if found is None else self._told(found)
        if not isinstance(state, Ended):
            self._ended_since = None
            return state
        self._ended_since = self._ended_since or now
        never_ran = found is not None and not found.nodes
        return state if never_ran or now - self._ended_since >= SETTLE_SECONDS else Running()

    def _look_at_job(self) -> SlurmJob | None:
        found = self._executor.find(self._order.job)
        if found is not None:
            # If `_submitted` is False, an earlier runner submitted the Slurm job, or the answer to
            # the submission got lost.
            if not self._submitted:
                self._order.say(f"found Slurm job {found.id}")
            self._seen, self._submitted = found, True
        return found

    def _submit(self) -> Waiting:
        """Submits the Slurm job. If the answer to a submission gets lost, the Slurm job is found by
        its name."""
        batch, order = self._batch, self._order
        made = self._executor.ask(
            lambda: self._slurm.submit(
                batch.words(order.job, order.files), batch.script(order.job), batch.exported()
            )
        )
        self._submitted = True
        order.say(f"submitted Slurm job {made.partition(';')[0]}")
        return Waiting(f"Slurm: job {made.partition(';')[0]} is submitted")

    def _told(self, found: SlurmJob) -> Waiting | Running | Ended:
        printed = last_lines(output_path(self._order.files), lines=10) if found.ended else ""
        return read(found, began=bool(self._beats), printed=printed)

    def _gone(self) -> JobError:
        message = f"{self._seen or 'its Slurm job'} is not known to Slurm any more"
        return JobError(type="job_deleted", message=message, retriable=True)

    def _lacks(self, _host: int) -> str:
        return str(self._seen) if self._seen is not None else ""

    def _explained(self, ended: Ended, now: float) -> Ended | None:
        self._unexplained_since = self._unexplained_since or now
        if now < self._next_ask:
            return None
        self._next_ask = now + POLL_SECONDS
        waited = now - self._unexplained_since
        try:
            found = self._look_at_job()
        except (TandemError, OSError):
            return ended if waited > EXPLAIN_SECONDS else None
        state = Ended(1, self._gone()) if found is None else self._told(found)
        if isinstance(state, Ended):
            return state if state.error is not None else ended
        return ended if waited > EXPLAIN_SECONDS else None

    def _stop_engine(self) -> None:
        self._cancel()

    def _kill_engine(self) -> None:
        """Lets the Slurm job end by itself if all agents have ended, and cancels the Slurm job if
        an agent has not ended. Slurm kills processes that do not end. The ranks on lost nodes get
        no signal and may continue. `tandem.spool.fence` keeps ranks on lost nodes from changing the
        run."""
        if len(self._ends) == self._plan.hosts:
            # The cluster's accounting would count a cancelled Slurm job as failed.
            self._executor.lets_finish(self._order.job)
        else:
            self._cancel()

    def _cancel(self) -> None:
        if self._seen is not None and self._seen.ended:
            return
        try:
            self._executor.ask(partial(self._slurm.cancel, self._batch.name(self._order.job)))
        except SlurmAway as error:
            # `wait_until_free` cancels the Slurm job before the next attempt.
            log.warning("can't cancel the Slurm job now", error=error)
