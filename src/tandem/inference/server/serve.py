"""`python -m tandem.inference.server.serve`: becomes the vLLM server that the settings describe."""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from tandem.config import Settings
from tandem.errors import InvalidInput, TandemError
from tandem.inference.server.args import server_command
from tandem.inference.server.room import make_room
from tandem.system.logs import Log, configure

log = Log("inference")


def main() -> None:
    """Replace this process by vLLM, so that signals and exit status are vLLM's own. Exits 2 on wrong settings, 1 where
    there is no room for it now."""
    configure()
    try:
        settings = Settings()
        command = server_command(settings)
    except (ValidationError, InvalidInput, OSError) as error:
        log.error(f"vLLM can't be started: {error}")
        sys.exit(2)
    try:
        variables = make_room(settings)
    except TandemError as error:
        log.error(f"vLLM can't be started: {error}")
        sys.exit(2 if isinstance(error, InvalidInput) else 1)
    if not settings.secret("admin_token"):
        log.warning("no admin token is set (TANDEM_ADMIN_TOKEN): nobody, the publisher included, can load adapters")
    log.info("starting vLLM", command=" ".join(command.argv[1:]))
    os.execve(command.argv[0], command.argv, command.env | variables)


if __name__ == "__main__":
    main()
