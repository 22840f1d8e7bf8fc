"""Records in which a publisher reports about its vLLM. `SharedVllm` tells the runner whether vLLM
is awake. `VllmPlace` tells ranks the address to which they send weights."""

from typing import Literal

from tandem.spool.schema.base import JobId, Record


class HoldAnswer(Record):
    """The publisher's answer to a hold, with which a runner asks for shared GPUs. The outcome
    `refused` means that vLLM stays awake. The outcome `gone` means that vLLM died while it was put
    to sleep. `why` is the reason for `refused` or `gone`."""

    runner: str
    job: JobId
    attempt: int
    outcome: Literal["asleep", "gone", "refused"]
    why: str = ""


class SharedVllm(Record):
    """`jobs/vllm.json`: the state of a vLLM that shares its GPUs with the trainer. The state `gone`
    means that vLLM does not answer, or that its engine is dead."""

    schema_version: Literal[1] = 1
    state: Literal["awake", "asleep", "gone"]
    why: str = ""  # reason why vLLM is not awake
    looked: float
    """The time at which the publisher last looked for a hold, before it asked vLLM. The time is in
    seconds of the machine's monotonic clock. The runner is on the same machine and uses the same
    clock."""
    beat: float  # time of this record, in seconds of the same clock as `looked`
    answer: HoldAnswer | None = None  # the answer to the hold that existed at the time `looked`


class VllmPlace(Record):
    """The address of an inference server, for ranks that send weights to it: `jobs/inference.json`,
    or a field of a replica's record."""

    address: str
    network: str
    """Processes with the same `system.network.network_name` reach the server over loopback."""
