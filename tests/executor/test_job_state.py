"""The meaning that the states of a Job, its pods and its Kueue Workload have for an attempt. The
tests set the clock."""

from typing import Any

import pytest

from tandem.trainer.executor import Ended, Running, Waiting
from tandem.trainer.executor.job_state import IMAGE_SECONDS, LOST_SECONDS, JobStates, Seen

GRACE = 90.0
Object = dict[str, Any]


def job(*conditions: str, suspend: bool = False) -> Object:
    said = [{"type": kind, "status": "True", "reason": "R", "message": "m"} for kind in conditions]
    return {
        "metadata": {"name": "j", "uid": "u"},
        "spec": {"suspend": suspend},
        "status": {"conditions": said},
    }


def pod(state: Object | None = None, phase: str = "Running", **status: Any) -> Object:
    states = [] if state is None else [{"name": "trainer", "state": state}]
    return {
        "metadata": {"name": "j-0-abcde", "uid": "p"},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": phase, "containerStatuses": states, **status},
    }


def exited(code: int, **more: str) -> Object:
    ended = {"exitCode": code, "finishedAt": "2026-11-27T12:00:00Z", **more}
    return pod({"terminated": ended}, "Succeeded" if code == 0 else "Failed")


RUNS = pod({"running": {}})
PULLS = pod({"waiting": {"reason": "ImagePullBackOff", "message": "x: not found"}}, "Pending")
FULL = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/12 nodes are available: 12 Insufficient nvidia.com/gpu.",
}
DISRUPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "preempting to accommodate a higher priority pod",
}


def workload(kind: str, status: str, message: str) -> Object:
    return {"status": {"conditions": [{"type": kind, "status": status, "message": message}]}}


def end_of(*pods: Object, condition: str = "Failed", now: float = 10.0) -> Ended:
    """The end of an attempt whose Job has the condition `condition`."""
    states = JobStates(GRACE)
    seen = Seen(job(condition), list(pods))
    assert not isinstance(states.read(seen, now), Ended), "what the agents wrote may come later"
    ended = states.read(seen, now + 5)
    assert isinstance(ended, Ended)
    return ended


@pytest.mark.parametrize(
    ("pods", "kind", "words"),
    [
        ([pod(phase="Failed", conditions=[DISRUPTED])], "preempted", "PreemptionByScheduler"),
        # When one pod of a Job fails or is disrupted, the other pods are stopped.
        ([exited(75), pod(phase="Failed", conditions=[DISRUPTED])], "preempted", "higher priority"),
        ([exited(75), exited(1)], None, None),
        ([exited(75)], "job_deleted", "somebody deleted it"),
        ([exited(76)], "preempted", "status 76"),
        ([exited(77)], "spool_unusable", "volume"),
        ([exited(137, reason="OOMKilled")], "rank_crashed", "OOMKilled"),
        ([exited(137, reason="Error")], "host_lost", "status 137"),
        (
            [exited(137) | {"status": exited(137)["status"] | {"reason": "DeadlineExceeded"}}],
            "deadline",
            "activeDeadlineSeconds",
        ),
        (
            [pod(phase="Failed", reason="UnexpectedAdmissionError", message="no GPU")],
            "launch_failed",
            "UnexpectedAdmissionError: no GPU",
        ),
        ([], "job_failed", "R: m"),
    ],
    ids=str,
)
def test_why_a_job_failed(pods, kind, words):
    ended = end_of(*pods)
    assert ended.status == 1
    if kind is None:
        assert ended.error is None, "the ranks' files tell"
        return
    assert ended.error is not None
    assert (ended.error.type, ended.error.retriable) == (kind, True)
    assert words in ended.error.message


def test_a_disruption_is_known_when_its_pod_is_gone():
    """A pod can be deleted soon after its end, before the next poll comes."""
    states = JobStates(GRACE)
    states.read(Seen(job(), [pod({"running": {}}, conditions=[DISRUPTED])]), 0)
    for left in ([], [exited(75)]):
        ended = states.why_failed(Seen(job("Failed"), left))
        assert ended is not None
        assert ended.error is not None
        assert ended.error.type == "preempted"
        assert "PreemptionByScheduler" in ended.error.message
    ended = states.why_failed(Seen(job("Failed"), [exited(77)]))
    assert ended is not None
    assert ended.error is not None
    assert ended.error.type == "spool_unusable"


def test_a_disruption_that_no_poll_saw_is_in_the_words_of_the_job():
    failed = job("FailureTarget")
    words = "Pod ns/j-0-abcde has condition DisruptionTarget matching FailJob rule at index 0"
    failed["status"]["conditions"][0] |= {"reason": "PodFailurePolicy", "message": words}
    ended = JobStates(GRACE).why_failed(Seen(failed))
    assert ended is not None
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("preempted", f"PodFailurePolicy: {words}")
    assert JobStates(GRACE).why_failed(Seen(job("FailureTarget"))) is None


def test_a_complete_job_has_ended_well():
    assert end_of(exited(0), condition="Complete") == Ended(0)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (Seen(job()), Waiting("its Job has no pod yet")),
        (
            Seen(job(), events=[{"type": "Warning", "reason": "FailedCreate", "message": "quota"}]),
            Waiting("FailedCreate: quota"),
        ),
        (
            Seen(job(), [pod(phase="Pending", conditions=[FULL])]),
            Waiting(f"pod j-0-abcde is Pending: Unschedulable: {FULL['message']}"),
        ),
        (
            Seen(job(), [pod({"waiting": {"reason": "ContainerCreating"}}, "Pending")]),
            Waiting("pod j-0-abcde waits: ContainerCreating"),
        ),
        (Seen(job(), [RUNS]), Running()),
        # Some pods run, so the attempt counts as running, and the time limit for the other pods'
        # start applies.
        (Seen(job(), [RUNS, pod(phase="Pending", conditions=[FULL])]), Running()),
        (
            Seen(job(suspend=True), workload=workload("QuotaReserved", "False", "no flavor fits")),
            Waiting("Kueue: no flavor fits"),
        ),
        (
            Seen(job(suspend=True)),
            Waiting("its Job is suspended; Kueue has not said why"),
        ),
    ],
    ids=str,
)
def test_how_a_job_goes_on(seen, state):
    states = JobStates(GRACE)
    for now in (0.0, 1e6):  # however long
        assert states.read(seen, now) == state


@pytest.mark.parametrize("before", [True, False])
def test_a_job_that_ran_and_is_suspended_was_preempted(before):
    states = JobStates(GRACE, ran=before)  # `before`: the Job ran under an earlier runner
    if not before:
        assert states.read(Seen(job(), [RUNS]), 0) == Running()
    evicted = workload("Evicted", "True", "Preempted to accommodate another")
    ended = states.read(Seen(job(suspend=True), workload=evicted), 1)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.type == "preempted"
    assert "Kueue: Preempted to accommodate another" in ended.error.message


@pytest.mark.parametrize(
    "gone", [None, job() | {"metadata": {"deletionTimestamp": "2026-11-27T12:00:00Z"}}]
)
def test_a_job_that_is_gone_was_deleted(gone):
    ended = JobStates(GRACE).read(Seen(gone), 0)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.type == "job_deleted"


def test_an_image_that_does_not_come_ends_the_attempt_after_a_while():
    states = JobStates(GRACE)
    seen = Seen(job(), [PULLS])
    assert isinstance(states.read(seen, 100), Waiting)
    assert isinstance(states.read(seen, 100 + IMAGE_SECONDS), Waiting)
    # This poll finds no image error, so the time to wait for the image begins again.
    assert isinstance(states.read(Seen(job(), [pod(phase="Pending")]), 221), Waiting)
    assert isinstance(states.read(seen, 222), Waiting)
    ended = states.read(seen, 223 + IMAGE_SECONDS)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.type == "launch_failed"
    assert "ImagePullBackOff: x: not found" in ended.error.message


def test_a_pod_on_a_lost_node_ends_the_attempt():
    """A lost node's pod has the condition DisruptionTarget and is never deleted."""
    states = JobStates(GRACE)
    lost = pod({"running": {}}, conditions=[DISRUPTED | {"reason": "DeletionByTaintManager"}])
    assert states.read(Seen(job(), [lost]), 0) == Running()
    assert states.read(Seen(job(), [lost]), GRACE + LOST_SECONDS) == Running()
    ended = states.read(Seen(job(), [lost]), GRACE + LOST_SECONDS + 1)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.type == "preempted"
    assert "node-1 is lost: DeletionByTaintManager" in ended.error.message
