"""A real runner process on a spool of its own, with ranks that misbehave on demand (`fake_rank`)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, Job, LoraShape, PackedData, RunSpec, SFTJob
from tandem.system import processes

HERE = Path(__file__).parent


class Stack:
    """`launch`: torchrun or fork. Everything it started is gone after `close`."""

    def __init__(
        self, root: Path, launch: str, ranks: int = 1, entry: str = "fake_rank", log: Path | None = None
    ) -> None:
        self.spool = Spool.create(root)
        self.log = log or root / "runner.log"
        self._entry = entry
        self.launch = launch
        self.environment = os.environ | {
            "TANDEM_ROOT": str(root), "TANDEM_LAUNCH": launch, "TANDEM_TRAINER_RANKS": str(ranks),
            "TANDEM_DEVICE": "cpu", "TANDEM_HEARTBEAT_SECONDS": "0.5", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start a runner, like a container does."""
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "tandem.trainer.runner", self._entry]
            runner = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self._processes.append(runner)
        return runner

    @property
    def runner(self) -> subprocess.Popen[bytes]:
        return self._processes[-1]

    def run(self, name: str = "run") -> str:
        spec = RunSpec(name=name, base_model="none", lora=LoraShape(rank=1), created=time.time())
        self.spool.runs.create(spec, lambda directory: (directory / "weights").write_text("0"))
        return name

    def submit(self, run: str, *, deadline: float = 120, stall: float = 60, attempts: int = 2, **labels: object) -> str:
        """One job; `labels` are the rank's orders."""

        def make(job_id: str, base_step: int, directory: Path) -> SFTJob:
            (directory / "tokens").write_text("data")
            data = PackedData(path="", num_rows=1, sequence_length=8, num_items=1, num_tokens=2, num_unshared_tokens=2,
                              num_trajectories=1, num_groups=1)  # fmt: skip
            return SFTJob(
                id=job_id, run=run, base_step=base_step, created=time.time(), fingerprint="f", data=data,
                deadline_seconds=deadline, stall_seconds=stall, max_attempts=attempts,
                labels={key: str(value) for key, value in labels.items()},
            )  # fmt: skip

        job, _ = self.spool.queue.submit(make, run=run, job_id=None, fingerprint="f", base_step=None)
        return job.spec.id

    def wait(self, job_id: str, timeout: float = 120) -> tuple[str, Job]:
        """The job's terminal state; fails when there is none within `timeout` seconds."""
        self.until(lambda: self.spool.jobs.get(job_id)[0] in TERMINAL, timeout, f"job {job_id} to end")
        state, job = self.spool.jobs.get(job_id)
        assert job.result is not None
        return state, job

    def ended(self, name: str, **order: object) -> tuple[str, str, Job]:
        """A new run and one job of it, with these orders, run to its end: its id, state and record."""
        self.run(name)
        job_id = self.submit(name, **order)
        return (job_id, *self.wait(job_id))

    def until(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"waited {timeout} s for {what}\n{self.log.read_text()}"
            time.sleep(0.05)

    def until_beating(self, job_id: str, attempt: int = 1, ranks: int = 1, timeout: float = 60) -> None:
        """Wait until all ranks of an attempt have sent a heartbeat."""
        work = self.spool.paths.work_dir(job_id, attempt)
        self.until(lambda: all((work / f"beat.{rank}").exists() for rank in range(ranks)), timeout, "heartbeats")

    def kinds(self, job_id: str) -> list[str]:
        return [event.type for event in self.spool.events.read(job_id)]

    def job_log(self, job_id: str) -> str:
        return self.spool.paths.log_file(job_id).read_text()

    def children(self) -> list[processes.Process]:
        """Living descendants of the runner."""
        return [process for process in processes.descendants(self.runner.pid) if not process.zombie]

    def marked(self) -> list[processes.Process]:
        """Everything this spool's runners ever started that still lives, whoever is its parent."""
        status = self.spool.root.stat()
        return processes.marked("TANDEM_RUNNER_OF", f"{status.st_dev}:{status.st_ino}")

    def stop(self, timeout: float = 40) -> int:
        self.runner.send_signal(signal.SIGTERM)
        return self.runner.wait(timeout)

    def close(self) -> None:
        for runner in self._processes:
            if runner.poll() is None:
                runner.kill()
                runner.wait(10)
        processes.kill_all(self.marked, timeout=10)


def read_lease_pids(stack: Stack, job_id: str) -> list[int]:
    path = stack.spool.root / "jobs/leases" / f"{job_id}.json"
    return [rank["pid"] for rank in json.loads(path.read_text())["ranks"]]
