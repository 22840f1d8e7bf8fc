"""Requests to the controller, repeated while it does not answer."""

from collections.abc import Mapping
from typing import Any

import httpx
from pydantic import TypeAdapter
from pydantic_core import to_json

from tandem.client.errors import RETRIED_STATUSES, error_of, unreachable
from tandem.client.http import ANSWER_SECONDS, CONNECT_SECONDS, AsyncHttp, Backoff, BlockingHttp, path
from tandem.errors import TandemError


class Requests:
    def __init__(self, http: AsyncHttp | BlockingHttp, patience: float) -> None:
        self._http = http
        self._patience = patience

    async def _call[T](self, kind: type[T], method: str, *parts: str, **options: Any) -> T:
        """`_request`, and its response as a `kind`."""
        response = await self._request(method, *parts, **options)
        return TypeAdapter(kind).validate_json(response.content)

    async def _request(
        self,
        method: str,
        *parts: str,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotent: bool = True,
        seconds: float = ANSWER_SECONDS,
    ) -> httpx.Response:
        """Send a request to /v1/<parts> until it is answered, for up to `patience` seconds.

        A request that is not idempotent is repeated only where it cannot have arrived. Raises the controller's error,
        or Unreachable.
        """
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        arguments: dict[str, Any] = {"method": method, "url": path(*parts), "params": params, "timeout": timeout}
        if body is not None:
            given = {name: value for name, value in body.items() if value is not None}
            # NaN is sent as NaN, so that the controller names the field that contains it.
            arguments |= {"content": to_json(given, inf_nan_mode="constants")}
            arguments |= {"headers": {"Content-Type": "application/json"}}
        backoff = Backoff(self._patience)
        while True:
            error: TandemError
            try:
                response = await self._http.request(**arguments)
                if response.is_success:
                    return response
                error = error_of(response)
                again = idempotent and response.status_code in RETRIED_STATUSES
            except httpx.TransportError as failure:
                error = unreachable(failure)
                again = idempotent or isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)
            if not again:
                raise error
            await self._http.sleep(backoff.next(error))
