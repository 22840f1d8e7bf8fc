"""Records of sessions, whose clients train by single calls: the sessions, their requests and the
results."""

from typing import Annotated, Literal

from pydantic import Field

from tandem.spool.schema.base import Record, RunName, SessionId
from tandem.spool.schema.training import RLLoss, SFTLoss

MOST_SEQUENCE_NUMBER = 10**8
Seq = Annotated[int, Field(ge=1, lt=MOST_SEQUENCE_NUMBER)]
"""A request's number within its run: 1, 2, 3, ... They are computed in this order."""


class SessionRecord(Record):
    """A session: `sessions/<id>/session.json`, written once. Its runs name it in
    `RunSpec.session`."""

    schema_version: Literal[1] = 1
    id: SessionId
    created: float  # Unix seconds
    submitted_by: str | None = None  # the name of the API key; None: it has none
    labels: dict[str, str] = Field(default_factory=dict)


class SessionBeat(Record):
    """`sessions/<id>/beat.json`: the time at which the client was last heard of."""

    time: float  # Unix seconds by the controller's clock


class SessionEnd(Record):
    """`sessions/<id>/end.json`: the session takes no request any more. The runs stay."""

    finished: float  # Unix seconds
    reason: str


class ClientModel(Record):
    """`sessions/<id>/model-<n>.json`, written once, before its run."""

    base_model: str  # as the client calls it


class ClientSampler(Record):
    """`sessions/<id>/sampler-<n>.json`, written once: the checkpoint that one of the client's
    samplers samples from. Without a run it samples the base model. Without a step, it samples the
    checkpoint with this name, which may be made later."""

    base_model: str  # as the client calls it
    path: str | None = None  # the client's
    run: RunName | None = None
    name: str | None = None
    step: int | None = Field(default=None, ge=0)


class PassRequest(Record):
    """A forward pass over packed rows, with or without the backward pass, whose gradients are added
    to the gradients since the last optimizer step. The loss is a sum over all items."""

    kind: Literal["forward", "forward_backward"]
    # The order matters: the JSON of an SFT loss would also be valid as an RL loss.
    loss: Annotated[SFTLoss | RLLoss, Field(union_mode="left_to_right")]
    lengths: tuple[int, ...]  # items of each sequence, in the client's order
    num_rows: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    num_tokens: int = Field(ge=1)  # slots in use
    loss_name: str = ""  # as the client called it


class StepRequest(Record):
    """A step of Adam with decoupled weight decay, after which the gradients are zero."""

    kind: Literal["optim_step"] = "optim_step"
    learning_rate: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=None, gt=0)  # None: gradients are not clipped


class SaveRequest(Record):
    """A checkpoint of the run with a name. If nothing has changed since the newest checkpoint, that
    checkpoint gets the name."""

    kind: Literal["save"] = "save"
    name: str = Field(min_length=1, max_length=256)
    group: Literal["weights", "sampler"] = "weights"  # names of either group are independent


class LoadRequest(Record):
    """Loads the weights of a checkpoint of any run with the same LoRA shape. `optimizer` loads
    Adam's state too; without it Adam starts anew."""

    kind: Literal["load"] = "load"
    run: RunName
    step: int = Field(ge=0)
    optimizer: bool


class VoidRequest(Record):
    """Takes the place of a request that never came, so that later requests are computed. Its result
    is an error with this reason."""

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
    sha256: str | None = None  # of the packed arrays of a `PassRequest`
    created: float  # Unix seconds


class RequestError(Record):
    """`category`: who can do something about the error."""

    category: Literal["user", "server"]
    message: str


class RequestResult(Record):
    """The result of a request: `runs/<run>/requests/<seq>/result.json`. The log-probs of a pass are
    in a file beside it. A request with an error changed nothing, except that a failed optimizer
    step discards the gradients. Names of metrics that are sums over a pass end in `:sum`."""

    error: RequestError | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    step: int | None = None  # the checkpoint that a `SaveRequest` names
    finished: float  # Unix seconds


class SavedName(Record):
    """One entry of `runs/<run>/names.json`: a client's name of a checkpoint."""

    group: Literal["weights", "sampler"]
    name: str
    step: int = Field(ge=0)
    created: float  # Unix seconds


class SavedNames(Record):
    """`runs/<run>/names.json`, which stays after the session has ended."""

    schema_version: Literal[1] = 1
    names: tuple[SavedName, ...] = ()
