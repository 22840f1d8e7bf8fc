"""The Slurm job of one attempt: its name, the arguments of `sbatch`, and its script."""

import hashlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job
from tandem.trainer.launch import HOSTS

WARNING_SECONDS = 60
"""Seconds between Slurm's SIGTERM and Slurm's time limit. In this time the ranks end, and the
agents measure the devices. Slurm may send SIGTERM up to a minute earlier."""

_FIXED = frozenset(
    {
        "array",
        "chdir",
        "clusters",
        "error",
        "export",
        "export-file",
        "get-user-env",
        "gpus",
        "gpus-per-node",
        "gpus-per-task",
        "help",
        "input",
        "job-name",
        "kill-on-bad-exit",
        "nodes",
        "no-requeue",
        "ntasks",
        "ntasks-per-node",
        "output",
        "parsable",
        "requeue",
        "signal",
        "test-only",
        "version",
        "wait",
        "wrap",
    }
)
"""Options of sbatch that TANDEM_SLURM_ARGS can't contain, because the executor sets them or relies
on their defaults."""

_OWN = (
    "TANDEM_DEVICE",
    "TANDEM_FREE_GPU_BYTES",
    "TANDEM_LOG_FORMAT",
    "TANDEM_TRANSPORT",
    "TANDEM_WEIGHTS",
)
_INHERITED = (
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HOME",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
)
_CONTAINER = ("--container", "--no-container")
_INHERITED_FAMILIES = ("GLOO_", "NCCL_", "TORCH_", "TRITON_")


def output_path(attempt: Attempt) -> Path:
    """The file that receives the output of the script and the agents. The output file is in the
    directory of the hosts' records."""
    return attempt.work / HOSTS / "slurm.log"


class Batch:
    """The options with which all Slurm jobs are submitted. Raises InvalidInput if TANDEM_SLURM_ARGS
    has an option that is not allowed."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self._root = settings.root.absolute()
        words = _checked(settings.slurm_args)
        # Container options are passed to srun, which starts a container on each node. If sbatch got
        # these options, it would run the batch script in a container.
        self._container = [word for word in words if word.startswith(_CONTAINER)]
        self._words = [word for word in words if word not in self._container]
        digest = hashlib.sha256(str(self._root).encode()).hexdigest()
        self.prefix = f"tandem-{digest[:8]}-"
        """The beginning of the names of this volume's Slurm jobs."""

    def name(self, job: Job) -> str:
        """The name of the attempt's Slurm job. No other attempt ever has this name, even if the
        volume is emptied."""
        digest = hashlib.sha256(job.key.name.encode()).hexdigest()
        return f"{self.prefix}{job.spec.id}.{job.attempt}.{digest[:6]}"

    def exported(self) -> dict[str, str]:
        """The environment variables that agents and their ranks read. The variables contain no
        secret. The agents read all other settings from the runner's order."""
        chosen = {
            name: value
            for name, value in self._environment.items()
            if name in _OWN + _INHERITED or name.startswith(_INHERITED_FAMILIES)
        }
        return chosen | {"TANDEM_ROOT": str(self._root)}

    def words(self, job: Job, attempt: Attempt) -> list[str]:
        """The arguments of `sbatch`. Variables are exported by name, so their values do not appear
        in any command line."""
        settings = self._settings
        gpus = [f"--gpus-per-node={settings.ranks_per_host}"] if settings.device != "cpu" else []
        log = str(output_path(attempt).absolute()).replace("%", "%%")
        return [
            "--parsable",
            "--no-requeue",
            f"--nodes={settings.trainer_hosts}",
            "--ntasks-per-node=1",
            *gpus,
            f"--signal=TERM@{WARNING_SECONDS}",
            f"--job-name={self.name(job)}",
            f"--export={','.join(sorted(self.exported()))}",
            f"--output={log}",
            f"--chdir={self._root}",
            *self._words,
        ]

    def script(self, job: Job) -> str:
        """The script starts one agent per node. An agent takes its host's number from
        SLURM_PROCID."""
        agent = [sys.executable, "-m", "tandem"]
        if self._container:
            # A variable set in the image overrides the job's variable of the same name.
            own = [name for name in sorted(self.exported()) if name.startswith("TANDEM_")]
            agent = ["env", *(f'{name}="${name}"' for name in own), "tandem"]
        else:
            agent = [shlex.quote(word) for word in agent]
        # Without CPU binding, the one task on each node may use all of the node's processors.
        srun = ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none", *self._container]
        of = ["--job", job.spec.id, "--attempt", str(job.attempt)]
        of += ["--hosts", str(self._settings.trainer_hosts)]
        words = [*map(shlex.quote, srun), *agent, "rank-agent", *map(shlex.quote, of)]
        return f"#!/bin/sh\nexec {' '.join(words)}\n"


def _checked(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _wrong(f"{text!r} is no list of words: {error}") from error
    for word in words:
        if not word.startswith("--") or word == "--":
            raise _wrong(
                f"{word!r} is no long option; write each option as one word, such as"
                " --partition=gpu"
            )
        if any(fixed.startswith(_option(word)) for fixed in _FIXED):
            raise _wrong(
                f"--{_option(word)} is the executor's own, or the beginning of such a word"
            )
    return words


def _option(word: str) -> str:
    return word.removeprefix("--").partition("=")[0]


def _wrong(problem: str) -> InvalidInput:
    return InvalidInput(problem, field="TANDEM_SLURM_ARGS")
