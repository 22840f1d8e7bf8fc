"""A release of the chart on a cluster in memory with one node on a Docker engine."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from compose_stack import TAG
from helm import charts
from helm.cluster import Cluster
from helm.kubelet import Kubelet
from tandem.client import Tandem

# With this name the chart's Service is `tandem-controller`, whose variable would be the setting TANDEM_CONTROLLER_PORT.
RELEASE, NAMESPACE = "tandem", "ml"
UID = 12345
RUN = "live"
EXAMPLES = [
    {"messages": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": answer}]}
    for answer in ("yes", "no")
]


class Live:
    """A release on a cluster with one node."""

    def __init__(self, cluster: Cluster, node: Kubelet) -> None:
        self.cluster, self.node = cluster, node
        self.keys = {name: secrets.token_hex(32) for name in ("api_key", "admin_token")}
        self.values = charts.load_values(charts.CHART / "values-cpu.yaml")
        self.set("image", tag=TAG if TAG != "0.1.0" else "")
        self.set("podSecurity", runAsUser=UID)
        self.set("data", keep=True)
        # Not the ports of the containers.
        self.set("controller", service={"port": 80})
        self.set("inference", service={"port": 81})
        cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        self.put_secret(**self.keys)

    def set(self, part: str, **values: Any) -> None:
        self.values[part] = self.values.get(part, {}) | values

    def put_secret(self, **keys: str) -> None:
        data = {name: base64.b64encode(value.encode()).decode() for name, value in keys.items()}
        meta = {"name": RELEASE, "namespace": NAMESPACE}
        self.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})

    def upgrade(self) -> None:
        charts.upgrade(self.cluster, self.values, release=RELEASE, namespace=NAMESPACE)

    @property
    def client(self) -> Tandem:
        # From outside the cluster, where its names mean nothing.
        return Tandem(f"http://{self.node.pod('tandem-controller').address}:8080", self.keys["api_key"])

    def submit(self, epochs: int) -> str:
        job = self.client.train_sft(RUN, examples=EXAMPLES, packing={"sequence_length": 128},
                                    optimizer={"learning_rate": 1e-4, "epochs": epochs})  # fmt: skip
        self.node.until("the job makes steps", lambda: self.types(job.spec.id).count("step"), 60)
        return job.spec.id

    def types(self, job: str) -> list[str]:
        return [event.type for event in self.client.job_events(job)]

    def pod(self, component: str) -> dict[str, Any]:
        """A component's pod, as the cluster has it."""
        name = "app.kubernetes.io/component"
        found = [p for p in self.cluster.objects("Pod", NAMESPACE) if p["metadata"]["labels"][name] == component]
        assert len(found) == 1, f"{component} has {len(found)} pods"
        return found[0]

    def status(self, component: str) -> dict[str, Any]:
        """Of the only container of a component's pod."""
        (status,) = self.pod(component)["status"]["containerStatuses"]
        return status
