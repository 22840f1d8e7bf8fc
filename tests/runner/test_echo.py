"""The ranks' lines reach the runner's stdout, whoever reads it and however slowly."""

import json
import os
import time

import pytest

from runner.runner_stack import Stack
from tandem.trainer.runner.echo import Echo


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read(end: int) -> list[str]:
    os.set_blocking(end, False)
    found = b""
    while True:
        try:
            found += os.read(end, 1 << 20)
        except BlockingIOError:
            return found.decode().splitlines()


def test_lines_come_with_their_job(pipe, monkeypatch):
    Echo("j1", pipe[1]).add(["[rank 0] hello", "[runner] stops"])
    assert read(pipe[0]) == ["job j1 [rank 0] hello", "job j1 [runner] stops"]
    monkeypatch.setenv("TANDEM_LOG_FORMAT", "json")
    Echo("j1", pipe[1]).add(["[rank 0] hello"])
    line = json.loads(read(pipe[0])[0])
    assert (line["message"], line["fields"]) == ("[rank 0] hello", {"job": "j1"})


def test_a_reader_that_stops_costs_lines_and_no_time(pipe):
    echo = Echo("j1", pipe[1])
    begin = time.monotonic()
    for i in range(10):
        echo.add([f"[rank 0] {i} {j}" for j in range(100_000)])
    assert time.monotonic() - begin < 3
    lines = []
    for _ in range(100):
        lines += read(pipe[0])
        echo.add([], patience=1)
    lines += read(pipe[0])
    assert lines[0] == "job j1 [rank 0] 0 0"
    left_out = int(lines[-1].removeprefix("job j1 [runner] ").split()[0])
    assert len(lines) - 1 + left_out == 1_000_000
    assert all(line.startswith("job j1 [r") for line in lines)
    assert read(pipe[0]) == []


def test_a_long_line_stays_one_piece_and_a_gone_reader_is_no_error():
    out, into = os.pipe()
    Echo("j1", into).add(["[rank 0] " + "é" * 50_000])
    (line,) = read(out)
    assert 2900 < len(line.encode()) < 4096
    os.close(out)
    Echo("j1", into).add(["[rank 0] nobody"])
    os.close(into)


def test_the_runners_log_shows_what_ranks_print(tmp_path):
    stack = Stack(tmp_path / "spool", "fork")
    try:
        stack.run()
        stack.start()
        job_id = stack.submit("run")
        assert stack.wait(job_id)[0] == "succeeded"
        of_job = stack.job_log(job_id).splitlines()
        shown = [line for line in stack.log.read_text().splitlines() if line.startswith(f"job {job_id} ")]
        assert any(line.startswith("[rank 0]") for line in of_job)
        assert [line.removeprefix(f"job {job_id} ") for line in shown] == of_job
    finally:
        stack.close()
