"""`kill -9` at each phase of a shared GPU's cycle: how long until vLLM serves again, and what is in
use then.

    python -m bench.shared_faults [--victims rank runner vllm] [--phases ...] [--seconds 520]
    [--device 0]

A whole `tandem up` on one GPU, with Qwen3-0.6B's layers and a vocabulary of bytes. Prints one JSON
row per kill, and writes them to bench/results/shared_faults.json. Fails where a row's bound did not
hold, a job got no end with a reason, memory did not come back, or anything ran out of memory.
`--seconds`: no kill is begun after that.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import httpx
import tiny_model

from bench.report import report
from local_stack import ADMIN_TOKEN, API_KEY, LocalStack
from tandem.spool.schema import TERMINAL
from tandem.system import processes

RUN = "faults"
PHASES = ("sleeping", "starting", "loading", "stepping", "checkpoint", "releasing", "waking")
HAVE = {
    "rank": ("loading", "stepping", "checkpoint"),
    "runner": PHASES,
    "vllm": ("sleeping", "loading", "stepping", "checkpoint", "waking"),
}
"""Whom there is to kill in which phase."""
BOUND = {"rank": 60.0, "runner": 60.0, "vllm": 200.0}
"""Seconds from the kill until vLLM answers with the newest step: a retry of the job and a wake; or
vLLM's start too."""
_TROUBLE = re.compile(r"CUDA out of memory|CUDA error|OutOfMemoryError", re.IGNORECASE)


def used(device: str) -> int:
    """MiB in use on the GPU, by anybody."""
    command = [
        "nvidia-smi",
        "-i",
        device,
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    )


class Watched:
    """A stack, and what can be seen of its cycle."""

    def __init__(self, stack: LocalStack, device: str) -> None:
        self.stack, self.spool, self.device = stack, stack.spool, device
        self.http = httpx.Client(
            base_url=stack.inference_url,
            timeout=60.0,
            trust_env=False,
            headers={
                "Authorization": f"Bearer {API_KEY}",
                "x-tandem-admin-token": ADMIN_TOKEN,
            },
        )

    def until(self, what: str, seconds: float, check: Callable[[], Any], poll: float = 0.02) -> Any:
        end = time.monotonic() + seconds
        while not (answer := check()):
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{self.state()}"
            assert not self.stack.dead(), f"tandem up ended\n{self.state()}"
            time.sleep(poll)
        return answer

    def state(self) -> str:
        """What a person wants to know when something went wrong."""
        jobs = [
            (job.spec.id, state, job.attempt, job.last_error)
            for state, job in self.spool.jobs.list(run=RUN)[-2:]
        ]
        events = [(e.type, e.attempt) for e in self.spool.events.read(jobs[-1][0])] if jobs else []
        return (
            f"hold {self.spool.hold.get()}\njobs {jobs}\nevents {events}\n{used(self.device)} MiB"
            f" in use\n{self.stack.tail()}"
        )

    def submit(self) -> str:
        examples = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q in ("Is it?", "Was it?")
            for a in ("yes", "no")
        ]
        job = self.stack.client.train_sft(
            RUN,
            examples=examples,
            packing={"sequence_length": 128},
            max_attempts=3,
            optimizer={"learning_rate": 1e-4, "epochs": 40},
        )
        return str(job.spec.id)

    def in_phase(self, job: str, phase: str) -> bool:
        types = [event.type for event in self.spool.events.read(job)]
        hold = self.spool.hold.get()
        if phase in ("sleeping", "releasing", "waking"):
            return hold is not None and hold.job == job and hold.phase == phase
        seen = {
            "starting": "slept",
            "loading": "started",
            "stepping": "step",
            "checkpoint": "checkpoint",
        }[phase]
        return types.count(seen) >= (3 if phase == "stepping" else 1)

    def kill(self, victim: str, job: str) -> list[processes.Process]:
        """kill -9; what else belonged to it and may outlive it."""
        if victim == "rank":
            events = [event for event in self.spool.events.read(job) if event.type == "started"]
            for pid in events[-1].data["pids"]:
                os.kill(pid, signal.SIGKILL)
            return []
        pid = self.until(f"a process of {victim}", 30, lambda: self.stack.pids(victim))[0]
        below = processes.descendants(pid)
        os.kill(pid, signal.SIGKILL)
        return below

    def served(self) -> str | None:
        """The newest step's name, once vLLM answers with it."""
        newest = self.spool.checkpoints.newest(RUN)
        served = self.spool.served.get(RUN)
        if served is None or served.step != newest or self.spool.hold.get() is not None:
            return None
        try:
            body = {"model": served.model, "prompt": "Is it?", "max_tokens": 4}
            answer = self.http.post("/v1/completions", json=body)
            awake = self.http.get("/is_sleeping").json() == {"is_sleeping": False}
        except (httpx.HTTPError, ValueError):
            return None
        return served.model if answer.status_code == 200 and awake else None


def strike(watched: Watched, victim: str, phase: str, awake_mib: int) -> dict[str, Any]:
    """One job, one kill; what came of it."""
    spool = watched.spool
    job = watched.submit()
    watched.until(
        f"{phase} of {job}",
        120,
        lambda: watched.in_phase(job, phase) or ended(watched, job),
        poll=0.002,
    )
    late = ended(watched, job)
    left = watched.kill(victim, job) if not late or victim != "rank" else []
    begin = time.monotonic()
    bound = BOUND[victim]
    lived = 0.0  # how long what the victim had started outlived it
    while any(_lives(process) for process in left) and time.monotonic() - begin < 20:
        time.sleep(0.05)
        lived = time.monotonic() - begin
    for process in left:
        # So that the rest can go on; 20 s in the row tell of it.
        processes.send(process, signal.SIGKILL)
    try:
        watched.until(f"{job} ends", bound + 60, lambda: ended(watched, job))
        model = watched.until("vLLM serves the newest step", bound, watched.served, poll=0.2)
        seconds, trouble = time.monotonic() - begin, ""
    except AssertionError as error:
        model, seconds, trouble = None, time.monotonic() - begin, str(error)
    state, record = spool.jobs.get(job)
    mib = used(watched.device)
    return {
        "phase": phase,
        "victim": victim,
        "seconds until served": round(seconds, 1),
        "bound": bound,
        "job": state,
        "attempts": record.attempt,
        "model": model,
        "MiB": mib,
        "MiB before": awake_mib,
        "late": late,
        "outlived by": round(lived, 1),
        "trouble": trouble[-3000:],
        "ok": (
            not trouble
            and seconds <= bound
            and state == "succeeded"
            and abs(mib - awake_mib) < 2048
        ),
    }


def ended(watched: Watched, job: str) -> bool:
    return watched.spool.jobs.get(job)[0] in TERMINAL


def _lives(process: processes.Process) -> bool:
    now = processes.read(process.pid)
    return now is not None and now.started == process.started and not now.zombie


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--victims", nargs="+", choices=list(HAVE), default=list(HAVE))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--device", default="0")
    parser.add_argument("--launch", choices=["torchrun", "fork", "resident"], default="fork")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--root", type=Path, default=None)
    options = parser.parse_args()
    begin = time.monotonic()
    root = options.root or Path(tempfile.mkdtemp(prefix="tandem-shared-faults-"))
    out = Path(os.environ.get("OUT") or root)
    tiny_model.write_tiny_qwen3(
        root / "models" / "m",
        hidden_size=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn_size=3072,
    )
    source = str(Path(__file__).parent.parent / "src")
    variables = {
        "TANDEM_BASE_MODEL": "models/m",
        "TANDEM_DEVICE": "cuda",
        "TANDEM_GPU_MODE": "shared",
        "TANDEM_TRAINER_DEVICES": options.device,
        "TANDEM_INFERENCE_DEVICES": options.device,
        "TANDEM_ENFORCE_EAGER": "1",
        "TANDEM_LAUNCH": options.launch,
        "TANDEM_DTYPE": "bfloat16",
        "TANDEM_VERIFY_TOLERANCE": "1",
        "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}",
    }
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    before = used(options.device)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with LocalStack(root, **variables) as stack:
        watched = Watched(stack, options.device)
        stack.client.create_run(RUN, lora={"rank": 16, "alpha": 32})
        stack.client.wait_served(RUN, 0, timeout=180)
        first = watched.submit()  # everything that compiles does so here
        watched.until("the first job", 180, lambda: ended(watched, first))
        watched.until("its step is served", 60, watched.served)
        awake = used(options.device)
        print(
            json.dumps(
                {
                    "ready after": round(time.monotonic() - begin, 1),
                    "MiB awake": awake,
                    "first job": spool_state(watched, first),
                }
            ),
            flush=True,
        )
        for victim in options.victims:
            for phase in (phase for phase in HAVE[victim] if phase in options.phases):
                if time.monotonic() - begin > options.seconds - (90 if victim == "vllm" else 30):
                    skipped.append(f"{victim} at {phase}")
                    continue
                rows.append(strike(watched, victim, phase, awake))
                print(json.dumps(rows[-1]), flush=True)
        logs = [*root.glob("logs/*.log"), *root.glob("jobs/logs/*.log")]
        found = [
            f"{path.name}: {line.strip()[:300]}"
            for path in logs
            for line in path.read_text(errors="replace").splitlines()
            if _TROUBLE.search(line)
        ]
        for path in root.glob("logs/*.log"):
            (out / f"faults.{path.name}").write_bytes(path.read_bytes()[-4_000_000:])
        (out / "faults.up.log").write_bytes((root / "up.log").read_bytes()[-4_000_000:])
    after = used(options.device)
    print(
        json.dumps(
            {
                "skipped for want of time": skipped,
                "logs with trouble": found,
                "MiB before": before,
                "MiB after": after,
                "seconds": round(time.monotonic() - begin),
            }
        ),
        flush=True,
    )
    if rows:
        shown = (
            "phase",
            "victim",
            "seconds until served",
            "bound",
            "job",
            "attempts",
            "MiB",
            "outlived by",
            "ok",
        )
        report(
            "shared_faults",
            "kill -9 on one GPU for both",
            [{key: row[key] for key in shown} for row in rows],
        )
    bad = [
        f"{row['victim']} at {row['phase']}: {row['trouble'] or row}"
        for row in rows
        if not row["ok"]
    ]
    assert not bad, "\n\n".join(bad)
    assert not found, "something ran out of memory"
    assert after - before < 256, f"{after - before} MiB are in use after the end"


def spool_state(watched: Watched, job: str) -> dict[str, Any]:
    """Seconds and MiB of a job's sleep and wake."""
    data = {event.type: event.data for event in watched.spool.events.read(job)}
    return {
        kind: {
            "seconds": round(data[kind]["seconds"], 2),
            "MiB": sum(data[kind]["devices"].values()) >> 20,
        }
        for kind in ("slept", "released", "woken")
        if kind in data
    }


if __name__ == "__main__":
    main()
