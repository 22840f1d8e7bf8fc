"""Runs jobs under each topology. Measures tokens/s, memory and the start time. Compares the memory
with the plan of `tandem plan`, and the start time with that on one GPU.

    python -m bench.topologies [--cases moe-1 moe-ep2 moe-tp2-sp ...] [--out DIR] [--jobs 2]
    [--device cuda]
    python -m bench.topologies --recommended 4 [--cases plan-8b-8k ...] [--jobs 1]
    python -m bench.topologies --hosts 2 [--network socket] --cases 8b-dp2 8b-tp2

Each case runs jobs of a few optimizer steps through the runner, with the launcher `fork` and a
model of random weights. Cases with the same shape and row have the same data, so their first losses
differ by rounding alone. The tokens/s are measured over all optimizer steps of a job except the
first. Memory is the largest peak of any rank: torch's allocations, and the additional memory of
CUDA and NCCL. The cases `groups-…` show the memory of CUDA and NCCL with small models. With
`--recommended N` each case has the topology that `tandem plan` recommends for N of this machine's
GPUs. With `--recommended`, a job that trains all weights is cancelled before it writes its
checkpoint of ten bytes per weight. With `--hosts N` each case's ranks are divided over N hosts,
each of which is an agent on this machine. `DIR` should be in memory, because the largest models
have 65 GB.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from bench.random_model import write_random_model
from bench.report import report
from bench.restart import SHAPES, parts, used, wait
from bench.train import MODELS as TRAIN
from tandem.config import Settings
from tandem.data.inputs import AdvantageSettings, Group, PackingSettings, Trajectory, Turn
from tandem.data.prepare import prepare_rl
from tandem.errors import InvalidInput
from tandem.families.adapter import default_targets
from tandem.families.arch import Arch
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.planning import memory, plan
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, LoraShape, OptimizerSettings, RLJob, RunSpec
from tandem.topology.sizes import Sizes
from tandem.trainer.launch import DEFAULT_ENTRY

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": (
        QWEN3
        | {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        }
    ),
    "8b": QWEN3 | SHAPES["qwen3-8b"],
    # The model has 6 layers, so that a GPU of 80 GB can train all its weights.
    "8b-6l": QWEN3 | SHAPES["qwen3-8b"] | {"num_hidden_layers": 6},
    "32b": (
        QWEN3
        | {
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "num_attention_heads": 64,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size": 25600,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
        }
    ),
    "30b-a3b": (
        SHAPES["qwen3-30b-a3b-8l"]
        | {"num_hidden_layers": 48, "architectures": ["Qwen3MoeForCausalLM"]}
    ),
    # The entries below have only the text model of each checkpoint, with the shapes of the
    # published checkpoint.
    "qwen3.5-9b": TRAIN["qwen3.5-9b"],
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 47,
        "hidden_size": 2048,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "rope_theta": 1e6,
    },
    "gemma4-31b": GEMMA4
    | {
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "intermediate_size": 21504,
    },
    "gemma4-26b-a4b": GEMMA4
    | {
        "num_hidden_layers": 30,
        "hidden_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "tiny": QWEN3 | SHAPES["tiny"],
    "tiny-moe": SHAPES["tiny-moe"] | {"architectures": ["Qwen3MoeForCausalLM"]},
}
ROWS, STEPS = 2, 4
PROMPT, ANSWER = 2048, 2016  # of a tree


@dataclass(frozen=True)
class Case:
    model: str
    settings: dict[str, int] = field(default_factory=dict)
    ranks: int = 2
    row: int = 8192
    # True: each row is one group of answers to a prompt; False: each row is one sequence
    tree: bool = False
    full: bool = False
    steps: int = STEPS
    rows: int = ROWS  # rows of an optimizer step, summed over all ranks
    cancelled: bool = False  # the job is cancelled after its steps


CASES = {
    "moe-1": Case("30b-a3b", ranks=1),
    "moe-ep2": Case("30b-a3b", {"EXPERT_PARALLEL": 2}),
    "moe-tp2-sp": Case("30b-a3b", {"TENSOR_PARALLEL": 2, "SEQUENCE_PARALLEL": 1}),
    "dense-1": Case("32b", ranks=1),
    "dense-tp2": Case("32b", {"TENSOR_PARALLEL": 2}),
    "dense-tp2-sp": Case("32b", {"TENSOR_PARALLEL": 2, "SEQUENCE_PARALLEL": 1}),
    "8b-1": Case("8b", ranks=1),
    "8b-dp2": Case("8b"),
    "8b-tp2-sp": Case("8b", {"TENSOR_PARALLEL": 2, "SEQUENCE_PARALLEL": 1}),
    "8b-pp2": Case("8b", {"PIPELINE_PARALLEL": 2}),
    "8b-cp2": Case("8b", {"CONTEXT_PARALLEL": 2}),
    "8b-1-tree": Case("8b", ranks=1, row=131072, tree=True, steps=2),
    "8b-cp2-tree": Case("8b", {"CONTEXT_PARALLEL": 2}, row=131072, tree=True, steps=2),
    "8b-1-tree-64k": Case("8b", ranks=1, row=65536, tree=True, steps=2),
    "8b-cp2-tree-64k": Case("8b", {"CONTEXT_PARALLEL": 2}, row=65536, tree=True, steps=2),
    "qwen3.5-9b-1": Case("qwen3.5-9b", ranks=1),
    "qwen3.5-moe-ep2": Case("qwen3.5-35b-a3b", {"EXPERT_PARALLEL": 2}),
    "glm-4.7-flash-ep2": Case("glm-4.7-flash", {"EXPERT_PARALLEL": 2}),
    "gemma4-31b-tp2-sp": Case("gemma4-31b", {"TENSOR_PARALLEL": 2, "SEQUENCE_PARALLEL": 1}),
    "gemma4-moe-ep2": Case("gemma4-26b-a4b", {"EXPERT_PARALLEL": 2}),
    "8b-tp2": Case("8b", {"TENSOR_PARALLEL": 2}),
    "0.6b-1": Case("0.6b", ranks=1, steps=9),
    "0.6b-1-2k": Case("0.6b", ranks=1, row=2048, steps=9),
    "0.6b-full-1": Case("0.6b", ranks=1, full=True),
    # Both pipeline stages hold the tied embedding table.
    "0.6b-full-pp2": Case("0.6b", {"PIPELINE_PARALLEL": 2}, full=True),
    "8b-6l-full-1": Case("8b-6l", ranks=1, full=True),
    "8b-6l-full-dp2": Case("8b-6l", full=True),
    "8b-full-1": Case("8b", ranks=1, full=True),
    "8b-full-dp2": Case("8b", full=True),
    **{
        f"plan-{model}-8k": Case(model, rows=8, steps=3)
        for model in ("0.6b", "8b", "32b", "30b-a3b")
    },
    **{
        f"plan-{model}-full-8k": Case(model, rows=8, steps=3, full=True)
        for model in ("0.6b", "8b", "32b", "30b-a3b")
    },
    "plan-8b-32k": Case("8b", row=32768, rows=8, steps=2),
    "plan-8b-full-32k": Case("8b", row=32768, rows=8, steps=2, full=True),
    "plan-30b-a3b-full-32k": Case("30b-a3b", row=32768, rows=8, steps=2, full=True),
    "plan-8b-tree": Case("8b", row=131072, rows=4, steps=1, tree=True),
    "plan-8b-full-tree": Case("8b", row=131072, rows=4, steps=1, tree=True, full=True),
    "plan-30b-a3b-tree": Case("30b-a3b", row=131072, rows=4, steps=1, tree=True),
    **{
        f"groups-{name}": Case("0.6b", settings, ranks, row=2048, rows=4)
        for name, settings, ranks in (
            ("dp2", {}, 2),
            ("tp2", {"TENSOR_PARALLEL": 2}, 2),
            ("cp2", {"CONTEXT_PARALLEL": 2}, 2),
            ("tp2-sp", {"TENSOR_PARALLEL": 2, "SEQUENCE_PARALLEL": 1}, 2),
            ("pp2", {"PIPELINE_PARALLEL": 2}, 2),
            ("tp2-dp2", {"TENSOR_PARALLEL": 2}, 4),
            ("cp2-dp2", {"CONTEXT_PARALLEL": 2}, 4),
            (
                "tp2-sp-cp2",
                {"TENSOR_PARALLEL": 2, "SEQUENCE_PARALLEL": 1, "CONTEXT_PARALLEL": 2},
                4,
            ),
            ("tp2-pp2", {"TENSOR_PARALLEL": 2, "PIPELINE_PARALLEL": 2}, 4),
        )
    },
    "groups-ep2": Case("tiny-moe", {"EXPERT_PARALLEL": 2}, row=512),
    "groups-ep4": Case("tiny-moe", {"EXPERT_PARALLEL": 4}, ranks=4, row=512, rows=4),
    "groups-ep2-dp2": Case("tiny-moe", {"EXPERT_PARALLEL": 2}, ranks=4, row=512, rows=4),
    "tiny-1": Case("tiny", ranks=1, row=512),
    "tiny-cp2": Case("tiny", {"CONTEXT_PARALLEL": 2}, row=512),
    "tiny-full": Case("tiny", row=512, full=True),
    "tiny-ep2": Case("tiny-moe", {"EXPERT_PARALLEL": 2}, row=512),
}


def submit(spool: Spool, job_id: str, vocabulary: int, case: Case) -> None:
    """Queues a job with the case's optimizer steps. A job that the program cancels gets one more
    step, so that it does not end by itself."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        found: list[int] = rng.integers(0, vocabulary, count).tolist()
        return found

    def group() -> Group:
        prompt = PROMPT if case.tree else 1
        lengths = [ANSWER] * ((case.row - prompt) // ANSWER) if case.tree else [case.row - prompt]
        context, trajectories = tokens(prompt), []
        for length in lengths:
            turn = Turn(
                prompt_token_ids=context,
                token_ids=tokens(length),
                logprobs=[-float(np.log(vocabulary))] * length,
            )
            trajectories.append(
                Trajectory(turns=[turn], reward=0.0, advantage=float(rng.choice([-1.0, 1.0])))
            )
        return Group(trajectories=trajectories)

    groups = [group() for _ in range(case.rows * (case.steps + case.cancelled))]

    def make(name: str, base: int, staged: Path) -> RLJob:
        data = prepare_rl(
            groups,
            vocab_size=vocabulary,
            advantage=AdvantageSettings(),
            out=staged,
            packing=PackingSettings(sequence_length=case.row),
        )
        return RLJob(
            id=name,
            run="bench",
            base_step=base,
            created=time.time(),
            fingerprint=name,
            data=data,
            optimizer=OptimizerSettings(epochs=1, grad_accumulation_sequences=case.rows),
            max_attempts=1,
        )

    spool.queue.submit(make, run="bench", job_id=job_id, fingerprint=job_id, base_step=None)


def gpu_memory() -> int:
    """The memory of GPU 0 in bytes, read by nvidia-smi. On a machine without GPUs it is 80 GiB, the
    memory of an H100. This process must not use memory on the trainer's GPUs, because the runner
    would wait for free GPUs."""
    if not torch.cuda.is_available():
        return 80 * 2**30
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 2**20


def recommended(case: Case, arch: Arch, gpus: int) -> Case:
    """The case with the topology that `tandem plan` recommends for `gpus` GPUs."""
    job = memory.Workload(arch, lora_of(case, arch), case.row, case.rows)
    sizes = plan.plan(job, gpus, gpu_memory()).recommended.sizes
    settings = {name.upper(): int(size) for name, size in sizes.fields().items()}
    return replace(case, settings=settings, ranks=gpus, cancelled=case.full)


def lora_of(case: Case, arch: Arch) -> LoraShape | None:
    return None if case.full else LoraShape(rank=16, alpha=32, targets=default_targets(arch))


def cancel_after(steps: int, spool: Spool, job: str, log: Path) -> None:
    """Waits until a job has made `steps` optimizer steps, and cancels the job."""
    end = time.monotonic() + 300
    while sum(event.type == "step" for event in spool.events.read(job)) < steps:
        assert time.monotonic() < end, log.read_text()[-3000:]
        assert spool.jobs.get(job)[0] not in TERMINAL, log.read_text()[-3000:]
        time.sleep(0.02)
    spool.queue.cancel(job)
    wait(spool, job, log, "cancelled")


def measure(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    model = write_random_model(options.out / case.model, MODELS[case.model], options.device)
    arch, root = read_arch(str(model)), options.out / f"spool.{name}"
    if options.recommended:
        case = recommended(case, arch, options.recommended)
    shutil.rmtree(root, ignore_errors=True)
    spool = Spool.create(root)
    lora = lora_of(case, arch)
    spec = RunSpec(
        name="bench",
        base_model=str(model),
        lora=lora,
        trainable="full" if case.full else "lora",
        created=time.time(),
        weights="merged" if case.full else "adapter",
    )
    spool.runs.create(
        spec,
        lambda out: lora and write_identity_adapter(out, arch, lora, base_model=str(model), seed=0),
    )
    given = {
        "ROOT": root,
        "DEVICE": options.device,
        "LAUNCH": "fork",
        "TRAINER_RANKS": case.ranks,
    } | case.settings
    if case.full:
        given |= {"WEIGHTS": "merged", "TRANSPORT": "volume"}
    gpus = (options.gpus or list(range(case.ranks)))[: case.ranks]
    given["TRAINER_DEVICES"] = ",".join(map(str, gpus)) if options.device == "cuda" else ""
    hosts = options.hosts if case.ranks % options.hosts == 0 else 1
    if hosts > 1:
        given |= {"EXECUTOR": "hosts", "TRAINER_HOSTS": hosts, "HOST_ADDRESS": "127.0.0.1"}
    environment = (
        os.environ
        | {f"TANDEM_{key}": str(value) for key, value in given.items()}
        | {
            "TORCHINDUCTOR_CACHE_DIR": str(options.out / "inductor"),
            "TRITON_CACHE_DIR": str(options.out / "triton"),
        }
    )
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log, jobs = options.logs / f"runner.{name}.log", options.jobs
    with log.open("wb") as errors:
        runner = subprocess.Popen(
            [sys.executable, "-m", "tandem.trainer.runner", DEFAULT_ENTRY],
            env=environment,
            stdout=errors,
            stderr=errors,
        )
        each = case.ranks // hosts
        agents = [
            _agent(host, gpus[host * each :][:each], environment, options, errors)
            for host in range(hosts if hosts > 1 else 0)
        ]
        try:
            for number in range(jobs):
                submit(spool, f"job-{number}", arch.vocab_size, case)
                if number == 0:
                    time.sleep(
                        max(0.0, 12 - (time.monotonic() - options.begun))
                        if options.device == "cuda"
                        else 0
                    )
                if case.cancelled:
                    cancel_after(case.steps, spool, f"job-{number}", log)
                else:
                    wait(spool, f"job-{number}", log)
            left = max(used(gpus, options.device))
        finally:
            for process in (runner, *agents):
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
            for number in range(jobs):
                events = [event.model_dump_json() for event in spool.events.read(f"job-{number}")]
                (options.logs / f"events.{name}.{number}.jsonl").write_text("\n".join(events))
    events = list(spool.events.read(f"job-{jobs - 1}"))
    row = _row(name, case, arch, lora, events) | {"left MiB": left}
    if hosts > 1:
        row |= {"hosts": hosts, "network": options.network}
    shutil.rmtree(root)
    return row


def _agent(
    host: int,
    gpus: list[int],
    environment: dict[str, str],
    options: argparse.Namespace,
    log: BinaryIO,
) -> subprocess.Popen[bytes]:
    """Starts the agent of one host. With `--network socket` each host has a different NCCL_HOSTID.
    NCCL then treats the hosts as different machines and sends through sockets."""
    own = {"TANDEM_HOST_INDEX": str(host)}
    if options.device == "cuda":
        own["TANDEM_TRAINER_DEVICES"] = ",".join(map(str, gpus))
    if options.network == "socket":
        own |= {"NCCL_HOSTID": f"host-{host}", "NCCL_IB_DISABLE": "1"}
    command = [sys.executable, "-m", "tandem", "rank-agent", "--follow"]
    return subprocess.Popen(command, env=environment | own, stdout=log, stderr=log)


def _row(
    name: str, case: Case, arch: Any, lora: LoraShape | None, events: list[Any]
) -> dict[str, Any]:
    steps = [event.data["metrics"] for event in events if event.type == "step"]
    speed = statistics.median(step["tokens_per_second"] for step in steps[1:] or steps) / case.ranks
    peak = outside = 0.0
    for step, phase in itertools.product(steps, ("forward_backward", "optimizer")):
        kinds = {
            kind: step[f"memory_{phase}_{kind}_bytes"]
            for kind in ("peak", "device_used", "reserved")
        }
        outside = max(outside, kinds["device_used"] - kinds["reserved"])
        peak = max(peak, kinds["peak"] + kinds["device_used"] - kinds["reserved"])
    sizes = Sizes.of(
        Settings.model_validate(
            {"trainer_ranks": case.ranks} | {k.lower(): v for k, v in case.settings.items()}
        )
    )
    job = memory.Workload(arch, lora, case.row, case.rows)
    planned = None
    if torch.cuda.is_available():
        total = gpu_memory()
        planned = next(
            one for one in plan.plan(job, case.ranks, total).candidates if one.sizes == sizes
        )
    seconds, context = parts(events), memory.rank_memory(job, sizes).context
    return {
        "case": name,
        "topology": plan.describe(sizes),
        "row": case.row,
        "tokens/s per GPU": speed,
        "planned tokens/s per GPU": (
            planned.tokens_per_second / case.ranks if planned else float("nan")
        ),
        "peak GiB": peak / 2**30,
        "planned GiB": planned.total / 2**30 if planned else float("nan"),
        "CUDA and NCCL GiB": outside / 2**30,
        "planned CUDA and NCCL GiB": context / 2**30,
        "peak / planned": peak / planned.total if planned else float("nan"),
        "keep (planned)": str(planned.levels if planned else None),
        "claim to first step": seconds["to first step"],
        "last step to 0 MiB": seconds["last step to 0 MiB"],
        "checkpoint": seconds["checkpoint"],
        "rehearsal": seconds["rehearsal"],
        "probe": seconds["probe"],
        "loss": steps[0]["loss"],
        "grad norm": steps[0]["grad_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None)
    parser.add_argument("--recommended", type=int, default=0, metavar="GPUS")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="of each job; default: the case's")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, nargs="+", help="indices; default: the first ones")
    parser.add_argument("--hosts", type=int, default=1, help="agents with as many GPUs each")
    parser.add_argument("--network", choices=["nvlink", "socket"], default="nvlink")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--logs",
        type=Path,
        default=None,
        help="of the runners, and the jobs' events; default: --out",
    )
    parser.add_argument("--name", default="topologies", help="of the file under bench/results")
    options = parser.parse_args()
    if options.cases is None:
        of_their_own = ("tiny", "groups") if options.recommended == 0 else ()
        options.cases = [
            name
            for name in CASES
            if not name.startswith(of_their_own)
            and name.startswith("plan") == bool(options.recommended)
        ]
    options.out = options.out or Path(tempfile.mkdtemp(prefix="tandem-topologies-"))
    options.logs = options.logs or options.out
    for directory in (options.out, options.logs):
        directory.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    models = [CASES[name].model for name in options.cases]
    for number, name in enumerate(options.cases):
        options.begun = time.monotonic()
        case = replace(CASES[name], steps=options.steps or CASES[name].steps)
        try:
            rows.append(measure(name, case, options))
            print(json.dumps(rows[-1]), f"{time.monotonic() - options.begun:.0f} s", flush=True)
        except (AssertionError, InvalidInput) as error:  # no topology fits the model
            print(f"{name}: {error}", flush=True)
        if CASES[name].model not in models[number + 1 :]:
            shutil.rmtree(options.out / CASES[name].model)  # frees memory in DIR for the next model
    if not rows:
        raise SystemExit("no case was measured")
    report(
        options.name,
        f"Topologies on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'the CPU'}",
        rows,
    )


if __name__ == "__main__":
    main()
