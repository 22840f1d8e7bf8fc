"""Kills a vLLM that makes no progress. The route `/health` of vLLM answers 200 even while vLLM's
engine hangs. So the watchdog watches vLLM's token counts."""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.supervise.supervisord import statuses
from tandem.system import processes
from tandem.system.ports import local_url
from tandem.system.processes import Process
from tandem.vllm_client.names import ADMIN_HEADER

_SERIES = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_REQUESTS = ("num_requests_running", "num_requests_waiting")
_TOKENS = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")
_TIMEOUT_SECONDS = 5.0
Question = Callable[[], bool]


@dataclass(frozen=True)
class Sample:
    """The work of vLLM, read from its `/metrics`."""

    requests: float  # number of running or waiting requests
    tokens: float  # a count that grows with every iteration of the engine
    asleep: bool = False


def parse(text: str) -> Sample:
    """Reads Prometheus' text format. A vLLM whose metrics have no token counts has had no requests
    yet."""
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
    """Decides whether vLLM has stalled for `stall_seconds`. The decision uses samples that are
    taken every `poll_seconds`."""

    def __init__(self, stall_seconds: float, poll_seconds: float) -> None:
        self._stall = stall_seconds
        self._longest_gap = 10 * poll_seconds + _TIMEOUT_SECONDS
        self._process = 0, 0  # pid and start time of the vLLM that is watched
        self._answered = False
        self._tokens = -1.0
        self._since = self._last = 0.0

    def observe(
        self,
        now: float,
        vllm: Process,
        sample: Sample | None,
        paused: Question,
        may_sleep: Question,
    ) -> str | None:
        """The reason to kill the process `vllm`; None if it must not be killed.

        Args:
            now: monotonic seconds.
            vllm: the pid and start time of vLLM's process.
            sample: vLLM's work; None if vLLM doesn't answer. Before its first answer, vLLM counts
                as loading and is not killed.
            paused: returns whether vLLM is paused; called only if no other reason explains the
                stall.
            may_sleep: returns whether vLLM may sleep; called only if vLLM sleeps.
        """
        if (vllm.pid, vllm.started) != self._process:
            self._process, self._answered, self._tokens, self._since = (
                (vllm.pid, vllm.started),
                False,
                -1.0,
                now,
            )
        elif now - self._last > self._longest_gap:
            self._since = now  # the watchdog itself was suspended meanwhile, and perhaps vLLM too
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
        return (
            f"{sample.requests:g} requests wait, and no token came for {waited:.0f} s"
            if stalled
            else None
        )


class Watchdog(threading.Thread):
    """Polls a vLLM, and kills it if it stalls. The watchdog is a thread, because an answer of vLLM
    may take seconds.

    Args:
        say: a function that prints a line.
        program: the name of vLLM's program in supervisord.
        port: the port at which this vLLM listens, by default the port in TANDEM_INFERENCE_PORT.
    """

    def __init__(
        self,
        settings: Settings,
        admin_token: str,
        say: Callable[[str], None],
        program: str = "vllm",
        port: int | None = None,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._settings, self._say, self._program = settings, say, program
        url = local_url(settings.inference_host, port or settings.inference_port)
        headers = {ADMIN_HEADER: admin_token}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=_TIMEOUT_SECONDS, trust_env=False
        )

    def run(self) -> None:
        poll_seconds = min(10.0, self._settings.vllm_stall_seconds / 10)
        progress = Progress(self._settings.vllm_stall_seconds, poll_seconds)
        while True:
            time.sleep(poll_seconds)
            status = statuses(self._settings).get(self._program)
            vllm = processes.read_process(status.pid) if status is not None and status.pid else None
            if vllm is None:
                continue
            why = progress.observe(
                time.monotonic(), vllm, self._sample(), self._paused, self._may_sleep
            )
            now = processes.read_process(vllm.pid)
            if why is not None and now is not None and now.started == vllm.started:
                self._say(f"{self._program} (pid {vllm.pid}) has stalled: {why}; killing it")
                with suppress(ProcessLookupError):
                    # supervisord started vLLM as the leader of a process group, to which vLLM's
                    # engine belongs.
                    os.killpg(vllm.pid, signal.SIGKILL)

    def _sample(self) -> Sample | None:
        try:
            response = self._http.get("/metrics")
            return parse(response.text) if response.status_code == 200 else None
        except httpx.HTTPError:
            return None

    def _paused(self) -> bool:
        try:
            answer = self._http.get("/is_paused")
            return answer.status_code == 200 and answer.json()["is_paused"] is True
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False  # an engine that hangs doesn't answer /is_paused

    def _may_sleep(self) -> bool:
        """Whether vLLM sleeps for a good reason. Without shared GPUs, vLLM may always sleep: the
        client that put it to sleep will wake it. On shared GPUs, vLLM may sleep only while the
        spool has a hold (a reservation of the GPUs for the trainer) whose deadline has not passed.
        Before the deadline, a trainer has the GPUs, or the publisher is about to wake vLLM."""
        if self._settings.gpu_mode == "dedicated":
            return True
        try:
            hold = Spool(self._settings.root).hold.get()
        except (TandemError, OSError):
            return True  # without the volume, the trainer's state is unknown
        return hold is not None and time.time() < hold.deadline
