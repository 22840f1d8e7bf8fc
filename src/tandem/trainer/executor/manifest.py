"""The Kubernetes Job of one attempt, from the template that the chart renders.

The template has all fields about nodes, images and volumes. This module fills in the name, the job,
and the time that the pods may live.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.errors import InvalidInput
from tandem.spool.schema import Job
from tandem.trainer.agent.hosts import TAKE_SECONDS

Object = dict[str, Any]

CONTAINER = "trainer"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SELECTED_BY = tuple(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component"))
"""The labels that all Jobs of a release have, and no other objects."""
JOB, ATTEMPT, RUN = "tandem/job", "tandem/attempt", "tandem/run"
LINGERS = "tandem/lingers"
"""Annotation of a Job whose pods may stay: the digest of its template."""
_MOST_SECONDS = 2**31 - 1


class JobTemplate:
    """The template of each attempt's Job. Raises InvalidInput if the chart has not made the
    template.

    Args:
        path: the template's file; None raises InvalidInput.
        hosts: the number of pods of an attempt; the template must have this number.
        start_seconds: the seconds within which all pods of an attempt must run.
        linger_seconds: the seconds for which the pods may stay after an attempt.
    """

    def __init__(
        self, path: Path | None, hosts: int, start_seconds: float, linger_seconds: float = 0.0
    ) -> None:
        self._start_seconds, self.linger_seconds = start_seconds, linger_seconds
        if path is None:
            raise self._wrong("not set: the chart's trainer.executor=kubernetes sets it")
        try:
            self._job: Object = json.loads(path.read_text())
            metadata, spec = self._job["metadata"], self._job["spec"]
            pod = spec["template"]
            containers = {container["name"] for container in pod["spec"]["containers"]}
            self.labels = {name: metadata["labels"][name] for name in SELECTED_BY}
            missing = self.labels.items() - pod["metadata"]["labels"].items()
        except OSError as error:
            raise self._wrong(f"can't read {path}: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{path} is not the chart's template of a Job: {error!r}"
            raise self._wrong(f"{problem}; upgrade the release") from error
        if missing or CONTAINER not in containers:
            lacks = ", ".join(name for name, _ in missing) or f"the container {CONTAINER}"
            raise self._wrong(f"the pods of {path} lack {lacks}; upgrade the release")
        if (spec.get("completions"), spec.get("parallelism")) != (hosts, hosts):
            raise InvalidInput(
                f"{hosts} pods, but {path} has completions={spec.get('completions')} and"
                f" parallelism={spec.get('parallelism')}; set trainer.hosts of the chart",
                field="TANDEM_TRAINER_HOSTS",
            )

    @staticmethod
    def _wrong(problem: str) -> InvalidInput:
        return InvalidInput(problem, field="TANDEM_JOB_TEMPLATE")

    @property
    def namespace(self) -> str | None:
        namespace: str | None = self._job["metadata"].get("namespace")
        return namespace

    @property
    def queue(self) -> str | None:
        """The Kueue queue that admits the Jobs; None without Kueue."""
        queue: str | None = self._job["metadata"]["labels"].get(QUEUE_LABEL)
        return queue

    @property
    def owner(self) -> str | None:
        """The name of the StatefulSet that owns the Jobs. Kubernetes deletes the Jobs when the
        StatefulSet is deleted."""
        owners = self._job["metadata"].get("ownerReferences") or [{}]
        name: str | None = owners[0].get("name")
        return name

    @property
    def grace_seconds(self) -> float:
        """The seconds between SIGTERM and SIGKILL of a pod."""
        return float(self._job["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30))

    def name(self, job: Job) -> str:
        """The name of the attempt's Job. No other attempt of any run has this name."""
        prefix: str = self._job["metadata"]["name"]
        return f"{prefix}-{_digest(job)}"

    def pods(self, name: str) -> str:
        """The Job `name` in the form of `AgentOrder.pods`: <namespace>/<name>."""
        return f"{self.namespace or ''}/{name}"

    @property
    def lingers(self) -> str:
        """The value of the annotation LINGERS of this template's Jobs. A Job with another value was
        made from another template, and can't serve this template's attempts."""
        text = json.dumps([self._job, self.linger_seconds], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fill(self, job: Job, owner_uid: str | None) -> Object:
        """The Kubernetes Job of the job's current attempt."""
        made = copy.deepcopy(self._job)
        metadata, spec = made["metadata"], made["spec"]
        pod = spec["template"]
        metadata["name"] = self.name(job)
        about = {
            JOB: job.spec.id,
            ATTEMPT: str(job.attempt),
            RUN: job.spec.run,
            "tandem/key": job.key.name,
        }
        if self.linger_seconds:
            about[LINGERS] = self.lingers
        for of in (metadata, pod["metadata"]):
            of["annotations"] = of.get("annotations", {}) | about
        if owner_uid is None:
            metadata.pop("ownerReferences", None)
        else:
            metadata["ownerReferences"][0]["uid"] = owner_uid
        # The kubelet ends the pod after `activeDeadlineSeconds`, even if the node can't be reached
        # any more.
        seconds = self._start_seconds + job.spec.deadline_seconds + self.grace_seconds
        # The last attempt of a lingering pod may begin up to start_seconds + linger_seconds +
        # TAKE_SECONDS after the pod's agent has started.
        if self.linger_seconds:
            seconds += self._start_seconds + self.linger_seconds + TAKE_SECONDS
        pod["spec"]["activeDeadlineSeconds"] = int(min(seconds, _MOST_SECONDS))
        (container,) = (c for c in pod["spec"]["containers"] if c["name"] == CONTAINER)
        agent = ("--job", job.spec.id, "--attempt", str(job.attempt))
        container["args"] = [*container["args"], *agent, "--hosts", str(spec["completions"])]
        if self.linger_seconds:
            stays = ("--linger", f"{self.linger_seconds:g}", "--pods", self.pods(metadata["name"]))
            container["args"] += stays
        return made


def is_of(made: Object, job: Job) -> bool:
    """Whether a Job in the cluster belongs to the job's current attempt."""
    about = made["metadata"].get("annotations") or {}
    return (about.get("tandem/key"), about.get(ATTEMPT)) == (job.key.name, str(job.attempt))


def _digest(job: Job) -> str:
    return hashlib.sha256(f"{job.key.name}/{job.attempt}".encode()).hexdigest()[:12]
