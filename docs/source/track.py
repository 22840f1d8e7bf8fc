"""Makes docs/track.png, which shows one run in TensorBoard, W&B (offline) and MLflow. During the
run, programs are killed, and later the run is rolled back.

    PYTHONPATH=tests:examples python -m docs.source.track DIRECTORY

The program starts a controller and a runner on the CPU. In the middle of the second job, the
program kills `tandem track` and the runner (SIGKILL). The third job starts after a rollback to
step 1.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt

from api_server import KEY, Process, make_root
from integrations.track.readers import curves, place
from local_stack import EXAMPLES
from tandem.client import Event, Tandem

RUN, STEPS = "my-run", 20
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}


def make_run(directory: Path) -> None:
    root = make_root(directory / "spool")
    environment = os.environ | {
        "TANDEM_ROOT": str(root),
        "TANDEM_DEVICE": "cpu",
        "TANDEM_BASE_MODEL": str(root / "models/tiny"),
        "TANDEM_API_KEY": KEY,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
    }

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *arguments], env=environment)

    with Process(root) as controller, Tandem(controller.url, KEY) as tandem:
        environment["TANDEM_URL"] = controller.url
        to = [word for name in TRACKERS for word in ("--to", place(name, directory))]
        tandem.create_run(RUN, lora={"rank": 4}, base_model=str(root / "models/tiny"))
        runner, tracker = start("tandem.trainer.runner"), start("tandem", "track", RUN, *to)

        def train(learning_rate: float, on_event: Callable[[Event], object] | None = None) -> None:
            optimizer = {"learning_rate": learning_rate, "epochs": STEPS}
            options = {"packing": {"sequence_length": 128}, "optimizer": optimizer}
            tandem.train_sft(
                RUN,
                EXAMPLES,
                wait="job",
                on_event=on_event,
                **options,  # type: ignore[arg-type]
            )

        def kill(event: Event) -> None:
            nonlocal runner, tracker
            if event.type == "step" and event.attempt == 1 and event.data["step"] == STEPS // 2:
                for process in (runner, tracker):
                    process.kill()
                    process.wait()
                runner = start("tandem.trainer.runner")

        train(2e-3)
        train(2e-2, kill)
        tracker = start("tandem", "track", RUN, *to)
        tandem.rollback(RUN, 1)
        train(5e-3)
        time.sleep(5)
        for process in (tracker, runner):
            process.terminate()
            process.wait()
        subprocess.run(
            [sys.executable, "-m", "tandem", "track", RUN, *to, "--no-follow"],
            env=environment,
            check=True,
        )


def plot(directory: Path, image: Path) -> None:
    figure, axes = plt.subplots(1, len(TRACKERS), figsize=(12, 3.2), sharey=True)
    for axis, (name, title) in zip(axes, TRACKERS.items(), strict=True):
        for number, curve in enumerate(curves(name, directory, RUN, "train/loss")):
            label = f"{RUN} ({number})" if number else RUN
            axis.plot(*zip(*curve, strict=True), marker=".", label=label)
        axis.set(title=title, xlabel="optimizer step")
        axis.legend()
    axes[0].set_ylabel("train/loss")
    figure.tight_layout()
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    make_run(where)
    plot(where, Path(__file__).parents[1] / "track.png")
