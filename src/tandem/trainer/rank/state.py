"""The state that a resident rank keeps from one job to the next."""

import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tandem.families.arch import Arch
from tandem.model import parallel
from tandem.model.device import memory
from tandem.model.parallel import Topology
from tandem.spool import Spool
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import checkpoint, model_checkpoint
from tandem.trainer.rank.model_loader import Checked, LoadedModel
from tandem.trainer.rank.rendezvous import Assignment

_libc = ctypes.CDLL(None)


class RankState:
    """The state that a resident rank (`launch=resident`) keeps from one job to the next: process
    groups and the model.

    Between jobs, the model's device memory is released. A job that needs other groups or another
    model gets new groups and a new model.
    """

    def __init__(self) -> None:
        # `Assignment.requirements` of the kept groups and model.
        self._requirements: tuple[object, ...] | None = None
        self._topology: Topology | None = None
        self.model: LoadedModel | None = None
        self.checkpoint: tuple[str, int, str] | None = None
        """Run, step and job of the checkpoint to which the model's trained weights and Adam's state
        are equal."""

    def check_checkpoint(
        self, spool: Spool, assignment: Assignment, arch: Arch
    ) -> Future[Checked | None]:
        """Start a thread that checks the files of the checkpoint that the job starts from. Call
        this method before `join`."""
        run, step = assignment.run, assignment.job.base_step
        kept, self.checkpoint = self.checkpoint, None
        in_memory = assignment.requirements() == self._requirements and (
            kept == (run.name, step, spool.checkpoints.manifest(run.name, step).job)
        )

        def check() -> Checked | None:
            if in_memory:
                spool.checkpoints.verify(run.name, step)
                return None
            if run.lora is None:
                return model_checkpoint.find(spool, run.name, step, Path(assignment.model))
            return checkpoint.check_checkpoint(spool, run.name, step, arch, run.lora)

        thread = ThreadPoolExecutor(1)
        result = thread.submit(check)
        thread.shutdown(wait=False)
        return result

    def join(
        self, assignment: Assignment, settings: RankSettings, connect: Callable[[], None]
    ) -> Topology:
        """The process groups for the job: either the kept groups or new groups. If the groups are
        new, the kept model is discarded.

        Args:
            settings: the settings, of which only the sizes of the parallel dimensions are used.
            connect: a function that joins torch's default process group; called only for new
                groups.
        """
        if assignment.requirements() != self._requirements or self._topology is None:
            if self.model is not None:
                self.model = None
                gc.collect()
                memory.release_cached()
            parallel.destroy()  # destroying the groups is a collective of all ranks
            connect()
            timeout = assignment.job.stall_seconds
            self._topology = parallel.init_parallel(settings.sizes, timeout_seconds=timeout)
            self._requirements = assignment.requirements()
        return self._topology

    def offload(self) -> None:
        """Release the model's device memory, and all memory that allocators keep unused."""
        if self.model is not None and not self.model.policy.offloaded:
            self.model.policy.offload()
            self.model.optimizer.offload()
        gc.collect()  # frees graphs and buffers in reference cycles
        memory.release_cached()
        _libc.malloc_trim(0)  # without this call, every job fragments the heap further
