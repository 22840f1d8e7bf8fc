"""Finds a vLLM that makes no progress. Its `/health` answers 200 while its engine hangs, so its tokens are watched."""

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
from tandem.system.ports import local_url
from tandem.system.processes import Process
from tandem.vllm_client.names import ADMIN_HEADER

_SERIES = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_REQUESTS = ("num_requests_running", "num_requests_waiting")
_TOKENS = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")
_TIMEOUT_SECONDS = 5.0
Life = tuple[int, int]
"""One life of a process: its pid and start time, as in `processes.Process`."""


@dataclass(frozen=True)
class Sample:
    """vLLM's work, as its `/metrics` describes it."""

    requests: float  # running or waiting
    tokens: float  # grows with every iteration of the engine
    asleep: bool = False


def parse(text: str) -> Sample:
    """Reads Prometheus' text format. Without series that count tokens there are no requests."""
    requests, tokens, counts_tokens, asleep = 0.0, 0.0, False, False
    for name, labels, value in _SERIES.findall(text):
        number = float(value)
        if not math.isfinite(number):
            continue
        if name in _REQUESTS:
            requests += number
        elif name in _TOKENS:
            tokens, counts_tokens = tokens + number, True
        elif name == "engine_sleep_state" and number and 'sleep_state="awake"' not in labels:
            asleep = True
    return Sample(requests if counts_tokens else 0.0, tokens, asleep)


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
        self, now: float, life: Life, sample: Sample | None, paused: Callable[[], bool], may_sleep: Callable[[], bool]
    ) -> str | None:
        """Why vLLM should be ended, or None.

        `life` is its process. `sample` is None where it doesn't answer; before its first answer it is loading.
        `may_sleep` is called only for a vLLM that sleeps, `paused` only where nothing else explains the stall.
        """
        if life != self._life:
            self._life, self._answered, self._tokens, self._since = life, False, -1.0, now
        elif now - self._last > self._longest_gap:
            self._since = now  # the watchdog was stopped meanwhile, and vLLM perhaps too
        self._last = now
        waited = now - self._since
        stalled = waited > self._stall
        if sample is None:
            return f"it has not answered for {waited:.0f} s" if self._answered and stalled else None
        self._answered = True
        if sample.asleep and not may_sleep():
            return f"it has slept for {waited:.0f} s, and can't be woken" if stalled else None
        if sample.asleep or not sample.requests or sample.tokens != self._tokens or paused():
            self._tokens, self._since = sample.tokens, now
            return None
        return f"{sample.requests:g} requests wait, and no token came for {waited:.0f} s" if stalled else None


class Watchdog:
    """Polls vLLM from a thread, because an answer may take seconds."""

    def __init__(self, settings: Settings, admin_token: str) -> None:
        self._settings = settings
        self._headers = {ADMIN_HEADER: admin_token}
        self._life: Life | None = None
        self._stall: tuple[Life, str] | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stalled(self, process: Process | None) -> str | None:
        """Why `process`, which is vLLM now, must be ended; each stall is returned once."""
        self._life = (process.pid, process.started) if process is not None else None
        stall, self._stall = self._stall, None
        return stall[1] if stall is not None and stall[0] == self._life else None

    def _run(self) -> None:
        poll_seconds = min(10.0, self._settings.vllm_stall_seconds / 10)
        progress = Progress(self._settings.vllm_stall_seconds, poll_seconds)
        url = local_url(self._settings.inference_host, self._settings.inference_port)
        with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            while True:
                time.sleep(poll_seconds)
                if (life := self._life) is None:
                    continue
                sample = _sample(client)
                why = progress.observe(time.monotonic(), life, sample, lambda: self._paused(client), self._may_sleep)
                if why is not None:
                    self._stall = life, why

    def _may_sleep(self) -> bool:
        """Whether its own user will wake it, or on shared GPUs a trainer that holds them (or the publisher after)."""
        if self._settings.gpu_mode == "dedicated":
            return True
        try:
            hold = Spool(self._settings.root, writable=False).hold.get()
        except (TandemError, OSError):
            return True  # without the volume nobody can see what a trainer does
        return hold is not None and time.time() < hold.deadline

    def _paused(self, client: httpx.Client) -> bool:
        try:
            answer = client.get("/is_paused", headers=self._headers)
            return answer.status_code == 200 and answer.json()["is_paused"] is True
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False  # an engine that hangs doesn't answer this either


def _sample(client: httpx.Client) -> Sample | None:
    try:
        response = client.get("/metrics")
        return parse(response.text) if response.status_code == 200 else None
    except httpx.HTTPError:
        return None
