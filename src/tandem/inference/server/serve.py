"""Starts vLLM (`python -m tandem.inference.server.serve`): this process becomes the vLLM server
that the settings describe.

Before vLLM starts, this process kills the processes that an earlier vLLM left, and waits until
vLLM's GPUs are free. A starting vLLM allocates a share of a GPU's total memory, and fails after a
minute of loading if another process uses this memory.
"""

import fcntl
import hashlib
import os
import sys
import time
from importlib.metadata import entry_points

from tandem.config import Settings, load_settings
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.inference.server.command import server_command, serving_device
from tandem.spool import Spool
from tandem.system import processes
from tandem.system.environment import current_role, runtime_dir, scratch_directory, vllm_caches
from tandem.system.gpus import STAYING_BYTES, Devices
from tandem.system.logs import Log, configure

log = Log("inference")

FREE_SECONDS = 60.0
"""Seconds within which the GPUs must become free. If they are not free by then, this program exits,
and supervisord starts it again."""
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.5
_MARKER = "TANDEM_VLLM_OF"
"""The environment variable that marks the processes of a vLLM, so that a later start finds them.
The variable's value names the spool and the port."""


class CannotStartNow(TandemError):
    """vLLM can't start now, but may start later."""


def main() -> None:
    """Replace this process by vLLM, so that vLLM receives the signals and sets the exit status.
    Exits with status 2 if the settings are wrong, and with status 1 if vLLM can't start now but may
    start later."""
    configure()
    try:
        settings = load_settings()
        settings.check_bind("inference")
        command = server_command(settings)
        check_plugin()
        has_token = bool(settings.secret("admin_token"))
        caches = vllm_caches(command.env)
        marker = wait_for_gpu(settings)
    except (TandemError, OSError) as error:
        log.error(f"vLLM can't be started: {error}")
        sys.exit(2 if isinstance(error, (InvalidInput, OSError)) else 1)
    if not has_token:
        log.warning(
            "TANDEM_ADMIN_TOKEN is not set: nobody can load adapters, not even the publisher"
        )
    _withdraw_records(settings)
    log.info("starting vLLM", command=" ".join(command.shown[1:]))
    # A killed vLLM leaves sockets and files in its TMPDIR. The compiled code of vLLM is kept
    # elsewhere.
    key = hashlib.sha256(marker[_MARKER].encode()).hexdigest()[:12]
    scratch = {"TMPDIR": str(scratch_directory(f"vllm-{key}"))}
    os.execve(command.argv[0], command.argv, command.env | marker | scratch | caches)


def check_plugin() -> None:
    """Raises InvalidInput if vLLM would not find Tandem's plugin. To find the plugin, vLLM reads
    the plugin's entry point in the metadata of the installed package. Without the plugin, adapters
    are not compared with their files, and weights can't be merged."""
    if not entry_points(group="vllm.general_plugins", name="tandem"):
        raise InvalidInput(
            "tandem-rl is not installed for this Python, so vLLM would not load its plugin; install"
            " it with pip or uv (its directory on PYTHONPATH is not enough)"
        )


def _withdraw_records(settings: Settings) -> None:
    """Remove the records of served steps, because the vLLM that starts now serves none. The
    publisher also removes these records, but the publisher may have died together with the earlier
    vLLM."""
    try:
        spool = Spool(settings.root)  # files can be deleted even on a full volume
        if settings.replica is not None:
            spool.replicas.withdraw(settings.replica)
            return
        for run in spool.runs.names():
            spool.served.withdraw(run)
    except (TandemError, OSError) as error:
        log.warning("can't remove the records of what the vLLM before served", error=error)


def wait_for_gpu(settings: Settings, *, free_seconds: float = FREE_SECONDS) -> dict[str, str]:
    """Kill the leftover processes of an earlier vLLM that used this spool and port. Wait until no
    trainer holds the GPUs and the GPUs' memory is free.

    Returns the marker variable for the environment of the vLLM that starts now. Takes a lock, which
    this process holds until the process ends, also across `exec`. Raises CannotStartNow if this
    vLLM already runs, if a process survives SIGKILL, or if a GPU is not free after `free_seconds`.
    """
    marker = (_MARKER, f"{settings.root.absolute()}:{settings.inference_port}")
    lock = runtime_dir(settings.root, current_role()) / f"vllm-{settings.inference_port}.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    # `exec` keeps a record lock, and child processes don't inherit it.
    os.set_inheritable(descriptor, True)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        message = f"vLLM already runs for this spool and port ({lock} is locked): stop it first"
        raise CannotStartNow(message) from error
    for leftover in processes.marked(*marker):
        log.warning(
            "killing a process of an earlier vLLM", pid=leftover.pid, command=leftover.command
        )
    survivors = processes.kill_all(lambda: processes.marked(*marker), timeout=_KILL_SECONDS)
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise CannotStartNow(f"processes of an earlier vLLM survive SIGKILL: {pids}")
    if settings.gpu_mode == "shared":
        _wait_for_trainer(settings)
    if serving_device(settings) == "cuda":
        _wait_for_memory(settings, free_seconds)
    return dict([marker])


def _wait_for_trainer(settings: Settings) -> None:
    """Wait while a live trainer holds the GPUs. A vLLM that died while a job had the GPUs therefore
    starts again after the job."""
    try:
        spool = Spool(settings.root)
        if hold := spool.hold.live():
            log.info(
                "waiting until the trainer gives the GPUs back", job=hold.job, runner=hold.runner
            )
        while spool.hold.live():
            time.sleep(_POLL_SECONDS)
    except SpoolUnusable as error:
        # Without the volume no runner can work, so vLLM does not have to wait for a trainer. The
        # caller then waits as usual until the GPUs' memory is free.
        log.warning("can't see whether a trainer holds the GPUs", error=error)


def _wait_for_memory(settings: Settings, free_seconds: float) -> None:
    # If more GPUs are visible than vLLM needs, vLLM uses the first GPUs. On shared GPUs, resident
    # ranks keep some memory. If too little memory is left for vLLM, vLLM itself refuses to start.
    devices = Devices(settings, "inference", most=settings.inference_tensor_parallel)
    allowed = STAYING_BYTES if settings.gpu_mode == "shared" else 0
    floor = dict.fromkeys(devices.uuids, allowed)
    if busy := devices.busy(floor):
        log.warning("waiting until the devices are free", bytes_in_use=busy)
        busy = devices.over(devices.wait_free(free_seconds, floor), floor)
    if busy:
        uses = [
            "the driver does not answer" if used is None else f"{used} bytes in use"
            for used in busy.values()
        ]
        in_use = ", ".join(f"{uuid} ({use})" for uuid, use in zip(busy, uses, strict=True))
        need = f"vLLM starts when less than {devices.free_bytes + allowed} bytes are in use"
        remedy = "stop the other programs on these GPUs, or raise TANDEM_FREE_GPU_BYTES"
        raise CannotStartNow(f"not free after {free_seconds:.0f} s: {in_use}; {need}; {remedy}")


if __name__ == "__main__":
    main()
