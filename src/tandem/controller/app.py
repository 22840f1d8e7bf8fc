"""The FastAPI application: its routes, its middleware from the outside in, and its OpenAPI document.

A request passes `metrics.CountRequests`, `access.Authentication`, `access.BodyLimit`, then its route.
"""

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
from tandem.controller.metrics import install_metrics, run_collectors
from tandem.controller.schemas import ErrorBody, Health, TrainRequest

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
        lifespan=run_collectors,
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


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the schema of the body that the route `train` parses itself."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        request = TypeAdapter(TrainRequest).json_schema(ref_template="#/components/schemas/{model}")
        components = schema["components"]["schemas"]
        for name, part in request.pop("$defs").items():
            components.setdefault(name, part)
        components["TrainRequest"] = request
        app.openapi_schema = schema
    return app.openapi_schema
