"""A real runner process on a spool of its own. The runner's ranks misbehave as a test orders
(`fake_rank`)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spool import spool_tools
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, Job
from tandem.system import processes

HERE = Path(__file__).parent


class Stack:
    """A spool and its runner. `launch`: the name of the runner's launcher. `close` ends all
    processes that the stack has started."""

    def __init__(self, root: Path, launch: str, ranks: int = 1, entry: str = "fake_rank") -> None:
        self.spool = Spool.create(root)
        self.log = root / "runner.log"
        self._entry = entry
        self._log_start = 0
        self.environment = os.environ | {
            "TANDEM_ROOT": str(root),
            "TANDEM_LAUNCH": launch,
            "TANDEM_TRAINER_RANKS": str(ranks),
            "TANDEM_DEVICE": "cpu",
            "TANDEM_HEARTBEAT_SECONDS": "0.5",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Starts a runner with the command that a container uses."""
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "tandem.trainer.runner", self._entry]
            runner = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self._processes.append(runner)
        return runner

    @property
    def runner(self) -> subprocess.Popen[bytes]:
        return self._processes[-1]

    def run(self, name: str = "run") -> str:
        self.spool.runs.create(
            spool_tools.run_spec(name), lambda directory: (directory / "weights").write_text("0")
        )
        return name

    def submit(
        self,
        run: str,
        *,
        deadline: float = 120,
        stall: float = 60,
        attempts: int = 2,
        **labels: object,
    ) -> str:
        """Submits a job whose labels are orders for its ranks. Returns the job's id."""
        limits = {"deadline_seconds": deadline, "stall_seconds": stall, "max_attempts": attempts}
        orders = {key: str(value) for key, value in labels.items()}
        return spool_tools.submit(self.spool, run=run, labels=orders, **limits).spec.id

    def wait(self, job_id: str, timeout: float = 240) -> tuple[str, Job]:
        """Waits for the job's end. Returns the job's terminal state and record. Fails if the job
        has not ended after `timeout` seconds."""
        self.until(
            lambda: self.spool.jobs.get(job_id)[0] in TERMINAL, f"job {job_id} to end", timeout
        )
        state, job = self.spool.jobs.get(job_id)
        assert job.result is not None
        return state, job

    def ended(self, name: str, **order: object) -> tuple[str, str, Job]:
        """Creates a run, submits a job to it and waits for the job's end. Returns the job's id,
        state and record."""
        self.run(name)
        job_id = self.submit(name, **order)
        return (job_id, *self.wait(job_id))

    def until[T](self, condition: Callable[[], T], awaited: str, timeout: float = 120) -> T:
        """Waits until `condition` returns a true value, and returns this value. Fails at once if
        the runner has ended with an error, because the condition would never become true."""
        end = time.monotonic() + timeout
        refused = False
        while not (answer := condition()):
            assert not refused, f"the runner ended before {awaited}\n{self.log.read_text()}"
            assert time.monotonic() < end, (
                f"waited {timeout} s for {awaited}\n{self.log.read_text()}"
            )
            refused = self._refused()
            time.sleep(0.05)
        return answer

    def _refused(self) -> bool:
        """Whether the newest runner has ended with an error. An end by a test's signal does not
        count as an error."""
        return bool(self._processes) and (self.runner.poll() or 0) > 0

    def until_logged(self, text: str) -> None:
        self.until(lambda: text in self.logged(), repr(text))

    def logged(self) -> str:
        """The text that runners have logged since the last call of `forget`."""
        return self.log.read_text()[self._log_start :]

    def forget(self) -> None:
        self._log_start = len(self.log.read_text()) if self.log.exists() else 0

    def until_beating(self, job_id: str, attempt: int = 1, ranks: int = 1) -> None:
        """Wait until all ranks of an attempt have written a heartbeat."""
        work = self.spool.paths.work_dir(job_id, attempt)
        self.until(
            lambda: all((work / f"beat.{rank}").exists() for rank in range(ranks)), "heartbeats"
        )

    def kinds(self, job_id: str) -> list[str]:
        return [event.type for event in self.spool.events.read(job_id)]

    def event(self, job_id: str, kind: str) -> dict:
        """The data of the job's first event of the type `kind`."""
        return next(event.data for event in self.spool.events.read(job_id) if event.type == kind)

    def job_log(self, job_id: str) -> str:
        with self.spool.paths.open_file(self.spool.paths.log_file, job_id) as file:
            return file.read().decode()

    def children(self) -> list[processes.Process]:
        """Living descendants of the runner."""
        return [process for process in processes.descendants(self.runner.pid) if not process.zombie]

    def pids(self) -> set[int]:
        return {process.pid for process in self.children()}

    def marked(self) -> list[processes.Process]:
        """Every living process that a runner of this spool has started, even if the process has
        another parent now."""
        status = self.spool.root.stat()
        return processes.marked("TANDEM_RUNNER_OF", f"{status.st_dev}:{status.st_ino}")

    def stop(self, timeout: float = 40) -> int:
        self.runner.send_signal(signal.SIGTERM)
        return self.runner.wait(timeout)

    def kill(self) -> None:
        """`kill -9` of the runner."""
        self.runner.kill()
        self.runner.wait(60)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(60)
        processes.kill_all(self.marked, timeout=10)
        print(self.log.read_text() if self.log.exists() else "the runner wrote no log")
