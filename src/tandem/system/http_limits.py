"""Limits how much a client of uvicorn may send, and how long the client may take to send it.
Controller and vLLM use the same limits.

The httptools protocol of uvicorn keeps a request's headers in memory until they are complete,
however many headers arrive. The server uvicorn also waits without a limit for the rest of a
request. A client needs no API key to exploit this lack of limits. Only programs that serve with
uvicorn import this module.
"""

from asyncio import TimerHandle, Transport
from typing import Literal, override

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 2**10
"""The most bytes of the request line and all headers of a request."""
WAIT_SECONDS = 30.0
"""Seconds within which a connection's first request, each request's headers, and each part of a
body must arrive."""
PART_BYTES = 16 * 2**10
"""The minimum number of body bytes per `WAIT_SECONDS`; a slower body ends its connection."""

_TOO_LARGE = (431, "Request Header Fields Too Large", f"headers have more than {HEAD_BYTES} bytes")
_TOO_SLOW = (408, "Request Timeout", f"the headers did not end within {WAIT_SECONDS:.0f} seconds")


Owed = Literal["request", "head", "body"]
"""The part that the peer must still send: a request that has not begun, the remaining headers, or
the remaining body."""


class _HeadTooLarge(Exception):
    """Stops the parser in the middle of a request's headers or trailers."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the limits of this module. A request beyond the limits is
    refused, and its connection is closed.

    A head (request line and headers) that never ends takes at most HEAD_BYTES of memory, plus the
    bytes of one read of the socket.
    """

    # The part of a request that the peer must still send. The value is None between two requests,
    # because uvicorn closes idle connections itself.
    _owed: Owed | None = None
    _since = 0.0  # loop time: when the head or the current part of the body began
    _raw = 0  # bytes since the head began, or since the last bytes of the body arrived
    _fields = 0  # bytes of the complete request line, headers and trailers
    _part = 0  # bytes in the current part of the body
    _timer: TimerHandle | None = None

    @override
    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect("request")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._raw += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        # The parser passes a header on only when the header is complete, so no callback has counted
        # an unfinished header.
        if self._owed and self._raw > HEAD_BYTES:
            self._refuse(*_TOO_LARGE)
        elif self._owed is None and not self._answering:
            # Blank lines between two requests cancel uvicorn's own timeout for the second request.
            self._expect("request")

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._raw = self._fields = 0
        self._expect("head")

    @override
    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._raw = self._part = 0
        self._expect("body")

    @override
    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._raw = 0
        self._part += len(body)
        if self._part >= PART_BYTES:
            self._part = 0
            self._since = self.loop.time()

    @override
    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect(None)

    @override
    def handle_websocket_upgrade(self) -> None:
        self._expect(None)  # from here on, the connection belongs to another protocol
        super().handle_websocket_upgrade()

    @override
    def send_400_response(self, msg: str) -> None:
        if self._fields > HEAD_BYTES:
            self._refuse(*_TOO_LARGE)
        else:
            super().send_400_response(msg)

    @property
    def _answering(self) -> bool:
        """Whether the answer to a request is being sent."""
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._fields += size
        if self._fields > HEAD_BYTES:
            raise _HeadTooLarge

    def _expect(self, owed: Owed | None) -> None:
        self._owed, self._since = owed, self.loop.time()
        if owed and self._timer is None:
            self._timer = self.loop.call_later(WAIT_SECONDS, self._look)
        elif owed is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Ends the connection if its peer is late. If the peer is in time, checks again at the next
        deadline."""
        self._timer = None
        if self._owed is None or self.transport.is_closing():
            return
        if self.flow.read_paused or (self._answering and self._owed != "body"):
            # The peer waits for the server: the application has not yet read the input, or has not
            # yet answered.
            self._since = self.loop.time()
        left = self._since + WAIT_SECONDS - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        elif self._owed == "head":
            self._refuse(*_TOO_SLOW)
        else:
            self.transport.abort()

    def _refuse(self, status: int, phrase: str, why: str) -> None:
        """Answers with an error status, unless the answer to an earlier request is still being
        sent. Always closes the connection."""
        self._expect(None)
        self.logger.warning("Refused a request: %s.", why)
        if self._answering:
            self.transport.abort()
            return
        body = f"{why}\n".encode()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
