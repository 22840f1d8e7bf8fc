"""What the spool's tests share."""

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from tandem.errors import Conflict, TandemError
from tandem.spool import Spool
from tandem.spool.schema import Job, JobError, JobResult, JobSpec, PackedData, RLJob, RunSpec

LOST = JobError(type="runner_lost", message="gone", retriable=True)


def write_adapter(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    (directory / "adapter_config.json").write_text("{}")


def run_spec(name: str = "r", **more) -> RunSpec:
    return RunSpec(name=name, base_model="base", created=time.time(), **more)


def spool_with_run(root: Path, name: str = "r") -> Spool:
    spool = Spool.create(root)
    spool.runs.create(run_spec(name), write_adapter)
    return spool


def maker(run: str = "r", fingerprint: str = "f", **more) -> Callable[[str, int, Path], JobSpec]:
    def make(job_id: str, base_step: int, directory: Path) -> JobSpec:
        (directory / "tokens.npy").write_bytes(b"tokens of " + job_id.encode())
        data = PackedData(
            path="", num_rows=1, sequence_length=8, num_items=1, num_tokens=1, num_unshared_tokens=1,
            num_trajectories=1, num_groups=1,
        )  # fmt: skip
        return RLJob(
            id=job_id, run=run, base_step=base_step, created=time.time(), fingerprint=fingerprint, data=data, **more
        )

    return make


def submit(spool: Spool, job_id: str | None = None, run: str = "r", base_step: int | None = None, **more) -> Job:
    fingerprint = more.pop("fingerprint", "f")
    make = maker(run, fingerprint, **more)
    job, _ = spool.queue.submit(make, run=run, job_id=job_id, fingerprint=fingerprint, base_step=base_step)
    return job


def stage(spool: Spool, job: Job, content: bytes = b"trained") -> Path:
    staged = spool.paths.work_dir(job.spec.id, job.attempt) / "checkpoint"
    (staged / "optimizer").mkdir(parents=True)
    (staged / "adapter_model.safetensors").write_bytes(content)
    (staged / "optimizer/adam.safetensors").write_bytes(b"adam" + content)
    return staged


def commit(spool: Spool, job: Job, content: bytes = b"trained") -> None:
    spool.checkpoints.commit(stage(spool, job, content), job.spec.run, job.spec.base_step + 1, job.spec.id)


def succeeded(job: Job) -> JobResult:
    return JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())


def failed(message: str = "no") -> JobResult:
    return JobResult(state="failed", error=JobError(type="rank_error", message=message), finished=time.time())


def train_one(spool: Spool, run: str = "r") -> Job:
    """One job from submission to the end."""
    job = submit(spool, run=run)
    claimed = spool.queue.claim("runner")
    assert claimed is not None
    assert claimed.spec.id == job.spec.id
    commit(spool, claimed)
    spool.queue.finish(claimed, succeeded(claimed))
    return claimed


@contextmanager
def refused(kind: type[TandemError], field: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(kind, match=match) as caught:
        yield
    assert caught.value.field == field


@contextmanager
def may_conflict(field: str) -> Iterator[None]:
    """A Conflict about `field` is fine here."""
    try:
        yield
    except Conflict as error:
        if error.field != field:
            raise


def tree(root: Path) -> dict[str, bytes | None]:
    """Every path under root with its content; directories map to None."""
    found = {}
    for path in sorted(root.rglob("*")):
        found[path.relative_to(root).as_posix()] = path.read_bytes() if path.is_file() else None
    return found


def temporary_names(root: Path) -> list[str]:
    return [name for name in tree(root) if "/." in "/" + name]


# ---------------------------------------------------------------- dying on purpose

_CHANGES = ("write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "open")


class DiedError(BaseException):
    """The end of a process that `dying_at` stands for."""


def die() -> NoReturn:
    raise DiedError


@contextmanager
def dying_at(count: int, die: Callable[[], NoReturn] = die) -> Iterator[None]:
    """Calls `die` instead of the `count`-th call within that changes the file system, and of all calls after it: a dead
    process can't clean up. The write that dies writes half of its bytes before; the open that dies empties its file."""
    calls = 0

    def mortal(real: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal calls
            if real is io_open and not set(str(args[1:2])) & set("wax+"):  # reading
                return real(*args, **kwargs)
            calls += 1
            if calls == count and real is os_write:
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            if calls == count and real is io_open:
                real(*args, **kwargs).close()
            if calls >= count:
                die()
            return real(*args, **kwargs)

        return call

    io_open, os_write = io.open, os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", mortal(io.open))
        for name in _CHANGES:
            patch.setattr(os, name, mortal(getattr(os, name)))
        yield


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked child; its exit status: 0 if it ended well, -9 if it killed itself."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


# ---------------------------------------------------------------- volumes


@contextmanager
def mounted(directory: Path, *options: str) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, str(directory)], capture_output=True, check=False).returncode:
        pytest.skip("this test needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """The directory, bind-mounted onto itself read-only."""
    with mounted(directory, "--bind", str(directory)):
        if subprocess.run(
            ["mount", "-o", "remount,bind,ro", str(directory)], capture_output=True, check=False
        ).returncode:
            pytest.skip("this test needs the right to remount")
        yield


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
