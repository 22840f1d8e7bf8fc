"""The runner writes the lines of a job's log to the runner's stdout. The reader of stdout may be
slow or gone."""

import errno
import json
import os
from types import SimpleNamespace

import pytest

from tandem.spool.attempt import Attempt
from tandem.system import tail
from tandem.trainer.runner.joblog import JobLog, JobStdout


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read(end: int) -> list[str]:
    os.set_blocking(end, False)
    content = b""
    while True:
        try:
            content += os.read(end, 1 << 20)
        except BlockingIOError:
            return content.decode().splitlines()


def test_lines_come_with_their_job(pipe, monkeypatch):
    JobStdout("j1", pipe[1]).write(["[rank 0] hello", "[runner] stops"])
    assert read(pipe[0]) == ["job j1 [rank 0] hello", "job j1 [runner] stops"]
    monkeypatch.setenv("TANDEM_LOG_FORMAT", "json")
    JobStdout("j1", pipe[1]).write(["[rank 0] hello"])
    line = json.loads(read(pipe[0])[0])
    assert (line["message"], line["fields"]) == ("[rank 0] hello", {"job": "j1"})


def test_a_reader_that_stops_costs_lines_and_blocks_nobody(pipe):
    stdout = JobStdout("j1", pipe[1])
    for i in range(10):
        stdout.write([f"[rank 0] {i} {j}" for j in range(10_000)])
    lines = []
    for _ in range(100):
        lines += read(pipe[0])
        stdout.write([])
    lines += read(pipe[0])
    assert lines[0] == "job j1 [rank 0] 0 0"
    left_out = int(lines[-1].removeprefix("job j1 [runner] ").split()[0])
    assert len(lines) - 1 + left_out == 100_000
    assert all(line.startswith("job j1 [r") for line in lines)
    assert read(pipe[0]) == []


@pytest.mark.parametrize("character", ["é", '"', "\x1b"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_line_stays_one_piece(pipe, monkeypatch, form, character):
    monkeypatch.setenv("TANDEM_LOG_FORMAT", form)
    JobStdout("j1", pipe[1]).write(["[rank 0] " + character * 50_000])
    (line,) = read(pipe[0])
    assert len(line.encode()) < 4096
    shown = json.loads(line)["message"] if form == "json" else line
    assert shown.count(character) > 300


def test_a_gone_reader_is_no_error():
    out, into = os.pipe()
    os.close(out)
    JobStdout("j1", into).write(["[rank 0] nobody"])
    os.close(into)


def test_the_end_of_a_log_that_outran_the_runner_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "_MOST", 1000)
    monkeypatch.setattr(tail, "_CHUNK", 100)
    paths = SimpleNamespace(log_file=lambda _: tmp_path / "log", work_dir=lambda *_: tmp_path)
    log = JobLog(Attempt(SimpleNamespace(paths=paths), "j1", 1), 1)
    (tmp_path / "rank.0.log").write_text("".join(f"line {n}\n" for n in range(900)))
    log.collect()
    assert 0 < len((tmp_path / "log").read_text().splitlines()) < 200
    log.collect(final=True)
    assert (tmp_path / "log").read_text().splitlines() == [f"[rank 0] line {n}" for n in range(900)]


def test_a_log_that_can_not_be_read_any_more_does_not_end_the_runner(tmp_path, monkeypatch):
    """A rank's log can't be read while the volume is gone. When the volume is back, the lines of
    the rank's log are written."""
    paths = SimpleNamespace(log_file=lambda _: tmp_path / "j.log", work_dir=lambda *_: tmp_path)
    (tmp_path / "rank.0.log").write_text("hello\n")
    log = JobLog(Attempt(SimpleNamespace(paths=paths), "j", 1), 1)
    lines = tail.Tail.lines

    def stale(self, *, final):
        if "rank.0" in str(self.path):
            raise OSError(errno.ESTALE, "Stale file handle")
        return lines(self, final=final)

    monkeypatch.setattr(tail.Tail, "lines", stale)
    log.collect()
    monkeypatch.undo()
    log.collect(final=True)
    assert (tmp_path / "j.log").read_text() == "[rank 0] hello\n"
