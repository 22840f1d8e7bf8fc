"""Turns errors into HTTP responses. A response has the body {"error": {"type", "message", "field"}}
and the status of the TandemError. On the routes of OpenAI's API, the response has the body of
OpenAI's errors."""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from tandem.controller.openai.errors import is_openai, openai_error
from tandem.controller.schemas import ErrorBody
from tandem.controller.tinker.errors import is_tinker, tinker_status
from tandem.errors import InvalidInput, TandemError, Unauthorized, invalid_input
from tandem.spool.fs import volume_error
from tandem.spool.schema import JobKind
from tandem.system.logs import Log

# The value of the header `Retry-After`, in seconds. A request may succeed after RETRY_SECONDS: the
# process may have closed files, or the volume may have free space again.
RETRY_SECONDS = 2

# If a body has more errors than MOST_ERRORS, the answer contains only the number of errors.
MOST_ERRORS = 1000
_OWN_PART = re.compile(r"as |.*\[|(int|float|str|bool|list|dict)$")

_NOT_JSON = InvalidInput("the body is not JSON", field="body")

log = Log("controller")


def response_of(error: TandemError, path: str) -> JSONResponse:
    """The response to a request that raised `error`. `path` is the path in the request's URL."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return _response(
        path, error.http_status, headers, type=error.code, message=error.message, field=error.field
    )


def refuse(error: TandemError, path: str) -> JSONResponse:
    """The response to a request whose body is not read. The response closes the connection, because
    the connection can't carry another request after an unread body."""
    response = response_of(error, path)
    response.headers["Connection"] = "close"
    return response


def parse_body[T](adapter: TypeAdapter[T], body: bytes) -> T:
    """Parses the JSON text `body` as the type of the pydantic `adapter`. Raises InvalidInput that
    names the mistake."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        if (count := error.error_count()) > MOST_ERRORS:
            # The details of each error would take about a kilobyte of memory.
            raise InvalidInput(
                f"{count} keys or values are wrong; send fewer to see which", field="body"
            ) from error
        errors = error.errors(include_url=False, include_context=False)
        if errors[0]["type"] == "json_invalid":
            raise InvalidInput(f"the body is not JSON: {errors[0]['msg']}", field="body") from error
        path = _keys(errors[0]["loc"]) if body.lstrip().startswith(b"{") else ["body"]
        raise invalid_input(errors, path) from error


def _keys(loc: Sequence[str | int]) -> list[str | int]:
    """The parts of pydantic's `loc` that are keys and indices of the body. The function `_keys`
    does not parse the body again. The other parts of `loc` are pydantic's own: the tag of a
    request's kind, and the names of a union's members.
    """
    parts = list(loc)
    if parts and parts[0] in get_args(JobKind):
        del parts[0]
    return [part for part in parts if not _OWN_PART.match(str(part))]


def _path_in(data: Any, error: Mapping[str, Any]) -> list[str | int]:
    """The keys and indices that lead to the wrong value in `data`, a small body that FastAPI has
    parsed.

    The last part of a "missing" error is a key that `data` lacks. If the body is not an object, the
    result is the part "body" alone.
    """
    if not isinstance(data, dict):
        return ["body"]
    path: list[str | int] = []
    for i, part in enumerate(error["loc"]):
        is_index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_index or (isinstance(data, dict) and part in data):
            data = data[part]
        elif not (error["type"] == "missing" and i == len(error["loc"]) - 1):
            continue
        path.append(part)
    return path


def install_handlers(app: FastAPI) -> None:
    """Answer every kind of exception with an `ErrorBody`."""

    @app.exception_handler(TandemError)
    async def _tandem_error(request: Request, error: TandemError) -> JSONResponse:
        if error.http_status >= 500:
            log.error(f"{error.code}: {error}")
        return response_of(error, request.url.path)

    @app.exception_handler(OSError)
    async def _volume_error(request: Request, error: OSError) -> JSONResponse:
        unusable = volume_error(error, error.filename or "the volume")
        if unusable is None:
            raise error
        return await _tandem_error(request, unusable)

    @app.exception_handler(RequestValidationError)
    async def _wrong_request(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = list(error.errors())
        if errors[0]["type"] == "json_invalid":
            return response_of(_NOT_JSON, request.url.path)
        where, *rest = errors[0]["loc"]
        path = _path_in(error.body, errors[0] | {"loc": rest}) if where == "body" else rest[:1]
        return response_of(invalid_input(errors, path), request.url.path)

    @app.exception_handler(HTTPException)
    async def _http_exception(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI wraps errors that are raised while it reads a body.
        if isinstance(error.__cause__, TandemError):
            return await _tandem_error(request, error.__cause__)
        if isinstance(error.__cause__, ValueError):  # for example, the body is not UTF-8
            return response_of(_NOT_JSON, request.url.path)
        status, message, headers = HTTPStatus(error.status_code), str(error.detail), error.headers
        if message == status.phrase:
            message += f": {request.method} {request.url.path}"
        # Starlette's header `Allow` names only the methods of the path's first route.
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers = {"Allow": ", ".join(sorted(_methods(request)))}
        kind = status.name.lower()
        return _response(request.url.path, status, headers, type=kind, message=message)

    @app.exception_handler(ClientDisconnect)
    # The client has disconnected and reads no answer, but the metrics count the answer's status.
    async def _hung_up(request: Request, __: ClientDisconnect) -> JSONResponse:
        return _response(
            request.url.path,
            400,
            type="bad_request",
            message="the client hung up before its request was complete",
        )

    @app.exception_handler(Exception)
    # uvicorn logs the traceback.
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        message = f"{type(error).__name__} in the controller; its log has the traceback"
        return _response(request.url.path, 500, type="internal", message=message)


def _methods(request: Request) -> set[str]:
    routes = [
        route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE
    ]
    return {method for route in routes for method in getattr(route, "methods", None) or ()}


def _response(
    path: str, status: int, headers: Mapping[str, str] | None = None, **detail: str | None
) -> JSONResponse:
    if is_openai(path):
        return openai_error(status, headers, **detail)
    status = tinker_status(status) if is_tinker(path) else status
    return JSONResponse(ErrorBody.model_validate({"error": detail}).model_dump(), status, headers)
