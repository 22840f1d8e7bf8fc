"""Records in which a publisher reports the state and the place of its vLLM to runner and ranks,
which don't talk to vLLM."""

from typing import Literal

from tandem.spool.schema.base import JobId, Record


class HoldAnswer(Record):
    """The publisher's answer to a hold. `refused`: vLLM does not sleep. `gone`: it died while it
    fell asleep. `why`: the reason for either."""

    runner: str
    job: JobId
    attempt: int
    outcome: Literal["asleep", "gone", "refused"]
    why: str = ""


class SharedVllm(Record):
    """`jobs/vllm.json`: the state of a vLLM that shares its GPUs with the trainer. `gone`: vLLM
    does not answer, or its engine is dead."""

    schema_version: Literal[1] = 1
    state: Literal["awake", "asleep", "gone"]
    why: str = ""  # why vLLM is not awake
    looked: float
    """When the publisher last looked for a hold, before it asked vLLM. Seconds of the machine's
    monotonic clock, which the runner beside the same GPUs shares."""
    beat: float  # when it wrote this, by the same clock
    answer: HoldAnswer | None = None  # to the hold that there was then


class VllmPlace(Record):
    """The place of an inference server, for ranks that send weights to it: `jobs/inference.json`,
    or a field of a replica's record."""

    address: str
    network: str
    """Processes with the same `system.network.network_name` reach the server over loopback."""
