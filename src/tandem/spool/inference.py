"""The state and the address of vLLM, written by its publisher. `jobs/vllm.json` (`SharedVllm`) has
the state of a vLLM that shares GPUs with the trainer. `jobs/inference.json` (`VllmPlace`) has the
address for ranks that send weights."""

from tandem.spool import fs
from tandem.spool.paths import Paths
from tandem.spool.replicas import Replicas
from tandem.spool.schema import Hold, HoldAnswer, SharedVllm, VllmPlace


class InferenceRecords:
    """Writes and reads the publisher's records. The writes are not durable, because a publisher
    writes its records again when it starts after a power loss."""

    def __init__(self, paths: Paths, replicas: Replicas) -> None:
        self._paths, self._replicas = paths, replicas

    def shared(self) -> SharedVllm | None:
        """The state of a vLLM that shares its GPUs; None if no publisher has written the state, or
        if the file is damaged."""
        return fs.read_undamaged(self._paths.shared_vllm, SharedVllm)

    def put_shared(self, record: SharedVllm) -> None:
        fs.write_json_atomic(self._paths.shared_vllm, record, durable=False)

    def put_place(self, place: VllmPlace) -> None:
        """Writes the address of the only inference server. If there are several servers, each
        server's own record in `replicas/` contains its address."""
        fs.write_json_atomic(self._paths.inference, place, durable=False)

    def places(self) -> list[VllmPlace]:
        """The addresses of the inference servers that have published an address."""
        if replicas := self._replicas.fresh():
            return [record.place for record in replicas.values() if record.place is not None]
        only = fs.read_undamaged(self._paths.inference, VllmPlace)
        return [] if only is None else [only]


def same_attempt(one: Hold | HoldAnswer | None, other: Hold | None) -> bool:
    """Whether both records belong to the same attempt of the same runner, or both are None."""
    if one is None or other is None:
        return one is other
    return (one.runner, one.job, one.attempt) == (other.runner, other.job, other.attempt)
