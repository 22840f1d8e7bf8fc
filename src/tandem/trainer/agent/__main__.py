"""`python -m tandem.trainer.agent` runs the agent of one host (`tandem rank-agent`)."""

import argparse
import os
import signal
import sys

from tandem.config import load_settings
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.spool import Spool
from tandem.system import logs
from tandem.trainer.agent.agent import HostAgent, log
from tandem.trainer.agent.hosts import FAILED, STOPPED, UNUSABLE
from tandem.trainer.agent.lingering import serve_and_linger
from tandem.trainer.stop import Stop

INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_PROCID", "TANDEM_HOST_INDEX")


def host_index(given: int | None) -> int:
    """The host's number: `given`, or else the first variable of INDEX_VARIABLES that is set.
    Kubernetes, Slurm or the deployment sets the variable. Raises InvalidInput if `given` is None
    and no variable is set."""
    if given is not None:
        return given
    for name in INDEX_VARIABLES:
        if value := os.environ.get(name):
            try:
                return int(value)
            except ValueError as error:
                raise InvalidInput(f"{value!r} is no number", field=name) from error
    raise InvalidInput(f"not known; give it, or set {' or '.join(INDEX_VARIABLES)}", field="--host")


def main() -> int:
    """Run until the attempt ends, or with --follow until SIGTERM. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tandem rank-agent")
    parser.add_argument("--job")
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--host", type=int)
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--linger", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--pods", default="", metavar="NAMESPACE/JOB")
    given = parser.parse_args()
    logs.configure()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.request)
    agent = None
    try:
        if given.follow == (given.job is not None and given.attempt is not None):
            raise InvalidInput("give --job and --attempt, or --follow alone", field="--follow")
        if given.linger and not given.pods:
            raise InvalidInput("give the Kubernetes Job, too: --pods", field="--linger")
        settings = load_settings()
        agent = HostAgent(settings, Spool(settings.root), host_index(given.host), stop)
        if given.follow:
            return agent.follow()
        agent.pods, agent.linger_seconds = given.pods, given.linger
        return serve_and_linger(agent, given.job, given.attempt, given.hosts)
    except SpoolUnusable as error:
        log.error("the volume is unusable", error=error)
        return UNUSABLE
    except TandemError as error:
        log.error("the agent can't run", type=error.code, error=error)
        return STOPPED if stop.requested else FAILED
    finally:
        if agent is not None:
            agent.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # `os._exit` does not wait for threads: a thread may wait for ever if the volume is unreachable.
    os._exit(status)
