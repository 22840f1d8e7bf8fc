"""Derives the state of an attempt from its Kubernetes Job, the Job's pods and Kueue's Workload."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.spool.schema import JobError
from tandem.trainer.agent.hosts import DONE, FAILED, STOPPED, UNUSABLE
from tandem.trainer.executor import Ended, Running, Waiting

Object = dict[str, Any]

IMAGE_SECONDS = 120.0
"""Seconds that a container may wait for its image, or for the ConfigMaps and Secrets that its
environment variables come from."""
SETTLE_SECONDS = 3.0
"""Seconds between the Job's end and the decision about it, because the agents' last records may
become visible later than the Job's end."""
LOST_SECONDS = 30.0
"""A pod that still exists this many seconds after its grace period counts as a pod on a lost
node."""

_CANT_START = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class Seen:
    """The API server's answers to one poll."""

    job: Object | None  # None: the Job is gone
    pods: list[Object] = field(default_factory=list)
    # Events about the Job; read only if the Job has no pods.
    events: list[Object] = field(default_factory=list)
    workload: Object | None = None  # Kueue's Workload; read only for a suspended Job


@dataclass
class JobStates:
    """Derives one attempt's state from the results of successive polls. All times are measured by
    the runner's own clock."""

    grace_seconds: float
    ran: bool = False
    """Whether a pod of the Job has run, possibly under an earlier runner."""

    def __post_init__(self) -> None:
        self._since: dict[str, float] = {}
        self._disrupted: Ended | None = None

    def read(self, seen: Seen, now: float) -> Waiting | Running | Ended:
        job = seen.job
        if job is None or job["metadata"].get("deletionTimestamp"):
            return Ended(1, _error("job_deleted", "somebody deleted its Kubernetes Job"))
        self.ran = self.ran or any(_has_run(pod) for pod in seen.pods)
        self._disrupted = _why_disrupted(seen.pods) or self._disrupted
        self._forget([str(pod["metadata"].get("uid")) for pod in seen.pods])
        if job["spec"].get("suspend"):
            why = _of_kueue(seen.workload)
            if self.ran:
                return Ended(1, _error("preempted", f"its Job was suspended again: {why}"))
            return Waiting(why)
        if (ended := self._ended(job, seen, now)) is not None:
            return ended
        for pod in seen.pods:
            if (error := self._cant_go_on(pod, now)) is not None:
                return Ended(1, error)
        if not seen.pods:
            return Waiting(_newest(seen.events) or "its Job has no pod yet")
        if any(_has_run(pod) for pod in seen.pods):
            return Running()
        return Waiting("; ".join(f"{_name(pod)} {lacks(pod)}" for pod in seen.pods))

    def _ended(self, job: Object, seen: Seen, now: float) -> Ended | None:
        """The attempt's end if the Job's own conditions say that the Job ended; None if not."""
        conditions = _true_conditions(job)
        end = conditions.get("Complete") or conditions.get("Failed")
        if end is None or now - self._since.setdefault("end", now) < SETTLE_SECONDS:
            return None
        if "Complete" in conditions:
            return Ended(DONE)
        return self.why_failed(seen) or Ended(
            1, _error("job_failed", f"its Job failed: {_words(end) or 'for no known reason'}")
        )

    def why_failed(self, seen: Seen) -> Ended | None:
        """The reason why the pods failed; None if neither a pod nor the Job reports a reason."""
        found = _why_failed(seen.pods)
        stopped = found is None or (found.error is not None and found.error.type == "job_deleted")
        return (self._disruption(seen.job) or found) if stopped else found

    def _disruption(self, job: Object | None) -> Ended | None:
        """The disruption of a pod that no longer exists, as an earlier poll has seen it. If no poll
        has seen it, the Job's message names it, because the Job's failure policy makes the Job fail
        after a disruption."""
        if self._disrupted is not None:
            return self._disrupted
        conditions = _true_conditions(job or {})
        words = _words(conditions.get("FailureTarget") or conditions.get("Failed") or {})
        return Ended(1, _error("preempted", words)) if "DisruptionTarget" in words else None

    def _cant_go_on(self, pod: Object, now: float) -> JobError | None:
        """The reason why a pod will never run (again), if the pod's Job does not report this
        reason."""
        uid, waiting = str(pod["metadata"].get("uid")), _waiting(pod)
        if waiting.get("reason") in _CANT_START:
            if now - self._since.setdefault(f"image {uid}", now) > IMAGE_SECONDS:
                return _error("launch_failed", f"{_name(pod)} can't start: {_words(waiting)}")
        else:
            self._since.pop(f"image {uid}", None)
        disruption = _disruption(pod)
        if disruption is None or _terminated(pod) is not None:
            return None
        bound = self.grace_seconds + LOST_SECONDS
        if now - self._since.setdefault(f"lost {uid}", now) > bound:
            node = pod["spec"].get("nodeName", "its node")
            message = f"{_name(pod)} does not end, {node} is lost: {_words(disruption)}"
            return _error("preempted", message)
        return None

    def _forget(self, uids: Sequence[str]) -> None:
        kept = ("end", *uids)
        self._since = {key: at for key, at in self._since.items() if key.endswith(kept)}


def _why_failed(pods: Sequence[Object]) -> Ended | None:
    """The reason why the pods of a failed Job failed; None if the pods don't report a reason. If
    several pods report a reason, returns the reason that caused the others: a disruption, else a
    failure of ranks, else a stopped pod."""
    if (disrupted := _why_disrupted(pods)) is not None:
        return disrupted
    ends = [(pod, end) for pod in pods if (end := _terminated(pod)) is not None]
    ends.sort(key=lambda found: found[1].get("finishedAt") or "")
    stopped: Ended | None = None
    for pod, end in ends:
        code, name = int(end.get("exitCode", 0)), _name(pod)
        if pod["status"].get("reason") == "DeadlineExceeded":
            message = f"{name} reached its activeDeadlineSeconds"
            return Ended(1, _error("deadline", message))
        if end.get("reason") == "OOMKilled":
            message = f"{name} was killed for its memory (OOMKilled); raise its limit"
            return Ended(1, _error("rank_crashed", message))
        if code == UNUSABLE:
            return Ended(1, _error("spool_unusable", f"{name}: the volume was unusable there"))
        if code == FAILED:
            return Ended(1)
        if code == STOPPED:
            message = f"{name} was stopped, and nobody says why: somebody deleted it"
            stopped = stopped or Ended(1, _error("job_deleted", message))
        elif code != DONE:
            message = f"{name} ended with status {code}: {_words(end) or 'see its log'}"
            kind = "preempted" if code == 76 else "host_lost"
            stopped = stopped or Ended(1, _error(kind, message))
    for pod in pods:
        if pod["status"].get("phase") == "Failed" and _terminated(pod) is None:
            return Ended(1, _error("launch_failed", f"{_name(pod)}: {_words(pod['status'])}"))
    return stopped


def all_run(seen: Seen, hosts: int) -> bool:
    """Whether all pods of the Job run and the Job has not ended. The agents of such a Job can wait
    for another attempt."""
    job = seen.job
    if job is None or job["metadata"].get("deletionTimestamp") or job["spec"].get("suspend"):
        return False
    if _true_conditions(job).keys() & {"Complete", "Failed", "FailureTarget"}:
        return False
    running = [
        pod
        for pod in seen.pods
        if any("running" in state for state in _states(pod))
        and _disruption(pod) is None
        and not pod["metadata"].get("deletionTimestamp")
    ]
    return len(running) == len(seen.pods) == hosts


def lacks(pod: Object) -> str:
    """A description of what a pod still needs before it can run."""
    status = pod.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"is Pending: {_words(scheduled)}"
    if waiting := _waiting(pod):
        return f"waits: {_words(waiting)}"
    return f"is {status.get('phase', 'Pending')}"


def index_of(pod: Object) -> int | None:
    """The number of the pod's host."""
    text = (pod["metadata"].get("annotations") or {}).get(INDEX, "")
    return int(text) if text.isdigit() else None


def _error(kind: str, message: str) -> JobError:
    return JobError(type=kind, message=message, retriable=True)


def _of_kueue(workload: Object | None) -> str:
    """The reason why Kueue does not admit the Job."""
    conditions = (workload or {}).get("status", {}).get("conditions") or []
    said = [
        condition["message"]
        for kind in ("Evicted", "QuotaReserved", "Admitted")
        for condition in conditions
        if condition["type"] == kind
        and (condition["status"] == "True") == (kind == "Evicted")
        and condition.get("message")
    ]
    return f"Kueue: {said[0]}" if said else "its Job is suspended; Kueue has not said why"


def _true_conditions(job: Object) -> dict[str, Object]:
    conditions = job.get("status", {}).get("conditions") or ()
    return {c["type"]: c for c in conditions if c["status"] == "True"}


def _why_disrupted(pods: Iterable[Object]) -> Ended | None:
    for pod in pods:
        if (disruption := _disruption(pod)) is not None:
            return Ended(1, _error("preempted", f"{_name(pod)}: {_words(disruption)}"))
    return None


def _disruption(pod: Object) -> Object | None:
    return _true_conditions(pod).get("DisruptionTarget")


def _states(pod: Object) -> list[Object]:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return [status.get("state") or {} for status in statuses]


def _waiting(pod: Object) -> Object:
    """The reason why a container or init container of the pod waits; empty if none waits."""
    status = pod.get("status", {})
    before = status.get("initContainerStatuses") or ()
    states = [one.get("state") or {} for one in before] + _states(pod)
    return next((state["waiting"] for state in states if state.get("waiting")), {})


def _terminated(pod: Object) -> Object | None:
    ended = [state["terminated"] for state in _states(pod) if state.get("terminated")]
    return max(ended, key=lambda end: int(end.get("exitCode", 0)), default=None)


def _has_run(pod: Object) -> bool:
    return any("running" in state or "terminated" in state for state in _states(pod))


def _newest(events: Sequence[Object]) -> str:
    """The newest warning about the Job."""
    warnings = [event for event in events if event.get("type") == "Warning"]
    return _words(warnings[-1]) if warnings else ""


def _words(said: Object) -> str:
    return ": ".join(filter(None, (said.get("reason"), said.get("message"))))


def _name(pod: Object) -> str:
    return f"pod {pod['metadata']['name']}"
