"""Records of sessions, of their requests, and of the requests' results. One request of a session's
client asks for one pass, one optimizer step or one save, not for a whole job."""

from typing import Annotated, Literal

from pydantic import Field

from tandem.spool.schema.base import Record, RunName, SessionId
from tandem.spool.schema.training import RLLoss, SFTLoss

MOST_SEQUENCE_NUMBER = 10**8
Seq = Annotated[int, Field(ge=1, lt=MOST_SEQUENCE_NUMBER)]
"""A request's number within its run: 1, 2, 3, ... Requests are computed in this order."""


class SessionRecord(Record):
    """A session: `sessions/<id>/session.json`, written once. The session's runs have the session's
    id in `RunSpec.session`."""

    schema_version: Literal[1] = 1
    id: SessionId
    created: float  # Unix seconds
    submitted_by: str | None = None  # the name of the API key; None if the key has no name
    labels: dict[str, str] = Field(default_factory=dict)


class SessionBeat(Record):
    """`sessions/<id>/beat.json`: the time of the client's last sign of life."""

    time: float  # Unix seconds by the controller's clock


class SessionEnd(Record):
    """`sessions/<id>/end.json`: the session accepts no further requests. The session's runs are
    kept."""

    finished: float  # Unix seconds
    reason: str


class ClientModel(Record):
    """`sessions/<id>/model-<n>.json`, written once, before the model's run is created."""

    base_model: str  # the client's name of the base model


class ClientSampler(Record):
    """`sessions/<id>/sampler-<n>.json`, written once: the checkpoint of one of the client's
    samplers. If `run` is None, the sampler samples from the base model. If `step` is None, the
    sampler samples from the checkpoint named `name`, which may be made later."""

    base_model: str  # the client's name of the base model
    path: str | None = None  # the path that the client gave
    run: RunName | None = None
    name: str | None = None
    step: int | None = Field(default=None, ge=0)


class PassRequest(Record):
    """A forward pass over packed rows, optionally with a backward pass. The pass's gradients are
    added to the gradients since the last optimizer step. The loss is a sum over all items."""

    kind: Literal["forward", "forward_backward"]
    # The order of the types matters: the JSON of an SFT loss would also be valid as an RL loss.
    loss: Annotated[SFTLoss | RLLoss, Field(union_mode="left_to_right")]
    lengths: tuple[int, ...]  # number of items of each sequence, in the client's order
    num_rows: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    num_tokens: int = Field(ge=1)  # slots in use
    loss_name: str = ""  # the client's name of the loss


class StepRequest(Record):
    """An optimizer step of Adam with decoupled weight decay. The step sets the gradients to zero
    afterwards."""

    kind: Literal["optim_step"] = "optim_step"
    learning_rate: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=None, gt=0)  # None: gradients are not clipped


class SaveRequest(Record):
    """A request for a named checkpoint of the run. If the run has not changed since its newest
    checkpoint, the newest checkpoint gets the name."""

    kind: Literal["save"] = "save"
    name: str = Field(min_length=1, max_length=256)
    group: Literal["weights", "sampler"] = "weights"  # each group has its own names


class LoadRequest(Record):
    """Loads the weights of a checkpoint of any run with the same base model and LoRA shape.
    If `optimizer` is true, Adam's state is loaded too. If `optimizer` is false, Adam starts with a
    new state."""

    kind: Literal["load"] = "load"
    run: RunName
    step: int = Field(ge=0)
    optimizer: bool


class VoidRequest(Record):
    """A placeholder for a request that never arrived, so that later requests can be computed. The
    result of a void request is an error with the text `reason`."""

    kind: Literal["void"] = "void"
    reason: str


AnyRequest = Annotated[
    PassRequest | StepRequest | SaveRequest | LoadRequest | VoidRequest,
    Field(discriminator="kind"),
]


class LoggedRequest(Record):
    """`runs/<run>/requests/<seq>/request.json`."""

    schema_version: Literal[1] = 1
    seq: Seq
    request: AnyRequest
    sha256: str | None = None  # SHA-256 of the packed arrays of a `PassRequest`
    created: float  # Unix seconds


class RequestError(Record):
    """The error with which a request ended. The field `category` tells whether the user or the
    server's operator can fix the error."""

    category: Literal["user", "server"]
    message: str


class RequestResult(Record):
    """The result of a request: `runs/<run>/requests/<seq>/result.json`. The log-probs of a pass are
    in another file in the same directory. A request that ended with an error changed nothing,
    except that a failed optimizer step discards the gradients. The names of metrics that are sums
    over a pass end in `:sum`."""

    error: RequestError | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    step: int | None = None  # the checkpoint that a `SaveRequest` named
    finished: float  # Unix seconds


class SavedName(Record):
    """One entry of `runs/<run>/names.json`: a name that a client gave to a checkpoint."""

    group: Literal["weights", "sampler"]
    name: str
    step: int = Field(ge=0)
    created: float  # Unix seconds


class SavedNames(Record):
    """`runs/<run>/names.json`, which is kept after the session has ended."""

    schema_version: Literal[1] = 1
    names: tuple[SavedName, ...] = ()
