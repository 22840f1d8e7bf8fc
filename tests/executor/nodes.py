"""The Job controller, the part of Kueue that concerns Jobs, and one node's kubelet, for the API
server of `helm.kubernetes_api`. The pods' containers are processes of this machine."""

import random
import signal
import string
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from helm.kubernetes_api import FOREGROUND, ApiServer, Object, now
from tandem.system import processes

TRACKING = "batch.kubernetes.io/job-tracking"
KUBELET = "kubelet"
"""Finalizers of a pod. TRACKING goes when the pod's Job has counted the pod, KUBELET when the pod's
containers have ended."""
MARK = "TEST_POD_UID"
TICK_SECONDS = 0.03


class Nodes:
    """A Job controller, Kueue and a node, which run until the end of the `with` block. A test sets
    an attribute to cause a fault, and from then on the fault affects the pods."""

    def __init__(self, api: ApiServer, logs: Path, environment: dict[str, str]) -> None:
        """`environment`: variables of all containers; the pods' own variables take precedence."""
        self.api, self._logs, self._environment = api, logs, environment
        self.command: list[str] | None = None
        """The command of all containers, in place of the pods' own commands."""
        self.full = ""
        """The reason why the scheduler finds no node; empty if it finds one."""
        self.no_image = False
        self.lost = False
        """The node is cut off: its processes go on, and the kubelet hears nothing."""
        self.kueue = False
        """Jobs with a queue are suspended until `admit`."""
        self.overrides: dict[str, str] = {}
        """Variables of all containers, whatever their pods say."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._asked: dict[str, float] = {}
        self._oom: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.problem: BaseException | None = None
        api.admission = self._queue

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        for uid in list(self._running):
            self._kill(uid)
        if self.problem is not None:
            raise self.problem

    def _work(self) -> None:
        while not self._done.wait(TICK_SECONDS):
            try:
                for job in self.api.objects("Job"):
                    self._sync_job(job["metadata"]["name"])
                for pod in self.api.objects("Pod"):
                    self.api.change("Pod", pod["metadata"]["name"], self._sync_pod)
            except BaseException as error:
                self.problem = error
                raise

    # ---- actions of a test

    def pods(self) -> list[Object]:
        return self.api.objects("Pod")

    def left(self) -> list[processes.Process]:
        """The living processes of the pods' containers."""
        return [p for uid in list(self._running) for p in processes.marked(MARK, uid)]

    def evict(self, reason: str = "EvictionByEvictionAPI", message: str = "drained") -> None:
        """Gives all pods the condition DisruptionTarget and deletes the pods."""

        def mark(pod: Object) -> None:
            condition = {"type": "DisruptionTarget", "status": "True"}
            _set(pod, condition | {"reason": reason, "message": message})
            pod["metadata"].setdefault("deletionTimestamp", now())

        for pod in self.pods():
            self.api.change("Pod", pod["metadata"]["name"], mark)

    def delete_pods(self) -> None:
        """Deletes all pods as `kubectl delete pod` does."""

        def mark(pod: Object) -> None:
            pod["metadata"].setdefault("deletionTimestamp", now())

        for pod in self.pods():
            self.api.change("Pod", pod["metadata"]["name"], mark)

    def kill_for_memory(self) -> None:
        for uid, process in list(self._running.items()):
            self._oom.add(uid)
            process.kill()

    def admit(self, job: str) -> None:
        """Admits the Job, as Kueue does when there is quota for the Job."""
        self.api.change("Job", job, lambda obj: obj["spec"].update(suspend=False))

    def preempt(self, job: str, message: str = "Preempted to accommodate a workload") -> None:
        """Takes the Job's quota away, as Kueue does when it preempts a Job."""
        self._say_workload(job, {"type": "Evicted", "status": "True", "message": message})
        self.api.change("Job", job, lambda obj: obj["spec"].update(suspend=True))

    def why_not_admitted(self, job: str, message: str) -> None:
        self._say_workload(job, {"type": "QuotaReserved", "status": "False", "message": message})

    def _say_workload(self, job: str, condition: dict[str, str]) -> None:
        (obj,) = (o for o in self.api.objects("Job") if o["metadata"]["name"] == job)
        uid = obj["metadata"]["uid"]
        name = f"job-{job}"
        if self.api.change("Workload", name, lambda found: _set(found, condition)) is None:
            workload: Object = {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "Workload",
                "metadata": {"name": name, "labels": {"kueue.x-k8s.io/job-uid": uid}},
                "spec": {},
            }
            _set(workload, condition)
            self.api.add(workload)

    def _queue(self, job: Object) -> str | None:
        if self.kueue and "kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {}):
            job["spec"]["suspend"] = True
        return None

    # ---- the Job controller

    def _sync_job(self, name: str) -> None:
        with self.api.changed:
            self.api.change("Job", name, self._control)

    def _control(self, job: Object) -> None:
        metadata, spec, status = job["metadata"], job["spec"], job.setdefault("status", {})
        pods = [
            pod
            for pod in self.pods()
            if pod["metadata"]["ownerReferences"][0]["uid"] == metadata["uid"]
        ]
        for pod in pods:
            if _terminal(pod):
                self._finish(pod, TRACKING)
        if metadata.get("deletionTimestamp"):
            self._delete(pods)
            if not pods and FOREGROUND in metadata.get("finalizers", []):
                metadata["finalizers"].remove(FOREGROUND)
            return
        if _is(job, "Complete") or _is(job, "Failed"):
            return
        if spec.get("suspend"):
            self._delete(pods)
            status.pop("startTime", None)
            _set(job, {"type": "Suspended", "status": "True", "reason": "JobSuspended"})
            return
        if _is(job, "Suspended"):
            _set(job, {"type": "Suspended", "status": "False", "reason": "JobResumed"})
        status.setdefault("startTime", now())
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        if failed or _is(job, "FailureTarget"):
            reason, message = self._failure(spec, failed)
            if not _is(job, "FailureTarget"):
                words = {"reason": reason, "message": message}
                _set(job, {"type": "FailureTarget", "status": "True", **words})
            self._delete([pod for pod in pods if not _terminal(pod)])
            if all(map(_terminal, pods)):
                _set(job, dict(_condition(job, "FailureTarget"), type="Failed"))
            return
        done = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        if len(done) == spec["completions"]:
            for kind in ("SuccessCriteriaMet", "Complete"):
                _set(job, {"type": kind, "status": "True", "reason": "CompletionsReached"})
            return
        # With podReplacementPolicy Failed, a terminating pod gets a successor only after its end.
        for index in sorted(set(range(spec["completions"])) - {_index(pod) for pod in pods}):
            self._make_pod(job, index)

    @staticmethod
    def _failure(spec: Object, failed: list[Object]) -> tuple[str, str]:
        for rule in spec.get("podFailurePolicy", {}).get("rules", []):
            for pod in failed:
                name = pod["metadata"]["name"]
                if "onPodConditions" in rule and _is(pod, "DisruptionTarget"):
                    message = f"Pod ns/{name} has condition DisruptionTarget matching FailJob rule"
                    return "PodFailurePolicy", message
                for one in pod["status"].get("containerStatuses", []):
                    code = one["state"].get("terminated", {}).get("exitCode", 0)
                    if "onExitCodes" in rule and code:
                        message = f"Container {one['name']} for pod ns/{name} failed with exit code"
                        return "PodFailurePolicy", f"{message} {code} matching FailJob rule"
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"

    def _make_pod(self, job: Object, index: int) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        most = self.api.quota.get("pods")
        if most is not None and len(self.pods()) >= most:
            if not any(e["reason"] == "FailedCreate" for e in self.api.objects("Event")):
                message = f'Error creating: pods "{name}-{index}" is forbidden: exceeded quota: of'
                self.api.event(job, "FailedCreate", f"{message}-gpus, limited: pods={most}")
            return
        metadata = template.get("metadata", {})
        number = str(index)
        ending = "".join(random.choices(string.ascii_lowercase, k=5))
        spec = template["spec"] | {"containers": [dict(c) for c in template["spec"]["containers"]]}
        for container in spec["containers"]:
            own = {"name": "JOB_COMPLETION_INDEX", "value": number}
            container["env"] = [*container.get("env", []), own]
        self.api.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-{index}-{ending}",
                    "labels": metadata.get("labels", {})
                    | {"batch.kubernetes.io/job-completion-index": number},
                    "annotations": metadata.get("annotations", {})
                    | {"batch.kubernetes.io/job-completion-index": number},
                    "finalizers": [TRACKING, KUBELET],
                    "ownerReferences": [
                        {
                            "apiVersion": "batch/v1",
                            "kind": "Job",
                            "name": name,
                            "uid": job["metadata"]["uid"],
                            "controller": True,
                        }
                    ],
                },
                "spec": spec,
                "status": {"phase": "Pending"},
            }
        )

    def _delete(self, pods: list[Object]) -> None:
        for pod in pods:
            if not pod["metadata"].get("deletionTimestamp"):
                name = pod["metadata"]["name"]
                stamp = {"deletionTimestamp": now()}
                self.api.change("Pod", name, lambda p, s=stamp: p["metadata"].update(s))

    def _finish(self, pod: Object, finalizer: str) -> None:
        def remove(pod: Object) -> None:
            with suppress(ValueError):
                pod["metadata"].get("finalizers", []).remove(finalizer)

        self.api.change("Pod", pod["metadata"]["name"], remove)

    # ---- the scheduler and the kubelet

    def _sync_pod(self, pod: Object) -> None:
        metadata, status = pod["metadata"], pod["status"]
        uid = metadata["uid"]
        if self.lost and status["phase"] != "Pending":
            return
        if _terminal(pod):
            if metadata.get("deletionTimestamp") and KUBELET in metadata["finalizers"]:
                metadata["finalizers"].remove(KUBELET)
        elif uid in self._running:
            self._sync_process(pod, uid)
        elif metadata.get("deletionTimestamp"):
            status["phase"] = "Failed"
        elif self.full:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            _set(pod, condition | {"message": self.full})
        else:
            _set(pod, {"type": "PodScheduled", "status": "True"})
            pod["spec"]["nodeName"] = "node-1"
            self._start(pod, uid)

    def _start(self, pod: Object, uid: str) -> None:
        (container,) = pod["spec"]["containers"]
        if self.no_image:
            words = {"reason": "ErrImagePull", "message": f"{container['image']}: not found"}
            _state(pod, container["name"], {"waiting": words})
            return
        command = self.command or container["args"]
        if command[0] == "tandem":
            command = [sys.executable, "-m", *command]
        own = {variable["name"]: variable["value"] for variable in container["env"]}
        environment = self._environment | own | self.overrides | {MARK: uid}
        with (self._logs / f"{pod['metadata']['name']}.log").open("wb") as log:
            self._running[uid] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        pod["status"] |= {"phase": "Running", "startTime": now()}
        self._asked[uid] = time.monotonic() + pod["spec"].get("activeDeadlineSeconds", 10**9)
        _state(pod, container["name"], {"running": {"startedAt": now()}})

    def _sync_process(self, pod: Object, uid: str) -> None:
        process, status = self._running[uid], pod["status"]
        code = process.poll()
        if code is not None:
            self._kill(uid)  # the processes that the agent has left behind end with the container
            reason = "Completed" if code == 0 else "Error"
            if uid in self._oom:
                reason = "OOMKilled"
            (container,) = pod["spec"]["containers"]
            number = code if code >= 0 else 128 - code
            ended = {"exitCode": number, "reason": reason, "finishedAt": now()}
            _state(pod, container["name"], {"terminated": ended})
            failed = code != 0 or status.get("reason") == "DeadlineExceeded"
            status["phase"] = "Failed" if failed else "Succeeded"
            return
        late = time.monotonic() > self._asked[uid]
        if pod["metadata"].get("deletionTimestamp") or late:
            if late:
                status["reason"] = "DeadlineExceeded"
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
            key = f"term {uid}"
            if key not in self._asked:
                self._asked[key] = time.monotonic() + grace
                process.send_signal(signal.SIGTERM)
            elif time.monotonic() > self._asked[key]:
                self._kill(uid)

    def _kill(self, uid: str) -> None:
        process = self._running[uid]
        processes.kill_all(lambda: processes.marked(MARK, uid), timeout=10)
        if process.poll() is None:
            process.kill()
        process.wait(30)


def _terminal(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def _condition(obj: Object, kind: str) -> Object:
    conditions: list[Object] = obj.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def _is(obj: Object, kind: str) -> bool:
    return _condition(obj, kind).get("status") == "True"


def _set(obj: Object, condition: dict[str, Any]) -> None:
    status = obj.setdefault("status", {})
    others = [c for c in status.get("conditions", []) if c["type"] != condition["type"]]
    status["conditions"] = [*others, condition]


def _state(pod: Object, container: str, state: Object) -> None:
    pod["status"]["containerStatuses"] = [{"name": container, "state": state}]
