"""OpenAI's shape of errors: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Mapping
from http import HTTPStatus

from fastapi.responses import JSONResponse

from tandem.errors import InvalidInput, TandemError

_PATHS = re.compile(r"^/v1/(files|fine_tuning|uploads)(/|$)")
# OpenAI's clients repeat a request after status 409, and do not know status 422.
_STATUSES = {HTTPStatus.UNPROCESSABLE_ENTITY: 400, HTTPStatus.CONFLICT: 400}
_CODES = {"unauthorized": "invalid_api_key", "invalid_input": "invalid_value"}


class BadRequest(InvalidInput, http_status=400):
    """The error for a request that OpenAI's API refuses, or that this deployment can't carry out.

    Args:
        param: the client's name of the wrong parameter; None if the error has no single wrong
            parameter.
        code: a code of OpenAI's API for the error, or a similar code if OpenAI has none.
    """

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message, field=param)
        self.code = code


def is_openai(path: str) -> bool:
    return _PATHS.match(path) is not None


def openai_error(
    status: int, headers: Mapping[str, str] | None, **detail: str | None
) -> JSONResponse:
    """OpenAI's answer for an error.

    Args:
        status: the HTTP status of Tandem's error; the answer has 400 in place of 409 and 422.
        detail: `type`, `message` and, if the error has one, `field` of Tandem's error.
    """
    kind = detail["type"] or ""
    error = {
        "message": detail["message"],
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": detail.get("field"),
        "code": _CODES.get(kind, kind),
    }
    return JSONResponse({"error": error}, _STATUSES.get(HTTPStatus(status), status), headers)


def at_param(error: TandemError, param: str) -> TandemError:
    """A copy of the error for the client. Its `field` is `param`, the client's name of the wrong
    parameter. Its message begins with the field of the original error, if there is one."""
    message = f"{error.field}: {error.message}" if error.field else error.message
    found = type(error)(message, field=param)
    found.code = error.code
    return found
