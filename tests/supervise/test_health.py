"""The images' health check, against programs under a real supervisord. Small programs take the
place of the images' programs."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from free_ports import free_ports
from inference.test_shared_gpu import HOLDER
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.locks import is_locked
from tandem.supervise.health import problems, stopped_loops
from tandem.supervise.supervisord import Status
from tandem.system import liveness
from tandem.system.environment import runtime_dir
from waiting import until


def check(environment, role, *options):
    """Runs the health check of `role`. Returns (exit status, the printed line)."""
    done = subprocess.run(
        [sys.executable, "-m", "tandem.supervise.health", *options],
        check=False,
        env=environment | {"TANDEM_ROLE": role},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    return done.returncode, done.stdout.strip()


def named(*names):
    return tuple({"name": name, "module": f"fake_program {name}"} for name in names)


@pytest.mark.slow
def test_a_trainer_is_healthy_while_its_runner_runs_and_holds_the_lock(up, tmp_path):
    stack = up(role="trainer", programs=named("runner", "other"))
    unlocked = 1, "the runner does not hold the spool's lock"
    until("both run", lambda: check(stack.environment, "trainer") == unlocked)
    lock = Spool(tmp_path).paths.runner_lock
    with Spool(tmp_path).runner_lock("me"):
        for _ in range(2):  # a check does not change the lock
            assert check(stack.environment, "trainer") == (0, "trainer is healthy")
    assert not is_locked(lock)
    assert check(stack.environment, "inference") == (1, "supervisord does not answer")


@pytest.mark.parametrize("options", [["--alive"], ["--live", "--started"]])
def test_unknown_options_are_refused(tmp_path, options):
    problem = f"{' '.join(options)} is no option; use --started, --live or neither"
    assert check({"TANDEM_ROOT": str(tmp_path)}, "trainer", *options) == (1, problem)


@contextmanager
def server(port: int, answers: dict[str, tuple[int, Any]]) -> Iterator[set]:
    """A server that answers each path with (status, body). If the body is None, the server sends
    only a part of a body. Yields the requested paths and keys."""
    requests = set()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_GET(self):
            status, body = answers.get(self.path, (404, {}))
            requests.add((self.path, self.headers["Authorization"]))
            self.send_response(status)
            if body is None:
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        yield requests
        http.shutdown()


@pytest.mark.slow
def test_inference_is_healthy_when_vllm_lists_the_base_model(up):
    stack = up(role="inference", programs=named("vllm", "publisher"), TANDEM_API_KEY="first second")
    url = f"http://127.0.0.1:{stack.ports[1]}"
    refused = f"{url}/health does not answer: [Errno 111] Connection refused"
    until("both run", lambda: check(stack.environment, "inference") == (1, refused))
    answers = {"/health": (500, {})}
    with server(stack.ports[1], answers) as requests:
        assert check(stack.environment, "inference") == (1, f"{url}/health answers 500")
        answers |= {"/health": (200, {}), "/v1/models": (200, {"data": [{"id": "run@1"}]})}
        assert check(stack.environment, "inference") == (1, "vLLM does not list the model 'base'")
        answers["/v1/models"] = (200, {"data": [{"id": "run@1"}, {"id": "base"}]})
        assert check(stack.environment, "inference") == (0, "inference is healthy")
        assert ("/v1/models", "Bearer first") in requests
        stack.until("ready after")
        # A vLLM with merged weights lists only the names of the run.
        answers["/v1/models"] = (200, {"data": [{"id": "run@1"}, {"id": "run"}]})
        merged = stack.environment | {"TANDEM_WEIGHTS": "merged"}
        assert check(merged, "inference") == (0, "inference is healthy")
        answers["/v1/models"] = (200, {"data": []})
        assert check(merged, "inference")[0] == 1


@pytest.mark.slow
def test_a_controller_is_healthy_when_it_is_ready():
    [port] = free_ports(1)
    environment = os.environ | {
        "TANDEM_CONTROLLER_PORT": str(port),
        "TANDEM_CONTROLLER_HOST": "0.0.0.0",
    }
    assert check(environment, "controller")[0] == 1
    answers: dict[str, tuple[int, Any]] = {"/readyz": (503, {})}
    with server(port, answers):
        assert check(environment, "controller") == (
            1,
            f"http://127.0.0.1:{port}/readyz answers 503",
        )
        answers["/readyz"] = (200, None)
        status, line = check(environment, "controller")
        assert (status, f"{port}/readyz does not answer: IncompleteRead" in line) == (1, True)
        answers["/readyz"] = (200, {})
        assert check(environment, "controller") == (0, "controller is healthy")


def test_a_program_that_does_not_run_is_named(tmp_path, monkeypatch):
    Spool.create(tmp_path)
    now = {"runner": Status("BACKOFF", 0, 0), "exporter": Status("FATAL", 0, 0)}
    monkeypatch.setattr("tandem.supervise.health.statuses", lambda settings: now)
    assert problems(Settings(root=tmp_path), "trainer")[0] == "runner is BACKOFF"
    del now["runner"]
    assert problems(Settings(root=tmp_path), "trainer")[0] == "runner is absent"


def test_a_vllm_that_waits_for_the_trainer_has_started_and_is_not_ready(tmp_path, monkeypatch):
    spool = Spool.create(tmp_path)
    running = {name: Status("RUNNING", 1, 0) for name in ("vllm", "publisher")}
    monkeypatch.setattr("tandem.supervise.health.statuses", lambda settings: running)
    settings = Settings(root=tmp_path, gpu_mode="shared")
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "0", "600", "training"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holds\n"
        assert problems(settings, "inference", started=True) == []
        assert "does not answer" in problems(settings, "inference")[0]
        holder.kill()
    assert spool.hold.get() is not None
    assert "does not answer" in problems(settings, "inference", started=True)[0]


def test_a_loop_that_does_not_turn_any_more_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROLE", "trainer")
    settings, directory = Settings(root=tmp_path), runtime_dir(tmp_path, "trainer")
    monkeypatch.setenv("TANDEM_ALIVE_DIR", str(directory))
    assert stopped_loops(settings, "trainer") == []  # no loop has begun
    for program in ("up", "runner", "publisher"):
        liveness.beat(program)
        os.utime(directory / f"{program}.alive", (0, time.time() - 100))
    # The check allows the runner's loop a longer turn, and ignores the publisher, which is no
    # program of the trainer.
    (message,) = stopped_loops(settings, "trainer")
    assert message.startswith("the loop of up has not turned for 100 s")


def test_a_program_of_several_loops_is_as_alive_as_the_one_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ALIVE_DIR", str(tmp_path))
    hangs, begun = threading.Event(), threading.Event()

    def loop() -> None:
        liveness.beat("runner")
        begun.set()
        hangs.wait()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        begun.wait()
        now = time.time()
        monkeypatch.setattr(liveness.time, "time", lambda: now + 1000)
        liveness.beat("runner")
        assert "the loop of runner has not turned for 1000 s" in (
            liveness.silence("runner", tmp_path) or ""
        )
    finally:
        hangs.set()
        thread.join()
    liveness.beat("runner")
    assert liveness.silence("runner", tmp_path) is None


def test_wrong_settings_are_one_line():
    assert check(os.environ | {"TANDEM_TRAINER_RANKS": "none"}, "trainer")[0] == 1
