"""The FastAPI application: its routes, its middleware from the outside in, and its OpenAPI document.

A request passes `metrics.CountRequests`, `access.Authentication`, `access.BodyLimit`, then its route.
"""

import ctypes
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter

import tandem
from tandem.config import Settings
from tandem.controller import routes_checkpoints, routes_jobs, routes_runs, routes_train
from tandem.controller.access import Authentication, BodyLimit
from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.http_errors import install_handlers
from tandem.controller.metrics import install_metrics
from tandem.controller.schemas import ErrorBody, Health, RenderRequest, TrainRequest
from tandem.spool import Spool
from tandem.spool.recovery import sweep
from tandem.spool.removal import prune
from tandem.system.logs import Log

SWEEP_SECONDS = 600.0

_DESCRIPTION = """Post-training of language models: create a run, train it by RL or SFT, follow the job, take
the checkpoint.

Sampling is vLLM's own OpenAI-compatible API; a run's step is its model `<run>@<step>`.
Every refusal is `{"error": {"type", "message", "field"}}`."""
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "The key is missing or is not one of this deployment's."},
    404: {"model": ErrorBody, "description": "The run, step or job does not exist."},
    409: {"model": ErrorBody, "description": "The request doesn't fit the present state."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "The input is wrong; `field` names the part."},
    500: {"model": ErrorBody, "description": "A checkpoint or a run on the volume is damaged."},
    503: {"model": ErrorBody, "description": "The volume can't be used; try again later."},
}

log = Log("controller")


def create_app(settings: Settings) -> FastAPI:
    """The application of one deployment.

    Raises InvalidInput where no base model is set, SpoolUnusable where the volume can't be used.
    """
    app = FastAPI(
        title="Tandem",
        version=tandem.__version__,
        description=_DESCRIPTION,
        generate_unique_id_function=lambda route: route.name,
        separate_input_output_schemas=False,
        redoc_url=None,
        lifespan=_run_threads,
    )
    app.state.deployment = Deployment(settings)
    install_handlers(app)
    # `Authentication` checks the key; this adds it to the OpenAPI document.
    bearer = Depends(HTTPBearer(auto_error=False, description="a key of TANDEM_API_KEY"))
    for module in (routes_runs, routes_train, routes_jobs, routes_checkpoints):
        app.include_router(module.router, responses=_REFUSALS, dependencies=[bearer])

    @app.get("/healthz", tags=["health"])
    async def live() -> Health:
        """The process answers."""
        return Health(version=tandem.__version__)

    @app.get("/readyz", tags=["health"], responses={503: _REFUSALS[503]})
    def ready(deployment: CurrentDeployment) -> Health:
        """The volume can be written."""
        deployment.spool.check_writable()
        return Health(version=tandem.__version__)

    # The middleware added last is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_request_bytes)
    app.add_middleware(Authentication, keys=settings.api_keys)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    install_metrics(app, app.state.deployment)
    return app


@asynccontextmanager
async def _run_threads(app: FastAPI) -> AsyncIterator[None]:
    """Runs the collectors and the sweeper. Does not wait for their ends, because the volume may hang."""
    deployment, collectors, stop = app.state.deployment, app.state.collectors, threading.Event()
    arguments = (deployment.spool, deployment.settings, stop)
    threading.Thread(target=remove_regularly, args=arguments, name="sweep", daemon=True).start()
    for thread in collectors:
        thread.start()
    yield
    stop.set()
    for thread in collectors:
        thread.stop()


def remove_regularly(spool: Spool, settings: Settings, stop: threading.Event) -> None:
    """Removes what dead processes left on the volume and what the settings do not keep, until `stop` is set.

    Also frees what many streams have left: glibc keeps freed memory otherwise. Python's own allocator keeps a MiB as
    long as a byte of it is in use, and uses it again for the next streams.
    """
    while not stop.wait(SWEEP_SECONDS):
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        try:
            spool.check()
            prune(spool, settings)
            sweep(spool)
        except Exception as error:  # the next time may go well
            log.warning("can't remove old or stale files", error=f"{type(error).__name__}: {error}")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the schemas of the bodies that routes parse themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema["components"]["schemas"]
        bodies: dict[str, Any] = {"TrainRequest": TrainRequest, "RenderRequest": RenderRequest}
        for request, body in bodies.items():
            components[request] = TypeAdapter(body).json_schema(ref_template="#/components/schemas/{model}")
            for name, part in components[request].pop("$defs").items():
                components.setdefault(name, part)
        app.openapi_schema = schema
    return app.openapi_schema
