"""The watchdog kills and restarts a vLLM that hangs. A vLLM that loads, sleeps, is paused or is
idle keeps running."""

import os
import re
import signal
import time
from dataclasses import replace

import pytest

from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.schema import Hold
from tandem.supervise.watchdog import Progress, Sample, Watchdog, parse
from tandem.system.processes import Process
from waiting import alive

VLLM = Process(pid=7, parent=1, zombie=False, started=1, command="vllm")
BUSY = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="base"} 2.0
vllm:num_requests_waiting{engine="0",model_name="base"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 1.0
vllm:engine_sleep_state{engine="0",model_name="base",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="base",sleep_state="discard_all"} 0.0
vllm:iteration_tokens_total_count{engine="0",model_name="base"} 40.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="base"} 12.0
vllm:prompt_tokens_total{engine="0",model_name="base"} 500.0
vllm:generation_tokens_total{engine="0",model_name="base"} 60.0
"""


def test_what_metrics_say():
    assert parse(BUSY) == Sample(requests=3, tokens=600)
    asleep = BUSY.replace('"discard_all"} 0.0', '"discard_all"} 1.0').replace(
        '"awake"} 1.0', '"awake"} 0.0'
    )
    assert parse(asleep).asleep
    # A vLLM that counts no tokens can't be judged by its tokens.
    assert parse("vllm:num_requests_running 2.0\n") == Sample(requests=0, tokens=0)
    assert parse("vllm:num_requests_running nan\nvllm:prompt_tokens_total 1.5e+06\n") == Sample(
        0, 1.5e6
    )


class Watched:
    """A `Progress` with a stall time of 300 s. The test calls `observe` for every 10 s."""

    def __init__(self) -> None:
        self.progress = Progress(300, 10)
        self.now = 1000.0

    def see(
        self, seconds: float, *samples: Sample | None, process=VLLM, paused=False, may_sleep=True
    ) -> str | None:
        """Observes `samples` in turn for `seconds`. Returns the first reason for a kill."""
        for i in range(int(seconds / 10)):
            self.now += 10
            why = self.progress.observe(
                self.now, process, samples[i % len(samples)], lambda: paused, lambda: may_sleep
            )
            if why:
                return why
        return None


def test_no_token_while_requests_run_is_a_stall():
    watched = Watched()
    assert watched.see(1000, Sample(0, 5)) is None
    assert watched.see(100, *(Sample(2, n) for n in range(10))) is None
    assert watched.see(300, Sample(2, 50)) is None
    assert watched.see(20, Sample(2, 50)) == "2 requests wait, and no token came for 310 s"


@pytest.mark.parametrize(
    ("sample", "paused"),
    [(Sample(0, 5), False), (Sample(2, 5, asleep=True), False), (Sample(2, 5), True)],
)
def test_idle_asleep_or_paused_is_no_stall(sample, paused):
    watched = Watched()
    assert watched.see(3000, sample, paused=paused) is None
    # The time of a stall counts from the end of the idle, sleeping or paused state.
    assert watched.see(300, Sample(2, 5)) is None
    assert watched.see(40, Sample(2, 5)) is not None


def test_a_sleep_that_nobody_will_end_is_a_stall():
    watched = Watched()
    asleep = Sample(0, 5, asleep=True)
    assert watched.see(3000, asleep) is None  # a job trains
    assert watched.see(300, asleep, may_sleep=False) is None  # the publisher is about to wake vLLM
    assert watched.see(20, asleep, may_sleep=False) == "it has slept for 310 s, and can't be woken"
    assert watched.see(20, Sample(0, 5), may_sleep=False) is None


def test_loading_is_no_stall_however_long_and_not_answering_any_more_is():
    watched = Watched()
    assert watched.see(5000, None) is None
    assert watched.see(10, Sample(0, 0)) is None
    assert watched.see(300, None) is None
    assert watched.see(20, None) == "it has not answered for 310 s"
    # vLLM was started again, with the same pid.
    assert watched.see(5000, None, process=replace(VLLM, started=2)) is None


def test_who_may_let_vllm_sleep(tmp_path):
    """On shared GPUs, vLLM may sleep only while a runner holds the GPUs and the hold's deadline has
    not passed. If the volume can't be read, vLLM may sleep."""
    spool, now = Spool.create(tmp_path / "spool"), time.time()

    def may_sleep(root=spool.root, **settings) -> bool:
        return Watchdog(Settings(root=root, **settings), "", print)._may_sleep()

    assert may_sleep()  # vLLM's own users may request the sleep
    assert not may_sleep(gpu_mode="shared")
    for seconds in (60, -60):
        spool.hold.put(
            Hold(
                runner="r",
                job="j",
                attempt=1,
                phase="training",
                since=now,
                beat=now,
                lease=1.0,
                deadline=now + seconds,
            )
        )
        assert may_sleep(gpu_mode="shared") is (seconds > 0)
    assert may_sleep(tmp_path / "gone", gpu_mode="shared")


def test_time_in_which_nobody_watched_does_not_count():
    watched = Watched()
    watched.see(20, Sample(2, 5))
    watched.now += 10000
    assert watched.see(300, Sample(2, 5)) is None


@pytest.mark.slow
def test_a_hung_vllm_is_killed_with_its_engine_and_started_again(up, tmp_path):
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "metrics").write_text(BUSY)
    (answers / "is_paused").write_text('{"is_paused": true}')
    vllm = {"name": "vllm", "module": "fake_vllm_server", "port": "inference"}
    variables = {"FAKE_VLLM": str(answers), "TANDEM_VLLM_STALL_SECONDS": "2", "FAKE_CRASHES": "8"}
    stack = up(role="inference", programs=(vllm,), **variables)
    stack.until("asked for /is_paused", count=20)  # 20 requests take twice the stall time
    assert stack.text().count("vLLM runs") == 1
    (answers / "is_paused").unlink()
    stack.until("has stalled: 3 requests wait, and no token came for")
    (answers / "metrics").write_text(BUSY.replace("2.0", "0.0").replace("1.0", "0.0"))
    stack.until("vLLM runs", count=2)
    stack.until("ended: terminated by SIGKILL; crash 1 of 8")
    first = re.findall(r"with engine (\d+)", stack.text())[0]
    assert not alive(int(first))
    stack.until("asked for /metrics", count=stack.text().count("asked for /metrics") + 20)
    assert stack.text().count("vLLM runs") == 2
    # The server itself hangs.
    os.kill(stack.pid("fake_vllm_server"), signal.SIGSTOP)
    stack.until("it has not answered for")
    stack.until("vLLM runs", count=3)
    assert stack.stop() == 0
