"""Attempts on a Kubernetes cluster. Each attempt is a Kubernetes Job, and each of the Job's pods
runs the agent of one host. The runner has no GPU. Tandem requests no GPU for training while it has
no Kubernetes Job.

The cluster places the pods, with or without Kueue. A Job's name is made from the attempt. A
restarted runner finds an attempt's Job by its name, and never makes a second Job for the attempt.
"""

import time
from contextlib import suppress
from functools import partial

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError
from tandem.system.logs import Log
from tandem.trainer.agent.hosts import DONE, TAKE_SECONDS, AgentOrder, Meeting
from tandem.trainer.executor import Ended, Order, Running, Waiting
from tandem.trainer.executor.agents import EngineExecution, EngineExecutor
from tandem.trainer.executor.cluster import Cluster, ClusterAway, ClusterRefused
from tandem.trainer.executor.job_state import JobStates, Seen, all_run, index_of, lacks
from tandem.trainer.executor.lingering import LingeringJobs
from tandem.trainer.executor.manifest import LINGERS, RUN, JobTemplate, Object, is_of
from tandem.trainer.stop import Stop

log = Log("runner")

POLL_SECONDS = 1.0
AWAY_POLL_SECONDS = 5.0
"""Seconds between two calls while the API server does not answer. This is longer than POLL_SECONDS,
because each call may take `cluster.TIMEOUT_SECONDS`."""
QUOTA_POLL_SECONDS = 10.0
_RIGHTS = (
    ("create", "batch", "jobs"),
    ("get", "batch", "jobs"),
    ("list", "batch", "jobs"),
    ("delete", "batch", "jobs"),
    ("list", "", "pods"),
    ("list", "", "events"),
)


class KubernetesExecutor(EngineExecutor):
    """An `Executor`."""

    engine, jobs, away = "the API server", "Jobs", ClusterAway

    def __init__(self, settings: Settings, entry: str, stop: Stop, spool: Spool) -> None:
        """Asks the API server whether the runner has the rights that it needs. Raises InvalidInput
        if the runner lacks a right, or if the chart has not made the template."""
        super().__init__(settings, entry, stop, spool)
        self._template = JobTemplate(
            settings.job_template,
            settings.trainer_hosts,
            settings.start_seconds,
            settings.linger_seconds,
        )
        self._cluster = Cluster(self._template.namespace)
        self._lingering = LingeringJobs()
        self._swept = False
        self._owner: str | None = None
        self.devices = f"Jobs of {self.devices} in namespace {self._cluster.namespace}"
        stop.retry("ask the API server for the runner's rights", self._check, until="it answers")

    def _check(self) -> None:
        cluster, template = self._cluster, self._template

        def check() -> None:
            for right in _RIGHTS:
                cluster.check_right(*right)
            if (owner := template.owner) is not None:
                cluster.check_right("get", "apps", "statefulsets", owner)
                self._owner = cluster.uid_of_set(owner)
            if (queue := template.queue) is not None:
                cluster.check_right("list", "kueue.x-k8s.io", "workloads")
                cluster.check_kueue(queue)

        self.ask(check)

    @property
    def queued(self) -> bool:
        """Whether Kueue admits the Jobs."""
        return self._template.queue is not None

    def _sweep(self) -> None:
        names = set()
        for key in self._spool.jobs.index.running():
            job = self._spool.jobs.get(key.id)[1]
            names |= {
                self._template.name(job),
                self._taken(Attempt(self._spool, key.id, job.attempt)),
            }
        # The names of lingering Jobs are read after the running jobs. A Job is added to the
        # lingering Jobs before its training job ends, so no Job is missed.
        names |= self._lingering.names
        for made in self.ask(lambda: self._cluster.jobs(self._template.labels)):
            metadata = made["metadata"]
            name, about = metadata["name"], metadata.get("annotations") or {}
            if name in names or metadata.get("deletionTimestamp"):
                continue
            if about.get(LINGERS) == self._template.lingers and not self._swept:
                log.info("found a Job whose pods may have stayed", job=name)
                self._lingering.add(name, about.get(RUN, ""), self._settings.linger_seconds)
                continue
            log.warning("deleting a Job that no running job has", job=name)
            self.ask(partial(self._cluster.delete, name))
        self._swept = True

    def rest(self) -> None:
        while (name := self._lingering.take_late()) is not None:
            log.info("deleting a Job whose pods stayed and got no attempt", job=name)
            self.delete(name)

    def delete(self, name: str) -> None:
        """Deletes a Job. Never raises an error."""
        try:
            self.ask(lambda: self._cluster.delete(name))
        except (ClusterAway, ClusterRefused) as error:
            # `wait_until_free` deletes the Job before the next attempt.
            log.warning("can't delete the Job now", job=name, error=error)
        self._lingering.forget(name)

    def lingers(self, name: str, run: str, seconds: float) -> None:
        """Records that the Job's pods stay for another attempt."""
        log.info("the pods stay for another attempt", job=name, seconds=seconds)
        self._lingering.add(name, run, seconds)

    def adopts(self, attempt: Attempt, /) -> bool:
        """As in `Executor`. Raises ClusterAway while the API server does not answer."""
        if not super().adopts(attempt):
            return False
        job = self._spool.jobs.get(attempt.job)[1]
        taken = self._taken(attempt)
        made = self.ask(lambda: self._cluster.job(taken or self._template.name(job)))
        if made is None or "deletionTimestamp" in made["metadata"]:
            return False
        return bool(taken) or is_of(made, job)

    @staticmethod
    def _taken(attempt: Attempt) -> str:
        """The name of the lingering Job that serves the attempt; empty if there is none."""
        order = Meeting(attempt).order()
        return "" if order is None else order.pods.rpartition("/")[2]

    def _take(self, made: Object, run: str) -> str:
        """The name of a lingering Job that can serve the attempt in place of the new Job `made`;
        empty if there is none. A lingering Job that can't serve the attempt is deleted, because it
        would only occupy GPUs that the attempt needs."""
        while (name := self._lingering.take(run)) is not None:
            with suppress(ClusterAway, ClusterRefused):
                seen = Seen(self.ask(partial(self._cluster.job, name)))
                seen.pods = self.ask(partial(self._cluster.pods, name))
                if all_run(seen, self._settings.trainer_hosts) and _life(seen.job) >= _life(made):
                    return name
            self.delete(name)
        return ""

    def _served(self, attempt: Attempt) -> bool:
        """Whether a pod began the attempt while an earlier runner ran."""
        meeting = Meeting(attempt)
        hosts = range(self._settings.trainer_hosts)
        return (
            self._stop.retry("look for tickets", lambda: any(map(meeting.has_ticket, hosts)))
            or False
        )

    def start(self, order: Order) -> "KubernetesExecution":
        made = self._template.fill(order.job, self._owner)
        plan = self._stop.retry("look for the order", lambda: self._order(order, made))
        plan = plan or self._plan
        execution = KubernetesExecution(
            order, self._settings, plan, self._stop, self, self._cluster
        )
        execution.make = made
        ran = bool(plan.pods) or self._served(order.files)
        execution.states = JobStates(self._template.grace_seconds, ran)
        execution.start()
        return execution

    def _order(self, order: Order, made: Object) -> AgentOrder:
        """The order that an earlier runner wrote, or a new order."""
        if (known := Meeting(order.files).order()) is not None:
            return known
        name = self._take(made, order.job.spec.run)
        pods = self._template.pods(name) if name else ""
        return self._plan.model_copy(update={"pods": pods})


class KubernetesExecution(EngineExecution):
    """An `Execution`."""

    make: Object
    states: JobStates

    def __init__(
        self,
        order: Order,
        settings: Settings,
        plan: AgentOrder,
        stop: Stop,
        executor: KubernetesExecutor,
        cluster: Cluster,
    ) -> None:
        super().__init__(order, settings, plan, stop)
        self._executor, self._cluster = executor, cluster
        self._made = bool(plan.pods)
        self._given = 0.0
        self._engine: Waiting | Running | Ended = Waiting("the API server")
        self._seen = Seen(job={})
        self._next_ask = 0.0

    @property
    def _name(self) -> str:
        name: str = self._plan.pods.rpartition("/")[2] or self.make["metadata"]["name"]
        return name

    def _start_engine(self) -> None:
        self._given = time.monotonic()
        if self._made:
            self._order.say(f"goes to Job {self._name}, whose pods stayed after their last attempt")

    def _ask_engine(self) -> Waiting | Running | Ended:
        now = time.monotonic()
        if isinstance(self._engine, Ended) or now < self._next_ask:
            return self._engine
        self._next_ask = now + POLL_SECONDS
        try:
            self._engine = self._read(now) if self._made else self._create()
        except (ClusterAway, ClusterRefused) as error:
            # While the API server does not answer, a running attempt keeps its last known state.
            # Heartbeats show whether the attempt's ranks still run.
            self._next_ask = time.monotonic() + AWAY_POLL_SECONDS
            if not isinstance(self._engine, Running):
                self._engine = Waiting(str(error))
        return self._engine

    def _create(self) -> Waiting | Ended:
        """Creates the Job. If an earlier request created the Job and its answer got lost, finds the
        Job."""
        try:
            self._executor.ask(lambda: self._cluster.create(self.make))
        except ClusterRefused as refusal:
            if refusal.status == 409:
                return self._adopt()
            if refusal.status == 403 and "denied the request" not in str(refusal):
                # The API server refuses the Job because of a quota, or because the account has lost
                # a right.
                self._next_ask = time.monotonic() + QUOTA_POLL_SECONDS
                return Waiting(str(refusal))
            message = f"the cluster refuses the Job: {refusal}"
            return Ended(1, JobError(type="launch_failed", message=message))
        self._made = True
        self._order.say(f"created Job {self._name}")
        return Waiting("its Job has no pod yet")

    def _adopt(self) -> Waiting | Ended:
        found = self._executor.ask(lambda: self._cluster.job(self._name))
        if found is None:  # the Job was deleted between the two calls
            return Waiting(f"Job {self._name} to be made")
        if not is_of(found, self._order.job):
            message = f"there is a Job {self._name} already, and it is not this attempt's"
            return Ended(1, JobError(type="launch_failed", message=message, retriable=True))
        self._made = True
        self._order.say(f"found Job {self._name}")
        return Waiting("its Job's pods")

    def _read(self, now: float) -> Waiting | Running | Ended:
        self._look_at_job()
        state = self.states.read(self._seen, now)
        late = now - self._given > TAKE_SECONDS and len(self._beats) < self._plan.hosts
        if self._plan.pods and (state == Ended(DONE) or (late and not isinstance(state, Ended))):
            message = f"the pods of Job {self._name} had stayed, but did not take the attempt"
            return Ended(1, JobError(type="preempted", message=message, retriable=True))
        return state

    def _look_at_job(self) -> None:
        cluster, ask = self._cluster, self._executor.ask
        seen = Seen(ask(lambda: cluster.job(self._name)))
        if seen.job is not None:
            seen.pods = ask(lambda: cluster.pods(self._name))
            uid = str(seen.job["metadata"]["uid"])
            if seen.job["spec"].get("suspend") and self._executor.queued:
                seen.workload = ask(lambda: cluster.workload(uid))
            elif not seen.pods:
                seen.events = ask(lambda: cluster.events(self._name))
        self._seen = seen

    def _lacks(self, host: int) -> str:
        for pod in self._seen.pods:
            if index_of(pod) == host:
                return f"pod {pod['metadata']['name']} {lacks(pod)}"
        return ""

    def _explained(self, ended: Ended, _now: float) -> Ended:
        try:
            self._look_at_job()
        except (TandemError, OSError):
            return ended
        self.states.ran = True
        state = self.states.read(self._seen, time.monotonic())
        if isinstance(state, Ended) and state.error is not None:
            return state
        if (found := self.states.why_failed(self._seen)) is not None and found.error is not None:
            return found
        if ended.error is not None and ended.error.type == "preempted":
            # The Job reports no disruption, and the Job's queue still admits the Job.
            update = {
                "type": "job_deleted",
                "message": f"{ended.error.message}: its pod was deleted",
            }
            return Ended(1, ended.error.model_copy(update=update))
        return ended

    def _stop_engine(self) -> None:
        self._executor.delete(self._name)

    def _kill_engine(self) -> None:
        """Lets the pods stay if the agents of all hosts have agreed to stay. Deletes the Job if an
        agent has not agreed to stay. Pods on a lost node may run long after their Job's deletion.
        The fence (`spool/fence.py`) keeps pods on a lost node from changing the run."""
        lingers = min((end.lingers for end in self._ends.values()), default=0.0)
        if lingers and len(self._ends) == self._plan.hosts:
            self._executor.lingers(self._name, self._order.job.spec.run, lingers)
        else:
            self._executor.delete(self._name)


def _life(job: Object | None) -> int:
    """The time that a Job's pods may live, in seconds."""
    seconds: int = (job or {})["spec"]["template"]["spec"]["activeDeadlineSeconds"]
    return seconds
