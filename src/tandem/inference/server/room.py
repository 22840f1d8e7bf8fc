"""Room for a vLLM that is about to start: what an earlier one left is ended, and its devices are free.

vLLM takes a share of the device's whole memory and fails, after a minute of loading, where something else holds it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from tandem.config import Settings
from tandem.errors import SpoolUnusable, TandemError
from tandem.inference.server.args import serving_device
from tandem.spool import Spool
from tandem.supervise import supervisord
from tandem.system import processes
from tandem.system.gpus import FREE_BYTES, STAYING_BYTES, Devices
from tandem.system.logs import Log

log = Log("inference")

FREE_SECONDS = 60.0
"""How long the devices may take to be free; after that supervisord tries again."""
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.5
_MARKER = "TANDEM_VLLM_OF"


class NoRoom(TandemError):
    """vLLM can't be started now; later it may."""

    code = "no_room"
    http_status = 503
    retriable = True


def make_room(settings: Settings, *, free_seconds: float = FREE_SECONDS) -> dict[str, str]:
    """End what is left of this deployment's earlier vLLM and wait for its devices; the variable by which the next one
    finds what this one leaves, for vLLM's environment.

    Holds a lock for the rest of this process's life, over `exec` too. Raises NoRoom where this vLLM runs already, where
    a process survives SIGKILL, or where a device is not free in time.
    """
    marker = (_MARKER, f"{settings.root.absolute()}:{settings.inference_port}")
    _lock(supervisord.runtime_dir(settings.root, supervisord.current_role()) / f"vllm-{settings.inference_port}.lock")
    for orphan in processes.marked(*marker):
        log.warning("ending a process of an earlier vLLM", pid=orphan.pid, command=orphan.command)
    left = processes.kill_all(lambda: processes.marked(*marker), timeout=_KILL_SECONDS)
    if left:
        raise NoRoom(f"processes of an earlier vLLM survive SIGKILL: {', '.join(str(process.pid) for process in left)}")
    if settings.gpu_mode == "shared":
        _wait_for_trainer(settings)
    if serving_device(settings) == "cuda":
        _wait_free(settings, free_seconds)
    return dict([marker])


def _lock(path: Path) -> None:
    """A record lock belongs to the process: `exec` keeps it, children don't get it, and it ends with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(descriptor, True)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise NoRoom(f"vLLM of this spool and port runs already ({path} is locked); stop that one first") from error


def _wait_for_trainer(settings: Settings) -> None:
    """While a trainer that lives holds the GPUs: a vLLM that died during a job starts when the job has ended."""
    said = False
    while True:
        try:
            hold = Spool(settings.root, writable=False).hold.live()
        except SpoolUnusable as error:
            log.warning("can't see whether a trainer holds the GPUs", error=error)
            return  # no runner works without the volume either; what is in use is measured next
        if hold is None:
            break
        if not said:
            log.info("waiting until the trainer gives the GPUs back", job=hold.job, runner=hold.runner)
            said = True
        time.sleep(_POLL_SECONDS)
    if said:
        log.info("the trainer has given the GPUs back")


def _wait_free(settings: Settings, free_seconds: float) -> None:
    # Where more devices are visible, vLLM takes the first. What resident ranks keep may stay: vLLM itself refuses to
    # start where its share of the device is not free.
    devices = Devices(settings, "inference").first(settings.inference_tensor_parallel)
    floor = dict.fromkeys(devices.uuids, STAYING_BYTES if settings.gpu_mode == "shared" else 0)
    if busy := devices.busy(floor):
        log.warning("waiting until the devices are free", bytes_in_use=busy)
        devices.wait_free(free_seconds, floor)
    if busy := devices.busy(floor):
        raise NoRoom(
            f"not free after {free_seconds:.0f} s: "
            + ", ".join(f"{uuid} ({'nvidia-smi does not tell' if used is None else f'{used} bytes in use'})"
                        for uuid, used in busy.items())
            + f"; vLLM starts when less than {FREE_BYTES + max(floor.values())} bytes are in use: "
            "end what else runs there"
        )  # fmt: skip
