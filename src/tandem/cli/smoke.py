"""`tandem smoke`: tests of a running stack, from a client's side. `helm test` runs these
commands."""

import time
from contextlib import ExitStack
from typing import Annotated, Any

import httpx
import typer

from tandem.cli.common import out
from tandem.client import Tandem
from tandem.client.http import Backoff
from tandem.config import load_settings
from tandem.errors import Conflict, NotFound, TandemError, Unreachable
from tandem.spool import fs

app = typer.Typer(
    help="Test a running stack: that it is reachable, that a small job succeeds.",
    no_args_is_help=True,
)
PATIENCE_SECONDS = 60.0
_EXAMPLES = [
    {
        "messages": [
            {"role": "user", "content": "Is this a test?"},
            {"role": "assistant", "content": answer},
        ]
    }
    for answer in ("Yes.", "Yes, it is.")
]
Inference = Annotated[
    str,
    typer.Option(envvar="OPENAI_BASE_URL", help="vLLM's API, as for OpenAI clients (with /v1)."),
]


class SmokeFailed(TandemError, code="smoke_failed"): ...


@app.command()
def reach(
    inference: Inference = "http://127.0.0.1:8000/v1",
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="URL of an exporter's /metrics, which must name its build; repeatable."),
    ] = None,
    closed: Annotated[
        list[str] | None,
        typer.Option(
            help="URL that must answer 401 to a request with the API key only; repeatable."
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds within which each must answer.")
    ] = PATIENCE_SECONDS,
) -> None:
    """Test that controller, vLLM and exporters answer, and that vLLM lists the base model or,
    merged, a step."""
    key = load_settings().inference_key
    with Tandem() as tandem:
        runs = tandem.list_runs()
        out.print(f"controller {tandem.url}: {len(runs)} runs")
    names = [model["id"] for model in _get(f"{inference}/models", key, patience).json()["data"]]
    if "base" not in names and not any("@" in name for name in names):
        raise SmokeFailed(
            f"{inference}/models lists {names}, without the model 'base' or a step of a run"
        )
    out.print(f"inference {inference}: {len(names)} models")
    for url in metrics or []:
        if "\ntandem_build_info{" not in _get(url, None, patience).text:
            raise SmokeFailed(f"{url} has no tandem_build_info")
        out.print(f"metrics {url}")
    for url in closed or []:
        status = _ask("POST", url, key).status_code
        if status != 401:
            raise SmokeFailed(f"{url} answers {status} to an API key, not 401")
        out.print(f"closed {url}")


@app.command()
def write(
    word: Annotated[str, typer.Argument(metavar="WORD", help="The word for `tandem smoke read`.")],
) -> None:
    """Write a word to the shared volume."""
    path = load_settings().root / ".smoke"
    fs.write_atomic(path, word.encode())
    out.print(f"wrote {path}")


@app.command()
def read(
    word: Annotated[str, typer.Argument(metavar="WORD", help="The word of `tandem smoke write`.")],
) -> None:
    """Read the word that another container wrote to the shared volume, and remove it."""
    path = load_settings().root / ".smoke"
    backoff = Backoff(PATIENCE_SECONDS)
    while not fs.exists(path):
        missing = SmokeFailed(f"{path} is missing: the two containers don't have the same volume")
        time.sleep(backoff.next(missing))
    if (content := path.read_text()) != word:
        raise SmokeFailed(f"{path} contains {content!r}, not {word!r}")
    path.unlink()
    out.print(f"read and removed {path}")


@app.command()
def job(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run for this test; created if missing. Each call adds one step."
        ),
    ],
    inference: Inference = "http://127.0.0.1:8000/v1",
    timeout: Annotated[
        float, typer.Option(help="Seconds for the job, and again for its step to be served.")
    ] = 1800,
) -> None:
    """Train a small SFT job, wait until its step is served, and sample from it. With merged
    weights, of which vLLM has one run's: nothing if there is a run, and a run that was made for
    this is deleted."""
    key = load_settings().inference_key
    with Tandem() as tandem, ExitStack() as behind:
        try:
            step = tandem.get_run(run).newest_step
        except NotFound:
            try:
                made = tandem.create_run(run, lora={"rank": 4, "alpha": 8})
            except Conflict as error:
                if error.field != "weights":
                    raise
                # vLLM serves another run's merged weights.
                out.print(f"no job was run: {error.message}")
                return
            step = made.newest_step
            if made.spec.weights == "merged":
                behind.callback(_delete, tandem, run)
        out.print(f"run {run} is at step {step}")
        optimizer = {"learning_rate": 1e-5, "epochs": 1}
        status = tandem.train_sft(
            run, _EXAMPLES, packing={"sequence_length": 128}, optimizer=optimizer
        )
        tandem.wait_job(status.id, timeout=timeout)
        left = [
            event.data["bytes"]
            for event in tandem.job_events(status.id)
            if event.type == "released"
        ]
        if not left:
            raise SmokeFailed(
                f"job {status.id} succeeded, and no event says what it left on the devices"
            )
        out.print(f"job {status.id} succeeded; left on the devices: {left[-1]} bytes")
        served = tandem.wait_served(run, status.spec.base_step + 1, timeout=timeout)
        out.print(
            f"{served.model} is served; vLLM and trainer differ by"
            f" {served.mean_abs_logprob_error:.2g} nats"
        )
        request = {"model": served.model, "max_tokens": 4, "messages": _EXAMPLES[0]["messages"][:1]}
        answer = _ask("POST", f"{inference}/chat/completions", key, json=request, timeout=120)
        if answer.status_code != 200 or not answer.json()["choices"]:
            raise SmokeFailed(f"{served.model} answers {answer.status_code}: {answer.text[:500]}")
        out.print(
            f"{served.model} says {answer.json()['choices'][0]['message']['content']!r}",
            markup=False,
        )


def _delete(tandem: Tandem, run: str) -> None:
    """Vacate vLLM, which serves one run's merged weights."""
    try:
        tandem.delete_run(run, cancel_jobs=True)
        out.print(f"run {run} is deleted, so that vLLM can serve another one")
    except TandemError as error:
        out.print(
            f"run {run} can't be deleted: {error}; `tandem run delete {run}` makes room for"
            " another one"
        )


def _get(url: str, key: str | None, patience: float) -> httpx.Response:
    """The first response 200 to a GET, which is repeated for `patience` seconds."""
    backoff = Backoff(patience)
    while True:
        try:
            answer = _ask("GET", url, key)
            if answer.status_code == 200:
                return answer
            problem = Unreachable(f"{url} answers {answer.status_code}")
        except Unreachable as error:
            problem = error
        time.sleep(backoff.next(problem))


def _ask(
    method: str, url: str, key: str | None, *, timeout: float = 10, **more: Any
) -> httpx.Response:
    """Raises Unreachable where nobody answers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.request(method, url, headers=headers, timeout=timeout, trust_env=False, **more)
    except httpx.TransportError as error:
        raise Unreachable(f"{url} does not answer: {error}") from error
