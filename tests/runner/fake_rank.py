"""A rank that keeps the protocol of ranks (heartbeats, error files, checkpoint) and misbehaves as
the job's labels say.

Labels: `do`: the misbehaviour (see `obey`). `rank`: the rank that misbehaves; by default all ranks
do. `until`: the last attempt in which ranks misbehave. `used`: the bytes of GPU memory that
heartbeats report. `meet`: the ranks also connect through torch.
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
    # The fork server, which is the ranks' parent, imports torch.distributed once for all jobs.
    if os.environ.get("TANDEM_LAUNCH") == "fork":
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
    """Connects the ranks through the launcher's store. Each attempt uses a new name in the store,
    because the store may stay for the next job."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()


def obey(order, work, rank, beat):
    match order:
        case "fail":  # The rank fails with a Tandem error that is not retriable.
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
        case "leave":  # The rank exits without any clean-up, with the status of success.
            os._exit(0)
        case "hang":
            time.sleep(3600)
        case "wait":  # The rank makes progress until another process ends it.
            for step in range(1, 1 << 30):
                beat("wait", step)
                time.sleep(0.1)
        case "wait_for_go":  # The rank makes progress until the test writes the file `go`.
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
        case "fill":  # The rank fills the volume with a part of the checkpoint.
            (work / "checkpoint").mkdir()
            with (work / "checkpoint" / "part").open("wb", buffering=0) as file:
                while file.write(b"\0" * 4096):
                    pass
        # The rank starts a process in a new session. The process ignores SIGTERM and outlives the
        # rank.
        case "leak" | "leak_and_wait":
            program = (
                "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                " time.sleep(3600)"
            )
            subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
            if order == "leak_and_wait":
                obey("wait", work, rank, beat)
