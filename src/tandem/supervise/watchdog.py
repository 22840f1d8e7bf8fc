"""Whether vLLM still makes progress. Its `/health` answers 200 while its engine hangs, so its tokens are watched."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.system.ports import loopback
from tandem.system.processes import Process
from tandem.vllm_client.names import ADMIN_HEADER

_SERIES = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_REQUESTS = ("num_requests_running", "num_requests_waiting")
_TOKENS = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")
_TIMEOUT_SECONDS = 5.0
Life = tuple[int, int]
"""A process: its pid and when it was started, as in `processes.Process`."""


@dataclass(frozen=True)
class Sample:
    """What vLLM's `/metrics` says of its work."""

    requests: float  # running or waiting
    tokens: float  # a number that grows with every iteration of the engine
    asleep: bool = False


def parse(text: str) -> Sample:
    """From Prometheus' text format. A vLLM that doesn't tell (no such series) has no requests."""
    requests, tokens, told, asleep = 0.0, 0.0, False, False
    for name, labels, value in _SERIES.findall(text):
        number = float(value)
        if not math.isfinite(number):
            continue
        if name in _REQUESTS:
            requests += number
        elif name in _TOKENS:
            tokens, told = tokens + number, True
        elif name == "engine_sleep_state" and number and 'sleep_state="awake"' not in labels:
            asleep = True
    return Sample(requests if told else 0.0, tokens, asleep)


class Progress:
    """Decides from samples, taken every `poll_seconds`, when vLLM has stalled for `stall_seconds`."""

    def __init__(self, stall_seconds: float, poll_seconds: float) -> None:
        self._stall = stall_seconds
        self._longest_gap = 10 * poll_seconds + _TIMEOUT_SECONDS
        self._life: Life | None = None
        self._answered = False
        self._tokens = -1.0
        self._since = self._last = 0.0

    def observe(
        self, now: float, life: Life, sample: Sample | None, paused: Callable[[], bool],
        may_sleep: Callable[[], bool] = lambda: True,
    ) -> str | None:  # fmt: skip
        """Why vLLM should be ended, or None. `life`: its process; `sample`: None where it doesn't answer; `may_sleep`
        and `paused`: asked only where it sleeps, and where nothing else explains it. A vLLM that has not answered yet
        is loading."""
        if life != self._life:
            self._life, self._answered, self._tokens = life, False, -1.0
            self._since = now
        elif now - self._last > self._longest_gap:
            self._since = now  # whoever watches was stopped meanwhile, and perhaps everybody was
        self._last = now
        waited = now - self._since
        if sample is None:
            return f"it has not answered for {waited:.0f} s" if self._answered and waited > self._stall else None
        self._answered = True
        if sample.asleep and not may_sleep():
            return f"it has slept for {waited:.0f} s, and can't be woken" if waited > self._stall else None
        if sample.asleep or not sample.requests or sample.tokens != self._tokens or paused():
            self._tokens, self._since = sample.tokens, now
            return None
        if waited <= self._stall:
            return None
        return f"{sample.requests:g} requests wait, and no token came for {waited:.0f} s"


@dataclass(frozen=True)
class Stall:
    life: Life
    why: str


class Watchdog:
    """Polls vLLM from a thread of its own: an answer may take its time. `watch` says which process is vLLM now,
    `take` gives each stall once; both from the thread that owns the programs."""

    def __init__(self, settings: Settings, admin_token: str | None) -> None:
        self._poll_seconds = min(10.0, settings.vllm_stall_seconds / 10)
        self._progress = Progress(settings.vllm_stall_seconds, self._poll_seconds)
        self._url = f"http://{loopback(settings.inference_host)}:{settings.inference_port}"
        self._headers = {ADMIN_HEADER: admin_token} if admin_token else {}
        self._life: Life | None = None
        self._stall: Stall | None = None
        self._end = threading.Event()
        self._settings = settings
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()

    def watch(self, process: Process | None) -> None:
        self._life = (process.pid, process.started) if process is not None else None

    def take(self) -> Stall | None:
        stall, self._stall = self._stall, None
        return stall if stall is not None and stall.life == self._life else None

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            while not self._end.wait(self._poll_seconds):
                life = self._life
                if life is None:
                    continue
                sample = self._sample(client)
                why = self._progress.observe(
                    time.monotonic(), life, sample, lambda: self._paused(client), self._may_sleep
                )
                if why is not None:
                    self._stall = Stall(life, why)

    @staticmethod
    def _sample(client: httpx.Client) -> Sample | None:
        try:
            response = client.get("/metrics")
            return parse(response.text) if response.status_code == 200 else None
        except httpx.HTTPError:
            return None

    def _may_sleep(self) -> bool:
        """Whether somebody will wake it: its own user, or on shared GPUs a trainer that holds them, or did."""
        if self._settings.gpu_mode == "dedicated":
            return True
        try:
            hold = Spool(self._settings.root, writable=False).hold.get()
        except (TandemError, OSError):
            return True  # nobody sees what a trainer does
        return hold is not None and time.time() < hold.deadline

    def _paused(self, client: httpx.Client) -> bool:
        try:
            answer = client.get("/is_paused", headers=self._headers)
            return answer.status_code == 200 and answer.json()["is_paused"] is True
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False  # an engine that hangs doesn't answer this either
