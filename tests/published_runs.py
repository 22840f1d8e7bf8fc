"""Runs with checkpoints for the publisher's tests: real adapters, and probes from the real policy or from anywhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tandem.families.arch import read_arch
from tandem.families.identity import write_identity_adapter
from tandem.inference.publisher.store import WEIGHTS_FILE
from tandem.spool import Spool, fs
from tandem.spool.schema import LoraShape, Manifest, Probe, RunSpec

LORA = LoraShape(rank=4, alpha=10.0)


def make_run(spool: Spool, name: str, model: Path, lora: LoraShape = LORA) -> RunSpec:
    spec = RunSpec(name=name, base_model=str(model), lora=lora, created=time.time())

    def write(directory: Path) -> None:
        write_identity_adapter(directory, read_arch(str(model)), lora, base_model=str(model), seed=0)

    return spool.runs.create(spec, write)


def commit(
    spool: Spool, run: str, adapter: Path | Callable[[Path], object], probe: Probe | None, job: str | None = None
) -> Manifest:
    """The next checkpoint of a run, with the adapter of that directory, or the one that the callable writes."""
    staged = spool.root / "jobs/work" / fs.new_ulid()
    staged.mkdir(parents=True)
    if callable(adapter):
        adapter(staged)
    else:
        shutil.copytree(adapter, staged, dirs_exist_ok=True)
    step = spool.checkpoints.newest(run) + 1
    return spool.checkpoints.commit(staged, run, step, job, probe=probe)


def weights_of(spool: Spool, run: str, step: int) -> Path:
    return spool.checkpoints.path(run, step) / WEIGHTS_FILE
