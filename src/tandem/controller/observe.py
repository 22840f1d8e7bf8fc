"""The controller's own `/metrics`: the queue, the runs, the shared volume, and what was asked and answered.

A request is counted under its route's template, so that neither ids nor whatever else a path holds becomes a label.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

from fastapi import FastAPI, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.controller.deployment import Deployment
from tandem.metrics.catalogue import METHODS, CollectorName
from tandem.metrics.collector import Collector, Loop, Scrape
from tandem.metrics.host import BuildCollector, VolumesCollector
from tandem.metrics.samples import Counts, Gauges
from tandem.metrics.server import encode
from tandem.spool import Spool

OTHER = "other"
"""Route of requests that met none: unknown paths, and those that the gate refused."""


class QueueCollector(Collector):
    name: ClassVar[CollectorName] = "queue"

    def __init__(self, spool: Callable[[], Spool]) -> None:
        super().__init__()
        self._spool = spool

    def collect(self, gauges: Gauges) -> None:
        spool = self._spool()
        queued, running = set(spool.jobs.ids("queued")), set(spool.jobs.ids("running"))
        gauges.set("tandem_jobs", len(queued - running), state="queued")
        gauges.set("tandem_jobs", len(running), state="running")
        gauges.set("tandem_runs", len(spool.runs.names()))


@asynccontextmanager
async def collecting(app: FastAPI) -> AsyncIterator[None]:
    """The application's life: collectors run while it does."""
    for loop in app.state.loops:
        loop.start()
    yield
    for loop in app.state.loops:
        loop.stop()


def install(app: FastAPI, here: Deployment) -> None:
    """Add `/metrics` and count every request. Added after the gate, so that what it refuses is counted too."""

    def spool() -> Spool:
        here.spool.check()
        return here.spool

    collectors = (BuildCollector(), QueueCollector(spool), VolumesCollector(spool, {}))
    app.state.loops = [Loop(collector) for collector in collectors]
    scrape = Scrape(app.state.loops, [here.counts])
    app.add_middleware(CountRequests, counts=here.counts)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """For Prometheus; needs no key and tells no names but routes'."""
        return Response(encode(scrape), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            for status_class in ("2xx", "4xx", "5xx"):  # so that increase() sees the first of each
                labels = {"route": path, "method": method.upper(), "status_class": status_class}
                here.counts.inc("tandem_http_requests_total", 0, **labels)


class CountRequests:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        status, streamed = 0, False

        async def noted(message: Message) -> None:
            nonlocal status, streamed
            if message["type"] == "http.response.start":
                status = message["status"]
                streamed = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = status or 500
            raise
        finally:
            if status:
                self._count(scope, status, None if streamed else time.perf_counter() - begin)

    def _count(self, scope: Scope, status: int, seconds: float | None) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self.counts.inc("tandem_http_requests_total", route=route, method=method, status_class=f"{status // 100}xx")
        if seconds is not None:
            self.counts.observe("tandem_http_request_duration_seconds", seconds, route=route)
