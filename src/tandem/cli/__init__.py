"""The `tandem` command."""

import sys

import typer

import tandem
from tandem.cli import doctor, jobs, programs, runs, smoke, train
from tandem.cli.common import Json, exit_code, print_error, show
from tandem.errors import TandemError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tandem",
    help="""Post-train language models by RL and SFT: Megatron-core trains, vLLM serves, one volume connects them.

    Start everything on this machine with [bold]tandem up[/bold], then, in another terminal:

    [bold]tandem run create my-run[/bold], [bold]tandem train my-run examples.jsonl[/bold], and ask vLLM for the model
    [bold]my-run@1[/bold].

    TANDEM_URL is the controller's address (http://127.0.0.1:8080), TANDEM_API_KEY the key sent to it.
    [bold]tandem doctor[/bold] checks everything and says what to do.
    """,
    epilog="Exit status: 0 done; 1 refused or broken; 2 wrong usage; 3 the job failed or was cancelled; 4 the step is "
    "not served; 5 the controller can't be reached.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up", rich_help_panel="Programs")(programs.up)
app.add_typer(runs.app, name="run")
app.command("train")(train.train)
app.add_typer(jobs.app, name="jobs")
app.command("logs")(jobs.logs)
app.command("memory")(jobs.memory)
app.add_typer(runs.checkpoints, name="checkpoints")
app.command("doctor")(doctor.doctor)
app.command("preflight")(doctor.preflight)
app.add_typer(smoke.app, name="smoke")
for _name, (_module, _help) in programs.PROGRAMS.items():
    app.command(_name, help=_help, rich_help_panel="Programs")(programs.become(_module))


@app.command()
def version(json: Json = False) -> None:
    """Print the version."""
    show({"version": tandem.__version__}, json, lambda data: data["version"])


def main() -> None:
    """Run the command line; exits with a status that the help lists."""
    try:
        app()
    except (TandemError, TimeoutError) as error:
        print_error(error, json="--json" in sys.argv)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
