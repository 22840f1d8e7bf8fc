"""A fake vLLM has the part of vLLM's HTTP API that Tandem uses, and a one-line language model that
adapters change.

The fake answers thousands of times faster than a real vLLM. `test_real_vllm.py` checks that a real
vLLM behaves in the same way.
"""

import hashlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from free_ports import free_ports

API_KEY, ADMIN_TOKEN = "key", "token"
_LORA_INFO = (
    'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{}",waiting_lora_adapters=""}}'
    " {!r}"
)
SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
MERGED = "/tandem/merged"
READY = "/tandem/ready"


def effect(adapter: Path) -> float:
    """The amount by which an adapter moves the log-probs; 0 for the identity."""
    weights = load_file(adapter / "adapter_model.safetensors")
    return float(sum(value.sum() for name, value in weights.items() if "lora_B" in name))


def logprobs(tokens: Sequence[int], moved: float) -> list[float]:
    prefixes = (json.dumps(list(tokens[: j + 1])).encode() for j in range(1, len(tokens)))
    digests = (hashlib.sha256(prefix).digest() for prefix in prefixes)
    return [-3.0 - digest[0] / 256 + moved * (digest[1] / 128 - 1) for digest in digests]


class FakeVllm:
    def __init__(self) -> None:
        self.version = "0.32.0"
        self.adapters: dict[str, tuple[str, float]] = {}
        self.in_use: set[str] = set()
        self.calls: list[tuple[str, Any]] = []
        self.ignores_weights = False  # serves every adapter as the base model
        self.max_model_len = 4096
        self.statuses: dict[str, list[int]] = {}  # path -> HTTP statuses of the path's next answers
        self.problem = "not now"  # the message of answers with a status of `statuses`
        self.list_seconds = 0.0  # duration of an answer with the list of models
        self.used: dict[str, float] = {}  # adapter -> Unix seconds of its last request
        self.merged_phase = ""  # with merged weights: the answer to GET /tandem/merged
        self.asleep = False
        # Whether the engine has died. The server still answers.
        self.dead = False
        # The fake calls `on_sleep` before the engine sleeps. If `on_sleep` raises, the answer is
        # 500.
        self.on_sleep: Callable[[], None] = lambda: None
        self.on_wake: Callable[[], None] = lambda: None
        self.ready_until = 0.0  # the end of readiness by the monotonic clock, in seconds
        self.instance = ""
        self._engine = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self, port: int = 0) -> None:
        """Start without adapters. By default, the port of an earlier start is used again."""
        # A port that the kernel has chosen could go to another program after `stop`.
        self._port = port or self._port or free_ports(1)[0]
        self.adapters.clear()
        self.ready_until, self.instance = 0.0, secrets.token_hex(4)
        self.asleep = self.dead = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                fake._answer(self, None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake._answer(self, json.loads(body) if body else {})

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def ready(self) -> bool:
        """Whether the server runs and is ready, as one of several servers behind one address."""
        return self._server is not None and time.monotonic() < self.ready_until

    def loads(self) -> list[str]:
        return [body["lora_name"] for path, body in self.calls if path == "/v1/load_lora_adapter"]

    def _answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        path = request.path.split("?")[0]
        self.calls.append((path, body))
        try:
            status, answer = self._route(path, body or {}, request)
        except Exception as error:
            status, answer = 500, {"error": {"message": repr(error)}}
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        # Each request has its own connection, so no connection is left when the server stops.
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(content)
        request.close_connection = True

    def _route(
        self, path: str, body: dict[str, Any], request: BaseHTTPRequestHandler
    ) -> tuple[int, Any]:
        if path.startswith("/v1/") and request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return 401, {"error": "Unauthorized"}
        admin = path in (
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/reset_prefix_cache",
            MERGED,
            *SLEEP,
        ) or (path == READY and request.command == "POST")
        if admin and request.headers.get("X-Tandem-Admin-Token") != ADMIN_TOKEN:
            return 401, {"error": {"message": "admin token"}}
        if self.statuses.get(path):
            return self.statuses[path].pop(0), {"error": {"message": self.problem}}
        if path in SLEEP:
            return self._sleep(path)
        match path:
            case "/health":
                return (503, "") if self.dead else (200, "")
            case "/version":
                return 200, {"version": self.version}
            case "/v1/models":
                time.sleep(self.list_seconds)
                served = {"base": "/model"} | {
                    name: path for name, (path, _) in self.adapters.items()
                }
                length = {"max_model_len": self.max_model_len}
                return 200, {
                    "data": [{"id": name, "root": root} | length for name, root in served.items()]
                }
            case "/v1/load_lora_adapter":
                name = body["lora_name"]
                if name in self.adapters:
                    return 400, {"error": {"message": "already loaded"}}
                if self.asleep:
                    self.dead = True  # as by "CUDA error: an illegal memory access"
                    return 500, {"error": {"message": "EngineCore encountered an issue"}}
                self.adapters[name] = (body["lora_path"], effect(Path(body["lora_path"])))
                return 200, "Success"
            case "/v1/unload_lora_adapter":
                found = self.adapters.pop(body["lora_name"], None)
                return (
                    (200, "Success") if found else (404, {"error": {"message": "cannot be found"}})
                )
            case "/reset_prefix_cache":
                return 200, {"success": True} if self.version >= "0.32" else ""
            case "/v1/completions":
                return self._complete(body)
            case "/tandem/ready":
                if body.get("instance") not in (None, self.instance):
                    return 409, {"error": {"message": "another process"}}
                self.ready_until = body.get("until", self.ready_until)
                return 200, {"ready": self.ready, "instance": self.instance}
            case "/tandem/merged" if self.merged_phase:
                return 200, {
                    "phase": self.merged_phase,
                    "name": "base",
                    "path": "base",
                    "in_flight": 0,
                }
            case "/metrics":
                return 200, self._metrics()
        return 404, {"error": {"message": "no such route"}}

    def _sleep(self, path: str) -> tuple[int, Any]:
        """The answer to a call of /sleep, /wake_up or /is_sleeping. The engine executes one call
        after another."""
        with self._engine:
            if self.dead:
                return 500, {"error": {"message": "EngineCore encountered an issue"}}
            if path == "/sleep" and not self.asleep:
                self.on_sleep()
                self.asleep = True
            elif path == "/wake_up" and self.asleep:
                self.on_wake()
                self.asleep = False
            return 200, {"is_sleeping": self.asleep} if path == "/is_sleeping" else ""

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] != "base" and body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if isinstance(body["prompt"][0], int):
            return self._sample(body)
        choices = []
        for tokens in body["prompt"]:
            if len(tokens) + body["max_tokens"] > self.max_model_len:
                return 400, {"error": {"message": "the prompt is too long"}}
            values = [
                None if math.isnan(value) else value
                for value in self._scores(body["model"], tokens)
            ]
            entries = [
                {str(token): {"logprob": value}}
                for token, value in zip(tokens[1:], values, strict=True)
            ]
            choices.append({"prompt_logprobs": [None, *entries]})
        return 200, {"choices": choices}

    def _sample(self, body: dict[str, Any]) -> tuple[int, Any]:
        """`max_tokens` tokens that count up from the prompt's last token. The answer ends with the
        first stop token."""
        prompt, most = body["prompt"], body["max_tokens"]
        if len(prompt) + most > self.max_model_len:
            return 400, {"error": {"message": "the prompt is too long"}}
        ids = [prompt[-1] + 1 + i for i in range(most)]
        stops = [i for i, token in enumerate(ids) if token in body.get("stop_token_ids", ())]
        ids = ids[: stops[0] + 1] if stops else ids
        named = [{f"token_id:{t + k}": -1.0 - k for k in range(body["logprobs"])} for t in ids]
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-1.0] * len(ids), "top_logprobs": named},
            "finish_reason": "stop" if stops else "length",
            "prompt_logprobs": None,
        }
        if (k := body.get("prompt_logprobs")) is not None:
            scores = self._scores(body["model"], prompt)
            choice["prompt_logprobs"] = [None] + [
                {str(t + i): {"logprob": score - i} for i in range(max(k, 1))}
                for t, score in zip(prompt[1:], scores, strict=True)
            ]
        return 200, {"choices": [choice | {"index": i} for i in range(body["n"])]}

    def _scores(self, model: str, tokens: list[int]) -> list[float]:
        return logprobs(
            tokens, 0.0 if model == "base" or self.ignores_weights else self.adapters[model][1]
        )

    def _metrics(self) -> str:
        now = time.time()
        return "\n".join(
            [
                (
                    'vllm:num_requests_running{engine="0",model_name="base"}'
                    f" {float(len(self.in_use))}"
                ),
                'vllm:num_requests_waiting{engine="0",model_name="base"} 0.0',
                (
                    'vllm:engine_sleep_state{engine="0",sleep_state="awake"}'
                    f" {float(not self.asleep)}"
                ),
                (
                    'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"}'
                    f" {float(self.asleep)}"
                ),
                (
                    'vllm:lora_requests_info{max_lora="2",running_lora_adapters="old@1",'
                    'waiting_lora_adapters=""}'
                    " 1.5e+09"
                ),
                (
                    f'vllm:lora_requests_info{{max_lora="2",'
                    f'running_lora_adapters="{",".join(sorted(self.in_use))}",'
                    'waiting_lora_adapters=""}'
                    f" {now!r}"
                ),
                *(_LORA_INFO.format(name, at) for name, at in self.used.items()),
            ]
        )
