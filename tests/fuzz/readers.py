"""Functions for `fuzz.files` that let every program read a damaged copy of the spool, in this
process.

Each function returns the problems that it found: an exception that would end a program or be
answered by 500, an undamaged run that is not served, or a job that succeeded with wrong weights.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from prometheus_client.exposition import generate_latest
from pydantic import ValidationError

import fake_vllm
from fuzz.stage import WITNESS, Stage
from tandem.cli.checks import Asked, Command, selected
from tandem.controller import app
from tandem.errors import SpoolUnusable, TandemError
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.publisher.transports import copies_directory
from tandem.metrics.collector import Page
from tandem.metrics.controller import QueueCollector
from tandem.metrics.exporter import make_collectors
from tandem.metrics.metric import BOTH
from tandem.model import parallel
from tandem.spool import Spool, fs, removal
from tandem.spool.recovery import sweep
from tandem.trainer.executor import local
from tandem.trainer.launch import Launch
from tandem.trainer.rank import entry
from tandem.trainer.runner import loop
from tandem.trainer.stop import Stop

AUTHORIZATION = {"Authorization": f"Bearer {fake_vllm.API_KEY}"}
RUNS = ("main", "lost", "asked", "ended", "forked", WITNESS)
JOBS = (
    "main-0",
    "main-1",
    "main-next",
    "lost-job",
    "asked-job",
    "failed",
    "cancelled",
    "ended-0",
    f"{WITNESS}-0",
    f"{WITNESS}-next",
)
_TURN = {"prompt_token_ids": [5, 6], "token_ids": [9, 2], "logprobs": [-0.7, -0.1]}
_GROUP = {"trajectories": [{"turns": [_TURN], "reward": 1.0}, {"turns": [_TURN], "reward": 0.0}]}
TRAIN = {"kind": "rl", "groups": [_GROUP], "packing": {"sequence_length": 16}}
Problems = Iterator[str]
_LOOP = asyncio.new_event_loop()
# `Api` replaces the OpenAPI document by this empty document, because `create_app` would build the
# document again for each case.
_OPENAPI = {"paths": dict[str, Any]()}


def guarded(
    what: str, action: Callable[[], object], allowed: tuple[type[BaseException], ...] = ()
) -> Problems:
    """The exception that `action` raises, unless it is one of `allowed`."""
    try:
        action()
    except allowed:
        pass
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        yield (
            f"{what}: {type(error).__name__}: {str(error)[:300]}"
            f" ({Path(where.filename).name}:{where.lineno})"
        )


class Api:
    """The routes of a newly started controller."""

    def __init__(self, stage: Stage, root: Path) -> None:
        with mock.patch.object(app, "_openapi", return_value=_OPENAPI):
            self._app = app.create_app(stage.settings(root))
        self._problems: list[str] = []

    def __call__(self, requests: Callable[["Api"], Awaitable[None]]) -> list[str]:
        """The problems in the answers to `requests`."""
        self._problems = []

        async def run() -> None:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://fuzz", headers=AUTHORIZATION
            ) as client:
                self._client = client
                await requests(self)

        _LOOP.run_until_complete(run())
        return self._problems

    async def ask(self, method: str, path: str, *, must: bool = False, **more: Any) -> None:
        answer = await self._client.request(method, path, **more)
        answered = f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        known = ("checkpoint_damaged", "run_damaged", "spool_unusable")
        if answer.status_code >= 500 and answer.json()["error"]["type"] not in known:
            self._problems.append(answered)
        elif must and (answer.status_code >= 400 or WITNESS not in answer.text):
            self._problems.append(f"the witness is not served: {answered}")


async def read(api: Api, *, witness: bool) -> None:
    """Sends requests to all GET routes. `witness`: whether the undamaged run `WITNESS` must be
    served."""
    await api.ask("GET", "/readyz")
    await api.ask("GET", "/metrics")
    for path in ("/v1/runs", "/v1/jobs", f"/v1/jobs?run={WITNESS}", "/v1/jobs?state=succeeded"):
        await api.ask("GET", path, must=witness)
    for run in RUNS:
        for path in ("", "/checkpoints", *(f"/checkpoints/{step}" for step in range(3))):
            must = witness and run == WITNESS and path in ("", "/checkpoints/0", "/checkpoints/1")
            await api.ask("GET", f"/v1/runs/{run}{path}", must=must)
        await api.ask("GET", f"/v1/runs/{run}/checkpoints/1/download")
    for job in JOBS:
        await api.ask("GET", f"/v1/jobs/{job}", must=witness and job.startswith(WITNESS))
        for path in ("events?wait=false", "log"):
            await api.ask("GET", f"/v1/jobs/{job}/{path}")


async def write(api: Api, *, witness: bool) -> None:
    """Sends requests to all routes that change the spool. `witness`: whether these requests must
    succeed for the run `WITNESS`."""
    for number, run in enumerate(RUNS):
        must = witness and run == WITNESS
        await api.ask(
            "POST", f"/v1/runs/{run}/train", json=TRAIN | {"id": f"new-{number}"}, must=must
        )
        await api.ask("PUT", f"/v1/runs/{run}/checkpoints/0/pin")
        await api.ask(
            "POST", f"/v1/runs/{run}/fork", json={"step": 0, "name": f"fork-{number}"}, must=must
        )
        await api.ask("POST", f"/v1/runs/{run}/rollback", json={"step": 0})
    for job in JOBS:
        if not job.startswith(WITNESS):
            await api.ask("POST", f"/v1/jobs/{job}/cancel")
    await api.ask("DELETE", "/v1/runs/main?cancel_jobs=true")
    await api.ask("DELETE", "/v1/runs/ended")


def collect(stage: Stage, root: Path, unusable: tuple[type[BaseException], ...]) -> Problems:
    """Every collector of the exporter and of the controller collects twice, and the page of metrics
    is made."""
    every = [*make_collectors(stage.settings(root), BOTH), QueueCollector(lambda: Spool(root))]
    collectors = [collector for collector in every if collector.name != "build"]
    for _ in range(2):
        for collector in collectors:
            collector.collect_once()
            for error in collector.errors:
                # An error that `try_each` reports begins with the item's name. An error of the
                # whole collector begins with the exception's class.
                kind = error.split(":")[0]
                if kind.endswith(("Error", "SpoolUnusable")) and kind not in [
                    each.__name__ for each in unusable
                ]:
                    yield f"collector {collector.name}: {error[:300]}"
    yield from guarded("metrics page", lambda: generate_latest(Page(collectors)))


def doctor(stage: Stage, root: Path) -> Problems:
    asked = Asked(Command.DOCTOR)
    asked.settings = stage.settings(root)
    for check in selected(asked.command):
        if check.name in ("damage", "weights", "model"):
            yield from guarded(
                f"doctor's {check.name}",
                lambda check=check: list(check.answer(asked)),  # type: ignore[misc]
                (OSError, TandemError, ValueError),
            )


def publish(stage: Stage, root: Path, used: bytes, good: dict[str, str], witness: bool) -> Problems:
    """Two passes of a publisher. `used`: the content of the publisher's file `used.json`. `good`:
    `<run>@<step>` -> SHA-256 of the step's adapter."""
    copies = copies_directory(root, stage.vllm.url)
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir(mode=0o700)
    (copies / "used.json").write_bytes(used)
    stage.vllm.adapters.clear()

    def passes() -> None:
        publisher = None
        for _ in range(2):
            try:
                publisher = publisher or stage.publisher(root)
                publisher.once()
            except (TandemError, ValidationError, OSError):
                continue  # the program tries again

    yield from guarded("publisher", passes)
    if witness and f"{WITNESS}@1" not in stage.vllm.adapters:
        yield f"publisher: the witness is not served, only {sorted(stage.vllm.adapters)}"
    for name, (path, _) in stage.vllm.adapters.items():
        if fs.sha256_file(Path(path) / WEIGHTS_FILE) != good[name]:
            yield f"publisher: {name} has other weights"


class _Impatient(Stop):
    """A `Stop` that ends the runner as soon as there is no job to claim. The runner never pauses,
    because the volume is not broken."""

    def pause(self, seconds: float) -> None: ...

    def retry(self, what: str, action: Callable[[], Any], **_: Any) -> Any:
        result = action()
        if what == "look for a job" and result is None:
            self.requested = True
        return result


class _Here:
    """A launcher, and the handle of its ranks: the rank runs in this process."""

    holds_devices = False

    def __init__(self, *_: object) -> None: ...

    def prepare(self) -> None: ...

    def launch(self, launch: Launch) -> "_Here":
        self._status = entry.main(launch.open(), launch.settings)
        if self._status:
            parallel.destroy()
        return self

    def poll(self) -> int:
        return self._status

    def processes(self) -> list[Any]:
        return []

    def kill_all(self, _: float) -> list[Any]:
        return []

    def close(self) -> None: ...


def run_jobs(stage: Stage, root: Path) -> Problems:
    """A new runner settles the attempts of a dead runner, and runs all jobs."""
    runner = loop.Runner(stage.settings(root), "")
    runner.stop = _Impatient()
    with (
        mock.patch.object(local, "Launcher", _Here),
        mock.patch.object(local.processes, "marked", return_value=[]),
    ):
        yield from guarded("runner", runner.run)


def made(root: Path) -> dict[str, str]:
    """Maps the name `<run>@<step>` of each readable checkpoint to its adapter file's SHA-256."""
    spool, found = Spool(root), {}
    for run in spool.runs.names():
        for step in spool.checkpoints.steps(run):
            try:
                found[f"{run}@{step}"] = (
                    spool.checkpoints.verify(run, step).files[WEIGHTS_FILE].sha256
                )
            except (TandemError, OSError, KeyError, ValueError):
                continue
    return found


def clean(stage: Stage, root: Path, unusable: tuple[type[BaseException], ...]) -> Problems:
    """The controller's sweeper."""

    def both() -> None:
        spool = Spool(root)
        removal.prune(spool, stage.settings(root))
        sweep(spool)

    yield from guarded("sweeper", both, unusable)


@contextmanager
def quiet() -> Iterator[Callable[[], str]]:
    """The programs' output goes to a file. The yielded function reads the file."""
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)

            def read() -> str:
                log.seek(0)
                return log.read().decode(errors="replace")

            yield read
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


UNUSABLE = (SpoolUnusable,)
