"""`tandem smoke`: tests of a running stack, from a client's side. `helm test` runs these
commands."""

import time
from contextlib import ExitStack
from typing import Annotated

import typer

from tandem.cli.checks import Asked, Command, questions, selected, services
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
    str | None,
    typer.Option(
        help=(
            "vLLM's address, with or without /v1.  \\[default: TANDEM_INFERENCE_URL, else this"
            " machine's]"
        )
    ),
]


class SmokeFailed(TandemError, code="smoke_failed"): ...


@app.command(epilog=questions(Command.REACH))
def reach(
    inference: Inference = None,
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
    """Test that controller, vLLM and exporters answer, and that vLLM lists the base model or, with
    merged weights, a step. The first service that does not answer ends the test."""
    asked = Asked(
        Command.REACH,
        inference=inference,
        metrics=metrics or [],
        closed=closed or [],
        patience=patience,
    )
    for check in selected(asked.command):
        try:
            for answer in check.answer(asked):
                if answer.status != "ok":
                    raise SmokeFailed("; ".join(filter(None, (answer.found, answer.remedy))))
                out.print(f"{answer.name} {answer.found}", markup=False)
        except Unreachable as error:
            raise Unreachable("; ".join(filter(None, (error.message, check.remedy)))) from error
        except ValueError as error:
            raise SmokeFailed(f"{check.name}: {error}") from error


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
    inference: Inference = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for the job, and again for its step to be served.")
    ] = 1800,
) -> None:
    """Train a small SFT job, wait until its step is served, and sample from it. With merged weights
    vLLM serves only one run: if another run exists, the test trains nothing, and if the test
    creates a run, it deletes the run afterwards."""
    vllm = services.inference_url(Asked(Command.REACH, inference=inference))
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
        answer = services.request("POST", f"{vllm}/v1/chat/completions", json=request, timeout=120)
        if answer.status_code != 200 or not answer.json()["choices"]:
            raise SmokeFailed(f"{served.model} answers {answer.status_code}: {answer.text[:500]}")
        out.print(
            f"{served.model} says {answer.json()['choices'][0]['message']['content']!r}",
            markup=False,
        )


def _delete(tandem: Tandem, run: str) -> None:
    """Delete the run, because vLLM can serve the merged weights of only one run at a time."""
    try:
        tandem.delete_run(run, cancel_jobs=True)
        out.print(f"run {run} is deleted, so that vLLM can serve another one")
    except TandemError as error:
        out.print(
            f"run {run} can't be deleted: {error}; `tandem run delete {run}` makes room for"
            " another one"
        )
