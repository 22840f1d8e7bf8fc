"""The ways to start the ranks of a job. All ways give bit-identical results.

`fork`, the default: a fork server forks a leader per job, and the leader forks the ranks
(`forkserver.py`). The fork server has imported torch and Megatron, and has never used CUDA. Between
jobs the fork server stays alive, and uses no GPU memory. `fork` does not use torch's elastic agent,
because that agent has threads when it forks. The elastic agent also does not notice a rank that
exits too early with status 0.

`torchrun`: torch's own launcher starts new processes for each job, with a port that the kernel
chooses (`torchrun.py`). No process stays between jobs.

`resident`: ranks under torchrun stay alive and receive their jobs over a socket. Resident ranks
keep CUDA's context, NCCL's buffers, and the model object, whose device memory is released. Between
jobs, a rank releases the memory of parameters, gradients and optimizer state
(`model/device/offload.py`). A resident rank drops the frozen base weights and reads them again from
the page cache for the next job. Reading the weights from the page cache takes as long as copying
them from pinned memory. A resident rank keeps the adapter and Adam's state in pinned buffers. The
rank uses the buffers if the next job starts from a checkpoint with the buffers' content. A rank
that uses the buffers still verifies the checkpoint's hashes. Memory that a living process can't
release is measured and reported in the job's event `released`. Resident ranks end after every job
that does not succeed.

`launcher.py` chooses the way to start ranks according to TANDEM_LAUNCH. If all ranks are on one
host, their store listens on loopback. Every launcher process and every rank asks the kernel to be
killed when its parent dies (`die_with_parent`). Each rank gets a `Launch`, which names the attempt
and contains the deployment's settings for ranks (`RankSettings`). `RankSettings` includes the sizes
that the runner has chosen. Ranks read no settings from the environment. A `Launch` contains no
secret, because torchrun puts it on the ranks' command lines.

`spool.attempt.Attempt` names most files of an attempt's work directory. With every launcher, the
ranks' parent writes two more files to the work directory, `launcher.log` and `exits.json`. With
several hosts, each host has its own `launcher.log` and `exits.json` in `hosts/`. `launcher.log` has
the output of the ranks' parent. `exits.json` has the exit statuses of failed ranks (see
`read_exits`).
"""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from tandem.config import Settings, Way
from tandem.spool import Spool, fs
from tandem.spool.attempt import Attempt
from tandem.spool.paths import Paths
from tandem.spool.schema import Record
from tandem.system.plain_files import read_plain
from tandem.system.processes import die_with_parent
from tandem.topology.sizes import Sizes

DEFAULT_ENTRY = "tandem.trainer.rank.entry"
"""The module whose `main(attempt: Attempt, settings: RankSettings)` runs a rank. The module's
`preload(device: str)` imports all modules that a rank needs; `device` is the setting."""

LAUNCHER_LOG, EXITS = "launcher.log", "exits.json"
HOSTS = "hosts"
"""The name of the directory for the files of the hosts' agents, in an attempt's work directory."""

SHARED_IDLE_SECONDS = 1.0
"""Seconds after which an idle session's ranks leave shared GPUs, because vLLM sleeps as long as
they stay."""

SHUTDOWN_SECONDS = {"torchrun": 30, "fork": 10}
"""Seconds between the first failure of a rank and SIGKILL for the other ranks. torch fixes
torchrun's 30 s; TORCH_ELASTIC_SHUTDOWN_TIMEOUT does not change this time."""


class RankSettings(Record):
    """The deployment's settings that ranks use. Ranks read no other settings.

    Every user of the host can read the settings on the ranks' command lines, so no setting is a
    secret.
    """

    sizes: Sizes = Sizes()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    recompute: Literal["auto", "none", "full"] = "auto"
    base_precision: Literal["same", "fp8"] = "same"
    way: Way = "merge"
    session_idle_seconds: float = 60.0

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            sizes=Sizes.of(settings),
            device=settings.device,
            dtype=settings.dtype,
            recompute=settings.recompute,
            base_precision=settings.base_precision,
            way=settings.way,
            session_idle_seconds=(
                settings.session_idle_seconds
                if settings.gpu_mode == "dedicated"
                else min(settings.session_idle_seconds, SHARED_IDLE_SECONDS)
            ),
        )


class HostPart(Record):
    """One host's part of an attempt."""

    number: int = 0
    hosts: int = 1
    # Address and port of the ranks' store, which runs on host 0; None: the store is on this host's
    # loopback.
    store: tuple[str, int] | None = None


class Launch(Record):
    """An order to start the ranks of one attempt on one host."""

    root: Path
    job: str
    attempt: int
    settings: RankSettings = RankSettings()
    entry: str = DEFAULT_ENTRY
    host: HostPart = HostPart()

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.settings.sizes.world

    @property
    def own_ranks(self) -> range:
        """Numbers of this host's ranks."""
        each = self.ranks // self.host.hosts
        return range(self.host.number * each, (self.host.number + 1) * each)

    @property
    def work(self) -> Path:
        """The attempt's work directory, which is known even if the spool can't be opened."""
        return Paths(self.root).work_dir(self.job, self.attempt)

    def of_parent(self, name: str) -> Path:
        """The path of `name` (LAUNCHER_LOG or EXITS), a file that the parent of this host's ranks
        writes."""
        return of_parent(self.work, name, None if self.host.store is None else self.host.number)

    def open(self) -> Attempt:
        """The attempt whose ranks are to be started. Raises SpoolUnusable if the spool can't be
        opened."""
        return Attempt(Spool(self.root), self.job, self.attempt)


def start_child(
    command: list[str], environment: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in its own session. The kernel kills the child when this process dies.

    Args:
        environment: all environment variables of the child, which inherits none.
        options: further arguments of `subprocess.Popen`.
    """
    parent = os.getpid()
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # A `preexec_fn` may be used, because `die_with_parent` takes no lock that another thread
        # may hold.
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        **options,
    )


def of_parent(work: Path, name: str, host: int | None) -> Path:
    """The path of the file `name` that the ranks' parent writes.

    Args:
        host: the index of the host whose agent started the ranks; None if there is one host.
    """
    return work / name if host is None else work / HOSTS / f"{host}.{name}"


def write_exits(path: Path, exits: dict[int, int]) -> None:
    path.write_text(json.dumps(exits))


def read_exits(work: Path) -> dict[int, int]:
    """The exit status of each rank that failed by itself, in the order of the failures. A status of
    -N means that signal N ended the rank. The result leaves out the ranks that their parent ended
    after the first failure. The result is empty if no rank failed, or if the ranks' parent was
    killed.
    """
    exits: dict[int, int] = {}
    for path in (work / EXITS, *sorted((work / HOSTS).glob(f"*.{EXITS}"))):
        with suppress(OSError, ValueError):
            found = json.loads(read_plain(path, most=fs.RECORD_BYTES))
            exits |= {int(rank): status for rank, status in found.items()}
    return exits
