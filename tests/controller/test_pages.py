"""The API returns lists in pages, also after a rollback or damage on the volume."""

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from api_server import claim, fail, rl_request, run_one, serve
from spool.volume_tools import refused
from tandem.controller.schemas import LISTED_PENDING
from tandem.errors import NotFound, NotServed, StepRefused
from tandem.spool.schema import Refused


def test_lists_come_in_pages(client, server, run, http, monkeypatch):
    jobs = [client.train(run, rl_request()).id for _ in range(5)]
    fail(server.spool, claim(server.spool))

    def ids(**more):
        return [job.id for job in client.list_jobs(run, **more)]

    assert ids() == jobs
    assert ids(limit=2) == jobs[3:]
    assert ids(limit=2, before=jobs[3]) == jobs[1:3]
    assert ids(states=["queued"], limit=3, before=jobs[3]) == jobs[1:3]
    with refused(NotFound, "before"):
        ids(before="nothing")
    for job in jobs[1:]:
        client.cancel(job)
    for _ in range(4):
        client.train(run, rl_request())
        run_one(server.spool)
    names = sorted(client.create_run(f"page-{i}", lora={"rank": 1}).spec.name for i in range(5))
    page = http.get("/v1/runs", params={"after": "page-0", "limit": 2}).json()
    assert [run["spec"]["name"] for run in page] == names[1:3]
    page = http.get(f"/v1/runs/{run}/checkpoints", params={"before": 4, "limit": 2}).json()
    assert [info["step"] for info in page] == [2, 3]
    monkeypatch.setattr("tandem.client.api._PAGE", 2)
    listed = [run.spec.name for run in client.list_runs()]
    assert listed == sorted(listed)
    assert set(names) <= set(listed)
    assert [info.step for info in client.checkpoints(run)] == [0, 1, 2, 3, 4]
    for path in ("/v1/jobs", "/v1/runs"):
        for limit in (0, 1001):
            assert http.get(path, params={"limit": limit}).status_code == 422


_opened: list[str] | None = None


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    # The hook counts only files that routes open, because collectors of metrics open files in other
    # threads.
    route = "AnyIO" in threading.current_thread().name
    if _opened is not None and event == "open" and route and not arguments[2] & os.O_DIRECTORY:
        _opened.append(str(arguments[0]))


def test_a_page_of_runs_opens_two_files_for_each_of_them(server, client, http):
    """A page of the list of runs opens two files for each run, whatever the spool contains. In this
    test the process has read no run before, and vLLM serves all runs. A hook sees every file that
    this process opens."""
    global _opened
    first = server.spool.runs.directory(client.create_run("many", lora={"rank": 1}).spec.name)
    for number in range(300):
        copy = first.with_name(f"many-{number:03}")
        shutil.copytree(first, copy)
        for name in ("run.json", "checkpoints/00000000/manifest.json"):
            text = (first / name).read_text().replace('"many"', f'"{copy.name}"')
            (copy / name).write_text(text)
        serve(server.spool, copy.name, 0)
    sys.addaudithook(_note_open)
    for after, limit in (("many", 20), ("many-150", 20), ("many-150", 50)):
        _opened = []
        page = http.get("/v1/runs", params={"after": after, "limit": limit}).json()
        opened, _opened = [name for name in _opened if str(server.spool.root) in name], None
        first_name = "many-000" if after == "many" else "many-151"
        assert (len(page), page[0]["spec"]["name"]) == (limit, first_name)
        there = [name for name in opened if "/runs/" in name and Path(name).exists()]
        assert len(there) >= limit
        assert len(opened) <= 2 * limit
    (server.spool.runs.directory("many-151") / "run.json").write_text("{")
    page = http.get("/v1/runs", params={"after": "many-150", "limit": 2}).json()
    assert [run["spec"]["name"] for run in page] == ["many-152", "many-153"]


def test_a_run_lists_its_first_pending_jobs_and_counts_all(client, server, run, monkeypatch):
    monkeypatch.setattr("tandem.controller.routes_runs.LISTED_PENDING", 2)
    jobs = [client.train(run, rl_request()).id for _ in range(4)]
    claim(server.spool)
    status = client.get_run(run)
    assert (status.pending, status.num_pending) == (jobs[:2], 4)
    assert LISTED_PENDING >= 100


def test_a_discarded_step_is_not_taken_for_the_served_one(client, server, run):
    """Step 1 is served and then discarded, and a new step 1 is made. The record of the served step
    still names the discarded step."""
    client.train(run, rl_request())
    run_one(server.spool)
    serve(server.spool, run, 1)
    assert client.wait_served(run, 1, timeout=0).step == 1
    client.rollback(run, 0)
    assert not client.get_run(run).served_in_chain
    for step in (0, 1):
        with pytest.raises(NotServed):
            client.wait_served(run, step, timeout=0)
    client.train(run, rl_request())
    job = run_one(server.spool)
    assert server.spool.checkpoints.manifest(run, 1).job == job.spec.id
    old = server.spool.served.get(run).model_copy(update={"checkpoint": "0" * 64})
    # the tests' adapter is the same at each step and can't show a difference
    server.spool.served.put(run, old)
    with pytest.raises(NotServed):
        client.wait_served(run, 1, timeout=0)
    serve(server.spool, run, 1)
    assert client.wait_served(run, 1, timeout=0).step == 1


def test_who_waits_is_told_that_the_first_step_is_refused(client, server, run):
    """vLLM serves no step of the run, and may never serve one."""
    server.spool.served.put_refused(run, Refused(step=0, reason="other log-probs"))
    with pytest.raises(StepRefused, match=f"the publisher refused {run}@0: other log-probs") as no:
        client.wait_served(run, 0)
    assert no.value.served is None
    serve(server.spool, run, 0)
    assert client.wait_served(run, 0, timeout=0).step == 0
    assert client.get_run(run).refused is None


def test_a_checkpoint_that_is_removed_while_it_is_listed_is_left_out(
    client, server, run, monkeypatch
):
    steps = server.spool.checkpoints.steps
    monkeypatch.setattr(server.spool.checkpoints, "steps", lambda run: [*steps(run), 7])
    assert [info.step for info in client.checkpoints(run)] == [0]
