"""The demo backend: every series of every exporter, of the controller, and of vLLM as dashboards use it, made up.

Two H200, one trains and one serves; jobs come and go, some fail, and the trainer's memory goes up and down with them.
A second of the world is a second of the clock, and it begins with half an hour of history behind it.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import tandem
from tandem.metrics import demo_vllm
from tandem.metrics.catalogue import CATALOGUE, PHASES, THROTTLE_REASONS, VLLM_METRICS, Exporter
from tandem.metrics.samples import Counts, Gauges, LabelValues, Series, Value, families

MIB, GIB = 2**20, 2**30
TOTAL, RESERVED = 141 * GIB, 1 * GIB
HISTORY_SECONDS = 1800
RUN = "countdown"
_UUIDS: dict[Exporter, str] = {
    "trainer": "GPU-5d8f1c2e-0a1b-4c3d-8e9f-000000000001",
    "inference": "GPU-5d8f1c2e-0a1b-4c3d-8e9f-000000000002",
}
_SETUP = {"rendezvous": 2, "data": 1, "build": 3, "rehearsal": 2, "base_weights": 4, "state": 1, "probe": 1}
_LOCAL = {"shm": (64, 61), "cache": (500, 312), "tmp": (8, 7.8)}
_PROGRAMS: dict[Exporter, tuple[str, ...]] = {
    "trainer": ("runner", "exporter"),
    "inference": ("vllm", "publisher", "exporter"),
}
_COLLECTORS: dict[Exporter, tuple[str, ...]] = {
    "trainer": ("build", "nvml", "policy", "supervisor", "volumes", "ranks", "jobs", "checkpoints"),
    "inference": ("build", "nvml", "policy", "supervisor", "volumes", "publish"),
    "controller": ("build", "volumes", "queue"),
}
_ROUTES = {"/v1/runs/{run}/train": "POST", "/v1/jobs/{job}": "GET", "/v1/jobs/{job}/events": "GET", "/healthz": "GET"}


class World:
    """The state of the made-up deployment; `counts` per exporter, and of vLLM."""

    def __init__(self, now: float) -> None:
        self.began = 0.0  # Unix seconds
        self.now = 0.0  # seconds since then
        self.random = random.Random(3)
        made_up = [metric for metric in CATALOGUE if metric.collector != "process"]
        self.counts = {
            exporter: Counts(metric for metric in made_up if exporter in metric.exporters) for exporter in _COLLECTORS
        }
        self.vllm = Counts(VLLM_METRICS)
        self.sampling = False  # whether rollouts are being drawn for the next job
        self.held = 0.0  # bytes of the trainer's device that ranks hold
        self._phase = ""
        self._job: tuple[str, str] | None = None  # id and kind of the running one
        self._queued = 0
        self._step, self._steps, self._number = 0, 12, 0
        self._made = self._served = 0
        self._last: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._life = self._jobs()
        while self.now < HISTORY_SECONDS or not self._every_series_is_there():
            self._second()
        self.began = now - self.now

    def advance(self, now: float) -> None:
        """Let the seconds until `now` pass."""
        while self.began + self.now + 1 <= now:
            self._second()

    def _every_series_is_there(self) -> bool:
        return self._job is not None and self._phase != "" and self._step >= 2

    def _second(self) -> None:
        self.now += 1
        next(self._life)
        demo_vllm.second(self.vllm, self.random, busy=self.sampling)
        for exporter, uuid in _UUIDS.items():
            self.counts[exporter].inc("tandem_gpu_energy_joules_total", self._watts(exporter), uuid=uuid)
        for route, method in _ROUTES.items():
            if self.random.random() < 0.4:
                http = self.counts["controller"]
                http.inc("tandem_http_requests_total", route=route, method=method, status_class="2xx")
                seconds = self.random.lognormvariate(-4, 1)
                http.observe("tandem_http_request_duration_seconds", seconds, route=route)

    def _watts(self, exporter: Exporter) -> float:
        busy = self._phase != "" if exporter == "trainer" else self.sampling
        return self.random.uniform(520, 690) if busy else self.random.uniform(75, 120)

    # ---------------------------------------------------------------- what happens; each yield is a second

    def _jobs(self) -> Iterator[None]:
        while True:
            self.sampling = True
            yield from self._wait(18, 35)
            self._number += 1
            kind = "sft" if self._number % 5 == 0 else "rl"
            self.counts["controller"].inc("tandem_jobs_submitted_total", kind=kind)
            self._queued = 1
            waited = self.random.randint(1, 4)
            yield from self._wait(waited, waited)
            self.sampling, self._queued = self._number % 3 == 0, 0
            self.counts["trainer"].observe("tandem_job_queue_wait_seconds", waited, kind=kind)
            begin = self.now
            yield from self._attempts(kind)
            self._job = None
            self.counts["trainer"].observe("tandem_job_duration_seconds", self.now - begin, kind=kind)

    def _attempts(self, kind: str) -> Iterator[None]:
        trainer = self.counts["trainer"]
        self._job = (f"01K{self._number:023d}", kind)
        for attempt in (1, 2):
            error = self.random.choices(("", "oom", "rank_crashed", "rank_hung"), (90, 4, 4, 2))[0]
            yield from self._attempt(error)
            if not error:
                trainer.inc("tandem_jobs_finished_total", outcome="succeeded")
                yield from self._publish()
                return
            trainer.inc("tandem_job_attempts_failed_total", error=error)
            if attempt == 2:
                trainer.inc("tandem_jobs_finished_total", outcome="failed")

    def _attempt(self, error: str) -> Iterator[None]:
        trainer, where = self.counts["trainer"], {"uuid": _UUIDS["trainer"], "rank": "0"}
        self._peaks, self._step = {}, 0
        for phase, seconds in _SETUP.items():
            yield from self._spend(phase, seconds, 34 * GIB if phase in ("state", "probe") else 18 * GIB)
        for step in range(self._steps):
            if error and step == 3:
                trainer.inc("tandem_torch_memory_ooms_total", float(error == "oom"), **where)
                break
            self._last["floor"] = 31.5 * GIB
            seconds = self.random.randint(3, 6)
            if step == 0:
                yield from self._spend("old_logprobs", 2, 60 * GIB)
                yield from self._spend("reference", 2, 58 * GIB)
            yield from self._spend("forward_backward", seconds, self.random.uniform(88, 104) * GIB)
            yield from self._spend("optimizer", 1, 40 * GIB)
            self._step = step + 1
            self._tell_step(seconds + 1)
        else:
            yield from self._spend("checkpoint", 3, 36 * GIB)
            self._made += 1
            self._last |= {"checkpoint_seconds": 2.8, "checkpoint": self.now}
        before, self._phase = self.held + 2 * GIB, ""
        self.held = 0.0
        released = self.random.uniform(0.4, 2.2)
        yield from self._wait(2, 2)
        self._last |= {"released": before, "left": 3.0 * MIB}
        trainer.observe("tandem_job_release_seconds", released)

    def _spend(self, phase: str, seconds: int, held: float) -> Iterator[None]:
        self._phase, self.held = phase, held
        self._peaks[phase] = held * self.random.uniform(0.9, 0.96)
        spent = seconds * self.random.uniform(0.9, 1.1)
        self.counts["trainer"].observe("tandem_train_phase_duration_seconds", spent, phase=phase)
        where = {"uuid": _UUIDS["trainer"], "rank": "0"}
        for name, chance in (("memory_alloc_retries", 0.005), ("device_allocs", 0.5), ("device_frees", 0.1)):
            happened = float(self.random.random() < chance)
            self.counts["trainer"].inc(f"tandem_torch_{name}_total", happened, **where)
        yield from self._wait(seconds, seconds)

    def _tell_step(self, seconds: float) -> None:
        trainer, draw = self.counts["trainer"], self.random.gauss
        trainer.observe("tandem_train_step_duration_seconds", seconds * self.random.uniform(0.9, 1.1))
        trainer.inc("tandem_train_tokens_total", 32768)
        trainer.inc("tandem_train_trainable_tokens_total", 21000)
        trainer.inc("tandem_train_samples_total", 64)
        done = self._made + self._step / self._steps
        reward = 1 - math.exp(-done / 12)
        self._last |= {
            "step": self.now, "loss": draw(0.02, 0.01), "grad_norm": abs(draw(0.4, 0.1)), "learning_rate": 1e-4,
            "entropy": 0.3 + 0.9 * math.exp(-done / 20) + draw(0, 0.02), "kl": 0.002 * done + abs(draw(0, 0.001)),
            "kl_sampler": abs(draw(0.002, 0.0005)), "logprob_mismatch": abs(draw(0.012, 0.002)),
            "clip_ratio": abs(draw(0.03, 0.01)), "importance_ratio_max": abs(draw(3, 0.6)),
            "reward_mean": reward + draw(0, 0.02), "reward_std": 0.5 * math.sqrt(max(reward * (1 - reward), 0.01)),
        }  # fmt: skip

    def _publish(self) -> Iterator[None]:
        yield from self._wait(2, 4)
        inference = self.counts["inference"]
        self._served = self._made
        inference.inc("tandem_publish_total", outcome="served")
        stages = {"copy": 0.2, "load": 0.9, "verify": 0.6, "since_checkpoint": 4.0}
        for stage, seconds in stages.items():
            inference.observe("tandem_publish_duration_seconds", seconds * self.random.uniform(0.7, 1.5), stage=stage)
        self._last["logprob_error"] = abs(self.random.gauss(0.011, 0.002))

    def _wait(self, least: int, most: int) -> Iterator[None]:
        for _ in range(self.random.randint(least, most)):
            yield

    # ---------------------------------------------------------------- what is seen

    def gauges(self, exporter: Exporter) -> Gauges:
        gauges = Gauges()
        self._container(gauges, exporter)
        if exporter == "controller":
            gauges.set("tandem_jobs", self._queued, state="queued")
            gauges.set("tandem_jobs", float(self._job is not None), state="running")
            gauges.set("tandem_runs", 1)
            return gauges
        self._device(gauges, exporter)
        step = self._made if exporter == "trainer" else self._served
        gauges.set("tandem_policy_version", step, side=exporter, run=RUN)
        if exporter == "trainer":
            self._training(gauges)
        else:
            gauges.set("tandem_policy_refused", 0, run=RUN)
            gauges.set("tandem_publish_logprob_error_nats", self._last.get("logprob_error", 0.011))
        return gauges

    def _container(self, gauges: Gauges, exporter: Exporter) -> None:
        have = {"torch": "2.13.0", "cuda": "13.0.96", "vllm": "0.32.0", "megatron": "0.19.2"}
        wanted = {"trainer": ("torch", "cuda", "megatron"), "inference": ("torch", "cuda", "vllm"), "controller": ()}
        versions = {name: value if name in wanted[exporter] else "" for name, value in have.items()}
        gauges.set("tandem_build_info", 1, version=tandem.__version__, revision="demo", python="3.12.1", **versions)
        for collector in _COLLECTORS[exporter]:
            gauges.set("tandem_collector_success", 1, collector=collector)
            gauges.set("tandem_collector_duration_seconds", self.random.uniform(0.001, 0.02), collector=collector)
            gauges.set("tandem_collector_last_success_timestamp_seconds", self.began + self.now, collector=collector)
        volumes = {"shared": (2000, 1400 - 0.02 * self._made), **({} if exporter == "controller" else _LOCAL)}
        for volume, (total, free) in volumes.items():
            gauges.set("tandem_volume_total_bytes", total * GIB, volume=volume)
            gauges.set("tandem_volume_free_bytes", free * GIB, volume=volume)
        gauges.set("tandem_volume_write_probe_seconds", self.random.uniform(0.004, 0.02), volume="shared")
        for program in _PROGRAMS.get(exporter, ()):
            gauges.set("tandem_supervisor_process_up", 1, program=program)
            self.counts[exporter].inc("tandem_supervisor_process_restarts_total", 0, program=program)
            gauges.set("tandem_supervisor_process_start_time_seconds", self.began, program=program)
            for state in ("running", "starting", "stopping", "stopped", "backoff", "exited", "fatal", "unknown"):
                now = float(state == "running")
                gauges.set("tandem_supervisor_process_state", now, program=program, state=state)

    def _device(self, gauges: Gauges, exporter: Exporter) -> None:
        uuid = _UUIDS[exporter]
        training = exporter == "trainer"
        busy = self._phase != "" if training else self.sampling
        used = 3 * MIB + (self.held * 1.06 + 2 * GIB if self.held else 0) if training else 121 * GIB
        gauges.set(
            "tandem_gpu_info", 1, uuid=uuid, index="0", name="NVIDIA H200", driver_version="580.95.05",
            cuda_version="13.0", pci_bus_id="00000000:19:00.0" if training else "00000000:3B:00.0", mig_profile="",
        )  # fmt: skip
        gauges.set("tandem_gpu_memory_total_bytes", TOTAL, uuid=uuid)
        gauges.set("tandem_gpu_memory_reserved_bytes", RESERVED, uuid=uuid)
        gauges.set("tandem_gpu_memory_used_bytes", used, uuid=uuid)
        gauges.set("tandem_gpu_memory_free_bytes", TOTAL - RESERVED - used, uuid=uuid)
        gauges.set("tandem_gpu_compute_processes", float(busy) if training else 1, uuid=uuid)
        gauges.set("tandem_gpu_utilization_ratio", self.random.uniform(0.75, 1) if busy else 0.0, uuid=uuid)
        gauges.set("tandem_gpu_temperature_celsius", self.random.randint(58, 66) if busy else 34, uuid=uuid)
        gauges.set("tandem_gpu_power_limit_watts", 700, uuid=uuid)
        self.counts[exporter].inc("tandem_gpu_ecc_uncorrected_errors_total", 0, uuid=uuid)
        for reason in THROTTLE_REASONS:
            throttled = busy and reason == "sw_power_cap" and self.random.random() < 0.2
            gauges.set("tandem_gpu_throttle_active", float(throttled), uuid=uuid, reason=reason)

    def _training(self, gauges: Gauges) -> None:
        last, uuid = self._last, _UUIDS["trainer"]
        gauges.set("tandem_train_active", float(self._job is not None))
        gauges.set("tandem_checkpoint_duration_seconds", last.get("checkpoint_seconds", 2.8))
        gauges.set("tandem_checkpoint_last_success_timestamp_seconds", self.began + last.get("checkpoint", 0.0))
        gauges.set("tandem_checkpoint_size_bytes", 0.52 * GIB)
        gauges.set("tandem_job_gpu_released_bytes", last.get("released", 0.0), uuid=uuid)
        gauges.set("tandem_job_gpu_left_bytes", last.get("left", 0.0), uuid=uuid)
        gauges.set("tandem_job_gpu_resident_bytes", 0.0, uuid=uuid)
        for metric in CATALOGUE:
            key = metric.name.removeprefix("tandem_train_")
            if metric.name == f"tandem_train_{key}" and key in last and metric.kind == "gauge" and key != "step":
                gauges.set(metric.name, last[key])
        if self._job is None:
            return
        job_id, kind = self._job
        gauges.set("tandem_job_info", 1, job_id=job_id, run=RUN, kind=kind)
        gauges.set("tandem_job_last_progress_timestamp_seconds", self.began + self.now)
        gauges.set("tandem_train_step", self._step)
        gauges.set("tandem_train_steps", self._steps)
        if "step" in last and self._step:
            gauges.set("tandem_train_last_step_timestamp_seconds", self.began + last["step"])
        gauges.set("tandem_rank_up", 1, rank="0")
        gauges.set("tandem_train_rank_step", self._step, rank="0")
        gauges.set("tandem_torch_host_pinned_bytes", 0.25 * GIB, rank="0")
        where, peak = {"uuid": uuid, "rank": "0"}, max(self._peaks.values(), default=0.0)
        shares = {"allocated": 0.88, "active": 0.9, "requested": 0.87, "inactive_split": 0.05, "reserved": 1.0}
        for name, share in shares.items():
            gauges.set(f"tandem_torch_memory_{name}_bytes", self.held * share, **where)
            gauges.set(f"tandem_torch_memory_{name}_peak_bytes", peak * share, **where)
        for phase in PHASES:
            if phase in self._peaks:
                held = 0.92 * self._peaks[phase]
                pinned = 0.5 * GIB if phase == "base_weights" else 0.0
                told = {"allocated": held, "reserved": 1.1 * held, "device_used": 1.1 * held + 2 * GIB,
                        "host_pinned": pinned, "peak": self._peaks[phase]}  # fmt: skip
                for name, value in told.items():
                    gauges.set(f"tandem_torch_memory_phase_{name}_bytes", value, **where, phase=phase)
        if "floor" in last:
            gauges.set("tandem_torch_memory_step_floor_bytes", last["floor"], **where)


class DemoPage(Collector):
    """What a scrape of some of the exporters tells; `vllm`: and of vLLM."""

    def __init__(self, world: World, lock: threading.Lock, exporters: tuple[Exporter, ...], *, vllm: bool) -> None:
        self._world, self._lock, self._exporters, self._vllm = world, lock, exporters, vllm
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Family]:
        series: dict[str, dict[LabelValues, Value]] = {}
        with self._lock:
            self._world.advance(time.time())
            parts: list[Series] = [self._world.gauges(exporter).series for exporter in self._exporters]
            parts += [self._world.counts[exporter].series() for exporter in self._exporters]
            if self._vllm:
                seen = demo_vllm.gauges(self._world.random, busy=self._world.sampling, now=time.time())
                parts += [seen.series, self._world.vllm.series()]
        for part in parts:
            for name, values in part.items():
                series.setdefault(name, {}).update(values)
        yield from families(series, CATALOGUE + VLLM_METRICS)
        if self._exporters:
            yield from self._process.collect()


def pages() -> dict[str, Collector]:
    """`/metrics` tells everything; the others are one Prometheus job each."""
    world, lock = World(time.time()), threading.Lock()
    each: tuple[Exporter, ...] = ("trainer", "inference", "controller")
    found: dict[str, Collector] = {"/metrics": DemoPage(world, lock, each, vllm=True)}
    for exporter in each:
        found[f"/metrics/{exporter}"] = DemoPage(world, lock, (exporter,), vllm=False)
    found["/metrics/vllm"] = DemoPage(world, lock, (), vllm=True)
    return found
