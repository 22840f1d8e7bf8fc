"""Types of the client's arguments and results, except the requests and responses of the API."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import AdvantageSettings, PackingSettings
from tandem.spool.schema import Event, OptimizerSettings, PreferenceLoss, RLLoss, SFTLoss

Wait = Literal["job", "served"]
OnEvent = Callable[[Event], object]


@dataclass(frozen=True)
class LogPart:
    """A part of a job's log; `next_offset` is the byte at which the next part begins."""

    data: bytes
    next_offset: int


class _JobOptions(TypedDict, total=False):
    """Options of a job. The defaults are those of the requests in `tandem.controller.schemas`."""

    id: str
    base_step: int
    optimizer: OptimizerSettings | Mapping[str, Any]
    packing: PackingSettings | Mapping[str, Any]
    deadline_seconds: float
    stall_seconds: float
    max_attempts: int
    labels: Mapping[str, str]


class SFTOptions(_JobOptions, total=False):
    held_out: Sequence[SFTExample | Mapping[str, Any]]
    loss: SFTLoss | Mapping[str, Any]


class DPOOptions(_JobOptions, total=False):
    held_out: Sequence[PreferencePair | Mapping[str, Any]]
    loss: PreferenceLoss | Mapping[str, Any]


class RLOptions(_JobOptions, total=False):
    loss: RLLoss | Mapping[str, Any]
    max_off_policy_steps: int
    advantage: AdvantageSettings | Mapping[str, Any]
