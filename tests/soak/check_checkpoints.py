"""The part of `soak.check` that reads checkpoints and the records of served steps. This module
shares no code with Tandem."""

import hashlib
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer/adam.safetensors"


def check(root: Path, ledger: Any, jobs: dict[str, Any], found: list[str], *, served: bool) -> None:
    """Appends the violations in the checkpoints of all runs to `found`. `ledger`, `jobs`: see
    `soak.check`."""
    made: dict[str, list[str]] = defaultdict(list)  # job id -> the job's checkpoints
    for run in sorted((root / "runs").iterdir()):
        if run.name.startswith(".tmp-") or not run.is_dir():
            continue
        chain = sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())
        if [int(path.name) for path in chain] != list(range(len(chain))) or not chain:
            found.append(f"run {run.name}: its chain is {[path.name for path in chain]}")
        discarded = [
            path for path in (run / "discarded").iterdir() if not path.name.startswith(".tmp-")
        ]
        read = {path: _manifest(path, run.name, found) for path in (*chain, *discarded)}
        manifests = {path: manifest for path, manifest in read.items() if manifest is not None}
        for path, manifest in manifests.items():
            if manifest["job"] is not None:
                made[manifest["job"]].append(f"{run.name}/{path.name}")
                _check_origin(path, manifest, jobs.get(manifest["job"]), found)
        in_chain = {path: manifests[path] for path in chain if path in manifests}
        _check_weights(run.name, in_chain, jobs, found)
        _check_served(run, in_chain, jobs, found, served)
    for job_id, job in sorted(jobs.items()):
        wanted = 1 if job.state == "succeeded" else 0
        if len(made[job_id]) != wanted and job_id not in ledger.damaged:
            found.append(f"job {job_id} ({job.state}): made the checkpoints {made[job_id]}")


def _manifest(path: Path, run: str, found: list[str]) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None if it can't be read. Every file is compared with the
    manifest."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        step = int(path.name.split("-")[0])
        if (manifest["run"], manifest["step"]) != (run, step):
            found.append(
                f"{run}/{path.name}: its manifest is of {manifest['run']}@{manifest['step']}"
            )
        listed = {
            name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
    except (OSError, ValueError, KeyError) as error:
        found.append(f"{run}/{path.name}: its manifest can't be read: {error!r}")
        return None
    files = {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }
    files.pop("manifest.json")
    actual = {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    }
    for name in sorted(actual.keys() | listed.keys()):
        if actual.get(name) != listed.get(name):
            found.append(
                f"{run}/{path.name}: {name} is {actual.get(name)}, the manifest says"
                f" {listed.get(name)}"
            )
    return manifest


def _check_origin(path: Path, manifest: dict[str, Any], job: Any, found: list[str]) -> None:
    """Checks that a succeeded job of the run made the checkpoint. The job must begin at the step
    before the checkpoint, and its last optimizer step must give the checkpoint's metrics."""
    name = f"{manifest['run']}/{path.name}"
    if job is None or job.state == "damaged":
        if job is None:
            found.append(f"{name}: its job {manifest['job']} does not exist")
        return
    if (job.run, job.base_step + 1) != (manifest["run"], manifest["step"]):
        found.append(f"{name}: its job {job.id} goes from {job.run}@{job.base_step}")
    made = next(reversed(job.made_by_attempt.items()), None)
    steps = [] if made is None else job.steps_by_attempt.get(made[0], [])
    # a full volume may have refused the step's event
    told = steps and steps[-1]["step"] == made[1][-1]
    if told and any(
        manifest["metrics"][key] != steps[-1]["metrics"][key] for key in ("loss", "grad_norm")
    ):
        found.append(f"{name}: its metrics are not those of the last step of job {job.id}")
    for event in job.events:
        if (
            event["type"] == "checkpoint"
            and event["data"]["sha256"] != manifest["files"][ADAPTER]["sha256"]
        ):
            found.append(f"{name}: job {job.id} announced another adapter")


def _check_weights(
    run: str, chain: dict[Path, dict[str, Any]], jobs: dict[str, Any], found: list[str]
) -> None:
    """Checks that all adapters have the shapes of step 0 and finite numbers, and that Adam counts
    every optimizer step once."""
    shapes: dict[str, tuple[int, ...]] | None = None
    count = 0
    for path, manifest in chain.items():
        job = jobs.get(manifest["job"])
        try:
            adapter = load_file(path / ADAPTER)
            optimizer = load_file(path / OPTIMIZER) if (path / OPTIMIZER).exists() else None
        except Exception as error:  # safetensors raises its own types of errors
            found.append(f"{run}/{path.name}: can't be loaded: {error!r}")
            return
        now = {name: value.shape for name, value in adapter.items()}
        if now != (shapes := shapes or now):
            found.append(f"{run}/{path.name}: its adapter has other tensors than step 0")
        if not all(
            np.isfinite(value).all() for value in (*adapter.values(), *(optimizer or {}).values())
        ):
            found.append(f"{run}/{path.name}: has numbers that are not finite")
        stored = 0 if optimizer is None else int(optimizer["step"])
        if job is not None and job.state == "succeeded":
            count += len(next(reversed(job.made_by_attempt.values()), []))
            if stored != count:
                found.append(
                    f"{run}/{path.name}: Adam counts {stored} optimizer steps, the events count"
                    f" {count}"
                )
        count = stored


def _check_served(
    run: Path,
    chain: dict[Path, dict[str, Any]],
    jobs: dict[str, Any],
    found: list[str],
    served: bool,
) -> None:
    """Checks that `served.json` names a verified step of the chain, with the hash of the step's
    adapter. If `served` is true, this step must be the newest step."""
    try:
        record = json.loads((run / "served.json").read_text())
    except FileNotFoundError:
        if served:
            found.append(f"run {run.name}: nothing is served")
        return
    except ValueError:
        found.append(f"run {run.name}: served.json can't be read")
        return
    step, path = record["step"], run / "checkpoints" / f"{record['step']:08d}"
    if path not in chain:
        found.append(f"run {run.name}: served.json names step {step}, which does not exist")
        return
    manifest = chain[path]
    facts = (record["model"], record["checkpoint"])
    if facts != (f"{run.name}@{step}", manifest["files"][ADAPTER]["sha256"]):
        found.append(f"run {run.name}: served.json says {facts} of step {step}")
    error, tokens = record["mean_abs_logprob_error"], record["tokens_checked"]
    if not (math.isfinite(error) and error <= 0.02 and tokens > 0 and record["verified"]):
        found.append(
            f"run {run.name}: step {step} was not verified: error {error} over {tokens} tokens"
        )
    if served and path != (newest := max(chain)):
        found.append(f"run {run.name}: step {step} is served, the newest is {newest.name}")
    job = jobs.get(manifest["job"])
    if (
        job is not None
        and job.state == "succeeded"
        and not any(event["type"] == "served" for event in job.events)
    ):
        found.append(f"run {run.name}: step {step} is served, and job {job.id} has no event of it")
