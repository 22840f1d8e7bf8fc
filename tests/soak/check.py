"""Checks the files of a spool on which all jobs have ended. This module shares no code with Tandem.

    python -m tests.soak.check ROOT LEDGER

Prints one line per violation. Exits with 1 if there is a violation. LEDGER contains the answers
that the client got (see `Ledger`).
"""

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import check_checkpoints

TERMINAL = ("succeeded", "failed", "cancelled")
# The events of one attempt, in their order. Only the event `step` may come more than once.
ORDER = (
    "claimed",
    "slept",
    "started",
    "loaded",
    "step",
    "checkpoint",
    "released",
    "woken",
    "requeued",
)
# The events of an attempt are a prefix of this chain. Each event is written before the next part of
# the attempt begins.
CHAIN = ("claimed", "started", "loaded", "step", "checkpoint")
JUNK = "soak-junk"
"""A part of the names of files that the soak itself put among the spool's files."""


@dataclass
class Ledger:
    """The soak's actions and the answers that it got, one JSON object per line: `{"kind": ...,
    ...}`."""

    # Job id -> the job's run, for every request that was sent.
    asked: dict[str, str] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)  # job ids that were answered with success
    refused: set[str] = field(default_factory=set)  # job ids that were answered with a refusal
    damaged: set[str] = field(default_factory=set)  # job ids whose queued file was damaged
    repeated: set[str] = field(default_factory=set)  # accepted job ids that were submitted again
    runs: set[str] = field(default_factory=set)  # runs whose creation was answered with success
    # Job id -> two numbers for each time that the volume was full: the number of the job's events
    # when the volume became full, and the number when the volume had space again.
    full: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    torn: int = 0  # half lines that were written to event files
    strikes: int = 0  # signals to programs

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        ledger = cls()
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            match entry["kind"]:
                case "asked":
                    ledger.asked[entry["id"]] = entry["run"]
                case "accepted" | "refused" | "damaged" | "repeated" as kind:
                    getattr(ledger, kind).add(entry["id"])
                case "run":
                    ledger.runs.add(entry["run"])
                case "full":
                    for job_id, (begin, end) in entry["events"].items():
                        ledger.full.setdefault(job_id, []).append((begin, end))
                case "torn":
                    ledger.torn += 1
                case "strike":
                    ledger.strikes += 1
        return ledger


@dataclass
class JobFile:
    """A job, from the name of its directory, its record and its events."""

    id: str
    run: str
    base_step: int
    directory: Path
    state: str  # a terminal state, or "damaged"
    record: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    # See `Ledger.full`.
    full: list[tuple[int, int]] = field(default_factory=list)

    @property
    def steps_by_attempt(self) -> dict[int, list[dict[str, Any]]]:
        """The data of the events `step`, by attempt."""
        found: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            if event["type"] == "step":
                found[event["attempt"]].append(event["data"])
        return found

    @property
    def made_by_attempt(self) -> dict[int, list[int]]:
        """The optimizer steps of each attempt that made steps. A step counts if it has an event, or
        if a full volume refused its event."""
        loaded = [event["attempt"] for event in self.events if event["type"] == "loaded"]
        found = {}
        for attempt in sorted({*loaded, *self.steps_by_attempt}):
            told = [data["step"] for data in self.steps_by_attempt.get(attempt, [])]
            ended = self.state == "succeeded" and attempt == max(loaded, default=0)
            if made := sorted(told + self._left_out(attempt, ended)):
                found[attempt] = made
        return found

    def _left_out(self, attempt: int, ended: bool) -> list[int]:
        """The attempt's steps that have no event because the volume was full when the event was
        due. `ended`: whether the attempt's checkpoint says that the attempt made all of its
        steps."""
        missing: list[int] = []
        told, place = 0, 0
        for number, event in enumerate(self.events):
            if event["attempt"] == attempt and event["type"] in ("loaded", "step"):
                reached = event["data"]["step"] if event["type"] == "step" else told + 1
                missing += self._refused(number, range(told + 1, reached))
                told, place = (reached, number + 1) if event["type"] == "step" else (0, number + 1)
        return missing + (self._refused(place, range(told + 1, self.steps + 1)) if ended else [])

    def _refused(self, place: int, steps: range) -> list[int]:
        return [*steps] if any(begin <= place <= end for begin, end in self.full) else []

    @property
    def steps(self) -> int:
        """The number of the job's optimizer steps, according to the job's events. If the job has no
        event `step`, the result is the number of epochs, because an epoch of the soak's jobs has
        one batch."""
        told = [data["steps"] for steps in self.steps_by_attempt.values() for data in steps]
        return int(told[0] if told else self.record["spec"]["optimizer"]["epochs"])


def violations(
    root: Path, ledger: Ledger, *, swept: bool = False, served: bool = True
) -> list[str]:
    """The violations, one line each. `swept`: whether a runner had to remove all temporary files.
    `served`: whether vLLM and the publisher had time to serve the newest steps."""
    found: list[str] = []
    jobs = _jobs(root, ledger, found)
    _check_promises(root, ledger, jobs, found)
    torn = 0
    for job in jobs.values():
        torn += _read_events(job, found)
        _check_events(job, found)
    if torn > ledger.strikes + ledger.torn:
        found.append(f"{torn} half-written lines in event files after {ledger.strikes} strikes")
    _check_remains(root, ledger, jobs, found, swept)
    check_checkpoints.check(root, ledger, jobs, found, served=served)
    return found


def _jobs(root: Path, ledger: Ledger, found: list[str]) -> dict[str, JobFile]:
    """Every job, by id. A job must have one directory, among the ended jobs or among the damaged
    jobs."""
    jobs = {}
    for path in (root / "jobs" / "damaged").iterdir():
        if JUNK in path.name:
            continue
        _, base_step, run, job_id = path.name.rpartition(".")[0].split(",")
        if job_id not in ledger.damaged:
            found.append(f"job {job_id}: {path.name} is set aside, and nobody damaged it")
        jobs[job_id] = JobFile(job_id, run, int(base_step), path, "damaged", {})
    places: dict[str, list[Path]] = defaultdict(list)
    for pattern in ("live/[!.]*/*/[!.]*", "ended/*/[!.]*"):
        for path in (root / "jobs").glob(pattern):
            if JUNK not in path.name:
                places[path.name.split(",")[3]].append(path)
    for job_id, directories in places.items():
        path = directories[-1]
        _, base_step, run, _, *states = path.name.split(",")
        if len(directories) > 1 or not states:
            names = [str(place.relative_to(root / "jobs").parts[0]) for place in directories]
            found.append(f"job {job_id}: is in {names}, not ended in exactly one directory")
        record = json.loads((path / "job.json").read_text())
        spec, result, state = record["spec"], record["result"], record["state"]
        if (spec["id"], spec["run"], spec["base_step"]) != (job_id, run, int(base_step)):
            found.append(f"job {job_id}: {path.name} holds job {spec['id']} of run {spec['run']}")
        if states not in ([], [state]) or (result or {}).get("state") not in (None, state):
            found.append(f"job {job_id}: is in {states}, its state {state}, its result {result}")
        if state in TERMINAL and result is None:
            found.append(f"job {job_id}: is {state} without a result")
        full = ledger.full.get(job_id, [])
        jobs[job_id] = JobFile(job_id, run, int(base_step), path, state, record, full=full)
    return jobs


def _check_promises(root: Path, ledger: Ledger, jobs: dict[str, JobFile], found: list[str]) -> None:
    for job_id in sorted(ledger.accepted - jobs.keys()):
        found.append(f"job {job_id}: was accepted, and is lost")
    for job_id, job in sorted(jobs.items()):
        if ledger.asked.get(job_id) != job.run:
            found.append(f"job {job_id} of run {job.run}: nobody asked for it")
        if job_id in ledger.refused:
            found.append(f"job {job_id}: was refused, and exists")
    for run in sorted(ledger.runs):
        if not (root / "runs" / run / "run.json").exists():
            found.append(f"run {run}: was created, and is lost")


def _read_events(job: JobFile, found: list[str]) -> int:
    """Fill in `job.events`; returns the number of half-written lines."""
    try:
        content = (job.directory / "events.jsonl").read_bytes()
    except FileNotFoundError:
        found.append(f"job {job.id}: has no events")
        return 0
    *lines, rest = content.split(b"\n")
    torn = int(bool(rest))
    for line in lines:
        try:
            event = json.loads(line)
            job.events.append(
                {name: event[name] for name in ("seq", "job", "type", "attempt", "data")}
            )
        except (ValueError, TypeError, KeyError):
            torn += 1
    return torn


def _check_events(job: JobFile, found: list[str]) -> None:
    def wrong(problem: str) -> None:
        found.append(f"job {job.id} ({job.state}): {problem}")

    events = job.events
    if [event["seq"] for event in events] != list(range(len(events))):
        wrong(f"the events' numbers are {[event['seq'] for event in events]}")
    if strangers := {event["job"] for event in events} - {job.id}:
        wrong(f"has events of {strangers}")
    ends = [event for event in events if event["type"] in TERMINAL]
    state = "failed" if job.state == "damaged" else job.state
    if [end["type"] for end in ends] != [state]:
        wrong(f"its terminal events are {[end['type'] for end in ends]}")
        return
    (end,) = ends
    after = [event["type"] for event in events[events.index(end) + 1 :]]
    if after not in ([], ["served"]) or sum(event["type"] == "served" for event in events) > 1:
        wrong(f"after its end come {after}")
    if job.state == "damaged":
        if end["data"]["error"]["type"] != "job_damaged":
            wrong(f"was damaged, and its end says {end['data']}")
        return
    _check_end(job, end, wrong)
    _check_order(job, wrong)
    _check_steps(job, wrong)


def _check_end(job: JobFile, end: dict[str, Any], wrong: Any) -> None:
    if (result := job.record["result"]) is None:  # `_jobs` has already reported the missing result
        return
    if any(result[name] != value for name, value in end["data"].items()):
        wrong(f"its result is {result}, its terminal event says {end['data']}")
    if job.state == "succeeded" and result["step"] != job.base_step + 1:
        wrong(f"made step {result['step']} from step {job.base_step}")
    if job.state != "succeeded" and not (
        result["error"] and result["error"]["type"] and result["error"]["message"]
    ):
        wrong("has no reason")
    claims = [event["attempt"] for event in job.events if event["type"] == "claimed"]
    if end["attempt"] != job.record["attempt"] or any(
        not 1 <= attempt <= end["attempt"] for attempt in claims
    ):
        wrong(
            f"ended in attempt {end['attempt']}, its record says {job.record['attempt']}, its"
            f" claims were {claims}"
        )


def _check_order(job: JobFile, wrong: Any) -> None:
    events = [event for event in job.events if event["type"] not in ("served", *TERMINAL)]
    places = [(event["attempt"], ORDER.index(event["type"])) for event in events]
    if places != sorted(places):
        wrong(f"events out of order: {[(event['attempt'], event['type']) for event in events]}")
    counts = Counter(
        (event["attempt"], event["type"]) for event in events if event["type"] != "step"
    )
    if doubled := [key for key, count in counts.items() if count > 1]:
        wrong(f"doubled events: {doubled}")
    seen = {(event["attempt"], event["type"]) for event in events}
    seen |= {(attempt, "step") for attempt in job.made_by_attempt}
    for attempt in sorted({attempt for attempt, _ in seen}):
        kinds = [kind for kind in CHAIN if (attempt, kind) in seen]
        if kinds != [*CHAIN[: len(kinds)]]:
            wrong(f"attempt {attempt} has only the events {kinds} of {CHAIN}")


def _check_steps(job: JobFile, wrong: Any) -> None:
    """Checks that each attempt's optimizer steps are 1, 2, 3, ..., and that the last attempt of a
    succeeded job has all steps. If another attempt repeats a step from the same checkpoint, the
    step has the same loss and the same gradient norm, bit for bit."""
    known: dict[int, dict[str, Any]] = {}
    for attempt, made in job.made_by_attempt.items():
        if made != list(range(1, len(made) + 1)):
            wrong(f"attempt {attempt} made the optimizer steps {made}")
        told = job.steps_by_attempt.get(attempt, [])
        if len({data["steps"] for data in told}) > 1 or len(made) > job.steps:
            wrong(f"attempt {attempt} made {len(made)} optimizer steps of {job.steps}")
        for data in told:
            numbers = {name: data["metrics"][name] for name in ("loss", "grad_norm")}
            if known.setdefault(data["step"], numbers) != numbers:
                wrong(
                    f"attempt {attempt} computed {numbers} in step {data['step']}, before"
                    f" {known[data['step']]}"
                )
    if job.state == "succeeded":
        last = next(reversed(job.made_by_attempt.values()), [])
        if len(last) != job.steps:
            wrong(f"succeeded with {len(last)} optimizer steps in its last attempt")


def _check_remains(
    root: Path, ledger: Ledger, jobs: dict[str, JobFile], found: list[str], swept: bool
) -> None:
    """A job needs some files only until its end. Checks that these files are gone, and that killed
    programs left few temporary files. If `swept` is true, no temporary file may be left."""
    for job in jobs.values():
        for path in job.directory.iterdir():
            if path.name not in ("job.json", "events.jsonl", "log"):
                found.append(f"job {job.id} ({job.state}): left {path.name}")
    for path in (root / "jobs" / "active").iterdir():
        if JUNK not in path.name:
            found.append(f"job {path.name.split(',')[-1]}: left {path.relative_to(root)}")
    temporary = [*root.rglob(".tmp-*")]
    if len(temporary) > (0 if swept else 2 * ledger.strikes + 5):
        names = ", ".join(str(path.relative_to(root)) for path in temporary[:5])
        found.append(
            f"{len(temporary)} temporary names after {ledger.strikes} strikes: {names}, ..."
        )


def leftovers(root: Path) -> list[str]:
    """Living processes that were started for this spool: `pid command line`."""
    mark, found = f"TANDEM_ROOT={root}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found.append(f"{entry.name} {command[:200]}")
        except OSError:  # it is gone
            continue
    return found


def main() -> int:
    root, ledger = map(Path, sys.argv[1:3])
    found = violations(root, Ledger.read(ledger))
    print("\n".join(found) or "0 violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
