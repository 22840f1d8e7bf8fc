"""The controller as a process: it does not load torch, and survives SIGTERM and SIGKILL at bad
moments."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from api_server import KEY, Process, claim, make_root, rl_request, succeed, work
from spool.volume_tools import mounted
from tandem.client import Tandem
from tandem.config import Settings
from tandem.controller import app
from tandem.spool import Spool
from waiting import answers, until

CHAT = [
    {
        "messages": [
            {"role": "user", "content": "Is it late?"},
            {"role": "assistant", "content": "maybe"},
        ]
    }
]
of_processes = pytest.mark.sample(2, of="the controller's process")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("process") / "spool")


@pytest.fixture(scope="module")
def process(root: Path) -> Iterator[Process]:
    with Process(root, TANDEM_LOG_FORMAT="json") as process:
        yield process


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[Tandem]:
    with Tandem(process.url, KEY, patience=60) as client:
        client.create_run("a", lora={"rank": 2})
        yield client


@pytest.fixture(autouse=True)
def no_jobs_left() -> None:
    """Each test ends its own jobs."""


def test_what_can_not_be_pruned_keeps_nothing_stale(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, stop = list[Spool](), threading.Event()

    def prune(*_: object) -> None:
        stop.set()
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(app, "prune", prune)
    monkeypatch.setattr(app, "sweep", swept.append)
    app._remove_regularly(Spool(root), Settings(), stop)
    assert swept


def test_chats_are_tokenised_without_torch(process, client):
    job = client.train_sft("a", CHAT, packing={"sequence_length": 64})
    # a token for each letter, and the end-of-turn token
    assert job.spec.data.num_items == len("maybe") + 1
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert "tokenizers" in maps  # /proc/PID/maps lists the loaded libraries
    assert "libtorch" not in maps
    assert "vllm" not in maps
    client.cancel(job.id)


@pytest.mark.slow
@of_processes
def test_the_first_chats_may_come_at_once(tmp_path):
    """transformers' lazy imports are not thread-safe, and the first requests of a controller do
    these imports."""
    root = make_root(tmp_path / "spool")
    with (
        Process(root) as process,
        Tandem(process.url, KEY) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        for number in range(8):
            client.create_run(f"r{number}", lora={"rank": 2})

        def send(number: int) -> str:
            return client.train_sft(f"r{number}", CHAT, packing={"sequence_length": 64}).state

        assert list(threads.map(send, range(8))) == ["queued"] * 8


def test_every_line_of_a_json_log_is_an_object(process):
    httpx.get(f"{process.url}/healthz", trust_env=False)  # the controller does not log probes
    httpx.get(f"{process.url}/v1/runs", trust_env=False)
    output = until(
        "the request is logged", lambda: "GET /v1/runs" in (text := process.output()) and text
    )
    assert "/healthz" not in output
    lines = [json.loads(line) for line in output.rpartition("\n")[0].splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    assert all(line["message"] for line in lines)


@pytest.mark.slow
@of_processes
def test_the_log_and_jobs_name_the_key_that_asked(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann:ann-secret\nbob:bob-secret\nplain-secret\n")
    root = make_root(tmp_path / "spool")
    with Process(root, TANDEM_API_KEY="", TANDEM_API_KEY_FILE=str(keys)) as process:
        jobs = {}
        for name in ("ann", "bob", "plain"):
            with Tandem(process.url, f"{name}-secret") as client:
                client.create_run(f"of-{name}", lora={"rank": 2})
                jobs[name] = client.train(f"of-{name}", rl_request()).spec.submitted_by
        assert jobs == {"ann": "ann", "bob": "bob", "plain": None}
        lines = process.output().splitlines()
        told = {name: [line for line in lines if f"/v1/runs/of-{name}/" in line] for name in jobs}
        for name, [line] in told.items():
            assert re.search(r"127\.0\.0\.1:\d+( ann| bob)? - \"POST ", line)
            assert (f" {name} - " in line) == (name != "plain")
        assert "secret" not in process.output()
        command = [sys.executable, "-m", "tandem", "jobs", "list"]
        environment = os.environ | {"TANDEM_URL": process.url, "TANDEM_API_KEY": "bob-secret"}
        listed = subprocess.run(
            command,
            env=environment | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert " by " in listed
        assert " ann " in listed
        answer = httpx.get(
            f"{process.url}/v1/runs", headers={"Authorization": "Bearer ann:ann-secret"}
        )
        assert answer.status_code == 401


@pytest.mark.slow
@of_processes
def test_a_second_controller_on_the_port_fails_visibly(process, root):
    second = Process(root, TANDEM_CONTROLLER_PORT=str(process.port))
    assert second.popen.wait(timeout=60) == 3
    assert "address already in use" in second.output()
    second.__exit__()
    assert httpx.get(f"{process.url}/healthz", trust_env=False).status_code == 200


@pytest.mark.slow
@of_processes
def test_a_controller_for_ipv6_answers_ipv4_too(root):
    """In an IPv6-only cluster, other pods connect by IPv6, and `tandem` in the container connects
    to 127.0.0.1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Process(root, TANDEM_CONTROLLER_HOST="::") as process:
        for host in ("127.0.0.1", "[::1]"):
            assert answers(f"http://{host}:{process.port}/healthz"), host
        second = Process(
            root, TANDEM_CONTROLLER_HOST="::", TANDEM_CONTROLLER_PORT=str(process.port)
        )
        try:
            assert second.popen.wait(timeout=60) == 3
            assert "in use" in second.output()
        finally:
            second.__exit__()


@pytest.mark.slow
@of_processes
def test_clients_follow_a_job_over_a_kill_and_a_stop_of_the_controller(process, client, root):
    spool = Spool(root)
    job = client.train("a", rl_request())
    claimed = claim(spool)
    seen: list[int] = []
    thread = threading.Thread(
        target=lambda: seen.extend(event.seq for event in client.events(job.id))
    )
    thread.start()
    until("the client follows", lambda: "/events" in process.output())

    work(spool, claimed)  # the runner goes on without a controller
    process.kill_and_restart()
    assert client.get_job(job.id).state == "running"

    process.popen.send_signal(signal.SIGTERM)  # a client's event stream is open at this moment
    assert process.popen.wait(timeout=60) == 0
    succeed(spool, claimed)
    process.start()
    thread.join(timeout=60)
    assert seen == list(range(7))
    assert client.wait_job(job.id).state == "succeeded"


def test_a_controller_starts_on_a_full_volume_and_says_so(tmp_path):
    volume = tmp_path / "volume"
    with mounted(volume, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        make_root(volume)
        filler = volume / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        process = Process(volume)
        try:
            url = f"{process.url}/readyz"

            def answer() -> httpx.Response | None:
                with suppress(httpx.TransportError):
                    return httpx.get(url, trust_env=False)
                return None

            full = until("it answers", answer)
            assert (full.status_code, "full" in full.text, full.headers["retry-after"]) == (
                503,
                True,
                "2",
            )
            filler.unlink()
            process.wait_ready()
        finally:
            process.__exit__()
