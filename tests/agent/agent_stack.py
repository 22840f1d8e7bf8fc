"""A real runner with TANDEM_EXECUTOR=hosts, and real agents. Each agent may be in a network
namespace of its own."""

import signal
import subprocess
import sys
from pathlib import Path

from runner.runner_stack import Stack
from spool import spool_tools
from tandem.spool.attempt import Attempt
from tandem.system import processes
from tandem.trainer.agent.hosts import Meeting


class AgentStack(Stack):
    """`hosts`: the number of hosts. `prefixes`: for each host's index, the words that precede the
    host's command, such as `ip netns exec a`."""

    def __init__(
        self,
        root: Path,
        hosts: int = 2,
        ranks: int = 2,
        entry: str = "fake_rank",
        **variables: str,
    ) -> None:
        super().__init__(root, "fork", ranks, entry)
        self.hosts = hosts
        self.environment |= {
            "TANDEM_EXECUTOR": "hosts",
            "TANDEM_TRAINER_HOSTS": str(hosts),
            "TANDEM_HOST_ADDRESS": "127.0.0.1",
        } | variables
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.prefixes: dict[int, list[str]] = {}

    def run(self, name: str = "run") -> str:
        """Creates the run `name` and the files of its base model on the spool. Returns the name."""
        model = self.spool.root / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        spec = spool_tools.run_spec(name).model_copy(update={"base_model": "model"})
        self.spool.runs.create(spec, lambda directory: (directory / "weights").write_text("0"))
        return name

    def agent_log(self, host: int) -> Path:
        return self.spool.root / f"agent.{host}.log"

    def start_agent(self, host: int, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start the agent of a host. An agent without `arguments` serves one attempt after another
        (`--follow`)."""
        command = [sys.executable, "-m", "tandem", "rank-agent", *(arguments or ["--follow"])]
        with self.agent_log(host).open("ab") as log:
            agent = subprocess.Popen(
                [*self.prefixes.get(host, []), *command],
                env=self.environment | {"TANDEM_HOST_INDEX": str(host)} | variables,
                stdout=log,
                stderr=log,
            )
        self._processes.append(agent)
        return agent

    def start_agents(self) -> None:
        for host in range(self.hosts):
            self.agents[host] = self.start_agent(host)

    def start(self) -> subprocess.Popen[bytes]:
        self._runner = super().start()
        return self._runner

    @property
    def runner(self) -> subprocess.Popen[bytes]:
        return self._runner

    def _refused(self) -> bool:
        return hasattr(self, "_runner") and super()._refused()

    def hosts_dir(self, job_id: str, attempt: int = 1) -> Path:
        return self.spool.paths.work_dir(job_id, attempt) / "hosts"

    def meeting(self, job_id: str, attempt: int = 1) -> Meeting:
        return Meeting(Attempt(self.spool, job_id, attempt))

    def addresses(self, job_id: str, attempt: int = 1) -> tuple[str, ...]:
        """The hosts' addresses, which the hosts recorded for this attempt. The result is an empty
        tuple while the record of any host is missing."""
        meeting = self.meeting(job_id, attempt)
        records = [meeting.record(host) for host in range(self.hosts)]
        there = [record for record in records if record is not None]
        return tuple(record.address for record in there) if len(there) == self.hosts else ()

    def signal_host(self, host: int, number: signal.Signals) -> None:
        """Send the signal to all processes of a host."""
        agent = processes.read_process(self.agents[host].pid)
        assert agent is not None
        for process in [agent, *processes.descendants(agent.pid)]:
            processes.send(process, number)

    def close(self) -> None:
        for host in self.agents:
            if self.agents[host].poll() is None:
                self.signal_host(host, signal.SIGCONT)
                self.signal_host(host, signal.SIGKILL)
        super().close()
        for host in range(self.hosts):
            if self.agent_log(host).exists():
                print(f"--- agent {host}\n{self.agent_log(host).read_text()}")
