"""The images' health check, against programs under a real supervisord that stand in for the real ones."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.locks import is_locked
from tandem.supervise.health import troubles
from tandem.supervise.supervisord import Status
from tandem.system import ports

HERE = Path(__file__).parent
START = """
import os, sys
from tandem.config import Settings
from tandem.supervise.supervisord import Program
from tandem.supervise.up import up
names = os.environ["NAMES"].split()
modules = ["fake_program_a", "fake_program_b"]
sys.exit(up(Settings(), os.environ["ROLE"], [Program(n, m, i, 2) for i, (n, m) in enumerate(zip(names, modules))]))
"""


def check(environment, role):
    """(exit status, the line)"""
    done = subprocess.run(
        [sys.executable, "-m", "tandem.supervise.health"],
        check=False, env=environment | {"TANDEM_ROLE": role}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    return done.returncode, done.stdout.strip()


@pytest.fixture
def stack(tmp_path):
    """`start(role, *names)`: `tandem up` of two programs that do nothing, under these names."""
    started = []
    with ports.reserve() as one, ports.reserve() as two:
        numbers = {"TANDEM_CONTROLLER_PORT": str(one.port), "TANDEM_INFERENCE_PORT": str(two.port)}
    environment = os.environ | {
        "TANDEM_ROOT": str(tmp_path), "TANDEM_BASE_MODEL": "none", "PYTHONPATH": str(HERE),
        "TANDEM_API_KEY": "first second", "TANDEM_ADMIN_TOKEN": "x", "TANDEM_VLLM_STALL_SECONDS": "1000", **numbers,
    }  # fmt: skip

    def start(role, *names):
        with (tmp_path / "out").open("wb") as out:
            command = [sys.executable, "-c", START]
            variables = environment | {"NAMES": " ".join(names), "ROLE": role}
            started.append(subprocess.Popen(command, env=variables, stdout=out, stderr=out))
        return environment

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def until(environment, role, wanted):
    end = time.monotonic() + 30
    while (answer := check(environment, role)) != wanted:
        assert time.monotonic() < end, answer
        time.sleep(0.2)


def test_a_trainer_is_healthy_while_its_runner_runs_and_holds_the_lock(stack, tmp_path):
    environment = stack("trainer", "runner", "other")
    until(environment, "trainer", (1, "the runner does not hold the spool's lock"))
    with Spool(tmp_path).runner_lock("me"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert check(environment, "trainer") == (0, "trainer is healthy")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert check(environment, "inference") == (1, "supervisord does not answer")


class Server:
    """Answers each path with (status, body), and notes the keys that came."""

    def __init__(self, port):
        self.answers, self.keys = {}, set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_): ...

            def do_GET(self):
                status, body = server.answers.get(self.path, (404, {}))
                server.keys.add((self.path, self.headers["Authorization"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


def test_inference_is_healthy_when_vllm_lists_the_base_model(stack):
    environment = stack("inference", "vllm", "publisher")
    port = environment["TANDEM_INFERENCE_PORT"]
    until(environment, "inference", (1, f"http://127.0.0.1:{port}/health does not answer: "
                                        "[Errno 111] Connection refused"))  # fmt: skip
    server = Server(int(port))
    server.answers["/health"] = (500, {})
    assert check(environment, "inference") == (1, f"http://127.0.0.1:{port}/health answers 500")
    server.answers |= {"/health": (200, {}), "/v1/models": (200, {"data": [{"id": "run@1"}]})}
    assert check(environment, "inference") == (1, "vLLM does not list the model 'base'")
    server.answers["/v1/models"] = (200, {"data": [{"id": "run@1"}, {"id": "base"}]})
    assert check(environment, "inference") == (0, "inference is healthy")
    assert ("/v1/models", "Bearer first") in server.keys
    server.http.shutdown()


def test_a_controller_is_healthy_when_it_is_ready(tmp_path):
    with ports.reserve() as port:
        environment = os.environ | {"TANDEM_CONTROLLER_PORT": str(port.port), "TANDEM_CONTROLLER_HOST": "0.0.0.0"}
    assert check(environment, "controller")[0] == 1
    server = Server(port.port)
    server.answers["/readyz"] = (503, {})
    assert check(environment, "controller") == (1, f"http://127.0.0.1:{port.port}/readyz answers 503")
    server.answers["/readyz"] = (200, {})
    assert check(environment, "controller") == (0, "controller is healthy")
    server.http.shutdown()


def test_a_program_that_does_not_run_is_named(tmp_path, monkeypatch):
    Spool.create(tmp_path)
    found = {"runner": Status("runner", "BACKOFF", 0), "exporter": Status("exporter", "FATAL", 0)}
    monkeypatch.setattr("tandem.supervise.health.statuses", lambda settings: found)
    assert next(troubles(Settings(root=tmp_path), "trainer")) == "runner is BACKOFF"
    del found["runner"]
    assert next(troubles(Settings(root=tmp_path), "trainer")) == "runner is absent"


def test_a_vllm_that_waits_for_the_trainer_has_started_and_is_not_ready(tmp_path, monkeypatch):
    spool, now = Spool.create(tmp_path), time.time()
    running = {name: Status(name, "RUNNING", 1) for name in ("vllm", "publisher")}
    monkeypatch.setattr("tandem.supervise.health.statuses", lambda settings: running)
    settings = Settings(root=tmp_path, gpu_mode="shared")
    code = f"""if True:
        import sys
        from tandem.spool import Spool
        from tandem.spool.schema import Hold
        spool = Spool({str(tmp_path)!r})
        with spool.runner_lock("me"):
            spool.hold.put(Hold(runner="me", job="j", attempt=1, phase="training", since={now + 60}, beat={now},
                                lease=600, deadline={now}))
            print("held", flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert list(troubles(settings, "inference", started=True)) == []
        assert "does not answer" in next(troubles(settings, "inference"))
        holder.kill()
    assert spool.hold.get() is not None
    assert "does not answer" in next(troubles(settings, "inference", started=True))


def test_wrong_settings_are_one_line():
    assert check(os.environ | {"TANDEM_TRAINER_RANKS": "none"}, "trainer")[0] == 1


def test_asking_for_a_lock_takes_nothing(tmp_path):
    spool = Spool.create(tmp_path)
    path = spool.paths.runner_lock
    assert not is_locked(path)
    code = f"from tandem.spool.locks import is_locked; from pathlib import Path; print(is_locked(Path({str(path)!r})))"
    with spool.runner_lock("me"):
        for _ in range(2):
            assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"
    assert not is_locked(path)
