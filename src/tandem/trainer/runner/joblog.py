"""A job's log: `jobs/logs/<id>.log`, and the same lines on the runner's stdout for the container's log."""

from contextlib import suppress

from tandem.spool import Spool, fs
from tandem.spool.schema import Job
from tandem.system.logs import as_json, json_line
from tandem.system.tail import Tail, last_lines

_STDOUT = 1


class JobLog:
    """Collects the lines of all logs in an attempt's work directory, with the printing process in front:
    `[rank 0] ...`. The job goes on where a line can't be written."""

    def __init__(self, spool: Spool, job: Job, ranks: int) -> None:
        self._job, self._path = job.spec.id, spool.paths.log_file(job.spec.id)
        work = spool.paths.work_dir(job.spec.id, job.attempt)
        self._tails = {"launcher": Tail(work / "launcher.log")}
        self._tails |= {f"rank {rank}": Tail(work / f"rank.{rank}.log") for rank in range(ranks)}

    def collect(self, *, final: bool = False) -> None:
        """Copy what was printed since the last call. `final`: the processes are gone."""
        for name, tail in self._tails.items():
            if lines := tail.lines(final=final):
                self._write([f"[{name}] {line}" for line in lines])
            if final:
                tail.close()

    def say(self, text: str) -> None:
        """Add a line of the runner's own."""
        self._write([f"[runner] {text}"])

    def last_lines(self) -> str:
        return last_lines(self._path)

    def _write(self, lines: list[str]) -> None:
        shown = [
            json_line("info", "job", line, job=self._job) if as_json() else f"job {self._job} {line}" for line in lines
        ]
        with suppress(OSError):
            fs.write_all(_STDOUT, "".join(f"{line}\n" for line in shown).encode(errors="replace"))
        with suppress(OSError), self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
