"""Replaces this process by HAProxy, which gives several inference servers one address (`python -m
tandem.supervise.proxy [HOST:PORT ... | --resolve NAME:PORT]`).

A rollout stays on its server while this server is up, because the server's cache has the rollout's
prefix, and the server's memory has the rollout's earlier turns. The samples of a group share their
prompt. So a group's samples start on the same server, unless this server has much more work than
the others. Without arguments, the servers are the inference servers that `tandem up` starts beside
the proxy. With `--resolve`, the servers are all addresses of a host name, for example of a headless
Service. The name is resolved again every second. Measurements of the routing rule are in
docs/performance.md.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from tandem.config import Settings, load_settings
from tandem.errors import InvalidInput, TandemError
from tandem.supervise.supervisord import replica_variables
from tandem.system.environment import current_role, runtime_dir
from tandem.system.logs import Log, configure
from tandem.vllm_client.names import (
    ADMIN_HEADER,
    GROUP_HEADER,
    PUBLIC_PATHS,
    READY_ROUTE,
    ROLLOUT_PATHS,
    SESSION_HEADER,
)

log = Log("proxy")

ANSWER_SECONDS = 3700
"""Seconds to wait for an answer; more than the clients' own limit."""
MOST_SESSIONS = 500_000
"""The maximum number of rollouts whose server is remembered. Each takes about 150 bytes of memory,
and is forgotten after SESSION_TIME without a request."""
SESSION_TIME = "2h"
RETRIED_BYTES = 131072
"""The maximum size in bytes, headers included, of a request that the proxy sends to another server
if the first server fails. If a larger request fails, the client has to send it again."""
MOST_RESOLVED = 64
INSTALL = "apt-get install haproxy"


def check_installed() -> None:
    """Raises InvalidInput if the program `haproxy` is missing."""
    if shutil.which("haproxy") is None:
        raise InvalidInput(
            "several inference servers need the program haproxy, which is not installed:"
            f" {INSTALL}; or set it to 1",
            field="TANDEM_INFERENCE_REPLICAS",
        )


def haproxy_config(settings: Settings, servers: Sequence[str] = (), resolve: str = "") -> str:
    """HAProxy's configuration.

    Args:
        servers: the address of each inference server, as `<host>:<port>`.
        resolve: a host name and a port, as `<name>:<port>`; each address of the host name is a
            server.
    """
    host = settings.inference_host
    address = f"[{host}]" if ":" in host else host
    # A server that refuses a connection is marked down immediately, because the hash would choose
    # the same server again for the retry.
    options = "check inter 500ms fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"
    lines = [f"server replica-{n} {server} {options}" for n, server in enumerate(servers)]
    if resolve:
        lines = [
            f"server-template replica- {MOST_RESOLVED} {resolve} {options} resolvers dns"
            " init-addr none"
        ]
    paths = sorted((PUBLIC_PATHS | ROLLOUT_PATHS) - {"/metrics", "/metrics/"})
    return f"""\
global
    log stdout format raw daemon notice
    no strict-limits
    tune.bufsize {RETRIED_BYTES}

defaults
    mode http
    log global
    option dontlognull
    timeout connect 5s
    timeout client {ANSWER_SECONDS}s
    timeout server {ANSWER_SECONDS}s
    timeout http-request 30s
    timeout http-keep-alive 30s
    timeout queue 30s
    timeout check 5s
    retries 3
    # A request is sent again only if all of it was here before it was sent first.
    option http-buffer-request
    option redispatch 1
    retry-on 503 conn-failure empty-response

frontend inference
    bind {address}:{settings.inference_port}
    acl public path {" ".join(paths)}
    acl public path_reg ^/rollout/sessions/[^/]+/finish$
    http-request use-service prometheus-exporter if {{ path /metrics }}
    http-request deny deny_status 404 unless public
    http-request del-header {ADMIN_HEADER}
    default_backend replicas

backend replicas
    balance hdr({GROUP_HEADER})
    hash-type consistent
    hash-balance-factor 150
    stick-table type string len 128 size {MOST_SESSIONS} expire {SESSION_TIME}
    stick on req.hdr({SESSION_HEADER})
    option httpchk GET {READY_ROUTE}
    http-check expect status 200
    {f"{chr(10)}    ".join(lines)}
{_RESOLVERS if resolve else ""}"""


_RESOLVERS = """
resolvers dns
    parse-resolv-conf
    accepted_payload_size 8192
    hold valid 1s
    hold obsolete 5s
"""


def main() -> None:
    """Replace this process by HAProxy. Exits with status 2 if the settings are wrong."""
    configure()
    parser = argparse.ArgumentParser(prog="python -m tandem.supervise.proxy")
    parser.add_argument("servers", nargs="*", metavar="HOST:PORT")
    parser.add_argument("--resolve", default="", metavar="NAME:PORT")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        settings.check_bind("inference")
        check_installed()
        servers = arguments.servers
        if not servers and not arguments.resolve:
            of = replica_variables(settings)
            servers = [one["TANDEM_INFERENCE_URL"].removeprefix("http://") for one in of]
        path = runtime_dir(settings.root, current_role()) / "haproxy.cfg"
        path.write_text(haproxy_config(settings, servers, arguments.resolve))
    except (TandemError, OSError) as error:
        log.error(f"the proxy can't be started: {error}")
        sys.exit(2)
    log.info("starting HAProxy", servers=", ".join(servers) or arguments.resolve)
    os.execvp("haproxy", ["haproxy", "-db", "-f", str(path)])


if __name__ == "__main__":
    main()
