"""The real vLLM with an engine that stops in the middle of a request: it is killed and started again."""

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from local_stack import API_KEY, LocalStack, until
from tandem import processes

pytestmark = pytest.mark.slow


def test_a_stopped_engine_is_noticed_although_health_answers(tmp_path):
    with LocalStack(tmp_path, TANDEM_VLLM_STALL_SECONDS="6", TANDEM_MAX_MODEL_LEN="4096") as stack:
        (server,) = stack.pids("vllm")
        engine = until("vLLM's engine", lambda: engines(server), 10)[0]
        threading.Thread(target=ask, args=(stack,), daemon=True).start()
        until("the request runs", lambda: 'running{engine="0",model_name="base"} 1.0' in metrics(stack), 30)
        os.kill(engine, signal.SIGSTOP)
        assert stack.answers(f"{stack.inference_url}/health")
        until("the stall is noticed", lambda: "has stalled: 1 requests wait, and no token came" in log(stack), 40)
        until("another vLLM", lambda: stack.pids("vllm") not in ([], [server]), 30)
        assert processes.read(engine) is None
        stack.wait_ready()
        assert ask(stack, tokens=2) == 200


def engines(server: int) -> list[int]:
    return [found.pid for found in processes.descendants(server) if b"EngineCore" in cmdline(found.pid)]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def metrics(stack: LocalStack) -> str:
    return httpx.get(f"{stack.inference_url}/metrics", timeout=5).text


def log(stack: LocalStack) -> str:
    return (stack.root / "up.log").read_text(errors="replace")


def ask(stack: LocalStack, tokens: int = 4000) -> int | None:
    body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    try:
        return httpx.post(f"{stack.inference_url}/v1/completions", json=body, headers=headers, timeout=300).status_code
    except httpx.HTTPError:
        return None
