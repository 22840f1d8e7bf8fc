"""`python -m tandem.inference.server.serve`: becomes the vLLM server that the settings describe."""

import hashlib
import os
import sys

from tandem.config import Settings, load_settings
from tandem.errors import InvalidInput, TandemError
from tandem.inference.server.command import server_command
from tandem.inference.server.wait_for_gpu import wait_for_gpu
from tandem.spool import Spool
from tandem.system.environment import scratch_directory
from tandem.system.logs import Log, configure

log = Log("inference")


def main() -> None:
    """Replace this process by vLLM, so that signals and exit status are vLLM's own.

    Exits 2 on wrong settings, and 1 where vLLM can't start now but may later.
    """
    configure()
    try:
        settings = load_settings()
        command = server_command(settings)
        marker = wait_for_gpu(settings)
    except (TandemError, OSError) as error:
        log.error(f"vLLM can't be started: {error}")
        sys.exit(2 if isinstance(error, (InvalidInput, OSError)) else 1)
    if not settings.secret("admin_token"):
        log.warning("TANDEM_ADMIN_TOKEN is not set: nobody can load adapters, not even the publisher")
    _withdraw_records(settings)
    log.info("starting vLLM", command=" ".join(command.argv[1:]))
    # A killed vLLM leaves sockets and files there.
    key = hashlib.sha256(f"{settings.root.absolute()}:{settings.inference_port}".encode()).hexdigest()[:12]
    scratch = {"TMPDIR": str(scratch_directory(f"vllm-{key}"))}
    os.execve(command.argv[0], command.argv, command.env | marker | scratch)


def _withdraw_records(settings: Settings) -> None:
    """Remove what says that vLLM serves a step: the vLLM that starts now has none, until the publisher loads them.

    The publisher does this too, but it may have died with the vLLM before. It does it alone where there is no volume.
    """
    try:
        spool = Spool(settings.root)  # a full volume can still lose files
        for run in spool.runs.names():
            spool.served.withdraw(run)
    except (TandemError, OSError) as error:
        log.warning("can't remove the records of what the vLLM before served", error=error)


if __name__ == "__main__":
    main()
