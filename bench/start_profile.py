"""Where the time of a job's start goes: what each part of a rank's work took, from the claim to the
first step.

    python -m bench.start_profile [--shape qwen3-8b] [--way fork] [--jobs 3] [--device cuda] [--out
    DIR] [--samples]
                                  [--ranks 1] [--tensor-parallel 1]
                                  [--do 'import tandem.model.weights.safetensors_reader as r;
                                  r.CHUNK_BYTES = 2**23']

The jobs are `bench.restart`'s; shown is the last. Parts within parts are indented, those of other
threads name them. --do: Python to run in the ranks (or what they are forked from) beforehand, to
see what another constant would do. With --samples the main thread's calls too, as milliseconds that
they were seen for; it is looked at about every 2.
"""

import argparse
import functools
import importlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from bench import restart
from tandem.spool.attempt import Attempt
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import entry

PARTS = (
    ("tandem.model.device", "activate"),
    ("tandem.trainer.rank.train", "meet"),
    ("tandem.trainer.rank.state", "RankState.join"),
    ("tandem.trainer.rank.checkpoint", "check"),
    ("tandem.model.device", "_create_context"),
    ("tandem.model.weights.base_memory", "BaseWeights.__init__"),
    ("tandem.model.weights.base_memory", "BaseWeights.connect"),
    ("tandem.model.weights.base_memory", "BaseWeights.exchange"),
    ("tandem.trainer.rank.model_loader", "load_weights"),
    ("tandem.trainer.rank.model_loader", "_load_cublas"),
    ("tandem.trainer.rank.model_loader", "_load_softmax_kernels"),
    ("tandem.trainer.rank.model_loader", "build_policy"),
    ("tandem.trainer.rank.model_loader", "AdapterOptimizer.__init__"),
    ("tandem.model.policy", "Policy.place"),
    ("tandem.model.policy", "Policy.rehearse"),
    ("tandem.model.policy", "tree_params"),
    ("tandem.model.parallel", "all_reduce"),
    ("tandem.model.parallel", "gather"),
    ("tandem.model.parallel", "scatter_sum"),
    ("tandem.model.attention", "attend"),
    ("tandem.model.compiled", "Compiled._load"),
    ("tandem.model.policy", "Policy._outputs"),
    ("tandem.trainer.rank.checkpoint", "read"),
    ("tandem.trainer.rank.checkpoint", "load"),
    ("tandem.model.weights.safetensors_reader", "fill_targets"),
    ("tandem.model.device.memory", "release_cached"),
    ("tandem.trainer.rank.probe", "logprobs"),
    ("tandem.training.steps", "Training.train"),
)
_marks: list[dict[str, Any]] = []


def _marked(module: str, path: str) -> None:
    """Have every call of it leave a mark."""
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*arguments: Any, **options: Any) -> Any:
        mark = {"part": path, "thread": threading.current_thread().name, "begin": time.time()}
        _marks.append(mark)
        try:
            return inner(*arguments, **options)
        finally:
            mark["end"] = time.time()

    setattr(owner, name, outer)


@functools.cache
def preload(device: str) -> None:
    """As a rank's entry: the real one's, and marks."""
    entry.preload(device)
    exec(os.environ["START_PROFILE_DO"], {})
    for part in PARTS:
        _marked(*part)


def main(attempt: Attempt, settings: RankSettings) -> int:
    """As a rank's entry: the real one's; marks and samples go to START_PROFILE."""
    out, rank = Path(os.environ["START_PROFILE"]), os.environ.get("RANK", "0")
    preload(settings.device)
    begin, had = time.time(), set(sys.modules)
    samples: list[tuple[float, list[str]]] = []
    if os.environ.get("START_PROFILE_SAMPLES"):
        threading.Thread(target=_sample, args=(threading.get_ident(), samples), daemon=True).start()
    status = entry.main(attempt, settings)
    out.mkdir(parents=True, exist_ok=True)
    told = {
        "begin": begin,
        "marks": _marks,
        "imported": sorted(sys.modules.keys() - had),
        "samples": samples,
    }
    (out / f"{attempt.job}.{rank}.json").write_text(json.dumps(told))
    return status


def _sample(thread: int, samples: list[tuple[float, list[str]]]) -> None:
    while True:
        time.sleep(0.002)
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
        stack = [
            f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"
            for code in reversed(codes)
        ]
        samples.append((time.time(), stack))


def show_samples(samples: list[tuple[float, list[str]]], until: float) -> None:
    """The tree of calls, without those that merely call the next."""
    seen: Counter[tuple[str, ...]] = Counter()
    before = samples[0][0]
    for at, stack in samples:
        if at > until:
            break
        for depth in range(1, len(stack) + 1):
            seen[tuple(stack[:depth])] += at - before
        before = at
    below: dict[tuple[str, ...], float] = {}  # of each call, the longest that it made
    for path, seconds in seen.items():
        below[path[:-1]] = max(seconds, below.get(path[:-1], 0.0))
    for path, seconds in seen.items():
        if seconds >= 0.008 and below.get(path, 0.0) < 0.93 * seconds:
            print(f"{1000 * seconds:7.0f} {' ' * (len(path) // 2)}{path[-1]}")


def show(events: list[dict[str, Any]], told: dict[str, Any]) -> None:
    """The timeline of one job's rank 0, in seconds after its claim."""
    at = {event["type"]: event["time"] for event in reversed(events)}
    claimed = at["claimed"]
    print(
        f"{'begin':>7} {'end':>7} {'took':>7}\n{told['begin'] - claimed:7.3f} {'':15} the rank runs"
    )
    open_until: dict[str, list[float]] = {}
    for mark in told["marks"]:
        if mark["begin"] > at["step"]:
            break
        within = open_until.setdefault(mark["thread"], [])
        while within and within[-1] <= mark["begin"]:
            within.pop()
        begin, end = mark["begin"] - claimed, mark["end"] - claimed
        thread = "" if mark["thread"] == "MainThread" else f"  ({mark['thread']})"
        print(
            f"{begin:7.3f} {end:7.3f} {end - begin:7.3f} {'  ' * len(within)}{mark['part']}{thread}"
        )
        within.append(mark["end"])
    print(f"imported by the rank: {' '.join(told['imported'])}")
    if told["samples"]:
        show_samples(told["samples"], at["loaded"])
    print(
        "  ".join(
            f"{name} {at[name] - claimed:.3f}"
            for name in ("started", "loaded", "step", "checkpoint")
        )
    )


def drive() -> None:
    """Run the jobs, show the last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(restart.SHAPES), default="qwen3-8b")
    parser.add_argument("--way", choices=["torchrun", "fork"], default="fork")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--do", default="", metavar="CODE")
    parser.add_argument(
        "--out", type=Path, default=None, help="its base model is used again where there is one"
    )
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="tandem-start-"))
    model = restart.make_model(out / options.shape, options.shape, options.device)
    os.environ |= {"START_PROFILE": str(out / "marks"), "START_PROFILE_DO": options.do}
    if options.samples:
        os.environ["START_PROFILE_SAMPLES"] = "1"
    fixed = {"expert_lora": False, "end": float("inf"), "out": out}
    jobs = argparse.Namespace(**vars(options) | fixed)
    spool = Path(tempfile.mkdtemp(prefix="spool-", dir=out))
    restart.measure(
        options.way, spool, model, list(range(options.ranks)), jobs, entry="bench.start_profile"
    )
    last = f"job-{options.jobs - 1}"
    lines = (out / f"events.{options.way}.{options.jobs - 1}.jsonl").read_text().splitlines()
    show(
        [json.loads(line) for line in lines],
        json.loads((out / "marks" / f"{last}.0.json").read_text()),
    )


if __name__ == "__main__":
    drive()
