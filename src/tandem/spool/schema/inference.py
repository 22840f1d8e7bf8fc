"""Records in which a publisher says how and where its vLLM is, for runner and ranks, which don't
talk to vLLM."""

from typing import Literal

from tandem.spool.schema.base import JobId, Record


class HoldAnswer(Record):
    """The publisher's answer to a hold. `refused`: vLLM does not sleep. `gone`: it died while it
    fell asleep. `why` has the reason of either."""

    runner: str
    job: JobId
    attempt: int
    outcome: Literal["asleep", "gone", "refused"]
    why: str = ""


class SharedVllm(Record):
    """`jobs/vllm.json`: how the vLLM is that shares its GPUs with the trainer. `gone`: it does not
    answer, or its engine is dead."""

    schema_version: Literal[1] = 1
    state: Literal["awake", "asleep", "gone"]
    why: str = ""  # it is not awake
    looked: float
    """When the publisher last looked for a hold, before it asked vLLM: seconds of the machine's
    monotonic clock, which the runner beside the same GPUs has too."""
    beat: float  # when it wrote this, by the same clock
    answer: HoldAnswer | None = None  # to the hold that there was then


class VllmPlace(Record):
    """`jobs/inference.json`, and in a replica's record: where an inference server is, for ranks
    that send it weights."""

    address: str
    network: str
    """Processes with the same `system.network.network_name` reach the server over loopback."""
