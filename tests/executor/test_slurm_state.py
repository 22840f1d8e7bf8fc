"""The meaning that Slurm's states have for an attempt, and the arguments of submissions."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spool.spool_tools import spool_with_run, start
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job
from tandem.trainer.executor import Ended, Running, Waiting
from tandem.trainer.executor.batch import Batch
from tandem.trainer.executor.slurm import Slurm
from tandem.trainer.executor.slurm_state import SlurmJob, _seconds, read


def line(state: str, reason: str = "None", **fields: str) -> str:
    """A line as squeue of Slurm 22.05 prints it."""
    known = {"left": "UNLIMITED", "preempted": "N/A", "code": "0", "nodes": "n[0-1]"} | fields
    parts = ["12", "tandem-0-j.1", state, *known.values(), reason]
    return "|".join(f"{part:<20}" for part in parts) + "|"


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (line("PENDING", "Resources", nodes=""), Waiting("Slurm: Resources")),
        (line("PENDING", "None", nodes=""), Waiting("Slurm: job 12 is pending")),
        (line("CONFIGURING"), Waiting("Slurm: CONFIGURING")),
        (
            line("PENDING", "Nodes required for job are DOWN, DRAINED or reserved", nodes=""),
            Waiting("Slurm: Nodes required for job are DOWN, DRAINED or reserved"),
        ),
        (line("RUNNING"), Running()),
        (line("COMPLETING"), Running()),
        (line("COMPLETED"), Ended(0)),
        # the ranks' own files name the cause of this end
        (line("FAILED", "NonZeroExitCode", code=str(1 << 8)), Ended(1)),
    ],
)
def test_a_slurm_job_waits_runs_and_ends(given: str, state: Waiting | Running | Ended) -> None:
    assert read(SlurmJob.parse(given), began=True) == state


STOPPED = str(75 << 8)
BEGUN = "2026-11-27T18:24:44"


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (line("PREEMPTED", preempted=BEGUN, code=STOPPED), "preempted", "was preempted"),
        (line("FAILED", "NonZeroExitCode", preempted=BEGUN, code=STOPPED), "preempted", "was pre"),
        (line("NODE_FAIL", "NodeDown", code=STOPPED), "preempted", "lost a node: NodeDown"),
        (line("BOOT_FAIL"), "preempted", "a node that does not start"),
        (line("SUSPENDED"), "preempted", "was suspended"),
        (line("TIMEOUT", "TimeLimit"), "deadline", "give --time in TANDEM_SLURM_ARGS"),
        (line("FAILED", "NonZeroExitCode", left="0:33", code=STOPPED), "deadline", "time limit"),
        (line("FAILED", left="5:33", code=STOPPED), "job_deleted", "SIGTERM"),
        (line("CANCELLED", code=STOPPED), "job_deleted", "somebody cancelled Slurm job 12 on n[0-"),
        (line("CANCELLED", nodes=""), "job_deleted", "somebody cancelled Slurm job 12"),
        (line("OUT_OF_MEMORY"), "rank_crashed", "give --mem"),
        (line("FAILED", code=str(77 << 8)), "spool_unusable", "the volume was unusable"),
        (line("FAILED", code=str(127 << 8)), "launch_failed", "status 127 before .*: not found"),
        (line("FAILED", "BadConstraints", code="1"), "launch_failed", "before its agents"),
    ],
)
def test_why_a_slurm_job_ended(given: str, kind: str, words: str) -> None:
    printed = "not found" if "status 127" in words else ""
    ended = read(SlurmJob.parse(given), began=kind != "launch_failed", printed=printed)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert (ended.error.type, ended.error.retriable) == (kind, True)
    assert all(part in ended.error.message for part in words.split(".*"))


def test_times_as_squeue_prints_them() -> None:
    times = {"0:33": 33, "1:00:05": 3605, "2-00:00:01": 172801, "-0:05": -5}
    assert {text: _seconds(text) for text in times} == times
    assert [_seconds(text) for text in ("UNLIMITED", "INVALID", "NOT_SET", "")] == [None] * 4


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return start(spool_with_run(tmp_path / "a 100% volume"), "j")


def batch_of(root: Path, arguments: str = "", **variables: str) -> Batch:
    settings = Settings(
        root=root, executor="slurm", trainer_hosts=2, trainer_ranks=8, slurm_args=arguments
    )
    return Batch(settings, {"PATH": "/usr/bin", **variables})


def test_the_words_and_the_script_of_an_attempt(tmp_path: Path, job: Job) -> None:
    root = tmp_path / "a 100% volume"
    secrets = {"TANDEM_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "AWS_SECRET": "s3cret"}
    given = {"TANDEM_HOST_ADDRESS": "10.0.0.1", "NCCL_DEBUG": "INFO", **secrets}
    batch = batch_of(root, "--partition=gpu --exclusive", **given)
    words = batch.words(job, Attempt(spool_with_run(tmp_path / "other"), "j", 1))
    for word in (
        "--parsable",
        "--no-requeue",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--signal=TERM@60",
        f"--job-name={batch.name(job)}",
        "--export=NCCL_DEBUG,PATH,TANDEM_ROOT",
        f"--chdir={root}",
        "--partition=gpu",
        "--exclusive",
    ):
        assert word in words
    exported = {"NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "TANDEM_ROOT": str(root)}
    assert batch.exported() == exported
    script = batch.script(job)
    assert "s3cret" not in script + str(words)
    (command,) = [line for line in script.splitlines() if line.startswith("exec ")]
    assert shlex.split(command)[1:] == [
        *("srun", "--kill-on-bad-exit=1", "--cpu-bind=none", sys.executable, "-m", "tandem"),
        *("rank-agent", "--job", "j", "--attempt", "1", "--hosts", "2"),
    ]


def test_a_name_is_of_one_attempt_of_one_volume(tmp_path: Path, job: Job) -> None:
    names = {
        batch_of(root).name(one)
        for root in (tmp_path / "a", tmp_path / "b")
        for one in (job, job.model_copy(update={"attempt": 2}))
    }
    later = job.spec.model_copy(update={"created": job.spec.created + 1})
    names.add(batch_of(tmp_path / "a").name(job.model_copy(update={"spec": later})))
    assert len(names) == 5
    assert all(name.startswith("tandem-") and "-j." in name for name in names)


def test_a_container_has_the_agents_variables(tmp_path: Path, job: Job) -> None:
    root = tmp_path / "a 100% volume"
    arguments = (
        "--container-image=tandem.sqsh '--container-mounts=/a b:/c' --no-container-mount-home"
    )
    batch = batch_of(root, arguments, TANDEM_LOG_FORMAT="json")
    words = batch.words(job, Attempt(spool_with_run(tmp_path / "other"), "j", 1))
    assert not any(word.startswith(("--container", "--no-con")) for word in words)
    script = batch.script(job).replace("exec srun", "exec printf '%s\\n'")
    variables = batch.exported()
    ran = subprocess.run(
        ["sh", "-c", script], env=variables, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [
        *("--kill-on-bad-exit=1", "--cpu-bind=none", "--container-image=tandem.sqsh"),
        *("--container-mounts=/a b:/c", "--no-container-mount-home", "env"),
        *("TANDEM_LOG_FORMAT=json", f"TANDEM_ROOT={root}", "tandem", "rank-agent"),
        *("--job", "j", "--attempt", "1", "--hosts", "2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nodes=4", "--nodes is the executor's own"),
        ("--no", "--no is the executor's own, or the beginning of such a word"),
        ("--export=ALL", "--export is the executor's own"),
        ("--gpus=8", "--gpus is the executor's own"),
        ("-p gpu", "'-p' is no long option; write each option as one word"),
        ("--partition gpu", "'gpu' is no long option"),
        ("--comment='a", "is no list of words"),
    ],
)
def test_words_that_the_executor_sets_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=r"^TANDEM_SLURM_ARGS: ") as refused:
        batch_of(Path("/root"), arguments)
    assert words in str(refused.value)


def test_without_slurms_programs_the_line_that_installs_them_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"sbatch and squeue and scancel .*install slurm-client"):
        Slurm()
