"""`tandem up` with small programs: output, order, restarts, crash loops, and that nothing is left whatever ends it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.supervise.supervisord import runtime_dir
from tandem.system import ports, processes

HERE = Path(__file__).parent
START = """
import os, sys
from tandem.config import Settings
from tandem.supervise.supervisord import Program
from tandem.supervise.up import up
module = sys.modules['tandem.supervise.up']
module.CRASHES = int(os.environ.get("FAKE_CRASHES", 2))
module.TRY_AGAIN_SECONDS = 3
essential = "FAKE_B_EXTRA" not in os.environ
sys.exit(up(Settings(), os.environ.get("FAKE_ROLE", "all"), [
    Program("a", "fake_program_a", 1, 2, port="controller"), Program("b", "fake_program_b", 2, 2, essential=essential),
]))
"""


class Up:
    def __init__(self, root: Path, **variables: str) -> None:
        self.root = root
        with ports.reserve() as one, ports.reserve() as two:
            self.ports = one.port, two.port
        self.environment = os.environ | {
            "TANDEM_ROOT": str(root), "TANDEM_BASE_MODEL": "none", "PYTHONPATH": str(HERE),
            "TANDEM_CONTROLLER_PORT": str(self.ports[0]), "TANDEM_INFERENCE_PORT": str(self.ports[1]), **variables,
        }  # fmt: skip
        self.out = root / "terminal"
        self.process = self.start(self.out)

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        with out.open("ab") as file:
            return subprocess.Popen([sys.executable, "-c", START], env=self.environment, stdout=file, stderr=file)

    def text(self) -> str:
        return self.out.read_text()

    def until(self, wanted: str, timeout: float = 20, count: int = 1) -> None:
        end = time.monotonic() + timeout
        while self.text().count(wanted) < count:
            assert time.monotonic() < end, f"no {wanted!r} in\n{self.text()}"
            assert self.process.poll() is None, f"ended before {wanted!r}:\n{self.text()}"
            time.sleep(0.05)

    def left(self) -> list[processes.Process]:
        return processes.marked("TANDEM_ROOT", str(self.root))

    def pid(self, module: str) -> int:
        for process in self.left():
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            if module.encode() in words:
                return process.pid
        raise AssertionError(f"{module} does not run")

    def wait(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)


@pytest.fixture
def up(tmp_path):
    started: list[Up] = []

    def start(**variables: str) -> Up:
        started.append(Up(tmp_path, **variables))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            item.process.kill()
            item.process.wait()
        processes.kill_all(item.left, timeout=10)


def both_run(stack: Up) -> Up:
    stack.until("a | a runs; admin token of 43 characters")
    stack.until("b | b runs")
    return stack


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_in_order_and_it_ends_with_0(up, how):
    stack = both_run(up(TANDEM_ADMIN_TOKEN="s3cret" + "x" * 37))
    stack.process.send_signal(how)
    assert stack.wait() == 0
    assert stack.left() == []
    stopped = {name: float(at) for name, at in re.findall(r"(.) stops at ([0-9.]+)", stack.text())}
    assert stopped["b"] < stopped["a"]
    # What the terminal showed is in the logs too; the token is in neither, nor in any other file.
    assert "admin token" in (stack.root / "logs" / "a.log").read_text()
    written = [path for path in stack.root.rglob("*") if path.is_file()]
    directory = runtime_dir(stack.root, "all")
    assert directory.stat().st_mode & 0o077 == 0
    for path in [*written, directory / "supervisord.conf"]:
        assert b"s3cret" not in path.read_bytes()


def test_a_crashed_program_is_started_again(up):
    stack = both_run(up())
    os.kill(stack.pid("fake_program_a"), signal.SIGKILL)
    stack.until("a runs", count=2)
    stack.until("ended: terminated by SIGKILL; crash 1 of 2")
    assert stack.process.poll() is None


def test_a_crash_loop_ends_with_71_and_names_the_program(up):
    stack = up(FAKE_B="crash-loop")
    assert stack.wait() == 71
    assert "ended: exit status 4; crash 1 of 2" in stack.text()
    assert "b crashes again and again; the end of its log:" in stack.text()
    assert stack.left() == []


def test_a_program_that_cannot_start_ends_with_70(up):
    stack = up(FAKE_A="start-fails", FAKE_CRASHES="8")
    assert stack.wait() == 70
    assert "a can't be started" in stack.text()
    assert stack.left() == []


def test_a_program_that_ignores_sigterm_is_killed_with_its_group(up):
    stack = both_run(up(FAKE_B="stubborn", FAKE_A="child"))
    begin = time.monotonic()
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0
    assert time.monotonic() - begin < 8
    assert stack.left() == []


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_when_supervisord_dies_nothing_is_left(up, sig):
    stack = both_run(up(FAKE_A="child"))
    os.kill(stack.pid("supervisor.supervisord"), sig)
    assert stack.wait() == 72
    assert stack.left() == []


def test_kill_9_of_tandem_up_itself_leaves_nothing(up):
    stack = both_run(up())
    stack.process.kill()
    stack.process.wait()
    end = time.monotonic() + 10
    while stack.left():
        assert time.monotonic() < end, stack.left()
        time.sleep(0.1)


def test_a_second_one_on_the_same_spool_and_a_taken_port_are_refused(up):
    stack = both_run(up())
    second = stack.start(stack.root / "second")
    assert second.wait(20) == 1
    assert "runs on" in (stack.root / "second").read_text()
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0
    with ports.reserve(stack.ports[0]):
        assert stack.start(stack.root / "third").wait(20) == 1
    assert "controller_port: port" in (stack.root / "third").read_text()


@pytest.mark.parametrize(("how", "says"), [("start-fails", "b can't be started"), ("crash-loop", "b crashes again")])
def test_a_program_that_is_not_essential_ends_nothing_and_is_tried_again(up, how, says):
    stack = up(FAKE_B=how, FAKE_B_EXTRA="1")
    stack.until(says)
    seen = stack.text().count("b runs")
    stack.until("b | b runs", count=seen + 2)
    assert stack.text().count(says) == 1
    assert stack.text().count("a | a runs") == 1
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0
    assert stack.left() == []


def test_two_roles_run_on_one_spool_and_their_files_are_the_groups(up):
    one = both_run(up())
    with ports.reserve() as other:
        two = up(FAKE_ROLE="trainer", TANDEM_CONTROLLER_PORT=str(other.port))
    two.out = one.root / "terminal of two"
    two.process.kill()
    two.process.wait()
    two.process = two.start(two.out)
    both_run(two)
    assert one.process.poll() is None
    logs = one.root / "logs/trainer"
    assert (logs / "a.log").stat().st_mode & 0o060 == 0o060
    for stack in (one, two):
        stack.process.send_signal(signal.SIGTERM)
        assert stack.wait() == 0


def test_orphans_are_reaped_while_it_runs(up):
    stack = both_run(up(FAKE_A="orphans"))
    stack.until("a | orphaned", count=3)
    time.sleep(1)
    children = [process for process in processes.all_processes() if process.parent == stack.process.pid]
    assert [process for process in children if process.zombie] == []
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0


def test_as_json_every_line_is_an_object_that_names_its_program(up):
    stack = up(TANDEM_LOG_FORMAT="json", FAKE_A="json")
    stack.until('"message": "b runs')
    stack.until("from a")
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0
    lines = [json.loads(line) for line in stack.text().splitlines()]
    assert {line["program"] for line in lines} == {"a", "b", "up"}
    (own,) = [line for line in lines if line["message"] == "from a"]
    assert (own["level"], own["logger"], own["fields"]) == ("warning", "fake", {"n": 1})
