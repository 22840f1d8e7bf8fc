"""The client for asyncio."""

from __future__ import annotations

from typing import Self

import httpx

from tandem.client.api import Api
from tandem.client.http import AsyncHttp, connection


class AsyncTandem(Api):
    """`tandem.client.Tandem` with coroutines; use it in one event loop."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, patience: float = 30.0) -> None:
        self._client = httpx.AsyncClient(**connection(base_url, api_key))
        super().__init__(AsyncHttp(self._client), patience)

    @property
    def url(self) -> str:
        """The controller's address."""
        return str(self._client.base_url)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
