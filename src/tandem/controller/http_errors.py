"""Errors as HTTP: each has the body {"error": {"type", "message", "field"}} and the status of its TandemError."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tandem.controller.schemas import ErrorBody, ErrorDetail
from tandem.errors import InvalidInput, TandemError, Unauthorized

log = logging.getLogger("tandem.controller")


def response_of(error: TandemError) -> JSONResponse:
    """The response for an error."""
    challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
    detail = ErrorDetail(type=error.code, message=error.message, field=error.field)
    return _response(error.http_status, detail, challenge)


def refuse(error: TandemError) -> JSONResponse:
    """The response to a request whose body is not read: the connection cannot carry another request."""
    response = response_of(error)
    response.headers["Connection"] = "close"
    return response


def invalid_input(errors: Sequence[Any], data: Any) -> InvalidInput:
    """Pydantic's errors about `data` as one: field and message of the first, and the number of the others."""
    first = errors[0]
    field = ".".join(str(part) for part in _path_in(data, first["loc"], missing=first["type"] == "missing"))
    message = str(first["msg"]).removeprefix("Value error, ")
    value = first.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        message += f" (got {json.dumps(value)})"
    elif value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 60):
        message += f" (got {value!r})"
    if len(errors) > 1:
        message += f"; and {len(errors) - 1} more errors"
    return InvalidInput(message, field=field or None)


def invalid_json(error: ValidationError, body: bytes) -> InvalidInput:
    """`invalid_input` for a body that was validated as JSON text."""
    errors = error.errors(include_url=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        return InvalidInput(f"the body is not JSON: {errors[0]['msg']}", field="body")
    return invalid_input(errors, json.loads(body))


def _path_in(data: Any, loc: Sequence[str | int], *, missing: bool) -> list[str | int]:
    """The parts of pydantic's `loc` that are keys and indices of `data`; others, as a union's tags, are pydantic's own.

    With `missing`, the last part is a key that `data` lacks.
    """
    path: list[str | int] = []
    for i, part in enumerate(loc):
        is_index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_index or (isinstance(data, dict) and part in data):
            data = data[part]
        elif not (missing and i == len(loc) - 1):
            continue
        path.append(part)
    return path


def install_handlers(app: FastAPI) -> None:
    """Answer every kind of exception in the one shape."""

    @app.exception_handler(TandemError)
    async def _tandem_error(_: Request, error: TandemError) -> JSONResponse:
        if error.http_status >= 500:
            log.error("%s: %s", error.code, error)
        return response_of(error)

    @app.exception_handler(RequestValidationError)
    async def _wrong_request(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = list(error.errors())
        if errors[0]["type"] == "json_invalid":
            return response_of(InvalidInput("the body is not JSON", field="body"))
        where, *rest = errors[0]["loc"]
        errors[0] = errors[0] | {"loc": rest}
        return response_of(invalid_input(errors, error.body if where == "body" else dict.fromkeys(rest)))

    @app.exception_handler(HTTPException)
    async def _http_exception(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, TandemError):  # FastAPI wraps errors that are raised while it reads a body
            return await _tandem_error(request, error.__cause__)
        status = HTTPStatus(error.status_code)
        message = str(error.detail)
        if error.detail == status.phrase:
            message = f"{status.phrase}: {request.method} {request.url.path}"
        return _response(status, ErrorDetail(type=status.name.lower(), message=message), error.headers)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:  # uvicorn logs the traceback
        message = f"{type(error).__name__} in the controller; its log has the traceback"
        return _response(500, ErrorDetail(type="internal", message=message))


def _response(status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(ErrorBody(error=detail).model_dump(), status, headers)
