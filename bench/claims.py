"""Measures the cost of jobs on spools with few and with many jobs: the time of the controller's
HTTP requests and of the runner's claims, CPU time, and the controller's memory.

    python -m bench.claims [--queued 10 1000 20000] [--ended 20000] [--runs 8] [--submissions 300]
    [--claims 100]
                          [--clients 200] [--checkpoints 5000] [--streams 1000] [--only jobs
                          checkpoints streams]

Each size has its own spool with copies of one small RL job (8 trajectories of 16 tokens), and its
own controller process. Clients and claims run in this process. Controller, clients and claims share
the machine's cores with other programs. `load` is the machine's load average during the
measurement. A high load changes CPU times less than other times. `between two jobs` is the time in
milliseconds from the call that ends a job until the next job is claimed.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from bench.many_jobs import KEY, Controller, deployment, fill, request
from bench.report import report
from tandem.metrics.controller import QueueCollector
from tandem.metrics.jobs import JobsCollector
from tandem.metrics.metric import Samples
from tandem.metrics.policy import CheckpointsCollector, PolicyCollector
from tandem.spool import Spool
from tandem.spool.schema import Event, Job, JobError, JobResult


def high(seconds: list[float]) -> float:
    """The 99th percentile, in milliseconds."""
    return 1000 * sorted(seconds)[max(0, int(len(seconds) * 0.99 - 1e-9))]


def timed(times: int, action: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return found


async def submissions(
    controller: Controller, count: int, clients: int, runs: int
) -> tuple[list[float], float]:
    """Sends `count` job submissions from `clients` concurrent clients. Returns the seconds of each
    submission, and the seconds of all submissions together."""
    seconds: list[float] = []
    numbers = iter(range(count))

    async def send(http: httpx.AsyncClient) -> None:
        for number in numbers:
            begin = time.perf_counter()
            answer = await http.post(f"/v1/runs/run-{number % runs}/train", json=request(number))
            seconds.append(time.perf_counter() - begin)
            assert answer.status_code == 202, answer.text

    async with controller.open(clients) as http:
        begin = time.perf_counter()
        await asyncio.gather(*(send(http) for _ in range(clients)))
        return seconds, time.perf_counter() - begin


def ask_health(url: str, parent: Connection) -> None:
    """Sends requests to /healthz until the parent process sends a message. Afterwards sends the
    seconds of each request to the parent."""
    seconds = []
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        http.get("/healthz")
        parent.send(None)
        while not parent.poll(0.02):
            seconds += timed(1, lambda: http.get("/healthz"))
    parent.send(seconds)


def crowd(controller: Controller, clients: int, runs: int) -> tuple[list[float], list[float]]:
    """`clients` clients submit one job each at the same moment. Returns the seconds of each
    submission, and the seconds of each concurrent request to /healthz.

    Another process sends the requests to /healthz, because this process is as busy as the
    controller.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=ask_health, args=(controller.url, there)
    )
    process.start()
    here.recv()
    seconds, _ = asyncio.run(submissions(controller, clients, clients, runs))
    here.send(None)
    health = here.recv()
    process.join()
    return seconds, health


@contextlib.contextmanager
def syncs() -> Iterator[list[float]]:
    """Within the block, collects the seconds that the volume needs for each fsync of this
    process."""
    seconds: list[float] = []
    real = os.fsync
    os.fsync = lambda fd: seconds.extend(timed(1, lambda: real(fd)))  # type: ignore[assignment]
    try:
        yield seconds
    finally:
        os.fsync = real


def claims(spool: Spool, count: int) -> dict[str, float]:
    """Claims jobs, writes heartbeats and ends jobs by the runner's functions."""
    claimed, own, renewed, between = [], [], [], []
    job: Job | None = None
    computed = time.process_time()
    for _ in range(count):
        begin = time.perf_counter()
        if job is not None:
            error = JobError(type="rank_error", message="bench")
            spool.queue.finish(job, JobResult(state="failed", error=error, finished=time.time()))
        # The runner also checks for queued jobs before it claims a job.
        assert any(spool.jobs.index.heads())
        claim_begin = time.perf_counter()
        with syncs() as synced:
            job = spool.queue.claim("bench")
        end = time.perf_counter()
        assert job is not None
        claimed.append(end - claim_begin)
        own.append(claimed[-1] - sum(synced))
        between.append(end - begin)
        renewed += timed(1, partial(spool.leases.write, job, "bench", "training"))
    computed = time.process_time() - computed
    return {
        "claim, heartbeat and end CPU ms": 1000 * computed / count,
        "claim p99 ms": high(claimed),
        "claim ms": 1000 * statistics.median(claimed),
        "claim without syncs p99 ms": high(own),
        "claim without syncs ms": 1000 * statistics.median(own),
        "heartbeat p99 ms": high(renewed),
        "between two jobs ms": 1000 * statistics.median(between[1:]),
    }


def collected(spool: Spool) -> float:
    """The time in milliseconds that the metrics collectors for jobs take for their second
    collection. The first collection reads all existing jobs."""
    collectors = (QueueCollector(lambda: spool), JobsCollector(lambda: spool))

    def collect() -> None:
        for collector in collectors:
            collector.collect(
                Samples(metric for metric in collector.metrics if metric.kind == "gauge")
            )

    return 1000 * timed(2, collect)[1]


def measure_jobs(queued: int, options: argparse.Namespace) -> dict[str, Any]:
    with deployment(options) as (spool, controller, tandem):
        first = tandem.train("run-0", request(0))
        _, job = spool.jobs.get(first.id)
        spool.queue.cancel(first.id)
        fill(spool, job, "succeeded", options.ended, options.runs)
        # Each run needs a real job for step 1, because the copies continue from step 1.
        for number in range(options.runs):
            tandem.train(f"run-{number}", request(number))
        fill(spool, job, "queued", max(0, queued - options.runs), options.runs)
        os.sync()  # writes the copies to the volume before syncs are measured
        time.sleep(3)  # directories settle
        tandem.get_run("run-0")
        row: dict[str, Any] = {"queued": queued, "ended": options.ended}
        computed = controller.cpu()
        seconds, total = asyncio.run(submissions(controller, options.submissions, 4, options.runs))
        row |= {
            "load": os.getloadavg()[0],
            "submissions/s": len(seconds) / total,
            "submission p99 ms": high(seconds),
        }
        row["submission CPU ms"] = 1000 * (controller.cpu() - computed) / len(seconds)
        row |= claims(spool, options.claims)
        with httpx.Client(
            base_url=controller.url, headers=controller.headers, trust_env=False, timeout=60
        ) as http:
            paths = {
                "poll": f"/v1/jobs/{first.id}",
                "get_run": "/v1/runs/run-1",
                "list_runs": "/v1/runs",
                "list_jobs": "/v1/jobs?limit=50",
                "failed jobs": "/v1/jobs?state=failed&limit=50",
                "page": "/v1/jobs?limit=50&before=succeeded-50",
                "/metrics": "/metrics",
            }
            for name, path in paths.items():
                http.get(path).raise_for_status()
                row[f"{name} p99 ms"] = high(
                    timed(50, lambda path=path: http.get(path).raise_for_status())
                )  # type: ignore[misc]
        row["collection ms"] = collected(spool)
        seconds, health = crowd(controller, options.clients, options.runs)
        row |= {
            f"{options.clients} clients p99 s": high(seconds) / 1000,
            "healthz p99 s": high(health) / 1000,
        }
        row["controller MiB"] = controller.memory()
    return row


def measure_checkpoints(options: argparse.Namespace) -> dict[str, Any]:
    with deployment(options) as (spool, controller, tandem):
        first = spool.checkpoints.path("run-0", 0)
        manifest = spool.checkpoints.manifest("run-0", 0)
        for step in range(1, options.checkpoints):
            directory = first.parent / f"{step:08d}"
            directory.mkdir()
            for name in manifest.files:
                (directory / name).hardlink_to(first / name)
            changed = manifest.model_copy(update={"step": step, "job": f"job-{step}"})
            (directory / "manifest.json").write_text(changed.model_dump_json(indent=1))
        row: dict[str, Any] = {"checkpoints": options.checkpoints}
        row["get_run p99 ms"] = high(timed(50, lambda: tandem.get_run("run-0")))
        row["listing of all s"] = statistics.median(timed(3, lambda: tandem.checkpoints("run-0")))
        row["scrape p99 ms"] = high(
            timed(20, lambda: httpx.get(f"{controller.url}/metrics", trust_env=False))
        )
        policy = (
            PolicyCollector(lambda: spool, ("trainer", "inference")),
            CheckpointsCollector(lambda: spool),
        )

        def collect() -> None:
            for collector in policy:
                collector.collect(
                    Samples(metric for metric in collector.metrics if metric.kind == "gauge")
                )

        row["collection s"] = max(timed(3, collect))
        row["rollback s"] = timed(1, lambda: tandem.rollback("run-0", 5))[0]
        assert tandem.get_run("run-0").newest_step == 5
    return row


async def follow(controller: Controller, job: str, streams: int, events: int) -> dict[str, Any]:
    """Opens `streams` event streams of a job. The client reads all events of one half of the
    streams, and reads nothing from the other half. Returns the controller's memory in MiB while the
    streams are open and after they are closed."""
    before = controller.memory()
    peak, reading = before, True
    host, port = controller.url.removeprefix("http://").split(":")
    head = (
        f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer"
        f" {KEY}\r\n\r\n"
    )

    async def watch() -> None:
        nonlocal peak
        while reading:
            peak = max(peak, controller.memory())
            await asyncio.sleep(0.1)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
        writer.write(head.encode())
        return reader, writer

    async def read(reader: asyncio.StreamReader) -> None:
        seen = 0
        while seen < events:
            part = await asyncio.wait_for(reader.read(2**16), 600)
            assert part, "the stream ended"
            seen += part.count(b"event: ")

    watching: Awaitable[None] = asyncio.create_task(watch())
    connections = [await connect() for _ in range(streams)]
    begin = time.perf_counter()
    await asyncio.gather(*(read(reader) for reader, _ in connections[::2]))
    seconds = time.perf_counter() - begin
    async with controller.open(1) as http:
        health = []
        for _ in range(50):
            begin = time.perf_counter()
            await http.get("/healthz")
            health.append(time.perf_counter() - begin)
    reading = False
    await watching
    for _, writer in connections:
        writer.close()
    await asyncio.sleep(5)
    row = {"MiB before": before, "MiB highest": peak, "MiB after": controller.memory()}
    return row | {"all read s": seconds, "healthz p99 ms": high(health)}


def measure_streams(options: argparse.Namespace) -> dict[str, Any]:
    with deployment(options) as (spool, controller, tandem):
        job = tandem.train("run-0", request(0)).id
        lines = (
            Event(
                seq=i,
                time=0.0,
                job=job,
                type="step",
                data={"step": i, "metrics": {"loss": 0.5, "x": 1.0}},
            )
            for i in range(options.events)
        )
        spool.paths.events_file(job).write_text(
            "".join(line.model_dump_json() + "\n" for line in lines)
        )
        row: dict[str, Any] = {
            "streams": options.streams,
            "read": options.streams // 2,
            "events": options.events,
        }
        row |= asyncio.run(follow(controller, job, options.streams, options.events))
        again = asyncio.run(follow(controller, job, options.streams, options.events))
        return row | {"MiB after the same again": again["MiB after"]}


def main(arguments: list[str] | None = None) -> None:
    """Runs the measurements that `--only` names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queued", nargs="+", type=int, default=[10, 1000, 20000])
    for name, default in (
        ("ended", 20000),
        ("runs", 8),
        ("submissions", 300),
        ("claims", 100),
        ("clients", 200),
        ("checkpoints", 5000),
        ("streams", 1000),
        ("events", 10000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--only", nargs="+", choices=("jobs", "checkpoints", "streams"), default=None
    )
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the spools are made; by default TMPDIR"
    )
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    wanted = options.only or ("jobs", "checkpoints", "streams")
    if "jobs" in wanted:
        rows = [measure_jobs(queued, options) for queued in options.queued]
        report("queue", "Jobs: what each action costs", rows)
    if "checkpoints" in wanted:
        report("queue-checkpoints", "A run with many checkpoints", [measure_checkpoints(options)])
    if "streams" in wanted:
        report(
            "queue-streams", "Event streams: the controller's memory", [measure_streams(options)]
        )


if __name__ == "__main__":
    main()
