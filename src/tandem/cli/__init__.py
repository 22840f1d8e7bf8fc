"""The `tandem` command: `app` has all subcommands.

Each module has the commands about one subject (`runs.py`, `jobs.py`, `train.py`, ...), and this
file adds the commands to `app`. `common.py` has the parts that all command modules share: the
client, `--json`, tables, exit statuses. `checks/` has the checks of `tandem doctor`, `tandem
preflight` and `tandem smoke reach`.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, get_args

import typer

import tandem
from tandem.cli import data, doctor, jobs, plan, rl, runs, smoke, train
from tandem.cli.checks import Command, questions
from tandem.cli.common import Json, err, exit_code, print_error, show
from tandem.config import Settings, load_settings
from tandem.errors import InvalidInput, TandemError

__all__ = ["app", "main"]

# The module and the help of each command.
_PROGRAMS = {
    "controller": ("tandem.controller", "Run the HTTP API."),
    "runner": (
        "tandem.trainer.runner",
        "Run the trainer's runner: it claims jobs and starts the ranks that train.",
    ),
    "serve": ("tandem.inference.server.serve", "Run vLLM with the deployment's settings."),
    "publisher": (
        "tandem.inference.publisher",
        "Run the publisher: it loads new steps into vLLM and verifies them.",
    ),
    "exporter": (
        "tandem.metrics.exporter",
        "Run the exporter: it serves the metrics of the trainer or of inference to Prometheus.",
    ),
}
app = typer.Typer(
    name="tandem",
    help="""Post-train language models by RL and SFT: Megatron-core trains, vLLM serves, one volume
    connects them.

    Start everything on this machine with [bold]tandem up[/bold], then, in another terminal:

    [bold]tandem train sft my-run examples.jsonl[/bold], and ask vLLM for the model
    [bold]my-run@1[/bold].

    TANDEM_URL is the controller's address (http://127.0.0.1:8080), TANDEM_API_KEY the key sent to
    it.
    [bold]tandem doctor[/bold] checks everything and says what to do.
    """,
    epilog=(
        "Exit status: 0 done; 1 refused or broken; 2 wrong usage; 3 the job failed or was"
        " cancelled; 4 the step is not served; 5 the controller can't be reached; 6 the publisher"
        " refused the step."
    ),
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(rich_help_panel="Programs")
def up(
    role: Annotated[
        str, typer.Option(help="all; trainer (the runner); inference (vLLM, the publisher)")
    ] = "all",
) -> None:
    """Start controller, trainer, vLLM and publisher on this machine, in the foreground; Ctrl-C
    stops everything.

    TANDEM_BASE_MODEL names the model; TANDEM_ROOT names the spool's directory. Exit status: 0
    stopped; 1 `tandem up` can't start; 2 wrong settings; 70 a program can't be started; 71 a
    program crashes again and again; 72 supervisord ended.
    """
    # imported late: only this command needs supervisord
    from tandem.supervise.up import up as start
    from tandem.system.environment import Role

    chosen: Role | None = next((known for known in get_args(Role) if known == role), None)
    try:
        if chosen is None:
            raise InvalidInput(
                f"{role!r} is not a role; use one of {', '.join(get_args(Role))}", field="--role"
            )
        settings = load_settings()
        if chosen != "trainer":
            _name_merged_on_the_cpu(settings)
        status = start(settings, chosen)
    except InvalidInput as error:
        print_error(error, json=False)
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def _name_merged_on_the_cpu(settings: Settings) -> None:
    from tandem.inference.server.command import serving_device

    with suppress(InvalidInput):  # raised if vLLM is not installed; the stack reports it
        if settings.weights == "adapter" and serving_device(settings) == "cpu":
            hint = "TANDEM_WEIGHTS=merged samples faster from one run (docs/merged.md)"
            err.print(f"vLLM runs on the CPU, with adapters: {hint}", soft_wrap=True)


def _become(module: str) -> Callable[[], None]:
    """Returns a command that replaces this process by the program `module`. The program then
    receives the signals and sets the exit status."""
    return lambda: os.execv(sys.executable, [sys.executable, "-m", module])


app.add_typer(runs.app, name="run")
app.add_typer(train.app, name="train")
app.add_typer(data.app, name="data")
app.command("track")(runs.track)
app.add_typer(rl.app, name="rl")
app.add_typer(jobs.app, name="jobs")
app.command("logs")(jobs.logs)
app.command("memory")(jobs.memory)
app.command("plan")(plan.plan)
app.add_typer(runs.checkpoints, name="checkpoints")
app.command("export")(runs.export)
app.command("doctor", epilog=questions(Command.DOCTOR))(doctor.doctor)
app.command("preflight", epilog=questions(Command.PREFLIGHT))(doctor.preflight)
app.add_typer(smoke.app, name="smoke")
for _name, (_module, _help) in _PROGRAMS.items():
    app.command(_name, help=_help, rich_help_panel="Programs")(_become(_module))


@app.command("rank-agent", rich_help_panel="Programs")
def rank_agent(
    job: Annotated[str | None, typer.Option(help="the job's id")] = None,
    attempt: Annotated[int | None, typer.Option(help="the attempt's number")] = None,
    host: Annotated[
        int | None,
        typer.Option(
            help="this host's number, from 0; default: JOB_COMPLETION_INDEX, SLURM_PROCID or"
            " TANDEM_HOST_INDEX"
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="how many hosts there are")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="serve all attempts, one after the other")
    ] = False,
    linger: Annotated[
        float | None,
        typer.Option(help="seconds to stay after an attempt for the next one of --pods"),
    ] = None,
    pods: Annotated[
        str | None, typer.Option(help="the Kubernetes Job of this pod, NAMESPACE/NAME")
    ] = None,
) -> None:
    """Run one host's part of an attempt: start the host's ranks, watch the ranks, and measure the
    GPU memory that stays in use after the ranks end.

    TANDEM_ROOT is the spool's directory. Exit status: 0 the ranks are done; 1 ranks failed, or the
    host was refused; 75 stopped; 76 another agent has this host, or the attempt was ended; 77 the
    volume is unusable.
    """
    given: dict[str, object] = {"--job": job, "--attempt": attempt, "--host": host}
    given |= {"--hosts": hosts, "--linger": linger, "--pods": pods}
    arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
    module = [sys.executable, "-m", "tandem.trainer.agent"]
    os.execv(sys.executable, [*module, *arguments, *(["--follow"] if follow else [])])


@app.command()
def version(json: Json = False) -> None:
    """Print the version."""
    show({"version": tandem.__version__}, json, lambda data: data["version"])


def main() -> None:
    """Run the command line; exits with a status that the help lists."""
    try:
        app()
    except (TandemError, OSError) as error:
        print_error(error, json="--json" in sys.argv)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
