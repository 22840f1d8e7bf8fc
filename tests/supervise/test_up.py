"""The tests run `tandem up` with small programs. The tests check output, order, restarts and crash
loops. They also check that no process is left after any kind of end."""

import json
import os
import re
import signal
from configparser import ConfigParser
from contextlib import suppress
from functools import partial

import pytest

from supervise.tandem_up import AB, Up
from tandem.config import Settings
from tandem.supervise import supervisord
from tandem.supervise import up as up_module
from tandem.supervise.supervisord import Program, Status
from tandem.system import ports, processes
from tandem.system.environment import runtime_dir
from waiting import alive, until

# Even a busy machine starts Python within this number of seconds. A program that ends earlier
# counts as not started.
STARTS = {"start-fails": "30", "crash-loop": "1"}
of_ends = pytest.mark.sample(3, of="ends of tandem up")


def both_run(stack: Up) -> Up:
    stack.until("a | a runs; admin token of 43 characters")
    stack.until("b | b runs")
    return stack


@pytest.mark.slow
@of_ends
def test_it_restarts_reaps_and_stops_in_order_and_ends_with_0(up):
    stack = both_run(up(TANDEM_ADMIN_TOKEN="s3cret" + "x" * 37, FAKE_A="orphans"))
    stack.until("a | orphaned", count=3)
    of_stack = partial(processes.descendants, stack.process.pid)
    until(
        "orphans are reaped", lambda: not any(p.zombie or p.command == "sleep" for p in of_stack())
    )
    os.kill(stack.pid("fake_program", "a"), signal.SIGKILL)
    stack.until("a runs", count=2)
    stack.until("ended: terminated by SIGKILL; crash 1 of 1")
    assert stack.stop(signal.SIGINT) == 0
    assert stack.left() == []
    stopped = {name: float(at) for name, at in re.findall(r"(.) stops at ([0-9.]+)", stack.text())}
    assert stopped["b"] < stopped["a"]
    # The logs contain the terminal's output. The token is neither in the output nor in any file.
    assert "admin token" in (stack.root / "logs" / "a.log").read_text()
    written = [path for path in stack.root.rglob("*") if path.is_file()]
    shown = {
        path: oct(path.stat().st_mode)
        for path in stack.root.rglob("*")
        if "terminal" not in path.name
    }
    assert not {path: mode for path, mode in shown.items() if int(mode, 8) & 0o007}
    directory = runtime_dir(stack.root, "all")
    assert directory.stat().st_mode & 0o077 == 0
    for path in [*written, directory / "supervisord.conf"]:
        assert b"s3cret" not in path.read_bytes()


@pytest.mark.slow
@of_ends
@pytest.mark.parametrize(
    ("how", "code", "lines"),
    [
        (
            "crash-loop",
            71,
            [
                "ended: exit status 4; crash 1 of 1",
                "b crashes again and again; the end of its log:",
            ],
        ),
        ("start-fails", 70, ["b can't be started"]),
    ],
)
def test_a_program_that_does_not_stay_up_ends_everything_and_is_named(up, how, code, lines):
    stack = up(FAKE_B=how, FAKE_RETRIES="3" if code == 71 else "0", FAKE_START_SECONDS=STARTS[how])
    assert stack.wait() == code
    assert [line for line in lines if line not in stack.text()] == []
    assert stack.left() == []


def test_a_costly_program_that_is_about_to_start_again_stays_up(tmp_path, monkeypatch):
    """The costly program has no process for a moment, because it is about to start again. The stack
    does not end if another program can't be started at this moment."""
    monkeypatch.setattr(supervisord, "start_again", lambda *_: None)
    programs = [Program("a", "a", 1, costly=True), Program("b", "b", 1)]
    for name in "ab":
        supervisord.log_path(tmp_path, name).touch()
    stack = up_module.Stack(
        Settings(root=tmp_path),
        "all",
        tmp_path,
        programs,
        supervisord.Console(tmp_path, "ab", as_json=False),
    )
    stack._ready = True
    a, b = programs
    assert stack._check(a, Status("RUNNING", 7, 0.0)) == 0
    assert stack._check(a, Status("BACKOFF", 0, 0.0)) == 0
    assert stack._check(b, Status("FATAL", 0, 0.0)) == 0
    assert stack._check(a, Status("FATAL", 0, 0.0)) == up_module.EXIT_FATAL


@pytest.mark.slow
@of_ends
@pytest.mark.parametrize(
    ("how", "says"), [("start-fails", "b can't be started"), ("crash-loop", "b crashes again")]
)
def test_once_the_stack_was_ready_one_programs_trouble_costs_no_other_its_state(up, how, says):
    programs = (AB[0] | {"costly": True}, AB[1])
    stack = up(
        programs=programs,
        FAKE_B=how,
        FAKE_RETRIES="4",
        FAKE_READY="1",
        FAKE_START_SECONDS=STARTS[how],
    )
    stack.until("ready after")
    stack.until(says)
    stack.until("b | b runs", count=stack.text().count("b | b runs") + 2)
    assert stack.text().count(says) == 1
    assert stack.text().count("a | a runs") == 1
    os.kill(stack.pid("fake_program", "a"), signal.SIGKILL)
    stack.until("a | a runs", count=2)

    def killed() -> bool:
        """If a program ends twice between two polls of `tandem up`, only one end is counted. So the
        test may kill the program more than twice."""
        with suppress(AssertionError, ProcessLookupError):
            os.kill(stack.pid("fake_program", "a"), signal.SIGKILL)
        return stack.process.poll() is not None

    until("the end: nothing is left that stays up", killed, poll=1)
    assert stack.wait() in (70, 71)


@pytest.mark.slow
@of_ends
def test_once_more_ctrl_c_kills_what_supervisord_left(up):
    stack = both_run(up(FAKE_A="daemon", FAKE_LEFTOVER="1000"))
    supervisord = stack.pid("supervisor.supervisord")
    stack.process.send_signal(signal.SIGINT)
    until("supervisord has ended", lambda: not alive(supervisord))
    stack.process.send_signal(signal.SIGINT)
    assert stack.wait() == 0
    assert stack.left() == []


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_when_supervisord_dies_nothing_is_left(up, sig):
    stack = both_run(up(FAKE_A="child"))
    os.kill(stack.pid("supervisor.supervisord"), sig)
    assert stack.wait() == 72
    assert stack.left() == []


@pytest.mark.slow
@of_ends
def test_kill_9_of_tandem_up_itself_leaves_nothing(up):
    stack = both_run(up())
    stack.process.kill()
    stack.process.wait()
    until("nothing is left", lambda: not stack.left())


@pytest.mark.slow
@of_ends
def test_what_a_killed_one_left_ends_before_the_next_starts_its_programs(up):
    first = up()
    first.until("a runs")
    left = first.pid("fake_program", "a")
    supervisord = first.pid("supervisor.supervisord")
    os.kill(supervisord, signal.SIGSTOP)  # a stopped supervisord stops no program
    first.process.kill()
    os.kill(supervisord, signal.SIGKILL)
    first.process.wait()
    assert alive(left)
    second = up()
    second.until("a runs", count=2)  # both stacks write to one file
    assert not alive(left)
    assert second.stop() == 0
    assert second.left() == []


@pytest.mark.slow
@of_ends
def test_a_second_one_on_the_same_spool_and_a_taken_port_are_refused(up):
    stack = both_run(up())
    second = stack.start(stack.root / "second")
    assert second.wait(120) == 1
    assert "runs on" in (stack.root / "second").read_text()
    assert stack.stop() == 0
    with ports.reserve(stack.ports[0]):
        assert stack.start(stack.root / "third").wait(120) == 1
    assert "controller_port: another Tandem process uses port" in (stack.root / "third").read_text()


@pytest.mark.slow
@of_ends
@pytest.mark.parametrize(
    ("how", "says"), [("start-fails", "b can't be started"), ("crash-loop", "b crashes again")]
)
def test_a_program_that_is_not_essential_ends_nothing_and_is_tried_again(up, how, says):
    programs = (AB[0], AB[1] | {"essential": False})
    stack = up(programs=programs, FAKE_B=how, FAKE_RETRIES="0", FAKE_START_SECONDS=STARTS[how])
    stack.until(says)
    stack.until("b | b runs", count=stack.text().count("b | b runs") + 1)
    assert stack.text().count(says) == 1
    assert stack.text().count("a | a runs") == 1
    assert stack.stop() == 0
    assert stack.left() == []


TWINS = tuple(
    {"name": f"b-{n}", "module": f"fake_program b{n}", "essential": False} for n in range(2)
)


@pytest.mark.slow
@of_ends
def test_programs_of_a_kind_stop_at_once(up):
    """Programs of one kind stop at the same time, so several inference servers stop within the time
    of one server."""
    stack = up(programs=(AB[0], *TWINS), FAKE_B0="stubborn", FAKE_B1="stubborn")
    for n in range(2):
        stack.until(f"b-{n} | b{n} runs")
    assert stack.stop() == 0
    log = (stack.root / "logs/supervisord.log").read_text()
    ends = re.findall(r"(killing '|stopped: )b-", log)
    assert ends == ["killing '"] * 2 + ["stopped: "] * 2
    assert stack.left() == []


def test_one_of_a_kind_is_tried_again(up):
    programs = (AB[0], *TWINS)
    stack = up(programs=programs, FAKE_B1="start-fails", FAKE_RETRIES="0", FAKE_START_SECONDS="30")
    stack.until("b-1 can't be started")
    stack.until("b-1 | b1 runs", count=2)


@pytest.mark.slow
@of_ends
def test_two_roles_run_on_one_spool_and_a_stubborn_program_is_killed_with_its_group(up, tmp_path):
    one = both_run(up(FAKE_B="stubborn", FAKE_A="child"))
    (tmp_path / "token").touch()  # an empty file is no token
    two = both_run(up(role="trainer", TANDEM_ADMIN_TOKEN_FILE=str(tmp_path / "token")))
    assert one.process.poll() is None
    assert (one.root / "logs/trainer/a.log").stat().st_mode & 0o060 == 0o060
    assert (two.stop(), one.stop()) == (0, 0)
    assert one.left() == []


@pytest.mark.slow
@of_ends
def test_as_json_every_line_is_an_object_that_names_its_program(up):
    stack = up(TANDEM_LOG_FORMAT="json", FAKE_A="json")
    stack.until('"message": "b runs')
    stack.until("from a")
    assert stack.stop() == 0
    lines = [json.loads(line) for line in stack.text().splitlines()]
    assert {line["program"] for line in lines} == {"a", "b", "up"}
    (own,) = [line for line in lines if line["message"] == "from a"]
    assert (own["level"], own["logger"], own["fields"]) == ("warning", "fake", {"n": 1})


def test_the_runner_gets_no_way_to_vllm(tmp_path, monkeypatch):
    """The runner's environment has empty variables for vLLM's address and admin token. Settings
    treat an empty variable as unset."""
    config = ConfigParser(interpolation=None)
    config.read(supervisord.write_config(tmp_path, tmp_path, supervisord.PROGRAMS["all"]))
    for name in ("vllm", "publisher", "runner"):
        for variable in ("TANDEM_ADMIN_TOKEN", "TANDEM_INFERENCE_URL"):
            monkeypatch.setenv(variable, "http://set")
        own = config[f"program:{name}"]["environment"]
        for variable, value in re.findall(r'(\w+)="([^"]*)"', own):
            monkeypatch.setenv(variable, value)
        settings = Settings()
        has = settings.secret("admin_token"), settings.inference_url
        assert has == ((None, None) if name == "runner" else ("http://set", "http://set"))
