"""A real runner with the API server, the Job controller and the kubelet of the tests. The pods of
the runner's Jobs are real agents on this machine."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agent.agent_stack import AgentStack
from executor.nodes import Nodes
from executor.releases import install, release
from helm.kubernetes_api import ApiServer, Object

SETTINGS = (
    "TANDEM_ROOT",
    "TANDEM_HEARTBEAT_SECONDS",
    "TANDEM_HOST_ADDRESS",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "TANDEM_LAUNCH",
)
"""Variables that containers on a cluster get by their image and their mounts, and that a test gives
to all containers."""


class KubernetesStack(AgentStack):
    def __init__(self, root: Path, hosts: int = 2, entry: str = "fake_rank", **more: str) -> None:
        super().__init__(root, hosts, hosts, entry)
        self._opened = ExitStack()
        rendered = release(hosts, queue="research")
        self.api = self._opened.enter_context(ApiServer(kueue=True))
        (directory := root / "cluster").mkdir()
        nodes = Nodes(self.api, directory, {"PATH": os.environ["PATH"]})
        self.nodes = self._opened.enter_context(nodes)
        own = {name: self.environment[name] for name in SETTINGS} | more
        self.nodes.overrides |= own
        variables = install(self.api, rendered, directory) | own
        outside = {k: v for k, v in self.environment.items() if not k.startswith("TANDEM_")}
        self.environment = outside | variables

    def jobs(self) -> list[Object]:
        return self.api.objects("Job")

    def names(self) -> list[str]:
        return [job["metadata"]["name"] for job in self.jobs()]

    def failed(self, name: str) -> bool:
        """Whether the Job has the condition Failed."""
        found = [job for job in self.jobs() if job["metadata"]["name"] == name]
        conditions = [c for job in found for c in job["status"].get("conditions", [])]
        return any(c["type"] == "Failed" and c["status"] == "True" for c in conditions)

    def delete_jobs(self) -> None:
        """Deletes all Jobs as `kubectl delete jobs --all --cascade=foreground` does."""
        for name in self.names():
            path = f"/apis/batch/v1/namespaces/ns/jobs/{name}"
            self.api.answer("DELETE", f"{path}?propagationPolicy=Foreground", b"")

    def until_phase(self, words: str) -> None:
        """Waits until a lease records the reason for which its job waits."""

        def found() -> bool:
            leases = [self.spool.leases.get(key.id) for key in self.spool.jobs.index.running()]
            return any(lease is not None and words in lease.phase for lease in leases)

        self.until(found, f"phase {words!r}")

    def until_empty(self) -> None:
        """Waits until no Job, no pod and no process of a pod is left."""
        self.until(
            lambda: not (self.jobs() or self.nodes.pods() or self.nodes.left()), "no Job", 60
        )

    def counted(self, job_id: str) -> list[tuple[Any, bool]]:
        """(type of the error, whether the attempt counts) of each attempt that was requeued."""
        events = self.spool.events.read(job_id)
        return [
            (event.data["error"]["type"], event.data["counts"])
            for event in events
            if event.type == "requeued"
        ]

    def close(self) -> None:
        super().close()
        self._opened.close()
        for path in sorted((self.spool.root / "cluster").glob("*.log")):
            print(f"--- {path.name}\n{path.read_text()}")
