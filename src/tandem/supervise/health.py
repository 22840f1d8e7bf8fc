"""The images' HEALTHCHECK: `python -m tandem.supervise.health [--started | --live]`. Prints one
line; exits with 0 if it finds no problem, and with 1 if it finds one.

TANDEM_ROLE selects the checks. The role `controller` must answer /readyz. The role `trainer` needs
a running runner that holds the spool's lock. The role `inference` needs a running publisher, and a
healthy vLLM that lists the base model. Without a role, the checks of all three roles are made.

`--started` is for a startup probe: a vLLM that waits until a trainer gives back shared GPUs counts
as healthy.

`--live` is for a liveness probe, and only checks that the programs' own loops still run
(`tandem.system.liveness`). So no program is killed while a model loads, a step is published or a
volume is missing. If vLLM's engine hangs, `tandem up` kills vLLM. If a job's ranks hang, the runner
ends the ranks.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Literal

from tandem.config import Settings, load_settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.locks import is_locked
from tandem.supervise.supervisord import programs_of, statuses
from tandem.system import liveness
from tandem.system.environment import current_role, runtime_dir
from tandem.system.ports import local_url
from tandem.vllm_client.names import BASE_MODEL_NAME, READY_ROUTE

_TIMEOUT_SECONDS = 4.0
# The servers are on this machine, so the opener needs no proxy and no TLS. `urllib`'s
# `build_opener` would read all certificates, which takes 25 ms of CPU time. `tandem up` makes eight
# requests per second until all programs are ready.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.HTTPHandler(),
    urllib.request.HTTPDefaultErrorHandler(),
    urllib.request.HTTPErrorProcessor(),
):
    _OPENER.add_handler(_handler)


def problems(settings: Settings, role: str, *, started: bool = False) -> list[str]:
    """The problems of the programs of `role`; empty if there are none.

    Raises SpoolUnusable or OSError if the volume can't be read.

    Args:
        started: whether to check as for a startup probe (`--started`).
    """
    found = [] if role in ("trainer", "inference") else [_get(settings, "controller", "/readyz")[0]]
    if role != "controller":
        now, needed = statuses(settings), _needed(settings, role)
        if not now:
            return [*filter(None, found), "supervisord does not answer"]
        states = [(name, now[name].state if name in now else "absent") for name in needed]
        found += [f"{name} is {state}" for name, state in states if state != "RUNNING"]
        spool = Spool(settings.root)
        if "runner" in needed and not is_locked(spool.paths.runner_lock):
            found.append("the runner does not hold the spool's lock")
        if "runner" in needed and not started:
            found.append(liveness.reported("runner", runtime_dir(settings.root, current_role())))
        waits = started and settings.gpu_mode == "shared" and spool.hold.live() is not None
        if {"vllm", "proxy"} & set(needed) and not waits:
            found.append(_problem_of_vllm(settings))
        if "vllm" in needed and settings.replica is not None and not started:
            # vLLM is ready only when it serves every announced step. Without the check of
            # READY_ROUTE, an upgrade would stop the next server too early.
            found.append(_get(settings, "inference", READY_ROUTE)[0])
    return [problem for problem in found if problem]


def _needed(settings: Settings, role: str) -> list[str]:
    """The essential programs that `role` runs under supervisord, except the controller, which is
    checked by /readyz."""
    return [p.name for p in programs_of(settings, role) if p.essential and p.name != "controller"]


def _problem_of_vllm(settings: Settings) -> str:
    problem, body = _get(settings, "inference", "/health")
    if not problem:
        problem, body = _get(settings, "inference", "/v1/models", settings.inference_key)
    if problem:
        return problem
    with suppress(ValueError, LookupError, TypeError):
        names = [model["id"] for model in json.loads(body)["data"]]
        # With merged weights, vLLM lists the names of the served run instead of the base model's
        # name.
        if BASE_MODEL_NAME in names or (settings.weights == "merged" and names):
            return ""
    return f"vLLM does not list the model {BASE_MODEL_NAME!r}"


def stopped_loops(settings: Settings, role: str) -> list[str]:
    """One message for each program of `role` whose loop no longer runs."""
    if role == "controller":
        problem, _ = _get(settings, "controller", "/healthz")
        return [problem] if problem else []
    directory = runtime_dir(settings.root, current_role())
    programs = [
        name
        for name in ("up", *_needed(settings, role))
        if liveness.program_kind(name) in liveness.LONGEST_SECONDS
    ]
    return [message for name in programs if (message := liveness.silence(name, directory))]


def _get(
    settings: Settings,
    server: Literal["controller", "inference"],
    path: str,
    key: str | None = None,
) -> tuple[str, bytes]:
    """A pair: the problem (an empty string if there is none), and the body of the server's
    answer."""
    url = local_url(getattr(settings, f"{server}_host"), getattr(settings, f"{server}_port")) + path
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return "", answer.read()
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}", b""
    except (OSError, HTTPException) as error:
        return f"{url} does not answer: {getattr(error, 'reason', error)}", b""


def main() -> int:
    options = sys.argv[1:]
    if options not in ([], ["--started"], ["--live"]):
        print(f"{' '.join(options)} is no option; use --started, --live or neither")
        return 1
    role = os.environ.get("TANDEM_ROLE") or "all"
    try:
        settings = load_settings()
        if options == ["--live"]:
            messages = stopped_loops(settings, role)
        else:
            messages = problems(settings, role, started=options == ["--started"])
    except (TandemError, OSError) as error:
        messages = [str(error)]
    print("; ".join(messages).replace("\n", " ") or f"{role} is healthy")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
