"""A job's lines are in its log and on the runner's stdout, with their job and their process."""

import json

import pytest

from spool import spool_tools
from tandem.trainer.runner.joblog import JobLog


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_come_with_their_job_and_their_process(tmp_path, monkeypatch, capfd, form):
    monkeypatch.setenv("TANDEM_LOG_FORMAT", form)
    spool = spool_tools.spool_with_run(tmp_path / "spool")
    job = spool_tools.start(spool, "j1")
    work = spool.paths.work_dir("j1", 1)
    work.mkdir(parents=True, exist_ok=True)
    log = JobLog(spool, job, 1)
    (work / "rank.0.log").write_bytes(b"hello\nnot fin\xffished")
    log.collect()
    log.say("stops")
    log.collect(final=True)
    lines = ["[rank 0] hello", "[runner] stops", "[rank 0] not fin\N{REPLACEMENT CHARACTER}ished"]
    assert spool.paths.log_file("j1").read_text().splitlines() == lines
    shown = capfd.readouterr().out.splitlines()
    if form == "text":
        assert shown == [f"job j1 {line}" for line in lines]
    else:
        objects = [json.loads(line) for line in shown]
        assert [(each["message"], each["fields"]) for each in objects] == [(line, {"job": "j1"}) for line in lines]
