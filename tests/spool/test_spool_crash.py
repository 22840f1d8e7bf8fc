"""kill -9 at every system call of every operation, torn writes included.

After each death a newly opened spool shows the state before the operation or the one after it; calling it again (what a
client or a new runner does) completes it, to the same state as without the death.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from spool.spool_tools import (
    LOST,
    commit,
    failed,
    in_child,
    run_spec,
    spool_with_run,
    submit,
    succeeded,
    train_one,
    write_adapter,
)  # fmt: skip
from tandem.errors import Conflict, NotFound
from tandem.spool import Spool
from tandem.spool.recovery import recover
from tandem.spool.schema import Served


def summary(spool: Spool) -> dict:
    """The state as everybody sees it: no times, no random names. Reads whole files, and verifies every checkpoint."""
    found: dict = {"runs": {}, "jobs": {}}
    for spec in spool.runs.list():
        steps = {step: spool.checkpoints.verify(spec.name, step).job for step in spool.checkpoints.steps(spec.name)}
        assert list(steps) == list(range(len(steps)))  # a chain without gaps
        found["runs"][spec.name] = steps, spool.served.get(spec.name) is not None
    for state, job in spool.jobs.list():
        job_id = job.spec.id
        assert spool.jobs.get(job_id) == (state, job)
        if state in ("queued", "running"):
            assert (spool.paths.data_dir(job_id) / "tokens.npy").read_bytes() == b"tokens of " + job_id.encode()
        if state == "running":
            assert spool.leases.get(job_id).attempt in (job.attempt, job.attempt + 1)
        found["jobs"][job_id] = state, job.attempt, job.last_error is not None
    for path in (spool.root / "jobs/events").iterdir():
        events = spool.events.read(path.stem)
        assert [event.seq for event in events] == list(range(len(events)))
        assert sum(event.type in ("succeeded", "failed", "cancelled") for event in events) <= 1
    return found


def remains(spool: Spool) -> list[str]:
    """What belongs to no living job (temporary names apart, which are swept once they are an hour old)."""
    jobs = spool.root / "jobs"
    names = [path for kind in ("data", "work", "leases", "cancel") for path in (jobs / kind).iterdir()]
    ids = {path: path.name.removesuffix(".json") for path in names if not path.name.startswith(".")}
    living = {job.spec.id for _, job in spool.jobs.list(states=("queued", "running"))}
    running = {job.spec.id for _, job in spool.jobs.list(states=("running",))}
    return [
        str(path)
        for path, job_id in ids.items()
        if job_id not in (living if path.parent.name == "data" else running)
    ]  # fmt: skip


@dataclass
class Case:
    prepare: Callable[[Spool], None]
    operate: Callable[[Spool], object]
    complete: Callable[[Spool], object] | None = None  # what is done after the crash; default: the operation again


def running(spool: Spool):
    return spool.jobs.list(states=("running",))[0][1]


def prepare_running(spool: Spool) -> None:
    submit(spool, "j")
    spool.queue.claim("dead")


def prepare_committed(spool: Spool) -> None:
    prepare_running(spool)
    commit(spool, running(spool))


def prepare_cancelling(spool: Spool) -> None:
    prepare_running(spool)
    spool.queue.cancel("j")


def prepare_chain(spool: Spool) -> None:
    for _ in range(3):
        train_one(spool)


def requeue(spool: Spool) -> None:
    _, job = spool.jobs.get("j")
    spool.queue.requeue(job, LOST)


def finish(spool: Spool) -> None:
    _, job = spool.jobs.get("j")
    spool.queue.finish(job, succeeded(job))


def create_run(spool: Spool) -> None:
    try:
        spool.runs.create(run_spec("new"), write_adapter)
    except Conflict:
        assert spool.runs.get("new").name == "new"


def fork(spool: Spool) -> None:
    try:
        spool.checkpoints.fork("r", 3, run_spec("new"))
    except Conflict:
        assert spool.runs.get("new").forked_from.step == 3


def recover_then_claim(spool: Spool) -> None:
    """What a new runner does after one that died in `claim`: the attempt it may have begun counts."""
    recover(spool, "new")
    job = spool.queue.claim("new")
    assert job.attempt in (1, 2)
    # Bring both ways to one state, for the comparison with the undisturbed claim.
    path = spool.root / "jobs/running/j.json"
    path.write_text(job.model_copy(update={"attempt": 1, "last_error": None}).model_dump_json())


def commit_again(spool: Spool) -> None:
    """The next attempt: a checkpoint that this job made already is not made again."""
    job = running(spool)
    try:
        done = spool.checkpoints.manifest("r", 1).job
    except NotFound:
        shutil.rmtree(spool.paths.work_dir("j", job.attempt) / "checkpoint", ignore_errors=True)
        commit(spool, job)
    else:
        assert done == "j"


def put_served(spool: Spool) -> None:
    served = Served(step=0, model="r@0", checkpoint="ab", verified=1.0, mean_abs_logprob_error=0.0, tokens_checked=1)
    spool.served.put("r", served)


def nothing(spool: Spool) -> None:
    pass


CASES = {
    "create run": Case(nothing, create_run),
    "submit": Case(nothing, lambda spool: submit(spool, "j")),
    "claim": Case(lambda spool: submit(spool, "j"), lambda spool: spool.queue.claim("dead"), recover_then_claim),
    "beat": Case(prepare_running, lambda spool: spool.leases.renew("j", "dead", "training")),
    "cancel queued": Case(lambda spool: submit(spool, "j"), lambda spool: spool.queue.cancel("j")),
    "cancel queued, then the runner": Case(
        lambda spool: submit(spool, "j"),
        lambda spool: spool.queue.cancel("j"),
        lambda spool: (recover(spool, "new"), spool.queue.cancel("j")),
    ),
    "cancel running": Case(prepare_running, lambda spool: spool.queue.cancel("j")),
    "requeue": Case(prepare_running, requeue),
    "requeue to cancelled": Case(prepare_cancelling, requeue),
    "requeue, then recover": Case(prepare_running, requeue, lambda spool: recover(spool, "new")),
    "finish": Case(prepare_committed, finish),
    "finish, then recover": Case(prepare_committed, finish, lambda spool: recover(spool, "new")),
    "fail": Case(prepare_running, lambda spool: spool.queue.finish(spool.jobs.get("j")[1], failed())),
    "recover": Case(prepare_running, lambda spool: recover(spool, "new")),
    "recover committed": Case(prepare_committed, lambda spool: recover(spool, "new")),
    "commit": Case(prepare_running, lambda spool: commit(spool, running(spool)), commit_again),
    "rollback": Case(prepare_chain, lambda spool: spool.checkpoints.rollback("r", 1)),
    "fork": Case(prepare_chain, fork),
    "served": Case(nothing, put_served),
}  # fmt: skip

# Operations of several commits: a death between them shows a whole, named state in between.
BETWEEN = {
    "rollback": lambda state: list(state["runs"]["r"][0]) == [0, 1, 2],
    "requeue": lambda state: state["jobs"]["j"] == ("running", 1, True),
    "requeue, then recover": lambda state: state["jobs"]["j"] == ("running", 1, True),
    "recover": lambda state: state["jobs"]["j"] == ("running", 1, True),
}


@pytest.mark.parametrize("name", CASES)
def test_dying_anywhere(memory_path, name):
    case = CASES[name]
    template = memory_path / "template"
    case.prepare(spool_with_run(template))
    before = summary(Spool(template))
    undisturbed = memory_path / "undisturbed"
    shutil.copytree(template, undisturbed)
    case.operate(Spool(undisturbed))
    after = summary(Spool(undisturbed))
    assert remains(Spool(undisturbed)) == []

    seen = []
    for kill_at in range(1, 1000):
        root = memory_path / "killed"
        shutil.copytree(template, root)
        spool = Spool(root)
        code = in_child(lambda spool=spool: case.operate(spool), kill_at)
        spool = Spool(root)
        state = summary(spool)
        if code == 0:
            assert state == after
            break
        assert code == -9
        assert state in (before, after) or BETWEEN[name](state), (kill_at, state)
        seen.append(state)
        (case.complete or case.operate)(spool)
        assert summary(spool) == after, kill_at
        assert remains(spool) == [], kill_at
        shutil.rmtree(root)
    else:
        pytest.fail("it never ended")
    assert len(seen) > 3
    assert seen[0] == before
    assert before == after or after in seen  # dying after the commit was tried too
