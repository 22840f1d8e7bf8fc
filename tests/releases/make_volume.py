"""The volume of a release, as later versions find it:

    PYTHONPATH=tests:examples python -m tests.releases.make_volume

Makes tests/releases/volume-<version>.tar.xz. A controller and a runner of this version train a tiny
model on the CPU: by SFT, by RL, by DPO, through OpenAI's API, and through Tinker's API. Further
jobs fail, are cancelled, or stay in the queue. Make the file once per release, from the released
commit. `test_volumes.py` reads the files of all releases.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tinker import types

from api_server import BASE_MODEL, KEY, Process, groups, make_root, serve
from openai_client import chats, client, upload
from tandem import __version__
from tandem.client import Tandem
from tandem.errors import TandemError
from tandem.spool import Spool
from tinker_client import datum, service
from waiting import until

HERE = Path(__file__).parent
PACKING = {"sequence_length": 64}
OPTIMIZER = {"learning_rate": 1e-3, "epochs": 2}
EXAMPLE = {"token_ids": [10, 11, 20, 21], "trainable": [False, False, True, True]}
PAIR = {
    "prompt": [{"role": "user", "content": "Is it?"}],
    "chosen": [{"role": "assistant", "content": "no"}],
    "rejected": [{"role": "assistant", "content": "yes"}],
}


def make_volume(root: Path) -> None:
    """Trains on a new spool `root` that contains the base model."""
    make_root(root)
    variables = {"TANDEM_DEVICE": "cpu", "TANDEM_SESSION_IDLE_SECONDS": "1"}
    with Process(root, **variables) as controller, Tandem(controller.url, KEY) as tandem:
        environment = os.environ | variables | {"TANDEM_ROOT": str(root)}
        with (root.parent / "runner.log").open("wb") as log:
            runner = subprocess.Popen(
                [sys.executable, "-m", "tandem.trainer.runner"], env=environment, stderr=log
            )
        try:
            _trained(tandem)
            _by_tinker(controller.url, Spool(root))
            _by_openai(controller.url, Spool(root))
        finally:
            runner.terminate()
            runner.wait()
        _left(tandem)
    spool = Spool(root)
    serve(spool, "main", 2)
    shutil.rmtree(root / "logs", ignore_errors=True)


def _trained(tandem: Tandem) -> None:
    """Makes runs with checkpoints of each kind of job, a rollback, a fork, and a failed job."""
    for run in ("main", "pairs"):
        tandem.create_run(run, lora={"rank": 2, "alpha": 4})
    sft = {"kind": "sft", "examples": [EXAMPLE], "packing": PACKING, "optimizer": OPTIMIZER}
    rl = {"kind": "rl", "groups": groups(), "packing": PACKING, "optimizer": OPTIMIZER}
    for request in (sft | {"id": "main-sft"}, rl | {"id": "main-rl"}, sft | {"id": "main-more"}):
        tandem.wait_job(tandem.train("main", request).spec.id)
    tandem.rollback("main", 2)
    tandem.pin("main", 1)
    tandem.fork("main", 1, "forked")
    pairs = {"kind": "dpo", "pairs": [PAIR], "packing": PACKING, "optimizer": OPTIMIZER}
    tandem.wait_job(tandem.train("pairs", pairs | {"id": "pairs-dpo"}).spec.id)
    wild = sft | {"id": "forked-failed", "optimizer": {"learning_rate": 1e30, "epochs": 3}}
    try:
        tandem.wait_job(tandem.train("forked", wild).spec.id)
    except TandemError as error:
        print(f"forked-failed: {error}")


def _by_tinker(url: str, spool: Spool) -> None:
    """A session whose model has two steps and a checkpoint."""
    with service(url) as client:
        model = client.create_lora_training_client(base_model=BASE_MODEL, rank=2).result()
        for _ in range(2):
            model.forward_backward([datum([5, 6, 7, 8])], "cross_entropy").result()
            model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        model.save_state("kept").result()
    _idle(spool)


def _by_openai(url: str, spool: Spool) -> None:
    """A file and a fine-tuning job of OpenAI's API. The job waits for vLLM to serve its step."""
    with client(url) as sdk:
        file = upload(sdk, chats(4)).id
        once = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
        job = sdk.fine_tuning.jobs.create(
            model=BASE_MODEL, training_file=file, suffix="kept", method=once
        )
        run = spool.tunings.get(job.id).run
        until("its run is there", lambda: run in spool.runs.names())
        until("it has a step", lambda: spool.checkpoints.newest(run))
    _idle(spool)


def _idle(spool: Spool) -> None:
    until("no job runs", lambda: not spool.jobs.list(states=("queued", "running")))


def _left(tandem: Tandem) -> None:
    """Submits two jobs while no runner runs. One job is cancelled, and the other job waits."""
    sft = {"kind": "sft", "examples": [EXAMPLE], "packing": PACKING}
    tandem.cancel(tandem.train("main", sft | {"id": "main-cancelled"}).spec.id)
    tandem.train("main", sft | {"id": "main-waits"})


def pack(root: Path, file: Path) -> None:
    """Packs the volume into `file`, without lock files. The checkout's path, which tracebacks in
    the volume's files contain, becomes `/checkout`."""
    checkout = str(HERE.parents[1]).encode()
    with tarfile.open(file, "w:xz") as archive:
        for path in sorted(root.rglob("*")):
            member = tarfile.TarInfo(path.relative_to(root).as_posix())
            if path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
            elif not path.name.endswith(".lock"):
                content = path.read_bytes().replace(checkout, b"/checkout")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        make_volume(Path(directory) / "spool")
        pack(Path(directory) / "spool", HERE / f"volume-{__version__}.tar.xz")
