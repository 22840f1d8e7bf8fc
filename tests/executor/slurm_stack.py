"""A real runner with TANDEM_EXECUTOR=slurm. Slurm starts the runner's agents."""

from pathlib import Path
from typing import Any

from agent.agent_stack import AgentStack
from executor.slurm_cluster import SlurmCluster

SECRET = "not-for-the-agents"


class SlurmStack(AgentStack):
    def __init__(self, cluster: SlurmCluster, root: Path, **more: str) -> None:
        variables = {"TANDEM_EXECUTOR": "slurm", "SLURM_CONF": str(cluster.conf)}
        super().__init__(root, **variables, **more)
        self.environment["TANDEM_ADMIN_TOKEN"] = SECRET

    def phase(self, job_id: str) -> str:
        lease = self.spool.leases.get(job_id)
        return "" if lease is None else lease.phase

    def until_phase(self, job_id: str, words: str) -> None:
        self.until(lambda: words in self.phase(job_id), f"phase {words!r}")

    def requeues(self, job_id: str) -> list[tuple[Any, bool]]:
        """(type of the error, whether the attempt counts) of each attempt that was requeued."""
        events = self.spool.events.read(job_id)
        return [
            (event.data["error"]["type"], event.data["counts"])
            for event in events
            if event.type == "requeued"
        ]
