"""All checks of `tandem doctor`, `tandem preflight` and `tandem smoke reach`. Each check has a
question, a remedy, and a list of the commands that run the check."""

from collections.abc import Iterator

from tandem.cli.checks import deployment, machine, services
from tandem.cli.checks.check import Answer, Asked, Check, Command, Container
from tandem.errors import TandemError, Unreachable, VolumeFull

__all__ = [
    "CHECKS",
    "Answer",
    "Asked",
    "Check",
    "Command",
    "Container",
    "answers",
    "questions",
    "selected",
]

_DOCTOR, _PREFLIGHT, _REACH = Command.DOCTOR, Command.PREFLIGHT, Command.REACH
CHECKS = (
    Check("python", "Is this Python supported?", machine.python, _DOCTOR),
    Check("packages", "Has each role its packages?", machine.packages, _DOCTOR),
    Check(
        "settings",
        "Is every TANDEM_* variable valid?",
        deployment.variables,
        _DOCTOR | _PREFLIGHT,
        remedy="correct the variable; docs/settings.md lists all of them",
        first=True,
    ),
    Check("GPUs", "Is a GPU named for each process?", deployment.gpu_names, _PREFLIGHT),
    Check("secrets", "Are the secrets set, and safe?", deployment.secrets, _DOCTOR | _PREFLIGHT),
    Check("volume", "Does the volume do what is needed?", machine.volume, _DOCTOR | _PREFLIGHT),
    Check("spool", "Is there a spool, or can one be made?", machine.spool, _PREFLIGHT),
    Check("disk", "Is there space on the volume?", machine.disk, _DOCTOR | _PREFLIGHT),
    Check("device", "Has this machine the device?", machine.device_answers, _DOCTOR),
    Check("damage", "Is something on the volume damaged?", deployment.damage, _DOCTOR),
    Check("model", "Can the base model be trained?", deployment.base_model, _DOCTOR | _PREFLIGHT),
    Check("weights", "How does vLLM get a run's weights?", deployment.weights, _DOCTOR),
    Check(
        "controller",
        "Does the controller answer, with our key?",
        services.controller,
        _DOCTOR | _REACH,
        remedy="start it (`tandem up`), or set TANDEM_URL to its address",
    ),
    Check(
        "vLLM",
        "Does vLLM answer, with our key, and has it Tandem's models?",
        services.inference,
        _DOCTOR | _REACH,
        remedy="start it (`tandem up`; it takes a minute), or set TANDEM_INFERENCE_URL",
    ),
    Check("metrics", "Does each exporter name its build?", services.metrics, _REACH),
    Check("closed", "Is each admin route closed to API keys?", services.closed, _REACH),
)


def selected(command: Command) -> list[Check]:
    return [check for check in CHECKS if command in check.by]


def questions(command: Command) -> str:
    """The questions of a command's checks, for the command's help text."""
    return "It asks: " + " ".join(check.asks for check in selected(command))


def answers(asked: Asked) -> Iterator[Answer]:
    """The answers of all checks of `asked.command`. A check that raises an error has failed. If a
    service does not respond, the answer is only a warning, because the service may not have been
    started yet."""
    for check in selected(asked.command):
        failed = False
        try:
            for answer in check.answer(asked):
                yield answer
                failed |= answer.status == "fail"
        except VolumeFull as error:
            yield _full(check, asked, error)
        except Unreachable as error:
            yield Answer("warn", check.name, error.message, check.remedy)
        except (OSError, TandemError, ValueError) as error:
            failed = True
            kind = "" if isinstance(error, TandemError) else f"{type(error).__name__}: "
            yield Answer("fail", check.name, f"{kind}{error}", check.remedy)
        if failed and check.first:
            return


def _full(check: Check, asked: Asked, error: VolumeFull) -> Answer:
    """The answer of a check that found the volume full. If the full volume has a spool, the answer
    in `tandem preflight` is a warning, because the programs start and wait for space."""
    if asked.command is Command.PREFLIGHT and (asked.settings.root / "spool.json").exists():
        remedy = "the programs start, and wait until there is space"
        return Answer("warn", check.name, error.message, remedy)
    return Answer("fail", check.name, error.message, check.remedy)
