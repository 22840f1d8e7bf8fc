"""A rank's heartbeats contain the rank's phase and its use of memory."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank import jobs
from tandem.metrics.metric import PHASES
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.schema import Beat, RLLoss
from tandem.trainer.rank import model_loader
from tandem.trainer.rank.heartbeat import BEAT_SECONDS, Heartbeat
from tandem.training.phases import MemoryWatch
from waiting import until


def test_a_beat_has_step_device_and_memory(spool: Spool, monkeypatch) -> None:
    beats: list[Beat] = []
    write = Heartbeat.write

    def write_and_read(self: Heartbeat, phase: str) -> None:
        write(self, phase)
        beats.append(Attempt(spool, "rl", 1).beats()[0])

    monkeypatch.setattr(Heartbeat, "write", write_and_read)
    loss = RLLoss(kl_coef=0.1, old_logprobs="trainer")
    jobs.run_here(spool, jobs.submit_rl(spool, loss=loss, epochs=2))
    last, total = beats[-1], len(jobs.steps_of(spool, "rl"))
    assert (last.step, last.steps, last.phase, last.uuid) == (total, total, "leave", "cpu")
    # The rank has gone through every phase of `PHASES`, except phases that only GPUs, resident
    # ranks or SFT jobs have. The rank reports a memory peak for each phase that it has gone
    # through.
    happened = set(PHASES) - {"offload", "rehearsal", "evaluate"}
    assert {beat.phase for beat in beats} - {"leave"} == happened == set(last.phases)
    assert last.memory.keys() == {"allocated", "reserved", "allocated_peak", "reserved_peak"}
    assert last.memory["allocated_peak"] >= max(held["peak"] for held in last.phases.values())
    peaks = [beat.memory["allocated_peak"] for beat in beats]
    assert peaks == sorted(peaks)
    assert all(beat.memory["allocated"] <= beat.memory["allocated_peak"] for beat in beats)
    assert last.step_floor is not None
    assert last.device_used_peak >= last.device_used > last.memory["allocated"] > 50 * 2**20
    assert all(beat.step_floor is None for beat in beats if beat.phase in ("data", "build"))


def test_a_rank_beats_while_it_reads_and_hashes_for_long(spool: Spool, monkeypatch) -> None:
    """On a slow volume, reading and hashing may take longer than the time that is allowed between
    two heartbeats."""
    beats: list[str] = []
    monkeypatch.setattr(Heartbeat, "__call__", lambda _self, phase: beats.append(phase))

    def slow(phase: str, action: Callable[..., Any]) -> Callable[..., Any]:
        """An action that begins after the rank has sent a second beat of `phase`."""

        def wait_and_do(*arguments: Any, **options: Any) -> Any:
            until(f"a beat of {phase}", lambda: beats.count(phase) > 1)
            return action(*arguments, **options)

        return wait_and_do

    monkeypatch.setattr(
        model_loader, "load_weights", slow("base_weights", model_loader.load_weights)
    )
    monkeypatch.setattr(Checkpoints, "commit", slow("checkpoint", Checkpoints.commit))
    jobs.run_here(spool, jobs.submit_sft(spool))


def test_a_beat_that_is_being_written_stands_beside_no_other(tmp_path: Path, monkeypatch) -> None:
    """A rank first writes a heartbeat to a temporary file, whose name the pattern `beat.*` does not
    match. If the name matched, `Attempt.beats` would read the file as a rank's heartbeat."""
    monkeypatch.setattr(MemoryWatch, "beat", lambda self: {})
    heartbeat, seen = Heartbeat(tmp_path / "beat.0", MemoryWatch()), []
    replace = Path.replace

    def look_and_replace(path: Path, target: Path) -> Path:
        seen.append(list(tmp_path.glob("beat.*")))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", look_and_replace)
    for phase in ("build", "train"):
        heartbeat(phase)
    assert seen == [[], [tmp_path / "beat.0"]]
    assert Beat.model_validate_json((tmp_path / "beat.0").read_bytes()).phase == "train"


def test_a_clock_that_is_set_back_holds_no_beat_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(MemoryWatch, "beat", lambda self: {})
    heartbeat = Heartbeat(tmp_path / "beat.0", MemoryWatch())
    heartbeat("train")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    now = time.monotonic() + BEAT_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heartbeat("train")
    assert Beat.model_validate_json((tmp_path / "beat.0").read_bytes()).time == 1000.0
