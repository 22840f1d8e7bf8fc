"""The spool: the volume that controller, trainer and inference share. The class `Spool` opens the
spool, and all access to the spool goes through this class.

`queue.py` claims jobs, ends jobs, and puts jobs back into the queue for the next attempt.
`job_checks.py` checks a job before the job is queued. `session_jobs.py` queues the jobs of
sessions. `recovery.py` ends or requeues the jobs that a dead runner left, and removes temporary
files of dead processes. `attempt.py` names the files of one attempt, and `fence.py` permanently
ends an attempt. `replicas.py` announces the steps that several inference servers have in common;
`inference.py` records the state and the address of vLLM. `sessions.py` stores the sessions, whose
clients train by single API calls. `requests.py` stores the calls of sessions. `tunings.py` stores
the files and jobs of OpenAI's API. `locks.py` has the leases of jobs and the hold, which reserves
shared GPUs for the trainer. `removal.py` removes files that the settings `keep_*` don't keep. No
other package builds a path on the volume.

    <root>/
      spool.json                          marks the directory as a spool and names its version
      uploads/<file id>/                  a file of OpenAI's API and its record; immutable once it
                                          has this name
      tunings/<job id>.json               a job of OpenAI's API: what was asked, what its files
                                          decided, how it ended
      sessions/<id>/session.json          a session, whose client trains by single calls; beat.json:
                                          when the client was last heard of; end.json: how it ended
      runs/<run>/run.json                 base model, LoRA shape, seed; written once
      runs/<run>/checkpoints/00000007/    immutable once it has this name
          adapter_model.safetensors  adapter_config.json
                                          PEFT's format and key names, fp32
          optimizer/adam.safetensors      exp_avg, exp_avg_sq, step, by the adapter's key names; any
                                          topology reads it
          manifest.json                   step, job, topology, versions, probe, size and SHA-256 of
                                          each file
      runs/<run>/discarded/               checkpoints that a rollback took out of the chain
      runs/<run>/pinned/00000007          marks a checkpoint that stays, whatever the settings keep
      runs/<run>/merged/00000007-<12 hex>/
                                          with TANDEM_TRANSPORT=volume: the merged weights of one
                                          checkpoint as a Hugging Face model; the two newest steps
                                          and the served one
      runs/<run>/served.json              the step that vLLM serves, and the result of its
                                          verification; absent while vLLM serves none
      runs/<run>/served/<id>.json         with several inference servers: the steps that one of them
                                          serves
      replicas/<id>.json                  with several inference servers: one of them, which
                                          rewrites it every 2 s: its address, whether it is ready,
                                          and why not
      runs/<run>/refused.json             the newest step that the publisher refused, while vLLM
                                          serves none
      sessions/<id>/model-<n>.json  sampler-<n>.json
                                          what the session's client calls its base model; what each
                                          of its samplers samples from, touched when it samples
      runs/<run>/wanted/<step>            a step that a sampler asks for and vLLM does not have; its
                                          time says when
      runs/<run>/requests/00000007/       of a session's run: a request, made whole by one rename;
                                          then its result
          request.json  arrays.npy        its kind and settings; packed arrays of a forward pass,
                                          until a checkpoint has what it did
          result.json  logprobs.f32       written by rank 0, not durably: what is lost is computed
                                          again, to the same bits
      runs/<run>/names.json               a client's names of checkpoints; these are pinned
      jobs/live/<run>/<bucket>/<key>/     a job that has not ended; <key> is <submitted, µs>,<base
                                          step>,<run>,<id>; a bucket has the jobs of 250 base steps
          job.json                        everything about the job; `state` is where it is; replaced
                                          by rename
          events.jsonl                    one JSON object per line, from the claim to the end
          log                             the output of the job's ranks
          data/arrays.npy                 the job's packed arrays in one file, memory-mapped. The
                                          job has its SHA-256
          lease.json                      the runner's heartbeat while the job runs
          cancel                          a request to cancel the job
          attempts/<n>/                   logs, heartbeats, errors and the staged checkpoint of one
                                          attempt; hosts/ has the records of its hosts' agents
      jobs/active/<key>                   names a live job that runs or is being ended
      jobs/ended/<digit>/<key>,<state>/   a job that has ended: job.json, events.jsonl, log; <digit>
                                          is the first of the SHA-256 of its id
      jobs/damaged/<key>.<ULID>/          a job whose job.json could not be read, set aside; removed
                                          with the ended jobs of that age
      jobs/hold.json                      on shared GPUs: the record that they belong to the trainer
      jobs/vllm.json                      on shared GPUs: the publisher says how vLLM is, and
                                          answers the hold
      jobs/inference.json                 with TANDEM_TRANSPORT=nccl: the publisher says where vLLM
                                          is; of several servers each says it in replicas/<id>.json

Checks: a rank computes the hashes in an adapter's manifest from the bytes in its memory. The rank
does not read the adapter's file back, because the data would come from the page cache. If all
weights are trained, several ranks write the files of the weights, and these files are read back to
compute their hashes. The next job and the publisher hash the files that they read. They compare
these hashes with the manifest.

Commit by rename (`fs.py`): a file or directory that has its final name is complete. On NFS, a
reader opens the parent directory before it relies on the absence of a name. `checkpoints.py`
commits a checkpoint, and `runs.py` writes its manifest. A submission writes a job's directory under
a temporary name, and one rename creates the job. When a job has ended, the files that only a queued
or running job needs are removed. One rename then moves the job's directory to `jobs/ended/`. The
name of a directory in `jobs/ended/` contains the job's state.

The names of directories give the order of jobs: a job's key contains its submission time, base
step, run and id. The queue, lists and counts of jobs are computed from the keys. A program
therefore opens only the files of the jobs that it needs. A claim takes the oldest queued job whose
run has no running job. A program that needs the running jobs reads the jobs that `jobs/active/`
names. A name in `jobs/active/` is written before the job's state changes from `queued`, and removed
after the job is queued again or has ended. The next claim removes a name in `jobs/active/` whose
job no longer runs. A directory that has not changed is not listed again (`listing` in `paths.py`,
`Index` in `jobs.py`). The lists of names are caches: a process may drop them at any time.

Removal by rename (`removal.py`): the controller removes files that the settings `keep_*` don't
keep. A run, a checkpoint or an ended job is renamed to a temporary name, and then its files are
removed.

Damage stays local. The directory of a job whose `job.json` can't be read is moved to
`jobs/damaged/`, and the job ends as `failed` with `job_damaged`. A `job.json` with keys that only a
newer version of Tandem knows is left unchanged, and its job waits for that version. Files of a
newer version exist during an upgrade, while the trainer still runs the old image. Lists of jobs
leave out directories whose names are not valid names of jobs. Lists of runs leave out runs without
a readable `run.json`. The log, the metric `tandem_spool_damaged` and `tandem doctor` report damaged
files. `python -m tests.fuzz.files` damages one file after another and lets every program read it.

A job's id is a ULID or an id that the client chose. Two submissions with the same id and the same
content are one job. A second submission with the same id and other content is refused as a
conflict. A job for base step N starts from checkpoint N and makes checkpoint N + 1. A job for base
step N is done if checkpoint N + 1 exists and this job made the checkpoint. A job with a result is
called decided. The job has ended once its terminal event is written. If a process dies after the
job's result and before the terminal event, the next process that finds the job writes the terminal
event.

The fence (`fence.py`): before an attempt ends without success, the directories that would become
its checkpoint are renamed. The fence then removes the attempt's directory. The fence repeats the
removal until the volume confirms that the attempt's directory no longer exists. A commit is a
rename out of the attempt's directory, so either the commit or the fence succeeds, never both. The
fence also stops a rank that was suspended and continues a day later. The NFS client of a suspended
rank may still have the old names in its cache. After the fence, a program looks for the attempt's
checkpoint again. If the attempt's checkpoint exists, the job has succeeded. A rank whose attempt
was ended can't append events (`Attempt.event`). Readers of events skip events that an attempt wrote
after its end.

Locks are fcntl locks on separate files (`locks.py`): `runs/<run>/lock`, `jobs/locks/`. The runner
holds `jobs/runner.lock`, and a second runner is refused. The publisher holds
`jobs/locks/publisher`; a second publisher logs which publisher holds the lock, and waits. If there
are several inference servers, each server has its own publisher. The publisher of one of several
servers holds the lock `replicas/<id>.lock`.

Events are appended under the job's lock. Readers of events ignore a half-written last line.

A volume of the previous format (`schema_version` 1 in `spool.json`) is refused. The previous and
the present format store runs in the same way. To upgrade a volume, let all jobs end, remove
`spool.json` and `jobs/`, and start the new version.
"""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryFile

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.checkpoints import Checkpoints, MergedFiles
from tandem.spool.events import Events
from tandem.spool.inference import InferenceRecords
from tandem.spool.jobs import Jobs
from tandem.spool.locks import (
    HoldRecord,
    Leases,
    file_lock,
    hold_publisher_lock,
    hold_runner_lock,
    runner_info,
)
from tandem.spool.paths import Paths, listing
from tandem.spool.queue import Queue
from tandem.spool.replicas import Replicas
from tandem.spool.requests import RequestLog
from tandem.spool.runs import Runs, ServedRecords
from tandem.spool.schema import SCHEMA_VERSION, RunnerInfo
from tandem.spool.sessions import CheckpointNames, TrainingSessions
from tandem.spool.tunings import Tunings, Uploads


def real_root(root: Path | str) -> Path:
    """The spool's directory with all links resolved. A link inside the spool can then be
    distinguished from a link in the path to the spool."""
    return Path(os.path.realpath(root))


class Spool:
    """A spool. Many processes may use a spool at once."""

    def __init__(self, root: Path | str) -> None:
        """Opens an existing spool, even if the volume is full or read-only. Raises SpoolUnusable if
        the spool can't be read."""
        self.root = real_root(root)
        self.paths = Paths(self.root)
        self.runs = Runs(self.paths)
        self.served = ServedRecords(self.runs)
        self.events = Events(self.paths)
        self.jobs = Jobs(self.paths, self.events)
        self.checkpoints = Checkpoints(self.runs, self.jobs)
        self.replicas = Replicas(self.paths, self.runs, self.served, self.checkpoints)
        self.merged = MergedFiles(self.runs, self.served, self.replicas.steps)
        self.leases = Leases(self.paths)
        self.hold = HoldRecord(self.paths)
        self.inference = InferenceRecords(self.paths, self.replicas)
        self.queue = Queue(
            self.paths, self.runs, self.checkpoints, self.jobs, self.events, self.leases
        )
        self.uploads = Uploads(self.paths)
        self.tunings = Tunings(self.paths)
        self.sessions = TrainingSessions(self.paths)
        self.requests = RequestLog(self.paths, self.runs, self.sessions)
        self.names = CheckpointNames(self.runs, self.checkpoints)
        self.check()

    @classmethod
    def create(cls, root: Path | str) -> "Spool":
        """Makes the directories that a spool lacks, and opens it. Raises SpoolUnusable if the
        volume refuses to make a directory. If `create` fails, a repeated call makes the directories
        that are still missing."""
        paths = Paths(real_root(root))
        with fs.volume_errors(paths.root):
            if fs.exists(paths.version_file):
                _check_version(paths)
            for directory in paths.directories:
                fs.make_dir(directory)
            # The lock files are made together with the spool, so that a full disk can't keep a
            # process from locking later.
            for file in paths.locks:
                if not fs.exists(file):
                    file.touch()
            if not fs.exists(paths.version_file):
                fs.write_atomic(
                    paths.version_file, json.dumps({"schema_version": SCHEMA_VERSION}).encode()
                )
        return cls(paths.root)

    def check(self) -> None:
        """Raises SpoolUnusable if the volume is no longer mounted. A mount point without its volume
        is an empty directory, which would look like a spool without runs and jobs."""
        _check_version(self.paths)

    def check_writable(self) -> None:
        """Raises SpoolUnusable if a small test file can't be written now. The test file is removed
        again."""
        with (
            fs.volume_errors(self.root),
            TemporaryFile(dir=self.root, prefix=fs.TEMPORARY, buffering=0) as file,
        ):
            fs.write_all(file.fileno(), b"\0" * 4096)
            os.fsync(file.fileno())

    def damage(self) -> dict[str, list[str]]:
        """The damaged entries that lists leave out, by kind. The kind `job` has the directories of
        damaged jobs. The kind `name` has paths whose names are not valid names of jobs. The kind
        `run` has the paths of damaged runs, each with its problem."""
        jobs = [str(self.paths.damaged / name) for name in listing(self.paths.damaged)]
        names = [str(path) for path in self.jobs.index.junk()]
        runs = [
            f"{self.paths.runs / name}: {problem}" for name, problem in self.runs.damaged().items()
        ]
        return {"job": jobs, "name": names, "run": runs}

    def job_lock(self, job_id: str) -> AbstractContextManager[int]:
        """The lock for changes of a job and its events. A caller that also needs `runs.lock` must
        take `runs.lock` before this lock."""
        return file_lock(self.paths.job_lock(job_id))

    def runner_lock(self, runner: str) -> AbstractContextManager[None]:
        """The lock that the only runner of the spool holds while it lives. If another runner holds
        the lock, raises SpoolUnusable with that runner's name."""
        return hold_runner_lock(self.paths, runner)

    def publisher_lock(self) -> AbstractContextManager[None]:
        """The lock that the only publisher of the spool holds while it lives. If another publisher
        holds the lock, raises SpoolUnusable with that publisher's name."""
        return hold_publisher_lock(self.paths)

    def runner(self) -> RunnerInfo | None:
        """The runner that holds the runner lock, or held it last; None if no runner ever held the
        lock. The runner itself must not call this method, because the call would release the
        runner's own lock."""
        return runner_info(self.paths)


def _check_version(paths: Paths) -> None:
    path = paths.version_file
    with fs.volume_errors(paths.root):
        content = fs.read_bytes(path)
    if content is None:
        reason = "it is a file" if paths.root.is_file() else f"{path} does not exist"
        raise SpoolUnusable(
            f"{paths.root} is not a spool: {reason}; set TANDEM_ROOT to the shared volume's"
            " directory, or make a spool there first (the controller and `tandem up` do)"
        )
    try:
        version = int(json.loads(content)["schema_version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SpoolUnusable(
            f'{path} is damaged; restore it: {{"schema_version": {SCHEMA_VERSION}}}'
        ) from error
    if version == SCHEMA_VERSION:
        return
    problem = f"{paths.root} has schema version {version}, this Tandem reads {SCHEMA_VERSION}"
    remedy = "use the same Tandem version in all containers"
    if version == 1:
        remedy = (
            "end its jobs with the Tandem that made it, stop that, and remove spool.json and jobs/:"
            " the runs stay"
        )
    raise SpoolUnusable(f"{problem}; {remedy}")
