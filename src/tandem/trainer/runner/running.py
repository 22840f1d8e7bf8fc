"""The jobs that a runner is running: one job in the runner's own thread, or several jobs, each in
its own thread."""

from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Self

from tandem.system import liveness
from tandem.trainer.executor import Executor
from tandem.trainer.runner.job import JobRun
from tandem.trainer.stop import Stop


class RunningJobs:
    """A context manager of the running jobs. The end of the `with` block waits until all attempts
    have ended or are left to the next runner.

    Attempts that can outlive their runner have one thread each. All other attempts run in the
    runner's own thread, because the kernel ends a child process when the thread that started it
    ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, most: int, executor: Executor, stop: Stop) -> None:
        """
        Args:
            most: the number of jobs that may run at once.
            executor: the executor, whose `stays` says whether attempts can outlive the runner.
            stop: the object whose `request` is called at the end of the `with` block.
        """
        self._most, self._threads, self._stop = most, executor.stays, stop
        self._running = dict[Future[float], JobRun]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stop.request()
        wait(self._running)
        if kind is None:
            self.ended()

    @property
    def full(self) -> bool:
        return len(self._running) >= self._most

    def start(self, run: JobRun) -> None:
        """Starts the job's attempt. More than `most` jobs may run, if an earlier runner left more
        attempts than `most`."""
        future = Future[float]()
        attempt = partial(liveness.settle, future, run.run)
        self._running[future] = run
        if self._threads:
            Thread(target=attempt, name=f"job {run.job.spec.id}").start()
        else:
            attempt()

    def ended(self) -> dict[str, float]:
        """The jobs whose attempts have ended since the last call, each with the seconds that the
        job should wait before its next attempt. Raises the error that ended an attempt's thread."""
        ended = [future for future in self._running if future.done()]
        return {self._running.pop(one).job.spec.id: one.result() for one in ended}
