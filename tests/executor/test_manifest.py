"""The Kubernetes Job of an attempt is complete and named after the attempt. A template that is not
the chart's is refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from executor.releases import release, template_of
from helm import schemas
from helm.charts import NEWEST, OLDEST, Object
from spool.spool_tools import spool_with_run, start
from tandem.errors import InvalidInput
from tandem.spool.schema import Job
from tandem.trainer.agent.hosts import TAKE_SECONDS
from tandem.trainer.executor.manifest import LINGERS, JobTemplate, is_of

START_SECONDS = 1800.0


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    spool = spool_with_run(tmp_path_factory.mktemp("spool"))
    return start(spool, "A.job_with-an-id." + "x" * 45 + "_", deadline_seconds=100.0)


def template(
    path: Path, hosts: int = 2, change: Callable[[Object], object] = id, linger: float = 0.0
) -> JobTemplate:
    made = copy.deepcopy(template_of(release(hosts)))
    change(made)
    path.write_text(json.dumps(made))
    return JobTemplate(path, hosts, START_SECONDS, linger)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("uid", [None, "9b2f9e1c-2e0a-4a9e-8a3e-0a3f6a3b7c11"])
def test_a_filled_template_is_a_job_of_kubernetes(tmp_path, job, version, uid):
    made = template(tmp_path / "job.json").fill(job, uid)
    assert schemas.validate(made, version) == []
    spec, pod = made["spec"], made["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert pod["restartPolicy"] == "Never"
    # A pod's deadline is the sum of the time to start, the job's own deadline, and the grace
    # period.
    assert (
        pod["activeDeadlineSeconds"] == START_SECONDS + 100 + pod["terminationGracePeriodSeconds"]
    )
    (container,) = pod["containers"]
    options = {"--job": job.spec.id, "--attempt": "1", "--hosts": "2"}
    words = [word for option in options.items() for word in option]
    assert container["args"] == ["tandem", "rank-agent", *words]
    owners = made["metadata"].get("ownerReferences", [])
    assert [owner["uid"] for owner in owners] == ([uid] if uid else [])
    for annotations in (
        made["metadata"]["annotations"],
        spec["template"]["metadata"]["annotations"],
    ):
        assert annotations["tandem/job"] == job.spec.id
        assert (annotations["tandem/run"], annotations["tandem/attempt"]) == (job.spec.run, "1")


def test_each_attempt_has_a_name_of_its_own(tmp_path, job):
    made = template(tmp_path / "job.json")
    second = job.model_copy(update={"attempt": 2})
    again = job.model_copy(
        update={"spec": job.spec.model_copy(update={"created": job.spec.created + 1})}
    )
    names = {made.name(one) for one in (job, second, again)}
    assert len(names) == 3
    # A pod's name adds an index and five characters to the Job's name, and must be a valid label.
    assert all(len(name) + len("-1023-abcde") <= 63 for name in names)
    filled = made.fill(job, None)
    assert filled["metadata"]["name"] == made.name(job)
    assert is_of(filled, job)
    assert not is_of(filled, second)
    assert not is_of(filled, again)


def test_pods_that_may_stay_differ_in_their_agents_words_and_their_life_alone(tmp_path, job):
    plain = template(tmp_path / "plain.json").fill(job, None)
    staying = template(tmp_path / "job.json", linger=30.0)
    made = staying.fill(job, None)
    assert schemas.validate(made, NEWEST) == []
    pod, own = made["spec"]["template"], plain["spec"]["template"]
    words = pod["spec"]["containers"][0]["args"]
    name = made["metadata"]["name"]
    assert words[-4:] == ["--linger", "30", "--pods", f"{made['metadata']['namespace']}/{name}"]
    del words[-4:]
    # The pod's last attempt may begin up to START_SECONDS + 30 s + TAKE_SECONDS after the agent's
    # start. The 30 s are the linger time.
    life = own["spec"]["activeDeadlineSeconds"] + START_SECONDS + 30 + TAKE_SECONDS
    assert pod["spec"].pop("activeDeadlineSeconds") == life
    del own["spec"]["activeDeadlineSeconds"]
    for of in (made["metadata"], pod["metadata"]):
        assert of["annotations"].pop(LINGERS) == staying.lingers
    assert made == plain
    other = template(tmp_path / "job.json", change=lambda t: t["spec"].update(x=1), linger=30.0)
    assert other.lingers != staying.lingers


def without(*path: str) -> Callable[[Object], object]:
    def remove(made: Object) -> None:
        node = made
        for part in path[:-1]:
            node = node[part]
        del node[path[-1]]

    return remove


INSTANCE = "app.kubernetes.io/instance"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("metadata", "labels", INSTANCE), "is not the chart's template of a Job"),
        (without("spec", "template", "metadata", "labels", INSTANCE), f"lack {INSTANCE}"),
        (without("spec", "template", "spec", "containers"), "is not the chart's template"),
        (
            lambda made: made["spec"]["template"]["spec"]["containers"][0].update(name="x"),
            "lack the container trainer",
        ),
        (lambda made: made["spec"].update(completions=3), "completions=3"),
    ],
)
def test_a_template_that_is_not_the_charts_is_refused(tmp_path, change, message):
    with pytest.raises(InvalidInput, match=message):
        template(tmp_path / "job.json", change=change)


def test_no_template_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="TANDEM_JOB_TEMPLATE: not set"):
        JobTemplate(None, 1, START_SECONDS)
    with pytest.raises(InvalidInput, match="No such file"):
        JobTemplate(tmp_path / "absent", 1, START_SECONDS)
    (tmp_path / "text").write_text("kind: Job")
    with pytest.raises(InvalidInput, match="is not the chart's template"):
        JobTemplate(tmp_path / "text", 1, START_SECONDS)
