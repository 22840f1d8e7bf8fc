"""The classes of checks: `Check`, `Command`, `Asked` (a command with its options), and `Answer`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from functools import cached_property
from typing import Literal, NamedTuple

from tandem.config import Settings, load_settings

Container = StrEnum("Container", ["ALL", "CONTROLLER", "TRAINER", "INFERENCE"])


class Command(Flag):
    """The commands that run checks. `Check.by` has the commands that run the check."""

    DOCTOR = auto()
    PREFLIGHT = auto()
    REACH = auto()  # `tandem smoke reach`


@dataclass
class Asked:
    """A command and its options."""

    command: Command
    role: Container = Container.ALL  # role of the container to be started
    devices_granted: bool = False
    inference: str | None = None  # vLLM's address; None: the settings' address
    metrics: Sequence[str] = ()  # URLs of exporters
    closed: Sequence[str] = ()  # URLs that must refuse the API key
    patience: float = 0.0  # seconds within which a service must answer

    @cached_property
    def settings(self) -> Settings:
        return load_settings()


class Answer(NamedTuple):
    """One line of a report. `remedy`: what the user should do."""

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A check. `answer` yields one Answer for each thing that the check examines."""

    name: str
    asks: str
    answer: Callable[[Asked], Iterator[Answer]]
    by: Command
    remedy: str = ""  # what the user should do if `answer` raises an error
    first: bool = False  # if this check fails, later checks are skipped
