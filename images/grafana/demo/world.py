"""A made-up deployment on H200s: half of the GPUs train, and the others serve. Every metric of
every exporter has a series.

Jobs start and end, some attempts fail, and the trainer's memory rises and falls with the jobs. The
deployment's state changes in real time, once per second. At the first scrape, the deployment is in
the middle of a job and has some minutes of history.
"""

import math
import random
import threading
import time
from collections.abc import Iterator

from images.grafana.demo import vllm

from tandem.metrics.catalogue import CATALOGUE
from tandem.metrics.metric import ALL, Exporter, Samples
from tandem.metrics.publish import STAGES

GIB = 2**30
HISTORY_SECONDS = 300
STEPS = 12  # optimizer steps of a job
_SETUP_SECONDS = {
    "rendezvous": 2,
    "data": 1,
    "build": 3,
    "rehearsal": 2,
    "base_weights": 4,
    "state": 1,
    "probe": 1,
}
_PUBLICATION = {
    "copy": 0.1,
    "stage": 0.15,
    "drain": 0.0,
    "swap": 0.02,
    "load": 0.3,
    "verify": 0.1,
    "since_checkpoint": 0.7,
}
_ROUTES = {
    "/v1/runs/{run}/train": "POST",
    "/v1/jobs/{job}": "GET",
    "/v1/jobs/{job}/events": "GET",
    "/healthz": "GET",
}


def new_samples(exporter: Exporter, *, gauges: bool) -> Samples:
    return Samples(
        m
        for m in CATALOGUE
        if exporter in m.exporters
        and (m.kind == "gauge") == gauges
        and not m.name.startswith("process_")
    )


class World:
    """The state of the deployment. The number of training GPUs is equal to the number of serving
    GPUs."""

    def __init__(self, gpus: int = 1) -> None:
        self.uuids: dict[Exporter, list[str]] = {
            exporter: [
                f"GPU-{first:x}{rank:07x}-0a1b-4c3d-8e9f-5d8f1c2e0000" for rank in range(gpus)
            ]
            for exporter, first in (("trainer", 0xA), ("inference", 0xB))
        }
        self.ranks = [
            {"uuid": uuid, "rank": str(rank)} for rank, uuid in enumerate(self.uuids["trainer"])
        ]
        self.lock = threading.Lock()  # the servers of several pages read and advance this state
        self.now = 0.0  # seconds since the begin of the deployment's history
        self.random = random.Random(3)
        self.counts = {exporter: new_samples(exporter, gauges=False) for exporter in ALL}
        self.vllm = vllm.new_samples(), vllm.new_samples()  # of two servers
        self.sampling = False  # whether clients sample for the next job
        self.held = 0.0  # bytes that each rank uses of its device
        self._phase = ""
        self.job: tuple[str, str] | None = None  # id and kind of the running job
        self.queued = 0
        self.step = self._jobs_made = 0
        self.newest = self.served = 0  # the newest and the served step of the run
        # part of the publication -> seconds, for the served step
        self.publication = dict(_PUBLICATION)
        self.released = 0.0  # bytes that the last job gave back on each GPU
        self.step_ended = self.checkpoint_made = 0.0  # times of events, on the scale of `now`
        self.last_step: dict[str, float] = {}  # tandem_train_<name> -> value
        self.phase_peaks: dict[str, float] = {}
        self._life = self._live()
        while self.now < HISTORY_SECONDS or not (self._phase and self.step >= 2):
            self._second()
        self.began = time.time() - self.now  # Unix seconds

    def advance(self, now: float) -> None:
        """Advances the state to the time `now` (Unix seconds)."""
        while self.began + self.now + 1 <= now:
            self._second()

    def _second(self) -> None:
        self.now += 1
        next(self._life)
        for samples in self.vllm:
            vllm.count_second(samples, self.random, busy=self.sampling)
        for exporter, uuids in self.uuids.items():
            for uuid in uuids:
                watts = (
                    self.random.uniform(520, 690)
                    if self.busy(exporter)
                    else self.random.uniform(75, 120)
                )
                self.counts[exporter].inc("tandem_gpu_energy_joules_total", watts, uuid=uuid)
        http = self.counts["controller"]
        for route, method in _ROUTES.items():
            if self.random.random() < 0.4:
                http.inc(
                    "tandem_http_requests_total", route=route, method=method, status_class="2xx"
                )
                seconds = self.random.lognormvariate(-4, 1)
                http.observe("tandem_http_request_duration_seconds", seconds, route=route)

    def busy(self, exporter: Exporter) -> bool:
        """Whether the GPUs of this exporter's role compute."""
        return self._phase != "" if exporter == "trainer" else self.sampling

    # ---------------------------------------------------------------- events; a yield is a second

    def _live(self) -> Iterator[None]:
        while True:
            self.sampling = True
            yield from self._wait(18, 35)
            self._jobs_made += 1
            kind = "sft" if self._jobs_made % 5 == 0 else "rl"
            self.counts["controller"].inc("tandem_jobs_submitted_total", kind=kind)
            self.queued = 1
            waited = self.random.randint(1, 4)
            yield from self._wait(waited, waited)
            self.sampling, self.queued = self._jobs_made % 3 == 0, 0
            self.counts["trainer"].observe("tandem_job_queue_wait_seconds", waited, kind=kind)
            begin = self.now
            yield from self._run_job(kind)
            self.job = None
            self.counts["trainer"].observe(
                "tandem_job_duration_seconds", self.now - begin, kind=kind
            )

    def _run_job(self, kind: str) -> Iterator[None]:
        trainer = self.counts["trainer"]
        self.job = (f"01K{self._jobs_made:023d}", kind)
        for _ in range(2):
            error = self.random.choices(("", "oom", "rank_crashed", "rank_hung"), (90, 4, 4, 2))[0]
            yield from self._run_attempt(error)
            if not error:
                trainer.inc("tandem_jobs_finished_total", outcome="succeeded")
                yield from self._publish()
                return
            trainer.inc("tandem_job_attempts_failed_total", error=error)
        trainer.inc("tandem_jobs_finished_total", outcome="failed")

    def _run_attempt(self, error: str) -> Iterator[None]:
        trainer = self.counts["trainer"]
        self.phase_peaks, self.step = {}, 0
        for phase, seconds in _SETUP_SECONDS.items():
            yield from self._run_phase(
                phase, seconds, 34 * GIB if phase in ("state", "probe") else 18 * GIB
            )
        for rank in self.ranks:
            trainer.inc("tandem_torch_memory_ooms_total", float(error == "oom"), **rank)
        for step in range(STEPS):
            if error and step == 3:
                break
            if step == 0:
                yield from self._run_phase("old_logprobs", 2, 60 * GIB)
                yield from self._run_phase("reference", 2, 58 * GIB)
            seconds = self.random.randint(3, 6)
            yield from self._run_phase(
                "forward_backward", seconds, self.random.uniform(88, 104) * GIB
            )
            yield from self._run_phase("optimizer", 1, 40 * GIB)
            self.step = step + 1
            self._end_step(seconds + 1)
        else:
            yield from self._run_phase("checkpoint", 3, 36 * GIB)
            self.newest += 1
            self.checkpoint_made = self.now
        self.released = self.held + 2 * GIB
        self._phase, self.held = "", 0.0
        yield from self._wait(2, 2)
        trainer.observe("tandem_job_release_seconds", self.random.uniform(0.4, 2.2))

    def _run_phase(self, phase: str, seconds: int, held: float) -> Iterator[None]:
        trainer = self.counts["trainer"]
        self._phase, self.held = phase, held
        self.phase_peaks[phase] = held * self.random.uniform(0.9, 0.96)
        spent = seconds * self.random.uniform(0.9, 1.1)
        trainer.observe("tandem_train_phase_duration_seconds", spent, phase=phase)
        for rank in self.ranks:
            retried = float(self.random.random() < 0.005)
            trainer.inc("tandem_torch_memory_alloc_retries_total", retried, **rank)
        yield from self._wait(seconds, seconds)

    def _end_step(self, seconds: float) -> None:
        trainer, draw = self.counts["trainer"], self.random.gauss
        trainer.observe(
            "tandem_train_step_duration_seconds", seconds * self.random.uniform(0.9, 1.1)
        )
        trainer.inc("tandem_train_tokens_total", 32768)
        trainer.inc("tandem_train_trainable_tokens_total", 21000)
        trainer.inc("tandem_train_samples_total", 64)
        done = self.newest + self.step / STEPS
        reward = 1 - math.exp(-done / 12)
        self.step_ended = self.now
        self.last_step = {
            "loss": draw(0.02, 0.01),
            "grad_norm": abs(draw(0.4, 0.1)),
            "learning_rate": 1e-4,
            "entropy": 0.3 + 0.9 * math.exp(-done / 20) + draw(0, 0.02),
            "kl": 0.002 * done + abs(draw(0, 0.001)),
            "kl_sampler": abs(draw(0.002, 0.0005)),
            "logprob_mismatch": abs(draw(0.012, 0.002)),
            "logprob_mismatch_fresh": abs(draw(0.005, 0.001)),
            "logprob_mismatch_stale": abs(draw(0.014, 0.002)),
            "clip_ratio": abs(draw(0.03, 0.01)),
            "importance_ratio_max": abs(draw(3, 0.6)),
            "reward_mean": reward + draw(0, 0.02),
            "off_policy_steps": 1.0,
            "held_out_loss": draw(0.05, 0.004),
            "reward_std": 0.5 * math.sqrt(max(reward * (1 - reward), 0.01)),
        }

    def _publish(self) -> Iterator[None]:
        yield from self._wait(2, 4)
        inference = self.counts["inference"]
        self.served = self.newest
        inference.inc("tandem_publish_total", outcome="served")
        self.publication = {
            part: seconds * self.random.uniform(0.7, 1.5) for part, seconds in _PUBLICATION.items()
        }
        for stage in STAGES:
            inference.observe(
                "tandem_publish_duration_seconds", self.publication[stage], stage=stage
            )

    def _wait(self, least: int, most: int) -> Iterator[None]:
        for _ in range(self.random.randint(least, most)):
            yield
