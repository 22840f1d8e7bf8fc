"""The controller's own `/metrics`: the queue, the runs, the shared volume, and the HTTP requests.

A request is counted under its route's template, so that no id and no other part of a path becomes a label.
"""

import time

from fastapi import FastAPI, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.controller.deployment import Deployment
from tandem.metrics.collector import Page
from tandem.metrics.container import BuildCollector, VolumesCollector
from tandem.metrics.controller import METHODS, QueueCollector
from tandem.metrics.samples import Samples

# Route of requests without one: unknown paths, and requests that were refused before they were routed.
OTHER = "other"


def install_metrics(app: FastAPI, deployment: Deployment) -> None:
    """Add `/metrics` and count every request. Called last, so that refused requests are counted too."""
    counts = deployment.counts
    app.state.collectors = (
        BuildCollector(),
        QueueCollector(lambda: deployment.spool),
        VolumesCollector(lambda: deployment.spool, {}),
    )
    page = Page(app.state.collectors, counts)
    app.add_middleware(CountRequests, counts=counts)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """For Prometheus. Needs no key, and contains no names of runs or jobs."""
        return Response(generate_latest(page), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            for status_class in ("2xx", "4xx", "5xx"):  # increase() misses the first request of a series without a 0
                labels = {"route": path, "method": method.upper(), "status_class": status_class}
                counts.inc("tandem_http_requests_total", 0, **labels)


class CountRequests:
    """ASGI middleware: counts requests, and observes the seconds of those that are not event streams."""

    def __init__(self, app: ASGIApp, counts: Samples) -> None:
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        status, is_stream = 0, False

        async def send_noted(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception:
            status = status or 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            method = scope["method"] if scope["method"] in METHODS else OTHER
            labels = {"route": route, "method": method, "status_class": f"{status // 100}xx"}
            if status:
                self.counts.inc("tandem_http_requests_total", **labels)
            if status and not is_stream:
                seconds = time.perf_counter() - begin
                self.counts.observe("tandem_http_request_duration_seconds", seconds, route=route)
