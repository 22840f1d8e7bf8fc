"""Agents that serve a single attempt, as in pods and under Slurm, report how the attempt ended."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.agent_stack import AgentStack
from tandem.config import Settings
from tandem.spool import fence
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job
from tandem.system import processes
from tandem.trainer.agent.hosts import DONE, FAILED, FENCED, STOPPED, UNUSABLE, Meeting
from tandem.trainer.executor import Order
from tandem.trainer.executor.hosts import HostsExecutor
from tandem.trainer.stop import Stop
from waiting import alive

ORPHAN_SECONDS = 6


class Attempts:
    """Claimed jobs of one host, each with an agent of its own."""

    def __init__(self, root: Path) -> None:
        self.stack = AgentStack(root, hosts=1, ranks=1)
        self.stack.log.touch()  # the test has no runner that writes this log
        self.jobs: dict[str, Job] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, root: Path | None = None, **orders: str) -> None:
        """Starts a job and its agent. `root`: the path at which the agent finds the volume."""
        spool = self.stack.spool
        job_id = self.stack.submit(self.stack.run(name), **orders)
        job = spool.queue.claim("test")
        assert job is not None
        assert job.spec.id == job_id
        attempt = Attempt(spool, job_id, 1)
        orphan = ORPHAN_SECONDS if name in ("cut-off", "orphaned") else 900
        settings = Settings(executor="hosts", device="cpu", orphan_seconds=orphan)
        order = Order(job, attempt, lambda: None, lambda _: None, lambda *_: None)
        HostsExecutor(settings, "fake_rank", Stop()).start(order)
        command = [sys.executable, "-m", "tandem.trainer.agent", "--host=0", "--hosts=1"]
        environment = self.stack.environment | {"TANDEM_ROOT": str(root or spool.root)}
        self.jobs[name] = job
        with (spool.root / f"{name}.log").open("wb") as log:
            self.agents[name] = subprocess.Popen(
                [*command, f"--job={job_id}", "--attempt=1"],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def attempt(self, name: str) -> Attempt:
        return Attempt(self.stack.spool, self.jobs[name].spec.id, 1)

    def meeting(self, name: str) -> Meeting:
        return Meeting(self.attempt(name))

    def beat(self, names: list[str]) -> bool:
        """Renew the leases, as a runner does. Returns whether the ranks of all jobs write
        heartbeats."""
        for name in names:
            self.stack.spool.leases.write(self.jobs[name], "test", "running")
        return all(self.attempt(name).beat(0).exists() for name in names)

    def ranks(self, name: str) -> list[int]:
        found = processes.descendants(self.agents[name].pid)
        return [process.pid for process in found if not process.zombie]

    def close(self) -> None:
        for name, agent in self.agents.items():
            agent.kill()
            agent.wait(30)
            print(f"--- {name}\n{(self.stack.spool.root / f'{name}.log').read_text()}")
        self.stack.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A second mount of the volume, and the process that serves it."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and the right to mount")
    root, mount = tmp_path / "spool", tmp_path / "seen"
    root.mkdir()
    mount.mkdir()
    server = subprocess.Popen(["bindfs", "-f", root, mount])
    try:
        while not os.path.ismount(mount):
            assert server.poll() is None
            time.sleep(0.05)
        yield mount, server
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", mount], check=True)
        server.wait(30)


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    attempts = Attempts(tmp_path / "spool")
    try:
        yield attempts
    finally:
        attempts.close()


@pytest.mark.slow
def test_the_exit_status_says_how_an_attempt_ended(
    mounted: tuple[Path, subprocess.Popen[bytes]], attempts: Attempts
) -> None:
    mount, server = mounted
    attempts.start("done")
    attempts.start("failed", do="die")
    for name in ("stopped", "fenced", "orphaned"):
        attempts.start(name, do="wait")
    attempts.start("cut-off", mount, do="wait")
    living = [name for name, job in attempts.jobs.items() if job.spec.labels.get("do") == "wait"]
    attempts.stack.until(lambda: attempts.beat(living), "heartbeats of all ranks")
    ranks = {name: attempts.ranks(name) for name in living}
    assert all(len(pids) >= 3 for pids in ranks.values())  # fork server, leader and rank

    server.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    attempts.agents["stopped"].terminate()
    fence.end(attempts.attempt("fenced").work)
    wanted = {
        "done": DONE,
        "failed": FAILED,
        "stopped": STOPPED,
        "orphaned": FENCED,
        "fenced": FENCED,
        "cut-off": UNUSABLE,
    }
    assert {name: attempts.agents[name].wait(60) for name in wanted} == wanted
    assert time.monotonic() - begin > ORPHAN_SECONDS - 1
    # A rank that waits for the frozen volume dies shortly after its agent has ended.
    attempts.stack.until(
        lambda: not any(alive(pid) for pids in ranks.values() for pid in pids), "all ranks' ends"
    )
    assert not attempts.attempt("fenced").work.exists()
    ends = {name: attempts.meeting(name).end(0) for name in wanted.keys() - {"fenced", "cut-off"}}
    assert {name: end and end.status for name, end in ends.items()} == {
        name: wanted[name] for name in ends
    }
    errors = {name: end and end.error and end.error.type for name, end in ends.items()}
    assert errors == {
        "done": None,
        "failed": None,
        "stopped": "preempted",
        "orphaned": "runner_lost",
    }
    assert attempts.meeting("cut-off").end(0) is None
