"""The executor's requests to the tests' API server, and the answers that the executor survives.
Pods are processes that only wait; test_kubernetes_stack.py has real agents.

TANDEM_TEST_KUBECONFIG names a kubeconfig file. If TANDEM_TEST_KUBECONFIG is set, the tests that use
the fixture `plane` run on the kubeconfig's control plane, in the namespace of the kubeconfig's
context. All other tests are skipped.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor.nodes import Nodes
from executor.releases import install, release
from helm.kubernetes_api import ApiServer, Object
from spool.spool_tools import spool_with_run, start
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError, JobResult
from tandem.trainer.agent.hosts import DONE, HostEnd, Meeting
from tandem.trainer.executor import Ended, Order, Running, Waiting, agents, job_state, kubernetes
from tandem.trainer.executor.job_state import index_of
from tandem.trainer.executor.kubernetes import KubernetesExecution, KubernetesExecutor
from tandem.trainer.stop import Stop

REAL = os.environ.get("TANDEM_TEST_KUBECONFIG")
scripted = pytest.mark.skipif(bool(REAL), reason="scripts what a control plane does")


class Runner:
    """A runner's executor, and a claimed job."""

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self.directory, self.variables = directory, variables
        self.spool = spool_with_run(directory / "spool")
        self.job = start(self.spool, "j")
        self.told: list[str] = []
        self.executor = self.make()

    def make(self) -> KubernetesExecutor:
        return KubernetesExecutor(Settings(), "fake_rank", Stop(), self.spool)

    @property
    def files(self) -> Attempt:
        return Attempt(self.spool, self.job.spec.id, self.job.attempt)

    def begin(self, executor: KubernetesExecutor | None = None) -> KubernetesExecution:
        def tell(kind: object, data: object) -> None:
            raise AssertionError("the executor tells no events by itself")

        order = Order(self.job, self.files, lambda: None, self.told.append, tell)
        return (executor or self.executor).start(order)


def until(
    execution: KubernetesExecution, state: type, words: str = ""
) -> Waiting | Running | Ended:
    """Polls the execution until its state has the type `state` and contains `words`. Returns the
    state."""
    end = time.monotonic() + 20
    found = execution.poll()
    while not isinstance(found, state) or words not in str(found):
        assert time.monotonic() < end, f"{found}, not {state.__name__} {words}"
        time.sleep(0.02)
        found = execution.poll()
    return found


@pytest.fixture
def quick(monkeypatch) -> None:
    for name in ("POLL_SECONDS", "AWAY_POLL_SECONDS", "QUOTA_POLL_SECONDS"):
        monkeypatch.setattr(kubernetes, name, 0.05)
    monkeypatch.setattr(job_state, "SETTLE_SECONDS", 0.2)


@pytest.fixture
def cluster(tmp_path, monkeypatch, quick) -> Iterator[SimpleNamespace]:
    """The `api`, the `nodes` and a `runner` of a release with a Kueue queue."""
    with ApiServer(kueue=True) as api, Nodes(api, tmp_path, dict(os.environ)) as nodes:
        nodes.command = ["sleep", "300"]
        variables = install(api, release(2, queue="research"), tmp_path)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield SimpleNamespace(api=api, nodes=nodes, runner=Runner(tmp_path, variables))


@pytest.fixture
def plane(tmp_path, monkeypatch, quick) -> Iterator[Runner]:
    """A runner whose Jobs have no owner and no queue, on the tests' control plane or a real one."""
    with ApiServer() as api, Nodes(api, tmp_path, dict(os.environ)) as nodes:
        nodes.command = ["sleep", "300"]
        variables = install(api, release(1), tmp_path)
        template = json.loads((tmp_path / "job.json").read_text())
        del template["metadata"]["ownerReferences"]
        if REAL:
            del template["metadata"]["namespace"]
            variables["KUBECONFIG"] = REAL
        (tmp_path / "job.json").write_text(json.dumps(template))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield Runner(tmp_path, variables)


def test_a_job_is_made_once_found_and_deleted_with_its_pods(plane):
    def there() -> list[str]:
        found = plane.executor._cluster.jobs(plane.executor._template.labels)
        return [job["metadata"]["name"] for job in found]

    execution = plane.begin()
    until(execution, Waiting, "(pod ")  # an earlier state has the reason "no pod yet"
    name = execution.make["metadata"]["name"]
    assert there() == [name]
    (pod,) = plane.executor._cluster.pods(name)
    assert index_of(pod) == 0
    second = plane.make()
    assert second.adopts(plane.files)
    until(plane.begin(second), Waiting, "pod")
    assert there() == [name]
    execution.kill()
    end = time.monotonic() + 150
    while there() or plane.executor._cluster.pods(name):
        assert time.monotonic() < end, "the Job and its pods stay"
        time.sleep(0.2)
    assert "job_deleted" in str(until(execution, Ended))


def test_a_job_that_the_server_finds_invalid_is_not_tried_again(plane):
    execution = plane.begin()
    execution.make["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    ended = until(execution, Ended)
    assert "restartPolicy" in str(ended)
    assert "retriable=False" in str(ended)


def jobs(cluster: SimpleNamespace) -> list[str]:
    return [job["metadata"]["name"] for job in cluster.api.objects("Job")]


def gone(cluster: SimpleNamespace) -> None:
    """Waits until no Job and no pod is left."""
    end = time.monotonic() + 20
    while cluster.api.objects("Job") or cluster.nodes.pods():
        assert time.monotonic() < end, (jobs(cluster), cluster.nodes.pods())
        time.sleep(0.05)


@scripted
def test_a_lost_answer_to_the_creation_makes_no_second_job(cluster):
    cluster.api.fail("POST", "jobs", "lost")
    execution = cluster.runner.begin()
    until(execution, Waiting, "host 0 of 2 has not arrived")
    (name,) = jobs(cluster)
    assert cluster.runner.told == [f"found Job {name}"]
    made = cluster.api.objects("Job")[0]
    (owner,) = made["metadata"]["ownerReferences"]
    (stateful,) = cluster.api.objects("StatefulSet")
    assert owner["uid"] == stateful["metadata"]["uid"]
    execution.kill()
    gone(cluster)


@scripted
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["cut", 500, 503, 429, 410])
def test_answers_that_fail_are_asked_for_again(cluster, how):
    cluster.nodes.full = "0/12 nodes are available"
    execution = cluster.runner.begin()
    for method, plural in (("POST", "jobs"), ("GET", "jobs"), ("GET", "pods")):
        cluster.api.fail(method, plural, how, times=3)
    until(execution, Waiting, "is Pending")
    cluster.nodes.full = ""
    until(execution, Waiting, "has not arrived (pod")
    cluster.api.fail("DELETE", "jobs", how)
    execution.kill()
    assert len(jobs(cluster)) == 1, "its deletion got no answer"
    error = JobError(type="preempted", message="for the test", retriable=True)
    cluster.runner.spool.queue.requeue(cluster.runner.job, error)
    cluster.runner.executor.wait_until_free()
    gone(cluster)


@scripted
def test_a_quota_of_jobs_is_waited_for(cluster):
    cluster.api.quota["count/jobs.batch"] = 0
    execution = cluster.runner.begin()
    until(execution, Waiting, "exceeded quota: of-jobs")
    cluster.api.quota.clear()
    until(execution, Waiting, "has not arrived")
    execution.kill()
    gone(cluster)


@scripted
def test_a_quota_of_pods_is_waited_for(cluster):
    cluster.api.quota["pods"] = 0
    execution = cluster.runner.begin()
    until(execution, Waiting, "FailedCreate: Error creating: pods")
    cluster.api.quota.clear()
    until(execution, Waiting, "has not arrived")
    execution.kill()
    gone(cluster)


@scripted
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (422, "the image is not allowed"),
        (400, "malformed"),
        (403, 'admission webhook "x" denied the request: no'),
    ],
)
def test_what_admission_refuses_is_not_tried_again(cluster, status, message):
    cluster.api.fail("POST", "jobs", status, message=message)
    ended = until(cluster.runner.begin(), Ended)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert (ended.error.type, ended.error.retriable) == ("launch_failed", False)
    assert message in ended.error.message
    assert jobs(cluster) == []


@scripted
def test_an_image_that_is_not_there(cluster, monkeypatch):
    monkeypatch.setattr(job_state, "IMAGE_SECONDS", 0.5)
    cluster.nodes.no_image = True
    execution = cluster.runner.begin()
    until(execution, Waiting, "ErrImagePull: tandem-trainer:0.1.0-cpu: not found")
    ended = until(execution, Ended, "launch_failed")
    assert "can't start: ErrImagePull" in str(ended)
    execution.kill()
    gone(cluster)


@scripted
def test_kueue_admits_preempts_and_admits_again(cluster):
    cluster.nodes.kueue = True
    execution = cluster.runner.begin()
    until(execution, Waiting, "Kueue has not said why")
    (name,) = jobs(cluster)
    cluster.nodes.why_not_admitted(name, "couldn't assign flavors to pod set main")
    until(execution, Waiting, "Kueue: couldn't assign flavors to pod set main")
    cluster.nodes.admit(name)
    until(execution, Waiting, "has not arrived")
    cluster.nodes.preempt(name)
    ended = until(execution, Ended, "preempted")
    assert "Kueue: Preempted to accommodate a workload" in str(ended)
    # Kueue could admit the same Job again, so the executor deletes the Job before the next attempt.
    execution.kill()
    gone(cluster)


@scripted
def test_hours_in_kueues_queue_do_not_count_as_the_hosts_time_to_arrive(cluster, monkeypatch):
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed, sleep=time.sleep)
    monkeypatch.setattr(agents, "time", clock)
    cluster.nodes.kueue = True
    execution = cluster.runner.begin()
    until(execution, Waiting, "Kueue has not said why")
    passed = 36_000
    for _ in range(3):
        passed += 1  # the runner polls five times a second
        assert "Kueue" in str(execution.poll())
    (name,) = jobs(cluster)
    cluster.nodes.admit(name)
    until(execution, Waiting, "has not arrived")
    passed += 901
    assert "not all hosts were there after 900 s" in str(until(execution, Ended))


@scripted
@pytest.mark.parametrize("began", [True, False])
def test_a_new_runner_finds_a_job_that_is_suspended(cluster, began):
    """Kueue may have preempted the Job while no runner ran. A host that has begun the attempt has
    already taken the host's only ticket for the attempt, so the attempt can't go on."""
    cluster.nodes.kueue = True
    execution = cluster.runner.begin()
    until(execution, Waiting, "Kueue has not said why")
    if began:
        assert Meeting(cluster.runner.files).take_ticket(1, "the pod's")
    again = cluster.runner.begin(cluster.runner.make())
    if began:
        assert "preempted" in str(until(again, Ended))
    else:
        until(again, Waiting, "Kueue has not said why")
    again.kill()
    gone(cluster)


@scripted
def test_a_job_that_somebody_deletes(cluster):
    execution = cluster.runner.begin()
    until(execution, Waiting, "has not arrived (pod")
    (name,) = jobs(cluster)
    cluster.runner.executor._cluster.delete(name)
    assert "job_deleted" in str(until(execution, Ended))
    execution.kill()
    gone(cluster)


@scripted
def test_memory_and_the_pods_own_deadline_are_told_apart(cluster):
    execution = cluster.runner.begin()
    until(execution, Waiting, "has not arrived (pod")
    cluster.nodes.kill_for_memory()
    assert "OOMKilled" in str(until(execution, Ended, "rank_crashed"))
    execution.kill()
    gone(cluster)
    late = cluster.runner.begin()
    late.make["spec"]["template"]["spec"]["activeDeadlineSeconds"] = 1
    late.make["metadata"]["name"] += "-late"
    assert "deadline" in str(until(late, Ended))
    late.kill()
    gone(cluster)


@scripted
def test_another_runner_finds_the_job_and_deletes_those_of_nobody(cluster):
    execution = cluster.runner.begin()
    until(execution, Waiting, "has not arrived")
    (name,) = jobs(cluster)
    stray = json.loads(json.dumps(execution.make))
    stray["metadata"]["name"] = "a-tandem-stray"
    cluster.api.add(stray)
    second = cluster.runner.make()
    assert second.adopts(cluster.runner.files)
    second.prepare()
    end = time.monotonic() + 10
    while jobs(cluster) != [name]:
        assert time.monotonic() < end, jobs(cluster)
        time.sleep(0.05)
    again = cluster.runner.begin(second)
    until(again, Waiting, "has not arrived")
    assert jobs(cluster) == [name], "one Job for one attempt"
    assert cluster.runner.told[-1] == f"found Job {name}"
    again.kill()
    gone(cluster)
    assert not second.adopts(cluster.runner.files), "its Job is gone"


@scripted
def test_a_job_of_an_old_release_goes_on_as_it_is(cluster):
    """The chart's template changes while the Job runs. The Job's labels and annotations still name
    the attempt."""
    execution = cluster.runner.begin()
    until(execution, Waiting, "has not arrived")
    made = image_of(cluster)
    path = Path(cluster.runner.variables["TANDEM_JOB_TEMPLATE"])
    template = json.loads(path.read_text())
    template["spec"]["template"]["spec"]["containers"][0]["image"] = "tandem-trainer:newer"
    path.write_text(json.dumps(template))
    second = cluster.runner.make()
    assert second.adopts(cluster.runner.files)
    second.prepare()
    again = cluster.runner.begin(second)
    until(again, Waiting, "has not arrived")
    assert again.make["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":newer")
    assert image_of(cluster) == made
    again.kill()
    gone(cluster)


@pytest.fixture
def stayed(cluster, monkeypatch) -> SimpleNamespace:
    """The `cluster`, with a Job that lingers after the first attempt of its job."""
    monkeypatch.setenv("TANDEM_LINGER_SECONDS", "300")
    cluster.runner.executor = cluster.runner.make()
    cluster.runner.executor.prepare()
    execution = cluster.runner.begin()
    until(execution, Waiting, "has not arrived")
    for host in range(2):
        execution._meeting.write(host, HostEnd(status=DONE, lingers=300.0))
    assert until(execution, Ended) == Ended()
    execution.kill()
    (cluster.name,) = jobs(cluster)
    next_attempt(cluster)
    return cluster


def is_going(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def next_attempt(cluster: SimpleNamespace, **limits: float) -> None:
    error = JobError(type="preempted", message="for the test", retriable=True)
    spool, job = cluster.runner.spool, cluster.runner.job
    if limits:
        spool.queue.finish(job, JobResult(state="cancelled", finished=0.0))
        cluster.runner.job = start(spool, "k", **limits)
    else:
        spool.queue.requeue(job, error)
        cluster.runner.job = spool.queue.claim("test")


@scripted
def test_pods_that_stayed_and_do_not_take_the_attempt_do_not_count(stayed, monkeypatch):
    monkeypatch.setattr(kubernetes, "TAKE_SECONDS", 0.5)
    stayed.runner.executor.wait_until_free()  # `wait_until_free` does not delete the Job
    execution = stayed.runner.begin()
    assert f"goes to Job {stayed.name}" in stayed.runner.told[-1]
    assert execution._meeting.order().pods == f"ns/{stayed.name}"
    stayed.runner.executor.wait_until_free()  # the Job stays
    ended = until(execution, Ended)
    assert "preempted" in str(ended)
    assert "had stayed, but did not take the attempt" in str(ended)
    execution.kill()
    gone(stayed)
    next_attempt(stayed)
    until(stayed.runner.begin(), Waiting, "has not arrived")
    assert jobs(stayed) != [stayed.name]


@scripted
def test_a_new_runner_adopts_an_attempt_in_pods_that_stayed(stayed):
    stayed.runner.begin()
    second = stayed.runner.make()
    assert second.adopts(stayed.runner.files)
    second.prepare()
    assert second._lingering.names == set(), "it has an attempt"
    again = stayed.runner.begin(second)
    until(again, Waiting, "has not arrived")
    assert jobs(stayed) == [stayed.name]
    # A preemption ends the attempt, because pods that Kueue starts again would serve the Job's
    # first attempt, which has ended.
    stayed.nodes.preempt(stayed.name)
    end = time.monotonic() + 20
    while stayed.nodes.pods():
        assert time.monotonic() < end
        time.sleep(0.05)
    third = stayed.runner.begin(stayed.runner.make())
    assert "preempted" in str(until(third, Ended))
    third.kill()
    gone(stayed)


@scripted
@pytest.mark.parametrize("why", ["longer", "another template", "another linger", "off"])
def test_pods_that_can_not_serve_the_attempt_go_before_its_own_are_made(stayed, why, monkeypatch):
    path = Path(stayed.runner.variables["TANDEM_JOB_TEMPLATE"])
    executor = stayed.runner.executor
    if why == "longer":  # the attempt's deadline is longer than the pods may live
        next_attempt(stayed, deadline_seconds=36_000)
    else:
        if why == "another template":
            made = json.loads(path.read_text())
            made["spec"]["template"]["spec"]["containers"][0]["image"] = "tandem-trainer:newer"
            path.write_text(json.dumps(made))
        seconds = {"another linger": "200", "off": "0"}.get(why, "300")
        monkeypatch.setenv("TANDEM_LINGER_SECONDS", seconds)
        executor = stayed.runner.make()
        executor.prepare()
    execution = stayed.runner.begin(executor)
    assert execution._meeting.order().pods == ""
    until(execution, Waiting, "has not arrived")
    made = stayed.api.objects("Job")
    goes_on = [job["metadata"]["name"] for job in made if not is_going(job)]
    assert goes_on == [execution.make["metadata"]["name"]]
    assert goes_on != [stayed.name]
    execution.kill()
    gone(stayed)


@scripted
def test_a_job_whose_deletion_is_lost_does_not_pass_for_one_that_stays(stayed):
    execution = stayed.runner.begin()
    until(execution, Waiting, "has not arrived")
    stayed.api.fail("DELETE", "jobs", 503)
    execution.kill()
    assert jobs(stayed) == [stayed.name]
    next_attempt(stayed)
    stayed.runner.executor.wait_until_free()
    gone(stayed)


@scripted
def test_two_attempts_at_once_take_two_jobs(stayed):
    lingering = stayed.runner.executor._lingering
    lingering.add("b", "left", 300.0)
    assert [lingering.take("left"), lingering.take("left")] == ["b", stayed.name]
    assert lingering.take("left") is None
    assert lingering.names == {"b", stayed.name}, "spared until their orders are written"
    lingering.add("b", "left", 0.0)
    assert lingering.take_late() == "b"
    assert lingering.take_late() is None


def image_of(cluster: SimpleNamespace) -> str:
    """The image of the pods of the Job. There must be exactly one Job."""
    (job,) = cluster.api.objects("Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    image: str = container["image"]
    return image


@scripted
def test_a_runner_that_waits_for_the_api_server_is_not_ready(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ALIVE_DIR", str(tmp_path))
    monkeypatch.setattr(agents, "REPORT_SECONDS", 0.3)
    execution = cluster.runner.begin()
    problem = tmp_path / "runner.problem"
    until(execution, Waiting, "has not arrived")
    with cluster.api.away():
        end = time.monotonic() + 10
        while not problem.exists():
            assert time.monotonic() < end
            state = execution.poll()
            assert "has not arrived" in str(state), "what is known stays"
            time.sleep(0.02)
        assert "no answer of the API server" in problem.read_text()
    end = time.monotonic() + 10
    while problem.exists():
        assert time.monotonic() < end
        execution.poll()
        time.sleep(0.02)
    execution.kill()


RIGHTS = ["create", "get", "list", "delete"]


@scripted
@pytest.mark.parametrize("verb", RIGHTS)
def test_a_right_that_is_missing_is_named_at_the_start(cluster, verb):
    rules = json.loads(json.dumps(cluster.api.rules))
    (of_jobs,) = (rule for rule in rules if rule["resources"] == ["jobs"])
    of_jobs["verbs"].remove(verb)
    cluster.api.rules = rules
    with pytest.raises(InvalidInput, match=rf"may not {verb} jobs\.batch in namespace ns"):
        cluster.runner.make()


@scripted
def test_a_queue_without_kueue_is_refused_at_the_start(tmp_path, monkeypatch, quick):
    with ApiServer() as api:
        for name, value in install(api, release(1, queue="research"), tmp_path).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InvalidInput, match=r"kueue\.queue=research, but this cluster has no"):
            Runner(tmp_path, {})


def test_without_an_api_server_the_start_is_refused(tmp_path, monkeypatch):
    with ApiServer() as api:
        variables = install(api, release(1), tmp_path)
    variables["KUBECONFIG"] = str(tmp_path / "absent")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="there is no Kubernetes API server to ask"):
        Runner(tmp_path, {})
