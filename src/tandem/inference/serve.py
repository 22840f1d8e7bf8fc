"""`python -m tandem.inference.serve`: becomes the vLLM server that the settings describe."""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.inference.args import server_command
from tandem.logs import Log, configure

log = Log("inference")


def main() -> None:
    """Replace this process by vLLM, so that signals and exit status are vLLM's own. Exits 2 on wrong settings."""
    configure()
    try:
        settings = Settings()
        command = server_command(settings)
    except (ValidationError, InvalidInput, OSError) as error:
        log.error(f"vLLM can't be started: {error}")
        sys.exit(2)
    if not settings.secret("admin_token"):
        log.warning("no admin token is set (TANDEM_ADMIN_TOKEN): nobody, the publisher included, can load adapters")
    log.info("starting vLLM", command=" ".join(command.argv[1:]))
    os.execve(command.argv[0], command.argv, command.env)


if __name__ == "__main__":
    main()
