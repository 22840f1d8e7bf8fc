"""Every refusal has one shape, {"error": {"type", "message", "field"}}, and the status of the TandemError behind it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tandem.controller.schemas import ErrorBody, ErrorDetail
from tandem.errors import InvalidInput, TandemError

log = logging.getLogger("tandem.controller")


def body_of(error: TandemError) -> dict[str, Any]:
    """The JSON of an error."""
    return ErrorBody(error=ErrorDetail(type=error.code, message=error.message, field=error.field)).model_dump()


def invalid(errors: Sequence[Any], data: Any) -> InvalidInput:
    """Pydantic's findings about `data` as one error: the first one's field and message, and how many more there are."""
    first = errors[0]
    field = ".".join(str(part) for part in _path(first["loc"], data, first["type"]))
    message = str(first["msg"]).removeprefix("Value error, ")
    value = first.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        message += f" (got {json.dumps(value)})"
    elif value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 60):
        message += f" (got {value!r})"
    if len(errors) > 1:
        message += f"; and {len(errors) - 1} more of this kind"
    return InvalidInput(message, field=field or None)


def _path(loc: Sequence[str | int], data: Any, kind: str) -> list[str | int]:
    """`loc` without what pydantic adds to it: tags of union members are no part of the input."""
    kept: list[str | int] = []
    for i, part in enumerate(loc):
        index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if index or (isinstance(data, dict) and part in data):
            data = data[part]
        elif not (kind == "missing" and i == len(loc) - 1):
            continue
        kept.append(part)
    return kept


def invalid_body(error: ValidationError, body: bytes) -> InvalidInput:
    """`invalid` for a request body that was validated as JSON text."""
    errors = error.errors(include_url=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        return InvalidInput(f"the body is not JSON: {errors[0]['msg']}", field="body")
    return invalid(errors, json.loads(body))


def install(app: FastAPI) -> None:
    """Answer every kind of exception in the one shape."""

    @app.exception_handler(TandemError)
    async def _tandem(_: Request, error: TandemError) -> JSONResponse:
        if error.http_status >= 500:
            log.error("%s: %s", error.code, error)
        headers = {"WWW-Authenticate": "Bearer"} if error.http_status == HTTPStatus.UNAUTHORIZED else None
        return JSONResponse(body_of(error), error.http_status, headers)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = list(error.errors())
        if errors[0]["type"] == "json_invalid":
            return JSONResponse(body_of(InvalidInput("the body is not JSON", field="body")), 422)
        where, *rest = errors[0]["loc"]
        errors[0] = errors[0] | {"loc": rest}
        data = error.body if where == "body" else dict.fromkeys(rest)
        return JSONResponse(body_of(invalid(errors, data)), 422)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, TandemError):  # FastAPI wraps what stops it from reading a body
            return await _tandem(request, error.__cause__)
        status = HTTPStatus(error.status_code)
        message = f"{status.phrase}: {request.method} {request.url.path}"
        if error.detail != status.phrase:
            message = str(error.detail)
        detail = ErrorDetail(type=status.name.lower(), message=message)
        return JSONResponse(ErrorBody(error=detail).model_dump(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:  # the server logs the traceback
        message = f"{type(error).__name__} in the controller; its log has the traceback"
        return JSONResponse(ErrorBody(error=ErrorDetail(type="internal", message=message)).model_dump(), 500)
