"""Records of the inference servers behind one address, and of the steps that each of them
serves."""

from typing import Annotated

from pydantic import Field

from tandem.errors import PATTERN_WORDS
from tandem.spool.schema.base import Record
from tandem.spool.schema.inference import VllmPlace
from tandem.spool.schema.runs import Refused, Served
from tandem.system.environment import REPLICA_PATTERN

PATTERN_WORDS |= {
    REPLICA_PATTERN: (
        "use lower-case letters, digits, '.' and '-', at most 63; a letter or digit at both ends"
    )
}
ONLY = "only"
"""For ranks that send whole weights: the name of the only inference server, which has no name of
its own."""

ReplicaId = Annotated[str, Field(pattern=REPLICA_PATTERN)]


class Replica(Record):
    """`replicas/<id>.json`: one vLLM with its publisher, which rewrites the record while it lives.

    If `ready` is true, a step is announced only after this replica serves the step or, with merged
    weights, a newer step. `why` is the reason why the replica is not ready.
    """

    replica: ReplicaId
    url: str  # the URL at which the publisher reaches vLLM
    host: str
    place: VllmPlace | None = None
    pid: int  # process id of the publisher
    started: float  # Unix seconds
    beat: float  # Unix seconds
    ready: bool = False
    why: str = ""


class ReplicaServed(Record):
    """`runs/<run>/served/<id>.json`: the steps of a run that one replica has loaded and verified,
    newest first. `refused` is the newest step that the replica refused."""

    steps: tuple[Served, ...] = ()
    refused: Refused | None = None
