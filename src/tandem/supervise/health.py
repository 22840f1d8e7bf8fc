"""`python -m tandem.supervise.health [--started | --live]`: the images' HEALTHCHECK. Prints one line;
exits with 0 if all is well, else with 1.

TANDEM_ROLE says what is looked at: `controller` answers /readyz; `trainer` has a runner that runs and holds the spool's
lock; `inference` has a publisher that runs, and a vLLM that is up, healthy and lists the base model. Else all of it.

`--started` is for a startup probe: a vLLM that waits until a trainer gives back the GPUs they share is no trouble then,
however long that job is. (One that sleeps answers, and is healthy.)

`--live` is for a liveness probe: it asks only whether the programs' own loops still turn (`tandem.system.liveness`), so
nothing is killed while a model loads, a step is published or a volume is away; what hangs below them, vLLM's engine or
a job's ranks, they end themselves.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

from tandem.config import Settings, load_settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.locks import is_locked
from tandem.supervise.supervisord import current_role, runtime_dir, statuses
from tandem.system import liveness
from tandem.system.ports import loopback
from tandem.vllm_client.names import BASE_MODEL_NAME

PROGRAMS = {
    "trainer": ("runner",),
    "inference": ("vllm", "publisher"),
    "all": ("runner", "vllm", "publisher"),
}
"""What must run, by role."""
_TIMEOUT_SECONDS = 4.0


def troubles(settings: Settings, role: str, *, started: bool = False) -> Iterator[str]:
    """What is wrong, in words; nothing if all is well. `started`: as for `--started`."""
    if role not in ("trainer", "inference"):
        url = f"http://{loopback(settings.controller_host)}:{settings.controller_port}/readyz"
        yield from _get(url)[0]
    if role == "controller":
        return
    programs = PROGRAMS.get(role, PROGRAMS["all"])
    found = statuses(settings)
    if not found:
        yield "supervisord does not answer"
        return
    for name in programs:
        state = found[name].state if name in found else "absent"
        if state != "RUNNING":
            yield f"{name} is {state}"
    if "runner" in programs and not is_locked(Spool(settings.root, writable=False).paths.runner_lock):
        yield "the runner does not hold the spool's lock"
    if "vllm" in programs and not (started and _waits(settings)):
        yield from _vllm(settings)


def silences(settings: Settings, role: str) -> Iterator[str]:
    """Which loops have stopped, in words."""
    if role == "controller":
        yield from _get(f"http://{loopback(settings.controller_host)}:{settings.controller_port}/healthz")[0]
        return
    directory = runtime_dir(settings.root, current_role())
    for program in ("up", *PROGRAMS.get(role, PROGRAMS["all"])):
        if program in liveness.LONGEST_SECONDS and (words := liveness.silent(program, directory)):
            yield words


def _waits(settings: Settings) -> bool:
    """Whether a trainer that shares the GPUs holds them, so that no vLLM may start."""
    return settings.gpu_mode == "shared" and Spool(settings.root, writable=False).hold.live() is not None


def _vllm(settings: Settings) -> Iterator[str]:
    base = f"http://{loopback(settings.inference_host)}:{settings.inference_port}"
    wrong, _ = _get(f"{base}/health")
    if wrong:
        yield from wrong
        return
    wrong, body = _get(f"{base}/v1/models", settings.inference_key)
    yield from wrong
    if not wrong:
        try:
            models = [model["id"] for model in json.loads(body)["data"]]
        except (ValueError, LookupError, TypeError):
            models = []
        if BASE_MODEL_NAME not in models:
            yield f"vLLM does not list the model {BASE_MODEL_NAME!r}"


def _get(url: str, key: str | None = None) -> tuple[list[str], bytes]:
    """(what is wrong, the answer's body)"""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    # Without the environment's proxies: it is this very machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return [], answer.read()
    except urllib.error.HTTPError as error:
        return [f"{url} answers {error.code}"], b""
    except OSError as error:
        return [f"{url} does not answer: {getattr(error, 'reason', error)}"], b""


def main() -> int:
    role = os.environ.get("TANDEM_ROLE") or "all"
    try:
        if "--live" in sys.argv[1:]:
            found = list(silences(load_settings(), role))
        else:
            found = list(troubles(load_settings(), role, started="--started" in sys.argv[1:]))
    except (TandemError, OSError) as error:
        found = [str(error)]
    print("; ".join(found).replace("\n", " ") if found else f"{role} is healthy")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
