"""The FastAPI application: its routes, its middleware, its own `/metrics`, and its OpenAPI
document."""

import ctypes
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Depends, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import TypeAdapter

import tandem
from tandem.config import Settings
from tandem.controller import routes_checkpoints, routes_jobs, routes_runs, routes_train
from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.http_errors import install_handlers
from tandem.controller.middleware import Authentication, BodyLimit, CountRequests
from tandem.controller.openai import routes_files, routes_tunings
from tandem.controller.openai.tuner import Tuner
from tandem.controller.schemas import ErrorBody, Health, RenderRequest, TrainRequest
from tandem.controller.tinker import routes_sampling, routes_sessions, routes_training
from tandem.controller.tinker.futures import forget_snapshots
from tandem.controller.tinker.service import TinkerApi
from tandem.metrics.collector import Page
from tandem.metrics.container import BuildCollector, VolumesCollector, downloads
from tandem.metrics.controller import QueueCollector
from tandem.spool import Spool
from tandem.spool.recovery import sweep
from tandem.spool.removal import prune
from tandem.system.logs import Log

SWEEP_SECONDS = 600.0
# The routes of OpenAI's and Tinker's APIs are not in the OpenAPI document, because the clients of
# these APIs have types of their own. The order of the routers matters: the last route of the last
# router answers all paths below Tinker's prefix that have no other route.
_FOREIGN = (
    routes_files.router,
    routes_tunings.router,
    routes_tunings.uploads,
    routes_training.router,
    routes_sampling.router,
    routes_sessions.router,
)

_DESCRIPTION = """Post-training of language models: create a run, train it by RL or SFT, follow
the job, take the checkpoint.

Sampling is vLLM's own OpenAI-compatible API; a run's step is its model `<run>@<step>`.
Every refusal is `{"error": {"type", "message", "field"}}`."""
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {
        "model": ErrorBody,
        "description": "The key is missing or is not one of this deployment's.",
    },
    404: {"model": ErrorBody, "description": "The run, step or job does not exist."},
    409: {"model": ErrorBody, "description": "The request doesn't fit the present state."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "The input is wrong; `field` names the part."},
    500: {"model": ErrorBody, "description": "A checkpoint or a run on the volume is damaged."},
    503: {"model": ErrorBody, "description": "The volume can't be used; try again later."},
}

log = Log("controller")


def create_app(settings: Settings) -> FastAPI:
    """The application of one deployment. Raises the errors of `Deployment`."""
    app = FastAPI(
        title="Tandem",
        version=tandem.__version__,
        description=_DESCRIPTION,
        generate_unique_id_function=lambda route: route.name,
        separate_input_output_schemas=False,
        docs_url=None,  # FastAPI's documentation page loads scripts from a CDN
        redoc_url=None,
        lifespan=_run_threads,
    )
    app.state.deployment = Deployment(settings)
    app.state.tinker = TinkerApi(app.state.deployment)
    install_handlers(app)
    # `Authentication` checks the key. `bearer` only adds the key to the OpenAPI document.
    bearer = Depends(HTTPBearer(auto_error=False, description="a key of TANDEM_API_KEY"))
    for module in (routes_runs, routes_train, routes_jobs, routes_checkpoints):
        app.include_router(module.router, responses=_REFUSALS, dependencies=[bearer])
    for router in _FOREIGN:
        app.include_router(router)

    @app.get("/healthz", tags=["health"])
    async def live() -> Health:
        """The process answers."""
        return Health(version=tandem.__version__)

    @app.get("/readyz", tags=["health"], responses={503: _REFUSALS[503]})
    def ready(deployment: CurrentDeployment) -> Health:
        """Whether the volume can be written."""
        deployment.spool.check_writable()
        return Health(version=tandem.__version__)

    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    _install_metrics(app, app.state.deployment)
    # The middleware that is added last is the outermost, so `CountRequests` also counts requests
    # that the other middleware refuses.
    app.add_middleware(BodyLimit, max_bytes=settings.max_request_bytes)
    app.add_middleware(Authentication, keys=settings.named_keys)
    app.add_middleware(CountRequests, counts=app.state.deployment.counts)
    return app


def _install_metrics(app: FastAPI, deployment: Deployment) -> None:
    def spool() -> Spool:
        return deployment.spool

    app.state.collectors = (
        BuildCollector(),
        QueueCollector(spool),
        VolumesCollector(spool, downloads()),
    )
    page = Page(app.state.collectors, deployment.counts)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """The controller's metrics, for Prometheus. The route needs no key, and shows no names of
        runs or jobs."""
        return Response(generate_latest(page), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    routes: dict[str, set[str]] = {path: {*of} for path, of in app.openapi()["paths"].items()}
    for route in (route for router in _FOREIGN for route in router.routes):
        if isinstance(route, APIRoute):
            routes.setdefault(route.path, set()).update(route.methods)
    for path, methods in routes.items():
        for method in methods:
            # Without an initial value of 0, Prometheus' increase() misses the first request of a
            # series.
            for status_class in ("2xx", "4xx", "5xx"):
                labels = {"route": path, "method": method.upper(), "status_class": status_class}
                deployment.counts.inc("tandem_http_requests_total", 0, **labels)


@asynccontextmanager
async def _run_threads(app: FastAPI) -> AsyncIterator[None]:
    """Runs the threads of the controller: the collectors, the sweeper, and the tuner of
    fine-tunings. Does not wait until the threads end, because the volume may hang."""
    deployment, stop = app.state.deployment, threading.Event()
    arguments = (deployment.spool, deployment.settings, stop)
    threading.Thread(target=_remove_regularly, args=arguments, name="sweep", daemon=True).start()
    tuner = Tuner(deployment)
    threading.Thread(target=tuner.run, args=(stop,), name="fine-tunings", daemon=True).start()
    for collector in app.state.collectors:
        collector.start(stop)
    yield
    stop.set()
    await app.state.tinker.close()


def _remove_regularly(spool: Spool, settings: Settings, stop: threading.Event) -> None:
    """Regularly removes files from the volume until `stop` is set: the files of dead processes, and
    the files that the settings do not keep.

    Also returns the memory of closed streams to the system, because glibc alone would keep freed
    memory. Python's allocator keeps a block of 1 MiB while any byte of the block is in use, and
    reuses the block for later streams.
    """
    while not stop.wait(SWEEP_SECONDS):
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        try:
            spool.check()
            try:
                forget_snapshots(spool)
                prune(spool, settings)
            finally:
                sweep(spool)
        except Exception as error:  # the next removal may succeed
            log.warning("can't remove old or stale files", error=f"{type(error).__name__}: {error}")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the bodies that routes parse themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = schema["components"]["schemas"]
        bodies: dict[str, Any] = {"TrainRequest": TrainRequest, "RenderRequest": RenderRequest}
        for request, body in bodies.items():
            components[request] = TypeAdapter(body).json_schema(
                ref_template="#/components/schemas/{model}"
            )
            for name, part in components[request].pop("$defs").items():
                components.setdefault(name, part)
        app.openapi_schema = schema
    return app.openapi_schema
