"""A rank that keeps the protocol of ranks (heartbeats, error files, checkpoint) and misbehaves as
the job's labels say.

`do`: what to do (see `obey`); `rank`: which rank does it (default: all); `until`: only in attempts
up to this one; `used`: bytes that heartbeats report; `meet`: the ranks connect through torch
instead of waiting for each other's files.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from tandem.spool.attempt import Attempt
from tandem.trainer.launch import RankSettings


def preload(device: str):
    if os.environ.get("TANDEM_LAUNCH") == "fork":  # the ranks' parent imports it for every job
        import torch.distributed  # noqa: F401


def main(attempt: Attempt, settings: RankSettings) -> int:
    spool, job_id, work = attempt.spool, attempt.job, attempt.work
    _, job = spool.jobs.get(job_id)
    rank = int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} says hello", flush=True)
    labels = job.spec.labels

    def beat(phase: str, step: int = 0) -> None:
        staged = work / f".beat.{rank}"
        content = {
            "time": time.time(),
            "phase": phase,
            "step": step,
            "phases": {"build": {"allocated": 1000 + rank}},
        }
        if "used" in labels:
            content |= {"uuid": "GPU-bbbb2222", "device_used_peak": int(labels["used"])}
        staged.write_text(json.dumps(content))
        staged.replace(work / f"beat.{rank}")

    if "litter" in labels:
        tempfile.mkdtemp()
    beat("begin")
    order = labels.get("do")
    if attempt.number > int(labels.get("until", attempt.number)) or rank != int(
        labels.get("rank", rank)
    ):
        order = None
    obey(order, work, rank, beat)
    if "meet" in labels:
        meet(str(attempt))
    (work / f"done.{rank}").touch()
    while len(list(work.glob("done.*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    if rank == 0 and order != "no_checkpoint":
        staged = work / "staged"
        staged.mkdir()
        (staged / "weights").write_text(f"{job_id} {attempt.number}")
        if order == "freeze_before_commit":
            (spool.root / "frozen").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        spool.checkpoints.commit(staged, job.spec.run, job.spec.base_step + 1, job_id)
    if order == "crash_after":
        os.kill(os.getpid(), signal.SIGSEGV)
    beat("end")
    return 0


def meet(name):
    """Connect the ranks through the launcher's store, under a new name for each job, because the
    store may stay."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()


def obey(order, work, rank, beat):
    match order:
        case "fail":  # with a Tandem error that is not retriable
            error = {
                "type": "checkpoint_damaged",
                "message": "adapter_model.safetensors is truncated",
            }
            (work / f"error.{rank}.json").write_text(json.dumps(error))
            sys.exit(1)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise ValueError("the fake rank raises")
        case "leave":  # without any clean-up, with a status that looks like success
            os._exit(0)
        case "hang":
            time.sleep(3600)
        case "wait":  # and make progress until somebody ends the rank
            for step in range(1, 1 << 30):
                beat("wait", step)
                time.sleep(0.1)
        case "wait_for_go":  # of the test
            for step in range(1, 1 << 30):
                beat("wait", step)
                if (work.parents[6] / "go").exists():
                    return
                time.sleep(0.1)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        case "one_dies_one_stays":
            if rank == 1:
                time.sleep(1)
                print(f"dies at {time.time()}", flush=True)
            obey("die" if rank == 1 else "stubborn", work, rank, beat)
        case "fill":  # the volume, with a part of the checkpoint
            (work / "checkpoint").mkdir()
            with (work / "checkpoint" / "part").open("wb", buffering=0) as file:
                while file.write(b"\0" * 4096):
                    pass
        case "leak" | "leak_and_wait":  # a process in a session of its own that ignores SIGTERM
            program = (
                "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                " time.sleep(3600)"
            )
            subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
            if order == "leak_and_wait":
                obey("wait", work, rank, beat)
