"""Makes a job's checkpoint: all ranks write it, rank 0 commits it."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tandem.model import parallel
from tandem.spool.schema import Manifest, Probe
from tandem.trainer.rank import checkpoint, model_checkpoint
from tandem.trainer.rank.model_loader import LoadedModel
from tandem.trainer.rank.rendezvous import Assignment
from tandem.trainer.rank.session import Session
from tandem.training.sharded_adam import ShardedAdam


class NewCheckpoint:
    """A checkpoint that is being made. All ranks must call `write` and then `commit`, which are
    collective operations. Rank 0 hashes, writes and commits files in `thread`."""

    def __init__(
        self,
        session: Session,
        assignment: Assignment,
        model: LoadedModel,
        versions: dict[str, str],
        thread: ThreadPoolExecutor,
    ) -> None:
        """Starts to measure the time for the field `seconds` of the event `checkpoint`.

        Args:
            model: the loaded model, whose weights `write` reads.
            versions: package -> version, for the manifest.
            thread: a pool of one thread.
        """
        self._session, self._assignment, self._model = session, assignment, model
        self._versions, self._thread = versions, thread
        self._begin = time.perf_counter()
        self._written: Future[dict[str, str]] | None = None
        """On rank 0: the hashes of files that were hashed while they were written."""

    def write(self) -> None:
        """Starts to write the checkpoint's files. The files of an adapter may still be written when
        this method has returned."""
        session, assignment, model = self._session, self._assignment, self._model
        if isinstance(model.optimizer, ShardedAdam):
            model_checkpoint.write_model(
                session.attempt.staged,
                Path(assignment.model),
                model.policy,
                model.optimizer,
                beat=session.beat("checkpoint"),
            )
            if session.rank == 0:
                self._written = self._thread.submit(dict)
            return
        contents = checkpoint.gather_contents(model.policy, model.optimizer)
        if session.rank == 0:
            spool, base_step = session.attempt.spool, assignment.job.base_step
            config = checkpoint.config_file(spool, assignment.run.name, base_step)
            self._written = self._thread.submit(
                checkpoint.write_adapter, contents, config, session.attempt.staged
            )

    def commit(
        self, metrics: dict[str, float], probe: Probe, seq: int | None = None
    ) -> Manifest | None:
        """Make the files the run's next checkpoint. Returns the checkpoint's manifest on rank 0,
        and None on other ranks.

        While rank 0 hashes up to hundreds of gigabytes, all ranks wait in short collective
        operations and send heartbeats.

        Args:
            seq: for a session's run, the number of the last request whose effect is in the
                checkpoint.
        """
        committed: Future[Manifest] | None = None
        if self._written is not None:
            committed = self._thread.submit(
                self._commit, self._written, metrics=metrics, probe=probe, seq=seq
            )

        def done() -> bool:
            return committed is None or bool(wait([committed], timeout=1.0).done)

        while not parallel.gather_objects(done())[0]:
            self._session.heartbeat("checkpoint")
        return None if committed is None else committed.result()

    def _commit(self, written: Future[dict[str, str]], **details: Any) -> Manifest:
        attempt = self._session.attempt
        manifest = attempt.spool.checkpoints.commit(
            attempt.staged,
            self._assignment.run.name,
            self._assignment.job.base_step + 1,
            attempt.job,
            sha256=written.result(),
            check=attempt.check,
            topology=self._session.settings.sizes.manifest(),
            versions=self._versions,
            **details,
        )
        self._session.event(
            "checkpoint",
            step=manifest.step,
            sha256=manifest.weights_sha256,
            bytes=sum(entry.size for entry in manifest.files.values()),
            seconds=time.perf_counter() - self._begin,
        )
        return manifest
