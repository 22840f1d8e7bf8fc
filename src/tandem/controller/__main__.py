"""Starts the HTTP API under uvicorn (`python -m tandem.controller`)."""

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from tandem.config import Settings, load_settings
from tandem.controller.app import create_app
from tandem.controller.middleware import OPEN_PATHS
from tandem.errors import TandemError, VolumeFull
from tandem.system.api_keys import name_in_log
from tandem.system.http_limits import BoundedHttp
from tandem.system.logs import configure
from tandem.system.open_files import allow_many_open_files

# After a stop signal, the process waits at most this many seconds for the end of running requests.
# The spool stays correct if a request does not end in time.
GRACE_SECONDS = 10
# Seconds between two attempts to make a spool on a full volume.
FULL_SECONDS = 1.0
# The mallopt parameter that limits how many arenas glibc's threads share.
M_ARENA_MAX = -8


def main() -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. The status is 0 if the process was
    stopped, 2 if the settings are wrong, and 3 if the process could not listen."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # This handler makes the exit status 0 if a signal arrives before uvicorn handles signals.
        # When uvicorn ends after a signal, uvicorn raises the signal again, which also runs this
        # handler.
        signal.signal(number, lambda *_: sys.exit(0))
    with suppress(OSError, AttributeError):  # another C library than glibc.
        # This call limits glibc to two arenas. With an arena per thread, glibc would keep more
        # freed memory after each burst of requests or streams.
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    # This line keeps transformers from importing torch together with a tokenizer. If torch is
    # installed, its import takes several seconds and needs gigabytes of memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # Without this variable, transformers would print that torch is missing. The printed lines would
    # not be JSON.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        settings = load_settings()
        settings.check_bind()
        app = _create_app(settings)
    except (TandemError, OSError) as error:
        print(f"tandem controller: {error}", file=sys.stderr)
        return 2
    configure()
    # Probes and scrapes come as often as once a second, and their lines would hide all other lines.
    logging.getLogger("uvicorn.access").addFilter(_is_news)
    logging.getLogger("uvicorn.access").addFilter(name_in_log)
    allow_many_open_files()  # each event stream needs an open socket
    config = uvicorn.Config(
        app,
        host=settings.controller_host,
        port=settings.controller_port,
        http=BoundedHttp,
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
        log_level="info",
        log_config=None,  # the root logger prints uvicorn's lines
    )
    server = uvicorn.Server(config)
    try:
        server.run(_sockets_for_both(settings))
    except OSError as error:
        address = f"[::]:{settings.controller_port}"
        print(
            f"tandem controller: can't listen on {address}: {error}; set TANDEM_CONTROLLER_PORT",
            file=sys.stderr,
        )
    return 0 if server.started else 3


def _sockets_for_both(settings: Settings) -> list[socket.socket] | None:
    """A socket that listens on `::` for IPv6 and IPv4; None if the configured host is not `::`. A
    socket that asyncio creates would listen on IPv6 only, but clients in the container connect to
    127.0.0.1."""
    if settings.controller_host != "::":
        return None
    address = "::", settings.controller_port
    return [
        socket.create_server(address, family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
    ]


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's access log is printed. The lines of successful probes and scrapes
    are not printed."""
    _, _, path, _, status = record.args or (None,) * 5
    return path not in OPEN_PATHS or status != 200


def _create_app(settings: Settings) -> FastAPI:
    """Calls `create_app`. If the volume is full and has no spool yet, waits until the volume has
    space for a spool."""
    said = False
    while True:
        try:
            return create_app(settings)
        except VolumeFull as error:
            if not said:
                print(f"tandem controller: waiting: {error}", file=sys.stderr)
            said = True
            time.sleep(FULL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
