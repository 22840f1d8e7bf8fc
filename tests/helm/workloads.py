"""The controllers of StatefulSets and Deployments of one pod, for the kubelet of the tests.

A StatefulSet's pod has the revision of the template it was made from. `RollingUpdate` deletes a pod of another revision
before it makes the new one, and (with `OrderedReady`, the default) only once the old one was ready: a pod that never
gets there is not replaced. `OnDelete` leaves it to whoever deletes the pod.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING

from helm.cluster_store import Object

if TYPE_CHECKING:
    from helm.kubelet import Kubelet

KINDS = ("StatefulSet", "Deployment")


def revision(workload: Object) -> str:
    """A word for the pod template's content."""
    content = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:10]


def new_pod(workload: Object, name: str) -> Object:
    """A pod of this workload's template."""
    template = copy.deepcopy(workload["spec"]["template"])
    meta = workload["metadata"]
    template["metadata"] |= {"name": name, "namespace": meta["namespace"], "ownerReferences": [
        {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": meta["name"], "uid": meta["uid"],
         "controller": True}
    ]}  # fmt: skip
    labels = template["metadata"].setdefault("labels", {})
    if workload["kind"] == "StatefulSet":
        labels |= {"controller-revision-hash": revision(workload), "statefulset.kubernetes.io/pod-name": name}
        template["spec"] |= {"hostname": name, "subdomain": workload["spec"]["serviceName"]}
    else:
        labels["pod-template-hash"] = revision(workload)
    return {"apiVersion": "v1", "kind": "Pod", **template}


def is_ready(pod: Object) -> bool:
    """Whether a pod's status says so."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def reconcile(kubelet: Kubelet) -> None:
    """One step of every workload towards what its spec says."""
    alive = set()
    # From the store itself: what was heard of may lack the pod that the last step made.
    now = kubelet.cluster.store.list(kubelet.cluster.kind({"apiVersion": "v1", "kind": "Pod"}))
    for workload in [w for kind in KINDS for w in kubelet.objects(kind)]:
        alive.add(workload["metadata"]["uid"])
        if workload["spec"].get("replicas", 1) != 1 or workload["spec"].get("volumeClaimTemplates"):
            raise NotImplementedError("a workload of other than one pod, or with claims of its own")
        selector = workload["spec"]["selector"]["matchLabels"].items()
        if not selector <= workload["spec"]["template"]["metadata"]["labels"].items():
            raise ValueError(f"{workload['metadata']['name']}: its selector doesn't select its pods")
        pods = [p for p in now if owner(p) == workload["metadata"]["uid"]]
        step = _statefulset if workload["kind"] == "StatefulSet" else _deployment
        step(kubelet, workload, pods)
        _post(kubelet, workload, pods)
    for pod in now:
        # What the garbage collector does.
        if owner(pod) is not None and owner(pod) not in alive:
            kubelet.cluster.delete(pod)


def owner(pod: Object) -> str | None:
    """The uid of the workload that made a pod."""
    return next((reference["uid"] for reference in pod["metadata"].get("ownerReferences", [])), None)


def _statefulset(kubelet: Kubelet, workload: Object, pods: list[Object]) -> None:
    name = f"{workload['metadata']['name']}-0"
    if not pods:
        # Never two of one name: the old one's containers end first.
        if not kubelet.runs(workload["metadata"]["namespace"], name):
            kubelet.cluster.put(new_pod(workload, name))
        return
    if workload["spec"].get("updateStrategy", {}).get("type", "RollingUpdate") == "OnDelete":
        return
    ordered = workload["spec"].get("podManagementPolicy", "OrderedReady") == "OrderedReady"
    if _stale(workload, pods[0]) and (is_ready(pods[0]) or not ordered):
        kubelet.cluster.delete(pods[0])


def _deployment(kubelet: Kubelet, workload: Object, pods: list[Object]) -> None:
    if workload["spec"]["strategy"] != {"type": "Recreate"}:
        raise NotImplementedError(f"a Deployment's strategy {workload['spec']['strategy']}")
    old = [pod for pod in pods if _stale(workload, pod)]
    for pod in old:
        kubelet.cluster.delete(pod)
    prefix = f"{workload['metadata']['name']}-"
    if not pods and not kubelet.runs(workload["metadata"]["namespace"], prefix):
        kubelet.cluster.put(new_pod(workload, f"{prefix}{revision(workload)}-{next(kubelet.numbers)}"))


def _stale(workload: Object, pod: Object) -> bool:
    label = "controller-revision-hash" if workload["kind"] == "StatefulSet" else "pod-template-hash"
    return pod["metadata"]["labels"][label] != revision(workload)


def _post(kubelet: Kubelet, workload: Object, pods: list[Object]) -> None:
    """The status, as Helm's `--wait` reads it."""
    ready = sum(map(is_ready, pods))
    updated = sum(not _stale(workload, pod) for pod in pods)
    now = revision(workload)
    status = {
        "observedGeneration": workload["metadata"]["generation"],
        "replicas": len(pods),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "updatedReplicas": updated,
    }
    if workload["kind"] == "StatefulSet":
        status |= {"updateRevision": now, "currentReplicas": len(pods)}
        status["currentRevision"] = pods[0]["metadata"]["labels"]["controller-revision-hash"] if pods else now
    else:
        progress = "NewReplicaSetAvailable" if ready and updated == len(pods) else "ReplicaSetUpdated"
        status["conditions"] = [
            {"type": "Available", "status": str(bool(ready)), "reason": "MinimumReplicas"},
            {"type": "Progressing", "status": "True", "reason": progress},
        ]
    if workload.get("status") != status:
        kubelet.post(workload, status)
