"""Compares TRL's GRPO with `tandem rl` on the same model, task, batch, learning rate and LoRA.

    python -m bench.peers trl MODEL --mode colocate --gpus 3 --out trl-colocate.json
    python -m bench.peers trl MODEL --mode server --url http://127.0.0.1:8200 --gpus 1 2 --out ...
    python -m bench.peers tandem --name dedicated --ahead 1 --gpus 0 1 --out tandem.json
    python -m bench.peers table ROW.json ...        (writes bench/results/peers.json)

Each with PYTHONPATH=src:examples. The task is `examples/sums.py` with sums of numbers from 10 to
99. A step has 32 groups of 8 answers of at most 24 tokens, and 4 optimizer steps of 8 groups each.
The LoRA has rank 16 and is on all linear layers. If `--groups` is below 8, a step has one optimizer
step. After every `--every` steps, 200 other sums are evaluated, with one answer each at temperature
1. `reward` is the share of right answers, and `alone` is the share of answers that consist of a
number only. `--task noise` measures only the speed. With `--task noise` the reward is the parity of
a checksum, the answers are as long as `--tokens` allows, and there is no evaluation.

Tandem's stack must run already (TANDEM_URL, TANDEM_INFERENCE_URL). TRL's server must run too:
`VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'
--logprobs-mode processed_logprobs`. Tandem's loss is CISPO and TRL's loss is DAPO, and each trainer
has its own correction for the sampler's rounding. All other settings that both trainers have are
equal. A row ends after `--steps` steps or `--seconds`, whichever is first. In a row, `idle` is the
share of time in which nothing ran on a GPU (NVML), and `peak MiB` is the most memory in use on each
GPU.
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zlib
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import sums

from bench.report import report

SMALLEST, LARGEST, EVALUATED, GROUP, PER_OPTIMIZER_STEP = 10, 99, 200, 8, 8
NUMBERS = {"smallest": SMALLEST, "largest": LARGEST}


class Noise(sums.Sums):
    """Sums whose reward is the parity of a checksum of the answer."""

    async def rollout(self, task: sums.Task, sampler: Any) -> Any:
        answer = await sampler.chat(sums.question(*task))
        return sampler.finish(noise(answer["content"] or ""))


def noise(said: str) -> float:
    return float(zlib.crc32(said.encode()) % 2)


def judged(said: str, wanted: int) -> tuple[float, float]:
    """The reward and the metric `alone` of an answer, as `sums.Sums` computes them."""
    right, alone = sums.judge(said, wanted)
    return float(right), float(alone)


class Gpus:
    """Reads the utilization and the memory of the GPUs from nvidia-smi five times per second."""

    def __init__(self, indices: list[int]) -> None:
        self._looks: list[tuple[float, int, int, int]] = []
        query = "--query-gpu=index,utilization.gpu,memory.used"
        command = ["nvidia-smi", "-i", ",".join(map(str, indices)), query, "-lms", "200"]
        command.append("--format=csv,noheader,nounits")
        self._program: subprocess.Popen[str] | None = None
        if indices:
            self._program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=(self._program.stdout,), daemon=True).start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            with suppress(ValueError):
                index, busy, used = map(int, line.split(","))
                self._looks.append((time.time(), index, busy, used))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        if self._program is not None:
            self._program.terminate()
        looks = [look for look in self._looks if begin <= look[0] <= end]
        of = {index: [look for look in looks if look[1] == index] for _, index, *_ in looks}
        idle = {i: 1 - statistics.mean(one[2] for one in found) / 100 for i, found in of.items()}
        peak = {index: max(one[3] for one in found) for index, found in of.items()}
        return {"idle": idle, "peak MiB": peak}


class Record:
    """The recorded steps and evaluations, each with its time."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self._options, self._name, self._gpus = options, name, Gpus(options.gpus)
        self.launched = self.began = time.time()
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def step(self, step: int, parts: dict[str, float], **more: Any) -> bool:
        """Records a step. Returns whether the measurement ends with this step."""
        self.steps.append({"at": time.time() - self.began, "step": step, "parts": parts} | more)
        print(self.steps[-1], flush=True)
        return step >= self._options.steps or self.is_late

    @property
    def is_late(self) -> bool:
        return time.time() - self.launched > self._options.seconds

    def evaluation(self, step: int, reward: float, alone: float) -> None:
        line = {"at": time.time() - self.began, "step": step, "reward": reward, "alone": alone}
        self.evaluations.append(line)
        print(line, flush=True)

    def write(self) -> None:
        options = self._options
        if len(self.steps) < 2:
            sys.exit(f"no row: {len(self.steps)} steps; two are needed, as the first compiles")
        ends = [0.0, *(step["at"] for step in self.steps)]
        each = [after - before for before, after in itertools.pairwise(ends)][1:]
        names = {name for step in self.steps for name in step["parts"]}
        median = statistics.median(each)
        row = {
            "peer": self._name,
            "GPUs": len(options.gpus),
            "steps": len(self.steps),
            "seconds to the first sample": self.began - self.launched,
            "first step": ends[1],
            "seconds per step": median,
            "answers/s": options.groups * GROUP / median,
            "parts": {
                name: statistics.median(step["parts"].get(name, 0.0) for step in self.steps[1:])
                for name in sorted(names)
            },
            **self._gpus.between(self.began + ends[1], time.time()),
            "task": options.task,
            "tokens": options.tokens,
            "evaluations": self.evaluations,
            "each": self.steps,
        }
        Path(options.out).write_text(json.dumps(row, indent=1) + "\n")
        print(json.dumps({k: v for k, v in row.items() if k not in ("each", "evaluations")}))


# ---- TRL


def trl_side(options: argparse.Namespace) -> None:
    record = Record(options, f"TRL, {options.mode}" if options.mode else "TRL, transformers")
    # without this variable, vLLM takes the address of the interface with the route to 8.8.8.8
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras import profiling

    parts: dict[str, float] = defaultdict(float)
    # TRL's `steps_per_generation` counts passes of `--micro-batch` answers.
    per_step = options.groups // options.per_optimizer_step

    def note(context: Any, duration: float) -> None:
        parts[context.name.removeprefix("GRPOTrainer.")] += duration

    profiling.ProfilingContext._log_metrics = note

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            record.began = time.time()

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            step, rest = divmod(state.global_step, per_step)
            if rest:
                return
            begun = record.steps[-1]["at"] if record.steps else 0.0
            whole = time.time() - record.began - begun
            sampling = parts["vLLM.generate"] + parts["transformers.generate"]
            took = {"sampling": sampling, "serving": parts["sync_weights"]}
            took["training"] = whole - sum(took.values())
            parts.clear()
            control.should_training_stop |= record.step(step, took)

        def on_evaluate(self, _args: Any, state: Any, *_: Any, metrics: Any, **__: Any) -> None:
            step = state.global_step // per_step
            record.evaluation(step, metrics["eval_reward"], metrics["eval_rewards/alone/mean"])
            parts.clear()

    def rows(tasks: list[sums.Task]) -> Dataset:
        """A data set with each task's prompt and right sum. Without a given fingerprint, the
        package datasets would pickle the table to compute a fingerprint. If pyarrow is neither
        below Python's prefix nor in `site-packages`, the pickle would contain the whole module
        pyarrow."""
        made = [{"prompt": sums.question(a, b), "wanted": a + b} for a, b in tasks]
        return Dataset(InMemoryTable.from_pylist(made), fingerprint=f"sums-{len(made)}")

    def reward(completions: Any, wanted: list[int], **_: Any) -> list[float]:
        said = [answer[0]["content"] for answer in completions]
        if options.task == "noise":
            return [noise(each) for each in said]
        return [judged(*each)[0] for each in zip(said, wanted, strict=True)]

    def alone(completions: Any, wanted: list[int], **_: Any) -> list[float]:
        said = [answer[0]["content"] for answer in completions]
        return [judged(*each)[1] for each in zip(said, wanted, strict=True)]

    answers = options.per_optimizer_step * GROUP
    is_sums = options.task == "sums"
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        max_steps=options.steps * per_step,
        # Tandem has the settings below too, with the same values.
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=options.micro_batch or answers,
        gradient_accumulation_steps=answers // (options.micro_batch or answers),
        generation_batch_size=options.groups * GROUP,
        num_generations=GROUP,
        max_completion_length=options.tokens,
        temperature=1.0,
        beta=0.0,
        reward_weights=[1.0, 0.0],
        # The settings below make TRL fastest, if the memory is large enough.
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        model_init_kwargs={"dtype": "bfloat16" if options.device == "cuda" else "float32"},
        gradient_checkpointing=options.checkpointing,
        use_vllm=options.mode is not None,
        vllm_mode=options.mode or "colocate",
        vllm_server_base_url=options.url,
        vllm_gpu_memory_utilization=options.utilization,
        vllm_max_model_length=1024,
        eval_strategy="steps" if is_sums else "no",
        eval_on_start=is_sums,
        eval_steps=options.every * per_step,
        num_generations_eval=1,
        per_device_eval_batch_size=options.evaluated,
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[reward, alone],
        args=config,
        train_dataset=rows(sums.Sums(**NUMBERS, skip=EVALUATED).tasks()),
        eval_dataset=rows(sums.Sums(**NUMBERS, count=options.evaluated).tasks())
        if is_sums
        else None,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[Steps()],
    )
    trainer.train()
    record.write()


# ---- Tandem


def tandem_side(options: argparse.Namespace) -> None:
    record = Record(options, f"Tandem, {options.name}")
    directory = Path(tempfile.mkdtemp())
    config = directory / f"{options.run}.toml"
    config.write_text(configuration(options))
    root = Path(__file__).parent.parent
    paths = [str(root), str(root / "examples"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "tandem", "rl", "train", str(config), "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    late = min(options.seconds, threading.TIMEOUT_MAX)
    # A shell starts background programs with SIGINT ignored, and their children inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as loop:
        timer = threading.Timer(late, loop.send_signal, [signal.SIGINT])
        timer.start()
        try:
            note(loop.stdout, record)
        except BaseException:
            loop.kill()  # the end of the `with` block waits until this process has ended
            raise
        finally:
            timer.cancel()
    record.write()


def note(lines: Any, record: Record) -> None:
    """Records the lines that `tandem rl train --json` prints."""
    for printed in lines:
        line = json.loads(printed)
        if "evaluated" in line:
            record.evaluation(line["evaluated"], line["reward"], line["metrics"]["alone"])
        elif "step" in line:
            parts = {name: line["seconds"][name] for name in ("sampling", "training", "serving")}
            record.step(line["step"], parts, reward=line.get("reward"))
        else:
            print(line, flush=True)


def configuration(options: argparse.Namespace) -> str:
    """`examples/sums.toml` with the name, the sizes and the number of steps of `options`."""
    wanted = tomllib.loads((Path(sums.__file__).parent / "sums.toml").read_text())
    rl, evaluation = wanted["rl"], wanted["eval"]
    rl |= {"steps": options.steps, "groups_per_step": options.groups, "group_size": GROUP}
    rl |= {"max_off_policy_steps": options.ahead}
    rl["sampling"] = {"max_tokens": options.tokens}
    rl["optimizer"] |= {
        "learning_rate": options.learning_rate,
        "batch_size": options.per_optimizer_step,
    }
    environment = {
        "use": "sums:Sums" if options.task == "sums" else "bench.peers:Noise",
        "arguments": {**NUMBERS, "skip": EVALUATED},
    }
    evaluation |= {"every": options.every, "groups": options.evaluated}
    evaluation["environment"] = {
        "use": "sums:Sums",
        "arguments": {**NUMBERS, "count": options.evaluated},
    }
    lines = ["[run]", f'name = "{options.run}"', "lora = { rank = 16, alpha = 32 }", "[rl]"]
    tables = {key: rl[key] for key in ("sampling", "optimizer")}
    lines += [f"{key} = {_toml(v)}" for key, v in rl.items() if key not in (*tables, "environment")]
    lines += [f"{key} = {_toml(value)}" for key, value in tables.items()]
    lines += ["[[rl.environment]]", *(f"{key} = {_toml(v)}" for key, v in environment.items())]
    if options.task == "sums":
        lines += ["[eval]", *(f"{key} = {_toml(value)}" for key, value in evaluation.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + " }"
    return json.dumps(value)


# ---- both


def table(options: argparse.Namespace) -> None:
    """Prints the rows' evaluations and the table."""
    rows = [json.loads(Path(row).read_text()) for row in options.rows]
    for row in rows:
        for evaluation in row["evaluations"]:
            print(row["peer"], {k: round(v, 3) for k, v in evaluation.items()})
    report("peers", "tandem rl beside TRL's GRPO", rows)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    sides = parser.add_subparsers(dest="side", required=True)
    trl, tandem = sides.add_parser("trl"), sides.add_parser("tandem")
    trl.add_argument("model")
    trl.add_argument("--mode", choices=["colocate", "server"], help="default: without vLLM")
    trl.add_argument("--url", help="of vLLM, with --mode server")
    trl.add_argument("--utilization", type=float, default=0.3, help="vLLM's, with --mode colocate")
    trl.add_argument("--micro-batch", type=int, help="answers per pass; all of an optimizer step")
    trl.add_argument("--checkpointing", action="store_true", help="recompute activations")
    trl.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    tandem.add_argument("--name", default="dedicated")
    tandem.add_argument("--run", default="peers")
    tandem.add_argument("--ahead", type=int, default=1, help="max_off_policy_steps")
    for side in (trl, tandem):
        side.add_argument("--gpus", type=int, nargs="*", default=[])
        side.add_argument("--out", required=True)
        side.add_argument("--steps", type=int, default=40)
        side.add_argument("--seconds", type=float, default=math.inf)
        side.add_argument("--every", type=int, default=5)
        side.add_argument("--evaluated", type=int, default=EVALUATED)
        side.add_argument("--groups", type=int, default=32)
        side.add_argument("--tokens", type=int, default=24)
        side.add_argument("--learning-rate", type=float, default=2e-4)
        side.add_argument("--task", choices=["sums", "noise"], default="sums")
    sides.add_parser("table").add_argument("rows", nargs="+")
    options = parser.parse_args(arguments)
    if options.side != "table":
        options.per_optimizer_step = min(PER_OPTIMIZER_STEP, options.groups)
        if options.groups % options.per_optimizer_step:
            parser.error(f"--groups {options.groups}: give a multiple of 8, or fewer than 8")
    {"trl": trl_side, "tandem": tandem_side, "table": table}[options.side](options)


if __name__ == "__main__":
    main(sys.argv[1:])
