"""What sampling beside the training brings: steps per hour of `tandem rl`, synchronous and one step
off policy.

    python -m bench.off_policy [--shape qwen3-8b] [--device cuda] [--steps 6] [--groups 16]
    [--group-size 8]
                               [--tokens 512] [--bounds 0 1 2] [--out DIR]

One stack, one run: the first `--steps` steps with the first bound, the next with the second.
Weights and rewards are random, and each answer has `--tokens` tokens. On two GPUs vLLM has GPU 0
and the trainer GPU 1; `--device cpu` with the shape `tiny` shows that it runs. Seconds of a step
are those between the ends of two jobs, without the first.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.report import report
from bench.restart import SHAPES, make_model
from bench.shared import write_tokenizer

sys.path[:0] = [
    str(Path(__file__).parents[1] / "tests"),
    str(Path(__file__).parents[1] / "examples"),
]
RUN = "off-policy"


class Answers:
    """Answers of a fixed length with random rewards."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def tasks(self) -> list[str]:
        """Prompts of 64 tokens."""
        chance = random.Random(0)
        return [" ".join(f"t{chance.randrange(2, 500)}" for _ in range(64)) for _ in range(256)]

    async def rollout(self, task: str, sampler: Any) -> Any:
        """One answer."""
        message = [{"role": "user", "content": task}]
        await sampler.chat(message, max_tokens=self.tokens, ignore_eos=True)
        return sampler.finish(random.random())


async def measure(stack: Any, bound: int, options: argparse.Namespace) -> dict[str, Any]:
    """`--steps` more steps of the run with this bound."""
    from tandem.client import AsyncTandem
    from tandem.client.rl.config import Config
    from tandem.client.rl.environment import Environment
    from tandem.client.rl.loop import Loop
    from tandem.client.rl.record import Record
    from tandem.client.vllm import open_vllm

    rl = {
        "steps": options.steps,
        "groups_per_step": options.groups,
        "group_size": options.group_size,
        "max_off_policy_steps": bound,
        "optimizer": {"learning_rate": 1e-6, "batch_size": options.groups},
        "packing": {"sequence_length": options.row},
        "environment": [
            {"use": "bench.off_policy:Answers", "arguments": {"tokens": options.tokens}}
        ],
    }
    config = Config.model_validate(
        {"run": {"name": RUN, "lora": {"rank": 16, "alpha": 32}}, "rl": rl}
    )
    directory = stack.root / f"bound-{bound}"
    directory.mkdir()
    os.environ |= {"TANDEM_INFERENCE_URL": stack.inference_url, "TANDEM_API_KEY": stack.api_key}
    async with AsyncTandem(stack.controller_url, stack.api_key) as tandem, open_vllm() as vllm:
        record = Record(directory / "metrics.jsonl", lambda line: print(line, flush=True))
        environments = [Environment(section, 0, "bench") for section in config.rl.environment]
        await Loop(config, tandem, vllm, environments, directory / "state.json", record).run()
        ends = [
            next(
                event.time
                for event in await tandem.job_events(line["job"])
                if event.type == "succeeded"
            )
            for line in record.lines
        ]
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    parts = {
        name: fmean(line["seconds"][name] for line in record.lines[1:])
        for name in record.lines[0]["seconds"]
    }
    tokens = fmean(line["tokens"] for line in record.lines[1:])
    stale = sum(line["left_out"]["stale"] for line in record.lines)
    oldest = max(line["off_policy_steps"]["max"] for line in record.lines)
    rates = {"seconds_per_step": seconds, "sampled_tokens_per_second": tokens / seconds}
    return {"bound": bound, **rates, **parts, "off_policy_max": oldest, "stale_groups": stale}


def main(arguments: list[str] | None = None) -> None:
    """Run the ways one after another; rows go to bench/results/off_policy-<shape>.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1])
    for name, value in {
        "steps": 6,
        "groups": 4,
        "group-size": 4,
        "tokens": 64,
        "row": 1024,
        "model-len": 1024,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    os.environ["TANDEM_TEST_DEVICE"] = options.device
    from local_stack import LocalStack

    root = (options.out or Path(tempfile.mkdtemp())) / "spool"
    model = root / "models" / "bench"
    if not (model / "config.json").exists():
        make_model(model, options.shape, options.device)
        write_tokenizer(model, SHAPES[options.shape]["vocab_size"])
        (model / "chat_template.jinja").write_text(
            "{% for message in messages %}{{ message.content }} {% endfor %}"
        )
    settings = {
        "TANDEM_BASE_MODEL": "models/bench",
        "TANDEM_MAX_MODEL_LEN": str(options.model_len),
        "TANDEM_KEEP_SERVED": "4",
        "TANDEM_ENFORCE_EAGER": str(int(options.device == "cpu")),
    }
    with LocalStack(root, **settings) as stack:
        rows = [asyncio.run(measure(stack, bound, options)) for bound in options.bounds]
    for row in rows:
        row["times_as_fast"] = rows[0]["seconds_per_step"] / row["seconds_per_step"]
    report(
        f"off_policy-{options.shape}",
        f"{options.shape} on {options.device}: steps of `tandem rl`",
        rows,
    )


if __name__ == "__main__":
    main()
