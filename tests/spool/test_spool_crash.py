"""The tests kill a process at every system call of every operation, and also in the middle of a
write.

After each death a newly opened spool shows the state before the operation or after it. A second
call by a client or a new runner completes the operation. The final state is the same as without the
death.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from spool.spool_tools import (
    LOST,
    add_run,
    commit,
    failed,
    job_path,
    run_spec,
    serve,
    spool_with_run,
    submit,
    succeeded,
    train_one,
)
from spool.volume_tools import DiedError, dying_at, tree
from tandem.config import Settings
from tandem.errors import Conflict, NotFound
from tandem.spool import Spool, recovery
from tandem.spool.recovery import recover, sweep
from tandem.spool.removal import delete_run, prune
from tandem.spool.runs import verify_files
from tandem.spool.schema import TERMINAL, Job, Manifest
from tandem.system.logs import Log


def summary(spool: Spool) -> dict:
    """The state that readers of the spool see, without times and random names. Reads whole files,
    and verifies every checkpoint."""
    state: dict = {"runs": {}, "jobs": {}}
    for spec in spool.runs.list():
        steps = {
            step: spool.checkpoints.verify(spec.name, step).job
            for step in spool.checkpoints.steps(spec.name)
        }
        discarded = spool.checkpoints.discarded(spec.name)
        for path in discarded:
            verify_files(path, Manifest.model_validate_json((path / "manifest.json").read_bytes()))
        state["runs"][spec.name] = steps, len(discarded), spool.served.get(spec.name) is not None
    for where, listed in spool.jobs.list():
        job_id = listed.spec.id
        assert spool.jobs.get(job_id) == (where, listed)
        assert spool.events.ended(job_id) is (where in TERMINAL)
        if where not in TERMINAL:
            assert (
                spool.paths.data_dir(job_id) / "tokens.npy"
            ).read_bytes() == b"tokens of " + job_id.encode()
        elif listed.spec.run == "logged":
            assert spool.paths.log_file(job_id).exists()
        if where == "running":
            assert spool.leases.get(job_id).attempt in (listed.attempt, listed.attempt + 1)
        state["jobs"][job_id] = where, listed.attempt, listed.last_error is not None
        events = spool.events.read(job_id)
        assert [event.seq for event in events] == list(range(len(events)))
        assert sum(event.type in TERMINAL for event in events) <= 1
    return state


def remains(spool: Spool) -> list[str]:
    """Files that no job needs any more. Temporary names are left out, because they are removed with
    their job or after an hour."""
    found = [*spool.jobs.index.junk()]
    running = {job.spec.id for _, job in spool.jobs.list(states=("running",))}
    found += [
        path for path in spool.paths.active.iterdir() if path.name.split(",")[3] not in running
    ]
    for state, job in spool.jobs.list():
        extra = {"queued": {"data"}, "running": {"data", "attempts", "lease.json", "cancel"}}
        kept = {"job.json", "events.jsonl", "log", *extra.get(state, ())}
        files = spool.paths.job_dir(job.spec.id).glob("[!.]*")
        found += [path for path in files if path.name not in kept]
    return [str(path) for path in found]


@dataclass
class Case:
    prepare: Callable[[Spool], object]
    operate: Callable[[Spool], object]
    # Calls, each of which completes the operation after a death. An operation without such calls is
    # repeated.
    complete: tuple[Callable[[Spool], object], ...] = ()
    # Whether a state is allowed after a death between two commits of the operation.
    between: Callable[[dict], bool] = lambda state: False


def job(spool: Spool) -> Job:
    return spool.jobs.get("j")[1]


def prepare_queued(spool: Spool) -> None:
    submit(spool, "j")


def prepare_running(spool: Spool) -> None:
    submit(spool, "j")
    spool.queue.claim("dead")


def prepare_committed(spool: Spool) -> None:
    prepare_running(spool)
    commit(spool, job(spool))


def prepare_cancelling(spool: Spool) -> None:
    prepare_running(spool)
    spool.queue.cancel("j")


def prepare_chain(spool: Spool) -> None:
    for _ in range(3):
        train_one(spool)


def prepare_old(spool: Spool) -> None:
    add_run(spool, "logged")
    for run in ("r", *3 * ["logged"]):
        spool.paths.log_file(train_one(spool, run).spec.id).write_text("printed")
    spool.checkpoints.rollback("logged", 2)


def cancel(spool: Spool) -> None:
    spool.queue.cancel("j")


def requeue(spool: Spool) -> None:
    spool.queue.requeue(job(spool), LOST)


def finish(spool: Spool) -> None:
    spool.queue.finish(job(spool), succeeded(job(spool)))


def recover_new(spool: Spool) -> None:
    recover(spool, "new")


def recover_then_cancel(spool: Spool) -> None:
    recover(spool, "new")
    cancel(spool)


def recover_then_claim(spool: Spool) -> None:
    """Recover and claim as a new runner does after an earlier runner died in `claim`. If the dead
    runner had begun an attempt, the attempt counts as the first attempt."""
    recover(spool, "new")
    claimed = spool.queue.claim("new")
    assert claimed.attempt in (1, 2)
    # Removes the difference between attempts 1 and 2, for the comparison with the undisturbed
    # claim.
    path = job_path(spool, "j")
    path.write_text(claimed.model_copy(update={"attempt": 1, "last_error": None}).model_dump_json())


def create_run(spool: Spool) -> None:
    try:
        add_run(spool, "new")
    except Conflict:
        assert spool.runs.get("new").name == "new"


def fork(spool: Spool) -> None:
    try:
        spool.checkpoints.fork("r", 3, run_spec("new"))
    except Conflict:
        assert spool.runs.get("new").forked_from.step == 3


def commit_again(spool: Spool) -> None:
    """Runs the next attempt. The attempt makes the job's checkpoint if the checkpoint does not
    exist."""
    try:
        assert spool.checkpoints.manifest("r", 1).job == "j"
    except NotFound:
        shutil.rmtree(spool.paths.work_dir("j", 1) / "checkpoint", ignore_errors=True)
        commit(spool, job(spool))


def delete(spool: Spool) -> None:
    try:
        shutil.rmtree(delete_run(spool, "logged"))
    except NotFound:
        prune(spool, Settings())  # the sweeper's call
    sweep(spool)


def remove(spool: Spool, **kept: float) -> None:
    prune(spool, Settings(**kept))
    sweep(spool)


CASES = {
    "create run": Case(lambda spool: None, create_run),
    "submit": Case(lambda spool: None, prepare_queued),
    "claim": Case(prepare_queued, lambda spool: spool.queue.claim("dead"), (recover_then_claim,)),
    "renew lease": Case(
        prepare_running, lambda spool: spool.leases.write(job(spool), "dead", "training")
    ),
    "cancel queued": Case(prepare_queued, cancel, (cancel, recover_then_cancel)),
    "cancel running": Case(prepare_running, cancel),
    "requeue": Case(prepare_running, requeue, (requeue, recover_new)),
    "requeue to cancelled": Case(prepare_cancelling, requeue),
    "finish": Case(prepare_committed, finish, (finish, recover_new)),
    "fail": Case(prepare_running, lambda spool: spool.queue.finish(job(spool), failed())),
    "recover": Case(prepare_running, recover_new),
    "recover committed": Case(prepare_committed, recover_new),
    "commit": Case(prepare_running, lambda spool: commit(spool, job(spool)), (commit_again,)),
    "rollback": Case(
        prepare_chain,
        lambda spool: spool.checkpoints.rollback("r", 1),
        between=lambda state: list(state["runs"]["r"][0]) == [0, 1, 2],
    ),
    "delete run": Case(prepare_old, delete, between=lambda state: True),
    "remove checkpoints": Case(
        prepare_old, partial(remove, keep_checkpoints=1), between=lambda state: True
    ),
    "remove jobs and discarded": Case(
        prepare_old, partial(remove, keep_days=1e-9), between=lambda state: True
    ),
    "fork": Case(prepare_chain, fork),
    "served": Case(lambda spool: None, lambda spool: serve(spool, 0)),
}


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_dying_anywhere(memory_path, monkeypatch, name):
    case = CASES[name]
    if case.prepare is prepare_old:
        monkeypatch.setattr(recovery, "STALE_SECONDS", -1.0)
        # The test disables logging, because the log's writes don't go to the volume.
        monkeypatch.setattr(Log, "info", lambda *_, **__: None)
    template, undisturbed, dead, again = (
        memory_path / part for part in ("template", "undisturbed", "dead", "again")
    )
    case.prepare(spool_with_run(template))
    before = summary(Spool(template))
    shutil.copytree(template, undisturbed)
    case.operate(Spool(undisturbed))
    after = summary(Spool(undisturbed))
    assert remains(Spool(undisturbed)) == []

    seen = []
    for count in range(1, 1000):
        shutil.copytree(template, dead)
        spool = Spool(dead)
        try:
            with dying_at(count):
                case.operate(spool)
        except DiedError:
            state = summary(Spool(dead))
        else:
            assert summary(Spool(dead)) == after
            break
        assert state in (before, after) or case.between(state), (count, state)
        seen.append(state)
        for complete in case.complete or (case.operate,):
            shutil.copytree(dead, again)
            spool = Spool(again)
            complete(spool)
            assert summary(spool) == after, count
            assert remains(spool) == [], count
            if case.prepare is prepare_old:
                assert tree(again).keys() == tree(undisturbed).keys(), count
            shutil.rmtree(again)
        shutil.rmtree(dead)
    else:
        pytest.fail("it never ended")
    assert len(seen) > 2
    assert seen[0] == before
    assert before == after or after in seen  # a death after the commit was tested, too
