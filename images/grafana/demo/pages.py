"""The metrics pages of the made-up deployment, which Prometheus scrapes."""

import math
import time
from collections.abc import Iterator

from images.grafana.demo import vllm
from images.grafana.demo.world import GIB, STEPS, World, new_samples
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import tandem
from tandem.metrics.container import STATES
from tandem.metrics.metric import ALL, Exporter, Samples
from tandem.metrics.publish import PHASES

JOBS = ("tandem-trainer", "tandem-inference", "tandem-controller", "tandem-vllm")
"""Prometheus' jobs, each of which has a page."""
MIB = 2**20
TOTAL, RESERVED = 141 * GIB, 1 * GIB
RUN = "countdown"
_PROGRAMS: dict[Exporter, tuple[str, ...]] = {
    "trainer": ("runner", "exporter"),
    "inference": ("proxy", "vllm-0", "vllm-1", "publisher-0", "publisher-1", "exporter"),
}
_COLLECTORS: dict[Exporter, tuple[str, ...]] = {
    "trainer": ("build", "nvml", "policy", "supervisor", "volumes", "ranks", "jobs", "checkpoints"),
    "inference": (
        "build",
        "nvml",
        "policy",
        "supervisor",
        "volumes",
        "publish",
        "merged",
        "replicas",
    ),
    "controller": ("build", "volumes", "queue"),
}


class DemoPage(Collector):
    """The page that Prometheus' job `job` scrapes. For vLLM, `server` is the number of the vLLM
    server that has the page."""

    def __init__(self, world: World, job: str, server: int = 0) -> None:
        self._world, self._server = world, server
        self._exporter = next((name for name in ALL if job == f"tandem-{name}"), None)

    def collect(self) -> Iterator[Family]:
        world = self._world
        with world.lock:
            world.advance(time.time())
            if self._exporter is None:
                samples = world.vllm[self._server]
                vllm.set_gauges(samples, world.random, busy=world.sampling, now=time.time())
                yield from samples.families()
                return
            yield from gauges(world, self._exporter).families()
            yield from world.counts[self._exporter].families()
            yield from ProcessCollector(registry=None).collect()


def gauges(world: World, exporter: Exporter) -> Samples:
    samples = new_samples(exporter, gauges=True)
    _set_container(samples, world, exporter)
    if exporter == "controller":
        samples.set("tandem_jobs", world.queued, state="queued")
        samples.set("tandem_jobs", float(world.job is not None), state="running")
        samples.set("tandem_runs", 1)
        for kind in ("job", "name", "run"):
            samples.set("tandem_spool_damaged", 0, kind=kind)
        return samples
    _set_devices(samples, world, exporter)
    step = world.newest if exporter == "trainer" else world.served
    samples.set("tandem_policy_version", step, side=exporter, run=RUN)
    if exporter == "trainer":
        samples.set("tandem_run_bytes", 525e6 * (step + 1), run=RUN)
        _set_training(samples, world)
    else:
        samples.set("tandem_policy_refused", 0, run=RUN)
        samples.set("tandem_policy_info", 1, run=RUN, weights="merged", transport="merge")
        for part, seconds in world.publication.items():
            samples.set("tandem_publish_seconds", seconds, run=RUN, part=part)
        samples.set("tandem_merged_runs", 1)
        samples.set("tandem_replicas_wanted", 2)
        for replica in ("0", "1"):
            for phase in PHASES:
                served = float(phase == "served")
                samples.set("tandem_merged_phase", served, replica=replica, phase=phase)
            samples.set("tandem_replica_ready", 1, replica=replica)
            samples.set("tandem_replica_steps_behind", 0, replica=replica)
            samples.set("tandem_replica_publish_seconds", 1.1 + 0.1 * int(replica), replica=replica)
        samples.set("tandem_publish_logprob_error_nats", 0.011 + 0.001 * math.sin(world.served))
        samples.set("tandem_publish_logprob_error_allowed_nats", 0.21)
    return samples


def _set_container(samples: Samples, world: World, exporter: Exporter) -> None:
    installed = {"torch": "2.13.0", "cuda": "13.0.96", "vllm": "0.32.0", "megatron": "0.19.2"}
    wanted = {
        "trainer": ("torch", "cuda", "megatron"),
        "inference": ("torch", "cuda", "vllm"),
        "controller": (),
    }
    versions = {
        name: value if name in wanted[exporter] else "" for name, value in installed.items()
    }
    samples.set(
        "tandem_build_info",
        1,
        version=tandem.__version__,
        revision="demo",
        python="3.12.1",
        **versions,
    )
    for collector in _COLLECTORS[exporter]:
        samples.set("tandem_collector_success", 1, collector=collector)
        samples.set(
            "tandem_collector_duration_seconds",
            world.random.uniform(0.001, 0.02),
            collector=collector,
        )
        samples.set(
            "tandem_collector_last_success_timestamp_seconds",
            world.began + world.now,
            collector=collector,
        )
    volumes = {"shared": (2000, 1400 - 0.02 * world.newest), "downloads": (500, 312)}
    if exporter != "controller":
        volumes |= {"shm": (64, 61), "cache": (100, 88), "tmp": (8, 7.8)}
    for volume, (total, free) in volumes.items():
        samples.set("tandem_volume_total_bytes", total * GIB, volume=volume)
        samples.set("tandem_volume_free_bytes", free * GIB, volume=volume)
    samples.set(
        "tandem_volume_write_probe_seconds", world.random.uniform(0.004, 0.02), volume="shared"
    )
    for program in _PROGRAMS.get(exporter, ()):
        samples.set("tandem_supervisor_process_up", 1, program=program)
        world.counts[exporter].inc("tandem_supervisor_process_restarts_total", 0, program=program)
        samples.set("tandem_supervisor_process_start_time_seconds", world.began, program=program)
        for state in STATES:
            value = float(state == "running")
            samples.set("tandem_supervisor_process_state", value, program=program, state=state)


def _set_devices(samples: Samples, world: World, exporter: Exporter) -> None:
    training, busy = exporter == "trainer", world.busy(exporter)
    used = 3 * MIB + (world.held * 1.06 + 2 * GIB if world.held else 0) if training else 121 * GIB
    memory = {"total": TOTAL, "reserved": RESERVED, "used": used, "free": TOTAL - RESERVED - used}
    for index, uuid in enumerate(world.uuids[exporter]):
        bus = f"00000000:{0x19 + 0x20 * index + (0 if training else 0x10):02X}:00.0"
        samples.set(
            "tandem_gpu_info",
            1,
            uuid=uuid,
            index=str(index),
            name="NVIDIA H200",
            driver_version="580.95.05",
            cuda_version="13.0",
            pci_bus_id=bus,
            mig_profile="",
        )
        for part, value in memory.items():
            samples.set(f"tandem_gpu_memory_{part}_bytes", value, uuid=uuid)
        samples.set("tandem_gpu_compute_processes", float(busy) if training else 1, uuid=uuid)
        samples.set(
            "tandem_gpu_utilization_ratio",
            world.random.uniform(0.75, 1) if busy else 0.0,
            uuid=uuid,
        )
        samples.set(
            "tandem_gpu_temperature_celsius",
            world.random.randint(58, 66) if busy else 34,
            uuid=uuid,
        )
        samples.set("tandem_gpu_power_limit_watts", 700, uuid=uuid)
        world.counts[exporter].inc("tandem_gpu_ecc_uncorrected_errors_total", 0, uuid=uuid)
        for reason in ("hw_thermal", "sw_thermal", "hw_power_brake", "sw_power_cap"):
            throttled = busy and reason == "sw_power_cap" and world.random.random() < 0.2
            samples.set("tandem_gpu_throttle_active", float(throttled), uuid=uuid, reason=reason)


def _set_training(samples: Samples, world: World) -> None:
    samples.set("tandem_train_active", float(world.job is not None))
    samples.set("tandem_checkpoint_duration_seconds", 2.8)
    samples.set(
        "tandem_checkpoint_last_success_timestamp_seconds", world.began + world.checkpoint_made
    )
    samples.set("tandem_checkpoint_size_bytes", 0.52 * GIB)
    for uuid in world.uuids["trainer"]:
        samples.set("tandem_job_gpu_released_bytes", world.released, uuid=uuid)
        samples.set("tandem_job_gpu_left_bytes", 3 * MIB, uuid=uuid)
        samples.set("tandem_job_gpu_resident_bytes", 0, uuid=uuid)
    for name, value in world.last_step.items():
        samples.set(f"tandem_train_{name}", value)
    if world.job is None:
        return
    job_id, kind = world.job
    samples.set("tandem_job_info", 1, job_id=job_id, run=RUN, kind=kind)
    samples.set("tandem_job_waiting_seconds", world.now % 1800, run="letters")
    samples.set("tandem_session_idle_seconds", world.now % 60, run="dialogue")
    samples.set("tandem_job_last_progress_timestamp_seconds", world.began + world.now, run=RUN)
    samples.set("tandem_train_step", world.step, run=RUN)
    samples.set("tandem_train_steps", STEPS, run=RUN)
    if world.step:
        ended = world.began + world.step_ended
        samples.set("tandem_train_last_step_timestamp_seconds", ended, run=RUN)
    for rank in world.ranks:
        _set_rank(samples, world, rank)


def _set_rank(samples: Samples, world: World, rank: dict[str, str]) -> None:
    where = {"run": RUN, "rank": rank["rank"]}
    samples.set("tandem_rank_up", 1, **where)
    samples.set("tandem_train_rank_step", world.step, **where)
    samples.set("tandem_torch_host_pinned_bytes", 0.25 * GIB, **where)
    samples.set("tandem_torch_memory_step_floor_bytes", 31.5 * GIB, **rank)
    peak = max(world.phase_peaks.values(), default=0.0)
    for name, size in (
        ("allocated", 0.88 * world.held),
        ("allocated_peak", 0.88 * peak),
        ("reserved", world.held),
        ("reserved_peak", peak),
        ("inactive_split", 0.05 * world.held),
    ):
        samples.set(f"tandem_torch_memory_{name}_bytes", size, **rank)
    for phase, peak in world.phase_peaks.items():
        held = 0.92 * peak
        memory = {"allocated": held, "device_used": 1.1 * held + 2 * GIB, "peak": peak}
        for name, value in memory.items():
            samples.set(f"tandem_torch_memory_phase_{name}_bytes", value, **rank, phase=phase)
