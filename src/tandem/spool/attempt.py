"""One attempt to run a job, and its files on the volume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.errors import Conflict
from tandem.spool import Spool, fence, fs
from tandem.spool.schema import Beat, EventType


@dataclass(frozen=True)
class Attempt:
    """One attempt to run a job. Runner, launcher and ranks get the paths of the attempt's files
    from an `Attempt`.

    The attempt's files are in the directory `work`. The directory `work` is created when the job is
    claimed, and removed when the attempt ends.
    """

    spool: Spool
    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job}/{self.number}"

    @property
    def work(self) -> Path:
        return self.spool.paths.work_dir(self.job, self.number)

    def log(self, rank: int) -> Path:
        """The file with a rank's stdout and stderr."""
        return self.work / f"rank.{rank}.log"

    def beat(self, rank: int) -> Path:
        """The file with a rank's heartbeat, a `Beat`."""
        return self.work / f"beat.{rank}"

    def error(self, rank: int) -> Path:
        """The file with the `JobError` of a rank that raised an error."""
        return self.work / f"error.{rank}.json"

    @property
    def left(self) -> Path:
        """The file that rank 0 writes when the ranks of a session's job end normally, after the
        job's last checkpoint."""
        return self.work / "left"

    @property
    def staged(self) -> Path:
        """The directory that the ranks fill with the next checkpoint before it is committed."""
        return self.work / f"checkpoint-{self.number}"

    @property
    def staged_model(self) -> Path:
        """The directory that the ranks fill with the merged model before it is committed."""
        return self.work / f"merged-{self.number}"

    @property
    def meeting(self) -> Path:
        """The file through which ranks and vLLM's workers find each other to exchange whole
        weights."""
        return self.work / "meeting"

    def event(self, kind: EventType, **data: Any) -> None:
        """Appends an event of this attempt to the job's events. Raises Conflict if the attempt was
        ended."""
        with self.spool.job_lock(self.job):
            self.check()
            self.spool.events.append(self.job, kind, attempt=self.number, **data)

    def check(self) -> None:
        """Raises Conflict if the attempt was ended, because an ended attempt must change neither
        the run nor the job."""
        located = self.spool.jobs.locate(self.job)
        current = (
            located is not None
            and located[0] == "running"
            and located[1].result is None
            and located[1].attempt == self.number
        )
        if not current or not fs.exists(self.work) or fs.exists(fence.mark(self.work)):
            raise Conflict(f"attempt {self.number} of job {self.job!r} was ended", field="attempt")

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank whose heartbeat can be read."""
        beats: dict[int, Beat] = {}
        for rank, path in sorted(self._of_ranks("beat").items()):
            if (beat := fs.read_undamaged(path, Beat, sure=False)) is not None:
                beats[rank] = beat
        return beats

    def errors(self) -> dict[int, Path]:
        """The error files that exist, by rank."""
        return self._of_ranks("error")

    def _of_ranks(self, kind: Literal["beat", "error"]) -> dict[int, Path]:
        paths = {
            path.name.removeprefix(f"{kind}.").removesuffix(".json"): path
            for path in self.work.glob(f"{kind}.*")
        }
        return {int(rank): path for rank, path in paths.items() if rank.isdigit()}

    def remove_staged(self) -> None:
        """Removes the files of an ended attempt that were not committed.

        The removal makes space for the record of the attempt's end, because staged files may have
        filled the volume. Committed files are not affected, because the commit has moved them out
        of the attempt's directory.
        """
        fence.take_staged(self.work)
