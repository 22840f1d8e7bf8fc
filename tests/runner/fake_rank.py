"""A rank that keeps the worker's protocol (heartbeats, error files, checkpoint) and misbehaves as the job's labels say.

`do`: what to do; `rank`: which rank does it (default: all); `until`: only in attempts up to this one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tandem.spool import Spool
from tandem.system.processes import die_with_parent


def preload():
    import torch.distributed  # noqa: F401


def main(root: Path, job_id: str, attempt: int) -> int:
    die_with_parent()
    spool = Spool(root)
    _, job = spool.jobs.get(job_id)
    rank, work = int(os.environ["RANK"]), spool.paths.work_dir(job_id, attempt)
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} says hello", flush=True)

    def beat(phase: str, step: int = 0) -> None:
        staged = work / f".beat.{rank}"
        told = {"time": time.time(), "phase": phase, "step": step, "phases": {"build": {"allocated": 1000 + rank}}}
        if "used" in job.spec.labels:
            told |= {"uuid": "GPU-bbbb2222", "device_used_peak": int(job.spec.labels["used"])}
        staged.write_text(json.dumps(told))
        staged.replace(work / f"beat.{rank}")

    beat("begin")
    labels = job.spec.labels
    act = attempt <= int(labels.get("until", 1 << 30)) and rank == int(labels.get("rank", rank))
    if "do" in labels and act:
        DEEDS[labels["do"]](work, rank, beat)
    if os.environ["WORLD_SIZE"] != "1":
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        # A resident rank meets the others anew for each job, in the store that stays.
        store, rank, size = next(rendezvous("env://"))
        store = dist.PrefixStore(f"{job_id}/{attempt}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0 and not (labels.get("do") == "no_checkpoint" and act):
        staged = work / "staged"
        staged.mkdir()
        (staged / "weights").write_text(job_id)
        spool.checkpoints.commit(staged, job.spec.run, job.spec.base_step + 1, job_id)
    if labels.get("do") == "crash_after" and act:
        os.kill(os.getpid(), signal.SIGSEGV)
    beat("end")
    return 0


def fail(work, rank, beat):
    """A Tandem error that trying again can't help."""
    error = {"type": "checkpoint_damaged", "message": "adapter_model.safetensors is truncated", "retriable": False}
    (work / f"error.{rank}.json").write_text(json.dumps(error))
    sys.exit(1)


def segfault(work, rank, beat):
    os.kill(os.getpid(), signal.SIGSEGV)


def die(work, rank, beat):
    os.kill(os.getpid(), signal.SIGKILL)


def raise_(work, rank, beat):
    raise ValueError("the fake rank raises")


def exit_zero(work, rank, beat):
    sys.exit(0)


def leave(work, rank, beat):
    """Gone without any clean-up, with a status that looks like success."""
    os._exit(0)


def hang(work, rank, beat):
    time.sleep(3600)


def wait(work, rank, beat):
    """Alive and beating until somebody ends it."""
    step = 0
    while True:
        beat("wait", step := step + 1)
        time.sleep(0.1)


def stubborn(work, rank, beat):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(work, rank, beat)


def one_dies_one_stays(work, rank, beat):
    if rank == 1:
        time.sleep(1)
        print(f"dies at {time.time()}", flush=True)
        die(work, rank, beat)
    stubborn(work, rank, beat)


def leak(work, rank, beat):
    """Leaves a grandchild in a session of its own, which ignores SIGTERM, and then succeeds."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)


def leak_and_wait(work, rank, beat):
    leak(work, rank, beat)
    wait(work, rank, beat)


def nothing(work, rank, beat):
    pass


DEEDS = {
    "fail": fail, "segfault": segfault, "die": die, "raise": raise_, "exit_zero": exit_zero, "leave": leave,
    "hang": hang, "wait": wait, "stubborn": stubborn, "leak": leak, "leak_and_wait": leak_and_wait,
    "one_dies_one_stays": one_dies_one_stays, "no_checkpoint": nothing, "crash_after": nothing,
}  # fmt: skip
