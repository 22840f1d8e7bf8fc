"""Measures the cost of ranks that exit after each job. The runner runs the same jobs with each
launcher, on GPUs.

    python -m bench.restart [--shape qwen3-8b] [--jobs 4] [--ways torchrun fork resident]
                            [--ranks 1] [--tensor-parallel 1] [--gpus 0 1 2] [--side-by-side] [--out
                            DIR]

The base model has the architecture `--shape` and random weights, which are written once. The run
has a LoRA of rank 16; each job is two optimizer steps of SFT. Times come from the job's own events;
`left` is the memory that nvidia-smi shows between two jobs. After each job the program also reads
the memory of all remaining processes, so that a measurement of many jobs (`--jobs 20`) shows a
growth of this memory. The program needs as many GPUs as ranks. With --side-by-side the jobs of all
launchers run at the same time, and each launcher needs as many GPUs as ranks. With --device cpu and
the shape `tiny` or `tiny-moe`, a run only tests this program.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import report
from tandem.data.examples import SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.prepare import prepare_sft
from tandem.families.arch import EXPERT_TARGETS
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.spool import Spool
from tandem.spool.schema import (
    LORA_TARGETS,
    TERMINAL,
    JobState,
    LoraShape,
    OptimizerSettings,
    RunSpec,
    SFTJob,
)
from tandem.system import processes
from tandem.trainer.launch import DEFAULT_ENTRY

RUN = "bench"
WAYS = ("torchrun", "fork", "resident")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "qwen3-30b-a3b-8l": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    },
}
ROW_LENGTH = {"tiny": 256}  # token slots of a packed row, by shape
LONG_ROW = 4096  # token slots of a packed row, for the other shapes

_MAKE_MODEL = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tandem.families.registry import read_arch, weight_rules
directory, where = Path(sys.argv[1]), sys.argv[2]
generator = torch.Generator(where).manual_seed(0)
shards, shard, size = [], {}, 0
for rule in weight_rules(read_arch(str(directory))):
    for name, shape in rule.sources.items():
        noise = torch.randn(shape, generator=generator, device=where)
        scaled = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        weight = scaled.to(torch.bfloat16).cpu()
        if size + weight.nbytes > 4 * 2**30:
            shards.append(shard)
            shard, size = {}, 0
        shard[name] = weight
        size += weight.nbytes
shards.append(shard)
index = {}
for i, shard in enumerate(shards):
    file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
    save_file(shard, directory / file)
    index |= dict.fromkeys(shard, file)
listed = {"metadata": {}, "weight_map": index}
(directory / "model.safetensors.index.json").write_text(json.dumps(listed))
"""


def make_model(directory: Path, shape: str, device: str) -> Path:
    """Writes config.json and shards of random bf16 weights, unless they exist already."""
    if not (directory / "model.safetensors.index.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "rms_norm_eps": 1e-6,
        } | SHAPES[shape]
        (directory / "config.json").write_text(json.dumps(config))
        subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(directory), device], check=True)
    return directory


def submit(spool: Spool, job_id: str, vocabulary: int, row: int) -> None:
    """Queues a job of two optimizer steps. The job's data is the same for every launcher."""
    rng = np.random.default_rng(0)
    length = row // 4
    half = length // 2
    examples = [
        SFTExample(
            token_ids=rng.integers(0, vocabulary, length).tolist(),
            trainable=[False] * half + [True] * half,
        )
        for _ in range(16)
    ]

    def make(name: str, base: int, staged: Path) -> SFTJob:
        data = prepare_sft(
            examples,
            tokenizer_path="",
            vocab_size=vocabulary,
            packing=PackingSettings(sequence_length=row),
            out=staged,
        )
        return SFTJob(
            id=name,
            run=RUN,
            base_step=base,
            created=time.time(),
            fingerprint=name,
            data=data,
            optimizer=OptimizerSettings(epochs=1, grad_accumulation_sequences=2),
            max_attempts=1,
        )

    spool.queue.submit(make, run=RUN, job_id=job_id, fingerprint=job_id, base_step=None)


@contextlib.contextmanager
def sampled_memory(out: Path, device: str) -> Iterator[None]:
    """Within the block, writes the time and the used MiB of every GPU to `out` once per second.
    Reading more often would slow the ranks down: while the driver answers nvidia-smi, processes
    that start CUDA or allocate memory have to wait."""
    if device != "cuda":
        yield
        return
    command = [
        "nvidia-smi",
        "--query-gpu=timestamp,index,memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        "1000",
    ]
    with out.open("w") as file, subprocess.Popen(command, stdout=file) as sampler:
        try:
            yield
        finally:
            sampler.terminate()


def measure(
    way: str,
    root: Path,
    model: Path,
    gpus: list[int],
    options: argparse.Namespace,
    entry: str = DEFAULT_ENTRY,
) -> dict[str, Any]:
    """Runs all jobs one after another with one launcher. Returns the seconds of each job's parts,
    the memory after each job, the losses, and a digest of each job's adapter."""
    spool, arch = Spool.create(root), read_arch(str(model))
    # In a mixture of experts only attention has adapters, which is also the controller's default.
    targets = [
        t for t in LORA_TARGETS if not arch.moe or options.expert_lora or t not in EXPERT_TARGETS
    ]
    lora = LoraShape(rank=16, alpha=32, targets=tuple(targets))
    spec = RunSpec(name=RUN, base_model=str(model), lora=lora, created=time.time())
    spool.runs.create(
        spec,
        lambda out: write_identity_adapter(out, arch, lora, base_model=spec.base_model, seed=0),
    )
    environment = os.environ | {
        "TANDEM_ROOT": str(root),
        "TANDEM_DEVICE": options.device,
        "TANDEM_LAUNCH": way,
        "TANDEM_TRAINER_RANKS": str(options.ranks),
        "TANDEM_TENSOR_PARALLEL": str(options.tensor_parallel),
        "TANDEM_TRAINER_DEVICES": ",".join(map(str, gpus)) if options.device == "cuda" else "",
        # The compilers' caches outlive a job, like in the container images, so that a second job
        # compiles nothing.
        "TORCHINDUCTOR_CACHE_DIR": str(options.out / f"inductor.{way}"),
        "TRITON_CACHE_DIR": str(options.out / f"triton.{way}"),
    }
    # The container images contain Python bytecode, so the child processes may write bytecode too.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = options.out / f"runner.{way}.log"
    stays: list[dict[str, float]] = []
    with log.open("wb") as errors:
        command = [sys.executable, "-m", "tandem.trainer.runner", entry]
        runner = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)
        try:
            # The sleep lets the runner's child processes finish their imports. With torchrun the
            # runner has no child process before a job.
            time.sleep(3 if way == "torchrun" else 12)
            for number in range(options.jobs):
                submit(
                    spool, f"job-{number}", arch.vocab_size, ROW_LENGTH.get(options.shape, LONG_ROW)
                )
                wait(spool, f"job-{number}", log)
                stays.append(
                    {"device MiB": max(used(gpus, options.device))} | host_memory(runner.pid)
                )
                # The numbers are printed after each job, so that they are not lost if the program
                # is killed.
                told = parts(list(spool.events.read(f"job-{number}")))
                print(json.dumps({"way": way, "job": number, **told, **stays[-1]}), flush=True)
                if time.monotonic() > options.end:
                    break
        finally:
            runner.send_signal(signal.SIGTERM)
            runner.wait(timeout=60)
    rows, losses, digests = [], [], []
    for number in range(len(stays)):
        events = list(spool.events.read(f"job-{number}"))
        rows.append(parts(events))
        losses.append([event.data["metrics"]["loss"] for event in events if event.type == "step"])
        (options.out / f"events.{way}.{number}.jsonl").write_text(
            "\n".join(e.model_dump_json() for e in events)
        )
        digests.append(next(event.data["sha256"] for event in events if event.type == "checkpoint"))
    return {"rows": rows, "stays": stays, "losses": losses, "digests": digests}


def wait(spool: Spool, job: str, log: Path, wanted: JobState = "succeeded") -> None:
    """Waits until the job has ended. Raises AssertionError if the job's state is not `wanted`."""
    end = time.monotonic() + 300
    while (state := spool.jobs.get(job)[0]) not in TERMINAL:
        assert time.monotonic() < end, f"{job} did not end\n{log.read_text()[-3000:]}"
        time.sleep(0.02)
    assert state == wanted, f"{job} {state}\n{log.read_text()[-3000:]}"


def used(gpus: list[int], device: str) -> list[int]:
    """Used MiB of each of the trainer's GPUs."""
    if device != "cuda":
        return [0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [int(lines[gpu]) for gpu in gpus]


def host_memory(runner: int) -> dict[str, float]:
    """The host memory in MiB and the number of open files, each summed over the runner and its
    descendants. Also the MiB in /dev/shm. Memory of mapped files is not counted, because other
    processes share it."""
    members = [runner, *(process.pid for process in processes.descendants(runner))]
    pss, files = 0, 0
    for pid in members:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            pss += sum(
                int(line.split()[1])
                for line in lines
                if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
            )
            files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    shm = sum(path.stat().st_size for path in Path("/dev/shm").rglob("*") if path.is_file())
    return {
        "processes": len(members),
        "host MiB": pss / 1024,
        "shm MiB": shm / 2**20,
        "open files": files,
    }


def growth(stays: list[dict[str, float]]) -> dict[str, float]:
    """The memory that is in use after the last job, and the growth of this memory since the second
    job. The growth leaves out the first job, which may fill caches."""
    first, last = stays[min(1, len(stays) - 1)], stays[-1]
    found = {"left MiB": max(each["device MiB"] for each in stays)}
    for name in ("device MiB", "host MiB", "shm MiB", "open files"):
        found |= {f"{name} after": last[name], f"{name} grown": last[name] - first[name]}
    return found


def parts(events: list[Any]) -> dict[str, float]:
    """Seconds of one job's parts. A part's time is NaN if the job was cancelled before this
    part."""
    at = {event.type: event.time for event in events}
    last_step = max(event.time for event in events if event.type == "step")
    loaded = next(event.data["seconds"] for event in events if event.type == "loaded")
    return {
        "to first step": at["loaded"] - at["claimed"],
        "to process group": at["started"] - at["claimed"],
        **{
            name: loaded.get(name, 0.0)
            for name in ("build", "rehearsal", "state", "base_weights", "probe")
        },
        "steps": last_step - at["loaded"],
        "last step to 0 MiB": at["released"] - last_step,
        "checkpoint": at.get("checkpoint", math.nan) - last_step,
        "job": at.get("succeeded", math.nan) - at["claimed"],
    }


def main(arguments: list[str] | None = None) -> None:
    """Runs the same jobs with every launcher. All launchers must give the same losses and adapters.
    `arguments`: the command line; None stands for sys.argv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-lora", action="store_true", help="adapters on experts too")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--gpus", nargs="+", type=int, default=None, help="indices; by default the first ones"
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="all ways at once, each on its own GPUs"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no job of a way is begun after that"
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    kept = options.out is not None
    options.out = options.out or Path(tempfile.mkdtemp(prefix="tandem-restart-"))
    options.out.mkdir(parents=True, exist_ok=True)
    model = make_model(options.out / options.shape, options.shape, options.device)
    options.end = time.monotonic() + options.seconds
    share = options.ranks if options.side_by_side else 0
    gpus = options.gpus or list(range(options.ranks + share * (len(options.ways) - 1)))

    def run(way: str) -> dict[str, Any]:
        root = options.out / f"spool-{way}"
        shutil.rmtree(root, ignore_errors=True)
        first = share * options.ways.index(way)
        with sampled_memory(options.out / f"memory.{way}.csv", options.device):
            return measure(way, root, model, gpus[first : first + options.ranks], options)

    with ThreadPoolExecutor(len(options.ways) if options.side_by_side else 1) as pool:
        found = dict(zip(options.ways, pool.map(run, options.ways), strict=True))
    rows = []
    for way in options.ways:
        jobs = found[way]["rows"]
        after = jobs[1:] or jobs
        medians = {key: statistics.median(job[key] for job in after) for key in jobs[0]}
        first = {"first job": jobs[0]["to first step"]}
        rows.append({"way": way, "jobs": len(jobs)} | medians | first | growth(found[way]["stays"]))
        print(json.dumps({"way": way, **found[way]}), flush=True)
    name = f"restart-{options.shape}-{options.ranks}x{options.tensor_parallel}"
    title = (
        f"{options.shape}, {options.ranks} ranks, TP {options.tensor_parallel}: seconds (medians"
        " after the 1st job)"
    )
    report(name, title, rows)
    common = min(len(way["rows"]) for way in found.values())
    for what in ("losses", "digests"):
        told = {json.dumps(way[what][:common]) for way in found.values()}
        assert len(told) == 1, f"the ways to start ranks have different {what}"
    print(f"losses and adapters of the {common} jobs that all ways did are the same", flush=True)
    if not kept:
        shutil.rmtree(options.out)


if __name__ == "__main__":
    main()
