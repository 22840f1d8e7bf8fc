"""How and where vLLM is, as its publisher says: `jobs/vllm.json` (`SharedVllm`) on GPUs that it
shares with the trainer, and `jobs/inference.json` (`VllmPlace`) for ranks that send weights."""

from tandem.spool import fs
from tandem.spool.paths import Paths
from tandem.spool.replicas import Replicas
from tandem.spool.schema import SharedVllm, VllmPlace


class InferenceRecords:
    """A loss of power loses nothing that matters: the publisher, which it ends too, writes them
    again."""

    def __init__(self, paths: Paths, replicas: Replicas) -> None:
        self._paths, self._replicas = paths, replicas

    def shared(self) -> SharedVllm | None:
        """None before a publisher wrote it, or if the file is damaged."""
        return fs.read_undamaged(self._paths.shared_vllm, SharedVllm)

    def put_shared(self, record: SharedVllm) -> None:
        fs.write_json_atomic(self._paths.shared_vllm, record, durable=False)

    def put_place(self, place: VllmPlace) -> None:
        """Of the only inference server. One of several says it in its own record."""
        fs.write_json_atomic(self._paths.inference, place, durable=False)

    def places(self) -> list[VllmPlace]:
        """Where the inference servers are, as far as they have said so."""
        if replicas := self._replicas.fresh():
            return [record.place for record in replicas.values() if record.place is not None]
        only = fs.read_undamaged(self._paths.inference, VllmPlace)
        return [] if only is None else [only]
