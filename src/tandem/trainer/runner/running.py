"""The jobs that a runner has going: one in its own thread, or several in a thread each."""

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
    """Ends with its block, when all attempts have ended or are left to the next runner.

    Attempts that outlive their runner have a thread each. Others are the runner's own children, and
    the kernel ends those with the thread that started them (PR_SET_PDEATHSIG).
    """

    def __init__(self, most: int, executor: Executor, stop: Stop) -> None:
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
        """Starts the job's attempt. More than `most` run if an earlier runner left more."""
        future = Future[float]()
        attempt = partial(liveness.settle, future, run.run)
        self._running[future] = run
        if self._threads:
            Thread(target=attempt, name=f"job {run.job.spec.id}").start()
        else:
            attempt()

    def ended(self) -> dict[str, float]:
        """The jobs whose attempts have ended since the last call, and how many seconds each should
        wait before its next one. Raises what ended an attempt's thread."""
        ended = [future for future in self._running if future.done()]
        return {self._running.pop(one).job.spec.id: one.result() for one in ended}
