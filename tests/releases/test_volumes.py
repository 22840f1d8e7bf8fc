"""This version reads every record of the volumes of released versions. The version shows the
records, and continues the training.

`make_volume.py` made the volumes. A version that can't read a volume needs a migration, or must
refuse the volume with a clear message. For example, this version refuses the format before 0.1.0.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from api_server import KEY, Server
from openai_client import client
from tandem.client import Tandem
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL
from waiting import until

VOLUMES = sorted(Path(__file__).parent.glob("volume-*.tar.xz"))
OWN = {
    "main-sft": "succeeded",
    "main-rl": "succeeded",
    "main-more": "succeeded",
    "pairs-dpo": "succeeded",
    "forked-failed": "failed",
    "main-cancelled": "cancelled",
    "main-waits": "queued",
}
"""The jobs that have names, and their states. A session and OpenAI's API made the other jobs."""


@pytest.fixture(params=VOLUMES, ids=lambda file: file.name.partition(".tar")[0])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the volume, on another machine and with other times."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path / "spool", filter="data")
    return tmp_path / "spool"


def test_there_is_one_for_this_release():
    assert [file.name for file in VOLUMES][:1] == ["volume-0.1.0.tar.xz"]


def test_every_record_is_read(root):
    spool = Spool(root)
    assert spool.runs.damaged() == {}
    states = {job.spec.id: (state, job) for state, job in spool.jobs.list()}
    assert {name: states[name][0] for name in OWN} == OWN
    assert len(states) == len(OWN) + 2
    for state, job in states.values():
        kinds = [event.type for event in spool.events.read(job.spec.id)]
        assert (kinds[-1:] == [state]) == (state in TERMINAL), job.spec.id
        assert job.result is None or job.result.state == state
    assert states["forked-failed"][1].result.error.type == "non_finite"
    steps = {run: spool.checkpoints.steps(run) for run in spool.runs.names()}
    assert (steps["main"], steps["forked"], steps["pairs"]) == ([0, 1, 2], [0], [0, 1])
    for run, of_run in steps.items():
        for step in of_run:
            assert spool.checkpoints.verify(run, step).step == step
    assert len(spool.checkpoints.discarded("main")) == 1
    assert spool.checkpoints.pinned("main") == [1]
    assert spool.served.get("main").step == 2


def test_sessions_and_tunings_are_read(root):
    spool = Spool(root)
    [session] = spool.sessions.ids()
    assert spool.sessions.ended(session) is not None
    [run] = spool.sessions.runs(session)
    kinds = [spool.requests.get(run, seq).request.kind for seq in range(1, 6)]
    assert kinds == [*("forward_backward", "optim_step") * 2, "save"]
    assert all(spool.requests.result(run, seq).error is None for seq in range(1, 6))
    [saved] = spool.names.list(run)
    assert (saved.name, saved.step) == ("kept", 1)
    [tuning] = spool.tunings.ids()
    assert spool.checkpoints.newest(spool.tunings.get(tuning).run) == 1
    [upload] = spool.uploads.ids()
    with spool.uploads.reader(spool.uploads.get(upload)) as reader:
        assert len(reader.readlines()) == 4


def test_clients_see_everything(root):
    with Server(root) as server, Tandem(server.url, KEY) as tandem:
        runs = {run.spec.name: run for run in tandem.list_runs()}
        assert len(runs) == 5
        assert {job.spec.id: job.state for job in tandem.list_jobs("main")} == {
            name: state for name, state in OWN.items() if name.startswith("main")
        }
        for run in runs:
            for checkpoint in tandem.checkpoints(run):
                assert tandem.checkpoint(run, checkpoint.step).step == checkpoint.step
        [memory] = tandem.memory("main-rl")
        assert memory.released
        assert memory.device == "cpu"
        assert "checkpoint 2 exists" in tandem.logs("main-rl")
        with client(server.url) as sdk:
            [file] = sdk.files.list()
            [tuning] = sdk.fine_tuning.jobs.list()
            assert tuning.training_file == file.id


@pytest.mark.slow
def test_the_runner_trains_on(root):
    """The job that has been waiting in the volume starts from the released version's step."""
    environment = os.environ | {"TANDEM_ROOT": str(root), "TANDEM_DEVICE": "cpu"}
    with (root.parent / "runner.log").open("wb") as log:
        runner = subprocess.Popen(
            [sys.executable, "-m", "tandem.trainer.runner"], env=environment, stdout=log, stderr=log
        )
    try:
        spool = Spool(root)
        until("the job has ended", lambda: spool.jobs.get("main-waits")[0] in TERMINAL)
    finally:
        runner.terminate()
        runner.wait()
    assert spool.jobs.get("main-waits")[0] == "succeeded", (root.parent / "runner.log").read_text()
    assert spool.checkpoints.verify("main", 3).step == 3
