"""The real process: no torch in it, stopped and killed at bad moments."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import httpx

from api_server import KEY, Process, claim, make_root, rl_request, succeed, work
from tandem.client import Tandem
from tandem.spool import Spool

CHAT = [{"messages": [{"role": "user", "content": "Is it late?"}, {"role": "assistant", "content": "maybe"}]}]


def test_it_tokenises_chats_without_torch(tmp_path):
    with Process(make_root(tmp_path / "spool")) as process, Tandem(process.url, KEY) as client:
        client.create_run("a", lora={"rank": 2})
        job = client.train_sft("a", CHAT, packing={"sequence_length": 64})
        assert job.spec.data.num_items == len("maybe") + 1  # and the end-of-turn token
        maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
        assert "tokenizers" in maps  # the files of what is loaded are seen here
        assert "libtorch" not in maps
        assert "vllm" not in maps


def test_killed_and_stopped_while_clients_follow(tmp_path):
    root = make_root(tmp_path / "spool")
    with Process(root) as process, Tandem(process.url, KEY, patience=60) as client:
        spool = Spool(root)
        client.create_run("a", lora={"rank": 2})
        job = client.train("a", rl_request())
        claimed = claim(spool)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(e.seq for e in client.events(job.id)))
        thread.start()
        time.sleep(0.5)

        process.popen.kill()  # no chance to say goodbye
        process.popen.wait()
        work(spool, claimed)  # the runner goes on without a controller
        process.start()
        process.wait_ready()
        assert client.get_job(job.id).state == "running"

        process.popen.send_signal(signal.SIGTERM)  # with an open stream
        started = time.monotonic()
        assert process.popen.wait(timeout=30) == 0
        assert time.monotonic() - started < 20  # its own bound is 10
        succeed(spool, claimed)
        process.start()
        process.wait_ready()
        thread.join(timeout=60)
        assert seen == list(range(7))
        assert client.wait_job(job.id).state == "succeeded"


def test_killed_while_it_takes_a_job_leaves_a_job_or_none(tmp_path):
    """Kill -9 at several moments of a submit; the client's retry makes it one job in the end."""
    root = make_root(tmp_path / "spool")
    with Process(root) as process, Tandem(process.url, KEY, patience=60) as client:
        client.create_run("a", lora={"rank": 2})
        spool = Spool(root)
        for index, delay in enumerate([0.005, 0.03]):
            job_id = f"job-{index}"
            answers = []
            thread = threading.Thread(
                target=lambda job_id=job_id, answers=answers: answers.append(client.train("a", rl_request(id=job_id)))
            )
            thread.start()
            time.sleep(delay)
            process.popen.kill()
            process.popen.wait()
            process.start()
            process.wait_ready()
            thread.join(timeout=60)
            assert [job.id for job in answers] == [job_id]
        jobs = spool.jobs.list(run="a")
        assert [(state, job.spec.id, job.spec.base_step) for state, job in jobs] == [
            ("queued", f"job-{i}", i) for i in range(2)
        ]


def test_a_second_controller_on_the_port_fails_visibly(tmp_path):
    root = make_root(tmp_path / "spool")
    with Process(root) as process:
        second = Process(root, TANDEM_CONTROLLER_PORT=str(process.port))
        assert second.popen.wait(timeout=60) != 0
        assert "address already in use" in second.output()
        second.__exit__()
        assert httpx.get(f"{process.url}/healthz", trust_env=False).status_code == 200


def test_as_json_every_line_of_its_log_is_an_object(tmp_path):
    with Process(make_root(tmp_path / "spool"), TANDEM_LOG_FORMAT="json") as process:
        httpx.get(f"{process.url}/healthz", timeout=10)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.stdout is not None
        lines = [json.loads(line) for line in process.popen.stdout.read().splitlines()]
        assert any("GET /healthz" in line["message"] for line in lines)
        assert {line["level"] for line in lines} == {"info"}
