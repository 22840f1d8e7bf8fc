"""Sessions and the requests of their runs on the volume."""

import os
import struct
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from spool.spool_tools import add_run, submit
from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput, NotFound
from tandem.spool import Spool
from tandem.spool.recovery import STALE_SECONDS, sweep
from tandem.spool.removal import RESULT_SECONDS, SILENT_SECONDS, prune
from tandem.spool.schema import (
    JobError,
    JobResult,
    LoadRequest,
    PassRequest,
    RequestError,
    RequestResult,
    RLLoss,
    RunSpec,
    SavedName,
    SaveRequest,
    SessionBeat,
    SessionEnd,
    SFTLoss,
    StepRequest,
    VoidRequest,
)
from tandem.spool.session_jobs import others_wait, queue_waiting

STEP = StepRequest(learning_rate=1e-4)
DONE = RequestResult(finished=0.0)


def a_pass(loss=None, **more) -> PassRequest:
    return PassRequest(
        kind="forward_backward",
        loss=loss or SFTLoss(normalisation="sum"),
        lengths=(2, 1),
        num_rows=1,
        sequence_length=8,
        num_tokens=5,
        **more,
    )


def writer(content: bytes = b"arrays"):
    def write(directory: Path) -> str:
        (directory / "arrays.npy").write_bytes(content)
        return content.hex()

    return write


@pytest.fixture
def run(spool: Spool) -> str:
    session = spool.sessions.create(labels={"of": "a test"})
    name = spool.sessions.run_name(session.id, 1)
    add_run(spool, name, session=session.id)
    return name


def session_of(spool: Spool, run: str) -> str:
    session = spool.runs.get(run).session
    assert session is not None
    return session


def test_a_request_is_logged_once(spool: Spool, run: str):
    assert spool.requests.append(run, 1, a_pass(), writer())
    assert not spool.requests.append(run, 1, a_pass(), writer())
    logged = spool.requests.get(run, 1)
    assert logged.request == a_pass()
    assert (spool.requests.data_dir(run, 1) / "arrays.npy").read_bytes() == b"arrays"
    assert Spool(spool.root).requests.pending(run) == [1]


@pytest.mark.parametrize(
    ("request_", "write"),
    [(a_pass(), writer(b"others")), (a_pass(loss_name="ppo"), writer()), (STEP, None)],
)
def test_another_request_with_this_number_is_a_conflict(spool: Spool, run: str, request_, write):
    spool.requests.append(run, 1, a_pass(), writer())
    with pytest.raises(Conflict, match="is another one, a forward_backward") as refused:
        spool.requests.append(run, 1, request_, write)
    assert refused.value.field == "seq"
    assert spool.requests.get(run, 1).request == a_pass()


@pytest.mark.parametrize("loss", [SFTLoss(normalisation="sum"), RLLoss(policy="ppo", clip_low=0.1)])
def test_a_loss_is_read_as_it_was_written(spool: Spool, run: str, loss):
    spool.requests.append(run, 1, a_pass(loss), writer())
    logged = spool.requests.get(run, 1).request
    assert isinstance(logged, PassRequest)
    assert logged.loss == loss
    assert type(logged.loss) is type(loss)


@pytest.mark.parametrize(
    "request_",
    [
        STEP,
        SaveRequest(name="final", group="sampler"),
        LoadRequest(run="r", step=3, optimizer=True),
        VoidRequest(reason="request 1 did not come within 60 s"),
    ],
)
def test_every_kind_of_request(spool: Spool, run: str, request_):
    spool.requests.append(run, 1, request_)
    assert spool.requests.get(run, 1).request == request_


def test_requests_are_taken_in_order_and_without_gaps(spool: Spool, run: str):
    log, other = spool.requests, Spool(spool.root).requests
    log.append(run, 2, STEP)
    assert (other.next(run), other.pending(run), other.last(run)) == (None, [2], 2)
    log.append(run, 1, a_pass(), writer())
    assert (other.next(run), other.pending(run)) == (1, [1, 2])
    log.answer(run, 1, DONE)
    assert (other.next(run), other.pending(run)) == (2, [2])
    log.answer(run, 2, DONE)
    assert (other.next(run), other.pending(run), other.last(run)) == (None, [], 2)


def test_the_first_result_stands(spool: Spool, run: str):
    spool.requests.append(run, 1, a_pass(), writer())
    assert spool.requests.result(run, 1) is None
    first = RequestResult(metrics={"loss:sum": 2.5}, finished=1.0)
    spool.requests.answer(run, 1, first, struct.pack("<3f", -1.0, -2.0, -3.0))
    error = RequestError(category="user", message="too late")
    spool.requests.answer(run, 1, RequestResult(error=error, finished=2.0))
    assert spool.requests.result(run, 1) == first
    logprobs = [
        struct.unpack(f"<{len(part) // 4}f", part) for part in spool.requests.logprobs(run, 1)
    ]
    assert logprobs == [(-1.0, -2.0), (-3.0,)]


def test_logprobs_that_are_not_there(spool: Spool, run: str):
    spool.requests.append(run, 1, STEP)
    spool.requests.append(run, 2, a_pass(), writer())
    for seq in (1, 2, 3):
        with pytest.raises(NotFound):
            spool.requests.logprobs(run, seq)
    spool.requests.answer(run, 2, DONE, b"\0" * 8)  # the array has two items instead of three
    with pytest.raises(NotFound, match="damaged"):
        spool.requests.logprobs(run, 2)


def test_arrays_go_when_a_checkpoint_has_what_they_did(spool: Spool, run: str):
    log = spool.requests
    for seq in (1, 2, 3):
        log.append(run, seq, a_pass(), writer())
        if seq < 3:
            log.answer(run, seq, DONE, b"\0" * 12)
    log.trim(run, 3)
    kept = [(log.data_dir(run, seq) / "arrays.npy").exists() for seq in (1, 2, 3)]
    assert kept == [False, False, True]  # the third request has no result yet
    assert log.logprobs(run, 2)
    assert not log.append(run, 1, a_pass(), writer())  # the request is still known
    assert not (log.data_dir(run, 1) / "arrays.npy").exists()


def test_a_damaged_result_is_computed_again(spool: Spool, run: str):
    spool.requests.append(run, 1, STEP)
    spool.requests.answer(run, 1, DONE)
    (spool.requests.data_dir(run, 1) / "result.json").write_bytes(b"")  # as after a loss of power
    assert Spool(spool.root).requests.next(run) == 1


def test_what_is_refused(spool: Spool, run: str):
    log, session = spool.requests, session_of(spool, run)
    with pytest.raises(NotFound):
        log.append("nothing", 1, STEP)
    with pytest.raises(Conflict, match="of no session"):
        log.append("r", 1, STEP)
    for seq in (0, -1, 10**8):
        with pytest.raises(InvalidInput):
            log.append(run, seq, STEP)
    with pytest.raises(NotFound, match="no request 7"):
        log.get(run, 7)
    spool.sessions.end(session, "its client said so")
    with pytest.raises(Conflict, match="its client said so"):
        log.append(run, 1, STEP)
    assert log.pending(run) == []


def test_a_request_that_breaks_off_leaves_nothing(spool: Spool, run: str):
    def breaks(directory: Path) -> str:
        (directory / "arrays.npy").write_bytes(b"half")
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        spool.requests.append(run, 1, a_pass(), breaks)
    assert spool.requests.pending(run) == []
    assert [*spool.paths.requests_dir(run).iterdir()] == []


def _append(root: Path, run: str, content: bytes) -> None:
    try:
        new = Spool(root).requests.append(run, 1, a_pass(), writer(content))
        os._exit(0 if new else 1)
    except Conflict:
        os._exit(2)


def test_of_several_at_the_same_moment_one_wins(spool: Spool, run: str):
    fork = get_context("fork")
    contents = [b"same", b"same", b"other", b"other"]
    processes = [fork.Process(target=_append, args=(spool.root, run, one)) for one in contents]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    assert sorted(codes) == [0, 1, 2, 2]
    same = codes[:2] if 0 in codes[:2] else codes[2:]
    assert sorted(same) == [0, 1]


def test_a_session_and_its_runs(spool: Spool, run: str):
    session = session_of(spool, run)
    assert spool.sessions.get(session).labels == {"of": "a test"}
    for number in (10, 2):
        add_run(spool, spool.sessions.run_name(session, number), session=session)
    add_run(spool, f"{session}-training")
    assert spool.sessions.runs(session) == [f"{session}-train-{n}" for n in (1, 2, 10)]
    assert len(RunSpec.model_validate(spool.runs.get(run).model_dump()).name) <= 64
    other = spool.sessions.create()
    assert spool.sessions.unended() == sorted([session, other.id])
    spool.sessions.end(session, "first")
    spool.sessions.end(session, "second")
    ended = spool.sessions.ended(session)
    assert ended is not None
    assert ended.reason == "first"
    assert spool.sessions.unended() == [other.id]
    with pytest.raises(Conflict, match="first"):
        spool.sessions.beat(session)
    for unknown in ("nothing", "../jobs", "0" * 26):
        with pytest.raises(NotFound):
            spool.sessions.beat(unknown)


def test_a_session_ends_when_its_client_is_silent(spool: Spool, run: str):
    session = session_of(spool, run)
    beat = spool.paths.session_dir(session) / "beat.json"
    assert spool.sessions.expire(60) == []
    beat.write_text(SessionBeat(time=time.time() - 61).model_dump_json())
    spool.sessions.beat(session)
    assert spool.sessions.expire(60) == []
    beat.write_text(SessionBeat(time=time.time() - 61).model_dump_json())
    assert spool.sessions.expire(60) == [session]
    assert spool.sessions.expire(60) == []


def test_a_name_pins_its_checkpoint(spool: Spool, run: str):
    def saved(name: str, group: str = "weights") -> SavedName:
        return SavedName.model_validate({"group": group, "name": name, "step": 0, "created": 1.0})

    names = spool.names
    for one in (saved("a"), saved("b"), saved("a", "sampler"), saved("a")):
        names.put(run, one)
    assert names.list(run) == [saved("b"), saved("a", "sampler"), saved("a")]
    assert names.find(run, "sampler", "a") == saved("a", "sampler")
    assert spool.checkpoints.pinned(run) == [0]
    for one in (saved("a"), saved("b"), saved("a", "sampler")):
        assert spool.checkpoints.pinned(run) == [0]
        names.remove(run, one.group, one.name)
    assert spool.checkpoints.pinned(run) == []
    with pytest.raises(NotFound, match='no checkpoint "a"'):
        names.find(run, "weights", "a")


def test_what_dead_processes_left_is_swept(spool: Spool, run: str):
    spool.requests.append(run, 1, STEP)
    for parent in (spool.paths.requests_dir(run), spool.paths.sessions):
        left = parent / ".tmp-left"
        left.mkdir()
        os.utime(left, (time.time() - STALE_SECONDS - 60,) * 2)
    sweep(spool)
    assert not [*spool.root.rglob(".tmp-*")]
    assert spool.requests.pending(run) == [1]


def test_what_a_session_leaves_is_removed(spool: Spool, run: str):
    session, other = session_of(spool, run), spool.sessions.create().id
    spool.requests.append(run, 1, STEP)
    directory = spool.paths.session_dir(session)
    settings = Settings(root=spool.root, keep_days=1)

    def after_prune() -> tuple[bool, bool, bool]:
        prune(spool, settings)
        requests = spool.paths.requests_dir(run)
        return spool.sessions.ended(session) is not None, requests.exists(), directory.exists()

    assert after_prune() == (False, True, True)
    silent = SessionBeat(time=time.time() - SILENT_SECONDS - 1)
    (directory / "beat.json").write_text(silent.model_dump_json())
    assert after_prune() == (True, True, True)
    for age, left in ((RESULT_SECONDS + 1, (True, False, True)), (86401, (False, False, False))):
        end = SessionEnd(finished=time.time() - age, reason="it is a test")
        (directory / "end.json").write_text(end.model_dump_json())
        assert after_prune() == left
    assert spool.sessions.unended() == [other]
    assert spool.checkpoints.steps(run) == [0]


def test_a_sessions_run_is_trained_by_its_requests_alone(spool: Spool, run: str):
    with pytest.raises(Conflict, match="requests of its session alone"):
        submit(spool, run=run)
    with pytest.raises(Conflict, match="can't be undone"):
        spool.checkpoints.rollback(run, 0)


def test_a_job_is_queued_where_a_request_waits(spool: Spool, run: str):
    def queued() -> list[str]:
        queue_waiting(spool)
        return [job.spec.run for _, job in spool.jobs.list(states=["queued"])]

    assert queued() == []
    spool.requests.append(run, 2, STEP)
    assert queued() == []  # the run's first request is missing
    spool.requests.append(run, 1, STEP)
    assert queued() == queued() == [run]
    job = spool.queue.claim("runner")
    assert job is not None
    assert (job.spec.kind, job.spec.run, job.spec.base_step) == ("session", run, 0)
    assert queued() == []
    for seq in (1, 2):
        spool.requests.answer(run, seq, DONE)
    spool.queue.finish(job, JobResult(state="succeeded", step=0, finished=time.time()))
    assert queued() == []
    spool.requests.append(run, 3, STEP)
    assert queued() == [run]
    spool.sessions.end(session_of(spool, run), "a test")
    spool.queue.cancel(spool.jobs.list(states=["queued"])[0][1].spec.id)
    assert queued() == []


def test_a_run_that_trains_itself_keeps_nobody_waiting(spool: Spool, run: str):
    """A session's ranks stay while jobs of other runs can run at the same time. The ranks leave if
    a waiting job of another run can't run at the same time."""
    other = spool.sessions.run_name(session_of(spool, run), 2)
    add_run(spool, other, session=session_of(spool, run))
    add_run(spool, "batch")
    for name in (run, other):
        spool.requests.append(name, 1, STEP)
    queue_waiting(spool)
    assert spool.queue.claim("runner") is not None
    assert others_wait(spool)
    assert spool.queue.claim("runner") is not None
    assert not others_wait(spool)
    submit(spool, run="batch")
    assert others_wait(spool)
    assert spool.queue.claim("runner") is not None
    submit(spool, run="batch")
    assert not others_wait(spool), "the run's second job waits for its first"


@pytest.mark.parametrize("way", ["cancelled", "failed"])
def test_requests_of_a_job_that_fails_get_its_error(spool: Spool, run: str, way: str):
    spool.requests.append(run, 1, STEP)
    queue_waiting(spool)
    if way == "cancelled":
        spool.queue.cancel(spool.jobs.list(run)[0][1].spec.id)
    else:
        job = spool.queue.claim("runner")
        assert job is not None
        spool.queue.requeue(job, JobError(type="checkpoint_damaged", message="it is torn"))
    queue_waiting(spool)
    result = spool.requests.result(run, 1)
    assert result is not None
    assert result.error is not None
    assert way in result.error.message
    queue_waiting(spool)
    assert spool.jobs.list(run, ["queued"]) == []
    spool.requests.append(run, 2, STEP)  # a new request needs a new job
    queue_waiting(spool)
    assert len(spool.jobs.list(run, ["queued"])) == 1
