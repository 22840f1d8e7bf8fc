"""The thread that advances fine-tunings. The thread validates the files of a fine-tuning, creates
its run, submits the jobs of its chain, and records its end. Each job is submitted while the
previous job trains. All state of the thread is on the volume. Each round compares the fine-tuning's
record with the run and the run's jobs, and takes the next step. If the controller dies, the next
controller continues from the state on the volume.
"""

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from itertools import batched
from typing import Any, Literal

from pydantic_core import to_json

from tandem.controller.deployment import Deployment
from tandem.controller.openai.hyperparameters import (
    checkpoint_every,
    resolved,
    row_length,
    training,
)
from tandem.controller.openai.lines import in_lines
from tandem.controller.openai.progress import measured, part_id, part_jobs, results, steps_made
from tandem.controller.routes_runs import make_fork, make_run, run_spec
from tandem.controller.routes_train import queue_job
from tandem.controller.schemas import CreateRun
from tandem.data.chain_plan import ChainPlan
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import PreferencePair
from tandem.data.packing import slots_of
from tandem.data.render import check_vocabulary, render
from tandem.errors import Conflict, InvalidInput, NotFound, TandemError
from tandem.spool import Spool, fs
from tandem.spool.schema import PENDING, JobState, LoraShape, RunSpec
from tandem.spool.schema.tuning import Hyperparameters, Tuning, TuningEnd, TuningPlan, Upload
from tandem.system.api_keys import asking
from tandem.system.logs import Log

EndStatus = Literal["succeeded", "failed", "cancelled"]
OPEN_CHAINS = 2
"""The number of chains whose files stay open and parsed between jobs. The files of other chains are
parsed again for each job."""
POLL_SECONDS = 1.0
_LONGEST_PAUSE = 10.0
_CHUNK, _CHUNK_BYTES = 256, 4 * 2**20
"""The most examples that are rendered together, and the most bytes (approximately) of their
lines."""
_REST = 4.0
"""The pause after a round over all fine-tunings, as a multiple of the round's duration. The pause
keeps the volume and the interpreter mostly free, however many fine-tunings there are."""

log = Log("controller")


class _Failed(Exception):
    """Raised when the fine-tuning has failed."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class Tuner:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._ended = set[str]()
        # The chains of the fine-tunings that train; the chains' files are open.
        self._chains: dict[str, ChainPlan] = {}
        # Finished plans that could not be written to the record yet, because the volume refused the
        # write. Plans are kept because measuring all examples again takes minutes.
        self._plans: dict[str, TuningPlan] = {}
        # the last problem of each fine-tuning, so that each problem is logged once
        self._said = dict[str, str]()

    def run(self, stop: threading.Event) -> None:
        """Runs the thread until `stop` is set."""
        pause = POLL_SECONDS
        while not stop.wait(pause):
            begin = time.monotonic()
            try:
                self._deployment.spool.check()
                for tuning_id in reversed(self._deployment.spool.tunings.ids()):
                    if tuning_id not in self._ended:
                        self._look(tuning_id)
            except Exception as error:  # the volume may work again later
                self._say("", f"{type(error).__name__}: {error}")
            pause = min(_LONGEST_PAUSE, max(POLL_SECONDS, _REST * (time.monotonic() - begin)))

    def _look(self, tuning_id: str) -> None:
        try:
            tuning = self._deployment.spool.tunings.get(tuning_id)
            if tuning.end is None:
                self.advance(tuning)
            else:
                self._ended.add(tuning_id)
                self._chains.pop(tuning_id, None)
                self._plans.pop(tuning_id, None)
            self._said.pop(tuning_id, None)
        # If a record is damaged or the volume refuses a change, the other fine-tunings continue.
        except Exception as error:
            self._say(tuning_id, f"{type(error).__name__}: {error}")

    def _say(self, tuning_id: str, problem: str) -> None:
        if self._said.get(tuning_id) != problem:
            self._said[tuning_id] = problem
            log.warning("can't carry a fine-tuning on now", id=tuning_id, problem=problem)

    def advance(self, tuning: Tuning) -> None:
        """Takes the next step of the fine-tuning, if the next step is possible now."""
        asking.set(tuning.submitted_by or "")
        try:
            if tuning.cancelled is not None:
                self._cancel(tuning)
            elif tuning.plan is None:
                if not tuning.paused:
                    self._validate(tuning)
            else:
                self._train(tuning, tuning.plan)
        except _Failed as failed:
            self._fail(tuning, failed.code, failed.message, failed.param)
        except TandemError as error:
            if error.retriable:
                self._say(tuning.id, str(error))
                return
            self._fail(tuning, error.code, str(error))
        except OSError:
            raise
        except Exception as error:
            log.error("a fine-tuning failed", id=tuning.id, exc_info=True)
            message = f"{type(error).__name__} in the controller; its log has the traceback"
            self._fail(tuning, "server_error", message)

    def _cancel(self, tuning: Tuning) -> None:
        """Ends the fine-tuning once all of its jobs have ended. This method also cancels the jobs,
        because the controller may have died before the route cancelled them."""
        if not cancel_jobs(self._deployment.spool, tuning):
            self._end(tuning, "cancelled")

    def _validate(self, tuning: Tuning) -> None:
        """Plans the fine-tuning, and makes its run."""
        deployment = self._deployment
        if (plan := self._plans.get(tuning.id)) is None:
            plan = self._plans[tuning.id] = self._plan(tuning)
        if tuning.origin is None:
            make_run(deployment, spec_of(deployment, tuning))
        else:
            make_fork(deployment, tuning.origin, tuning.run)
        deployment.spool.tunings.change(
            tuning.id, lambda now: now.model_copy(update={"plan": plan})
        )

    def _plan(self, tuning: Tuning) -> TuningPlan:
        """The plan. Renders all lines once before training, so that no line is refused in the
        middle of the training."""
        upload, _ = self._uploads(tuning)
        values = resolved(tuning.hyperparameters, tuning.method, upload.lines)
        every = checkpoint_every(_whole(values.batch_size), upload.lines, upload.size)
        positions = self._deployment.arch.max_positions
        chain = self._open(tuning, values, checkpoint_every=every)
        chunk = max(1, min(_CHUNK, _CHUNK_BYTES * upload.lines // max(upload.size, 1)))
        longest, tokens = self._measure(tuning, chain, positions, chunk)
        steps = chain.total // chain.config.epochs
        return TuningPlan(
            hyperparameters=values,
            sequence_length=row_length(longest, tokens, steps, positions),
            checkpoint_every=every,
            steps=chain.total,
            parts=len(chain.slices),
            tokens=tokens * chain.config.epochs,
            made=time.time(),
        )

    def _measure(
        self, tuning: Tuning, chain: ChainPlan, positions: int, together: int
    ) -> tuple[int, int]:
        """The number of slots of the longest example, and the number of tokens of all trained
        examples. Raises _Failed that names the line of an example that can't be trained."""
        tokenizer = load_tokenizer(self._deployment.model_path)
        day = datetime.fromtimestamp(tuning.created, UTC).date()
        longest = tokens = number = 0
        for chunk in batched(chain.parsed(), together):
            places, items = zip(*chunk, strict=True)
            try:
                rendered = render(tokenizer, items, places, day)
                for place, item, sequences in zip(places, items, rendered, strict=True):
                    check_vocabulary(item, sequences, self._deployment.arch.vocab_size, place)
                    pair = isinstance(item, PreferencePair)
                    slots = (
                        slots_of(sequences) if pair else max(len(one.tokens) for one in sequences)
                    )
                    if slots > positions:
                        problem = f"the example takes {slots} tokens, and the model has {positions}"
                        raise InvalidInput(f"{problem}; shorten it or leave it out", field=place)
                    longest = max(longest, slots)
                    tokens += slots if number < chain.examples else 0
                    number += 1
            except InvalidInput as error:
                raise _bad_file(tuning, error) from error
        return longest, tokens

    def _uploads(self, tuning: Tuning) -> tuple[Upload, Upload | None]:
        found: list[Upload | None] = []
        for param in ("training_file", "validation_file"):
            upload_id = getattr(tuning, param)
            try:
                found.append(self._deployment.spool.uploads.get(upload_id) if upload_id else None)
            except NotFound as error:
                raise _Failed(f"invalid_{param}", error.message, param) from error
        training_file, validation_file = found
        assert training_file is not None
        return training_file, validation_file

    def _open(self, tuning: Tuning, values: Hyperparameters, **more: int) -> ChainPlan:
        """Returns the fine-tuning's chain. The files of the chain are open and their lines are
        parsed."""
        spool = self._deployment.spool
        uploads = [one for one in self._uploads(tuning) if one is not None]
        for one in uploads:
            spool.uploads.reader(one).close()  # fails if the upload is no longer a regular file
        config = training(tuning, values, list(map(spool.uploads.path, uploads)), **more)
        try:
            return ChainPlan(config)
        except InvalidInput as error:  # the uploaded file was altered
            raise _bad_file(tuning, error) from error

    def _train(self, tuning: Tuning, plan: TuningPlan) -> None:
        """Submits jobs so that one job trains and the next job waits in the queue. When all parts
        have succeeded, calls `_complete`."""
        spool = self._deployment.spool
        done = steps_made(spool, tuning)
        if done >= plan.parts:
            self._complete(tuning, plan)
            return
        states = [self._state(tuning, part) for part in range(done, min(done + 2, plan.parts))]
        # the controller may have died before the pausing route cancelled the jobs
        if tuning.paused:
            cancel_jobs(spool, tuning, states=("queued",))
            return
        if "cancelled" in states:  # by an operator
            self._change(tuning, cancelled=time.time())
            return
        for part, state in enumerate(states, done):
            if state is None:
                try:
                    self._submit(tuning, plan, part)
                except Conflict:
                    if part == done:
                        raise
                    return  # the previous part's job has changed its state meanwhile

    def _state(self, tuning: Tuning, part: int) -> JobState | None:
        """The state of the part's job; None if the job has not been submitted yet. Raises _Failed
        if the job failed."""
        jobs = part_jobs(self._deployment.spool, tuning, part)
        for state, job in reversed(jobs):
            if state in PENDING:
                return state
            if state == "failed":
                error = job.result.error if job.result else None
                reason = f": {error.message}" if error else ""
                code = error.type if error else "job_failed"
                raise _Failed(code, f"job {job.spec.id} failed{reason}")
            if state == "succeeded":
                if steps_made(self._deployment.spool, tuning) <= part:
                    raise _Failed("conflict", f"the run {tuning.run} was rolled back")
                return state
        # A job that a pause has cancelled is ignored: after the pause, the part gets a job with
        # another id.
        last = jobs[-1][1].spec.id if jobs else ""
        return "cancelled" if last == part_id(tuning, part, tuning.pauses) else None

    def _submit(self, tuning: Tuning, plan: TuningPlan, part: int) -> None:
        if (chain := self._chains.pop(tuning.id, None)) is None:
            chain = self._open(
                tuning,
                plan.hyperparameters,
                checkpoint_every=plan.checkpoint_every,
                sequence_length=plan.sequence_length,
            )
        self._chains[tuning.id] = chain  # most recently used
        while len(self._chains) > OPEN_CHAINS:
            del self._chains[next(iter(self._chains))]
        name = part_id(tuning, part, tuning.pauses)
        request = chain.request(chain.slices[part], name, 0, {"fine_tuning_job": tuning.id})
        try:
            job, new = queue_job(self._deployment, tuning.run, to_json(request))
        except InvalidInput as error:
            raise _bad_file(tuning, chain.as_given(error, chain.slices[part])) from error
        if new:
            self._deployment.counts.inc("tandem_jobs_submitted_total", kind=job.spec.kind)

    def _complete(self, tuning: Tuning, plan: TuningPlan) -> None:
        """Ends the fine-tuning once vLLM serves the run's last step, or once the publisher has
        refused the last step."""
        spool = self._deployment.spool
        served = spool.served.get(tuning.run)
        if served is not None and served.step >= plan.parts:
            self._end(tuning, "succeeded", result_file=self._write_results(tuning))
            return
        refused = spool.served.refused(tuning.run) if served is None else served.refused
        if refused is not None and refused.step == plan.parts:
            raise _Failed("step_refused", f"vLLM can't serve it: {refused.reason}")

    def _write_results(self, tuning: Tuning) -> str:
        """Writes the result file. The file's id is derived from the fine-tuning's id, so that a
        repeated call does not make a second file."""
        spool = self._deployment.spool
        rows = measured(spool, tuning)
        content = results(rows)
        upload = Upload(
            id=f"file-{tuning.id.removeprefix('ftjob-')}",
            filename="step_metrics.csv",
            purpose="fine-tune-results",
            lines=len(rows),
            size=len(content),
            created=time.time(),
        )
        with spool.uploads.receiving() as staged:
            fs.write_atomic(staged / f"{upload.id}.csv", content)
            spool.uploads.commit(staged, upload)
        return upload.id

    def _change(self, tuning: Tuning, **update: Any) -> None:
        """Changes the record, unless the client has paused, resumed or cancelled the fine-tuning
        since the record was read. After such a request the update may be wrong, because it may come
        from states of jobs that the request itself has caused."""

        def changed(now: Tuning) -> Tuning:
            same = _steered(now) == _steered(tuning)
            return now.model_copy(update=update) if same else now

        self._deployment.spool.tunings.change(tuning.id, changed)

    def _fail(self, tuning: Tuning, code: str, message: str, param: str | None = None) -> None:
        cancel_jobs(self._deployment.spool, tuning)
        self._end(tuning, "failed", code=code, message=message, param=param)

    def _end(self, tuning: Tuning, status: EndStatus, **more: Any) -> None:
        end = TuningEnd.model_validate({"status": status, "finished": time.time(), **more})
        self._change(tuning, end=end)
        log.info("a fine-tuning has ended", id=tuning.id, status=status, reason=end.message)


def spec_of(deployment: Deployment, tuning: Tuning) -> RunSpec:
    """The run that the fine-tuning trains. The run gets the creation time of the fine-tuning. Chat
    templates print the run's creation day as the date."""
    rank = min(LoraShape().rank, deployment.settings.max_lora_rank)
    request = CreateRun(name=tuning.run, lora=LoraShape(rank=rank), seed=tuning.seed)
    spec = run_spec(deployment, request)
    return spec.model_copy(update={"created": tuning.created})


def cancel_jobs(spool: Spool, tuning: Tuning, *, states: Collection[str] = PENDING) -> bool:
    """Cancels the fine-tuning's jobs. Returns whether there were any jobs to cancel.

    Args:
        states: only jobs in these states are cancelled: "queued", "running" or both.
    """
    found = False
    with suppress(NotFound):
        for state, job in spool.jobs.pending(tuning.run):
            if job.spec.id.startswith(f"{tuning.id}.") and state in states:
                found = True
                if not (state == "running" and spool.jobs.cancel_requested(job.spec.id)):
                    spool.queue.cancel(job.spec.id)
    return found


def _bad_file(tuning: Tuning, error: InvalidInput) -> _Failed:
    """The failure for an error in a file. Its `param` is `training_file` or `validation_file`."""
    of_validation = tuning.validation_file is not None and tuning.validation_file in str(error)
    param = "validation_file" if of_validation else "training_file"
    return _Failed(f"invalid_{param}", in_lines(error), param)


def _steered(tuning: Tuning) -> tuple[object, ...]:
    """The fields of the record that change when the client pauses, resumes or cancels the
    fine-tuning."""
    return tuning.paused, tuning.pauses, tuning.cancelled


def _whole(value: int | str) -> int:
    assert isinstance(value, int)
    return value
