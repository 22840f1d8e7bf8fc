"""`python -m tandem.controller`: the HTTP API under uvicorn."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from tandem.config import Settings, load_settings, split_keys
from tandem.controller.app import create_app
from tandem.controller.gate import is_loopback
from tandem.errors import TandemError, Unauthorized
from tandem.system.logs import as_json, configure

# Requests under way when the process is told to stop get this long, in seconds; the spool loses nothing either way.
GRACE_SECONDS = 10


class _Server(uvicorn.Server):
    """Ends open event streams as soon as it is told to stop; clients reconnect to whoever comes next."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.deployment.stopping = True
        super().handle_exit(sig, frame)


def check_bind(settings: Settings) -> None:
    """Without a key, only this machine may reach the controller; raises Unauthorized otherwise."""
    if not split_keys(settings.secret("api_key")) and not is_loopback(settings.controller_host):
        raise Unauthorized(
            f"no API key is set, and {settings.controller_host} can be reached from other machines; set TANDEM_API_KEY "
            "(or TANDEM_API_KEY_FILE), or bind to 127.0.0.1",
            field="TANDEM_CONTROLLER_HOST",
        )


def main() -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status: 0 stopped, 2 wrong settings, 3 could not listen."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Before uvicorn listens, and when it raises again what it has obeyed: a stop is no failure.
        signal.signal(number, lambda *_: sys.exit(0))
    # Where torch is installed beside us, transformers would import it along with any tokenizer: seconds and gigabytes
    # for nothing. This makes it believe, as in the controller's image, that there is none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        settings = load_settings()
        check_bind(settings)
        app = create_app(settings)
    except (TandemError, OSError) as error:
        print(f"tandem controller: {error}", file=sys.stderr)
        return 2
    if as_json():
        configure()
    config = uvicorn.Config(
        app,
        host=settings.controller_host,
        port=settings.controller_port,
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
        log_level="info",
        # In JSON, uvicorn's own lines are the root logger's.
        log_config=None if as_json() else LOGGING_CONFIG,
    )
    server = _Server(config, app)
    server.run()
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main())
