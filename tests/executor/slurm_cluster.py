"""A real Slurm on this machine, of several nodes: munged, slurmctld, and a slurmd for each node.
The Slurm programs use no cgroups and only this user's files."""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from free_ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "scontrol")
NODES = ("node0", "node1")
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

CONF = """\
ClusterName=tandem
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={base}/munge.sock
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=5
MessageTimeout=10
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=graceful Nodes=ALL PriorityTier=1 GraceTime=30 MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    def __init__(self, base: Path) -> None:
        self.base, self.conf = base, base / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {"SLURM_CONF": str(self.conf)}
        self._environment["PATH"] += f":{SYSTEM_PATH}"

    def start(self) -> None:
        base, ports = self.base, free_ports(1 + len(NODES))
        user = pwd.getpwuid(os.getuid()).pw_name
        host = socket.gethostname()
        lines = [CONF.format(host=host, port=ports[0], user=user, base=base)]
        for node, port in zip(NODES, ports[1:], strict=True):
            where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"NodeName={node} {where} CPUs=1 State=UNKNOWN\n")
        self.conf.write_text("".join(lines))
        key = base / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in ("state", *NODES):
            (base / name).mkdir()
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={base}/munge.sock",
            f"--pid-file={base}/munged.pid",
            f"--seed-file={base}/munged.seed",
            f"--log-file={base}/munged.log",
        )
        self._until((base / "munge.sock").exists, "munged")
        self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._until(lambda: self.states() == ["idle"] * len(NODES), "idle nodes")

    def _start(self, *command: str) -> None:
        with (self.base / f"{command[0]}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
            )

    def _until(self, condition: object, awaited: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, f"waited {timeout} s for {awaited}: {self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.base.glob("*.log")))

    def run(self, *command: str) -> str:
        """The output of a Slurm program; an empty string if the program fails."""
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "-o", "%t").split()

    def jobs(self, prefix: str = "") -> list[tuple[str, str]]:
        """Names and states of all Slurm jobs, including ended ones."""
        lines = self.run("squeue", "--noheader", "--states=all", "-o", "%j %T").splitlines()
        found = [(name, state) for name, _, state in (line.partition(" ") for line in lines)]
        return [one for one in found if one[0].startswith(prefix)]

    def submit_urgent(self) -> None:
        """Submits a Slurm job that preempts the Slurm jobs of other partitions."""
        script = ["--nodes=1", "--wrap=sleep 1", "--output=/dev/null"]
        self.run("sbatch", "--partition=urgent", "--job-name=urgent", *script)

    def update_node(self, node: str, state: str) -> None:
        reason = [] if state == "resume" else ["reason=maintenance"]
        self.run("scontrol", "update", f"nodename={node}", f"state={state}", *reason)

    def clear(self) -> None:
        """Cancels all Slurm jobs and waits until the nodes are idle."""
        self.run("scancel", f"--user={os.getuid()}")
        for node in NODES:
            self.update_node(node, "resume")
        self._until(lambda: self.states() == ["idle"] * len(NODES), "idle nodes")

    def close(self) -> None:
        self.run("scancel", f"--user={os.getuid()}")
        with suppress(AssertionError):
            self._until(lambda: not self.run("squeue", "--noheader"), "the end of jobs", 20)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        print(self.logs())


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    found = f"{os.environ['PATH']}:{SYSTEM_PATH}"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=found) is None]:
        pytest.skip(f"no {' '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    # A socket's path may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        cluster = SlurmCluster(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
