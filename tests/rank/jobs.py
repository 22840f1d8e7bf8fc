"""Runs of a tiny model, jobs on these runs, and functions that run a job's ranks: one rank in this
process, or two ranks in two other processes."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ranks import run_ranks
from tandem.config import Settings
from tandem.data.examples import SFTExample
from tandem.data.inputs import AdvantageSettings, Group, PackingSettings, Trajectory, Turn
from tandem.data.prepare import prepare_rl, prepare_sft
from tandem.data.routing import Mixture
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.spool import Spool, schema
from tandem.spool.attempt import Attempt
from tandem.spool.schema import LoraShape, OptimizerSettings, RLJob, RLLoss, SFTJob, SFTLoss
from tandem.topology.sizes import Sizes
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import entry
from tiny import MOE, SHAPE, write_random_model

VOCAB = SHAPE["vocab_size"]
LORA = LoraShape(rank=4, alpha=8)
ROW = 48
Main = Callable[[Attempt, RankSettings], int]
"""A function that runs a rank, like `entry.main`."""
STALL_SECONDS = 180.0  # On a GPU the first job compiles kernels for a minute.


def gpu_like() -> SimpleNamespace:
    """A stand-in for the module `device`. With this stand-in `train` calls `Policy.rehearse` on the
    CPU, as `train` does on a GPU."""
    return SimpleNamespace(**vars(device) | {"is_cuda": lambda: True})


TOPOLOGIES = {
    "dp": Sizes(data=2),
    "tp": Sizes(tensor=2),
    "sp": Sizes(tensor=2, sequence=True),
    "cp": Sizes(context=2),
    "ep": Sizes(data=2, expert=2),
    "pp": Sizes(pipeline=2),
}
"""The sizes of two ranks, by the name of a topology."""


def make_model(directory: Path, family: str = "qwen3", **config: object) -> Path:
    return write_random_model(directory, family=family, seed=1, **config)


def make_run(
    spool: Spool,
    model: Path,
    name: str = "r",
    *,
    seed: int = 7,
    base_model: str | None = None,
    full: bool = False,
) -> schema.RunSpec:
    if full:
        of_all = {
            "name": name,
            "base_model": str(model),
            "trainable": "full",
            "lora": None,
            "weights": "merged",
        }
        return spool.runs.create(
            schema.RunSpec(**of_all, seed=seed, created=time.time()), lambda _: None
        )
    spec = schema.RunSpec(
        name=name, base_model=base_model or str(model), lora=LORA, seed=seed, created=time.time()
    )
    arch = read_arch(str(model))
    return spool.runs.create(
        spec,
        lambda path: write_identity_adapter(path, arch, LORA, base_model=str(model), seed=seed),
    )


def random_groups(seed: int, groups: int = 4, size: int = 3) -> list[Group]:
    """Groups of `size` trajectories with the same prompt. Prompts and completions have many
    lengths, so rows hold different numbers of items."""
    rng = np.random.default_rng(seed)

    def trajectory(prompt: list[int]) -> Trajectory:
        tokens = rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()
        logprobs = (-rng.exponential(3.0, len(tokens))).tolist()
        turn = Turn(prompt_token_ids=prompt, token_ids=tokens, logprobs=logprobs)
        return Trajectory(turns=[turn], reward=float(rng.normal()))

    prompts = (rng.integers(0, VOCAB, rng.integers(2, 9)).tolist() for _ in range(groups))
    return [Group(trajectories=[trajectory(prompt) for _ in range(size)]) for prompt in prompts]


def random_examples(seed: int, n: int = 8) -> list[SFTExample]:
    rng = np.random.default_rng(seed)

    def example() -> SFTExample:
        length = int(rng.integers(4, 20))
        trained = int(rng.integers(1, length - 1))
        flags, weight = (
            [False] * (length - trained) + [True] * trained,
            float(rng.choice([0.5, 1.0, 2.0])),
        )
        return SFTExample(
            token_ids=rng.integers(0, VOCAB, length).tolist(), trainable=flags, weight=weight
        )

    return [example() for _ in range(n)]


def submit_rl(
    spool: Spool,
    run: str = "r",
    job_id: str = "rl",
    *,
    groups: list[Group] | None = None,
    loss: RLLoss | None = None,
    row: int | None = None,
    **optimizer: Any,
) -> str:
    data = random_groups(0) if groups is None else groups
    mixture = Mixture(SHAPE["num_hidden_layers"], MOE["num_experts"], MOE["num_experts_per_tok"])
    preparation = {
        "advantage": AdvantageSettings(),
        "packing": PackingSettings(sequence_length=row or ROW),
        "mixture": mixture,
        "batch_size": optimizer.get("batch_size"),
    }
    pack = partial(prepare_rl, data, vocab_size=VOCAB, **preparation)
    return _submit(spool, RLJob, run, job_id, pack, loss or RLLoss(), optimizer)


def submit_sft(
    spool: Spool,
    run: str = "r",
    job_id: str = "sft",
    *,
    examples: list[SFTExample] | None = None,
    loss: SFTLoss | None = None,
    row: int = ROW,
    held_out: Sequence[SFTExample] = (),
    **optimizer: Any,
) -> str:
    data = random_examples(0) if examples is None else examples
    pack = partial(
        prepare_sft,
        data,
        held_out=held_out,
        tokenizer_path="",
        vocab_size=VOCAB,
        packing=PackingSettings(sequence_length=row),
        batch_size=optimizer.get("batch_size"),
        signed=loss is not None and loss.normalisation == "sum",
    )
    return _submit(spool, SFTJob, run, job_id, pack, loss or SFTLoss(), optimizer)


def _submit(
    spool: Spool,
    kind: Any,
    run: str,
    job_id: str,
    pack: Callable[..., schema.PackedData],
    loss: RLLoss | SFTLoss,
    optimizer: dict[str, Any],
) -> str:
    optimizer_settings = OptimizerSettings(**{"learning_rate": 1e-2, **optimizer})

    def make(name: str, base: int, staged: Path) -> Any:
        return kind(
            id=name,
            run=run,
            base_step=base,
            created=time.time(),
            fingerprint=name,
            stall_seconds=STALL_SECONDS,
            data=pack(out=staged, **({"base_step": base} if kind is RLJob else {})),
            loss=loss,
            optimizer=optimizer_settings,
        )

    spool.queue.submit(make, run=run, job_id=job_id, fingerprint=job_id, base_step=None)
    return job_id


def claim(spool: Spool, job_id: str) -> schema.Job:
    job = spool.queue.claim("test")
    assert job is not None
    assert job.spec.id == job_id
    return job


def finish(spool: Spool, job: schema.Job) -> Path:
    """Record the job's success. Returns the directory of the job's checkpoint."""
    step = job.spec.base_step + 1
    spool.queue.finish(job, schema.JobResult(state="succeeded", step=step, finished=time.time()))
    return spool.checkpoints.path(job.spec.run, step)


def settings() -> RankSettings:
    """The ranks' settings from the environment variables."""
    return RankSettings.of(Settings())


def run_here(spool: Spool, job_id: str, main: Main = entry.main) -> Path:
    """Run the job's only rank in this process. Returns the directory of the job's checkpoint."""
    job = claim(spool, job_id)
    assert main(Attempt(spool, job_id, job.attempt), settings()) == 0, error_of(spool, job)
    return finish(spool, job)


def fail_here(spool: Spool, job_id: str, main: Main = entry.main) -> schema.JobError:
    """Run a job that must fail. Returns the error that the job's rank has written. The job stays in
    the state `running`."""
    job = claim(spool, job_id)
    assert main(Attempt(spool, job_id, job.attempt), settings()) == 1
    parallel.destroy()  # A failed rank's process exits without destroying its process groups.
    return error_of(spool, job)


def error_of(spool: Spool, job: schema.Job) -> schema.JobError:
    error = Attempt(spool, job.spec.id, job.attempt).error(0)
    return schema.JobError.model_validate_json(error.read_text())


def run_two_ranks(
    spool: Spool, topologies: dict[str, str]
) -> dict[str, tuple[Path, dict[int, schema.Beat]]]:
    """Run several jobs one after the other in the same two ranks, so torch is imported only once.
    The jobs belong to different runs.

    `topologies`: job -> name in `TOPOLOGIES`. Returns each job's checkpoint and the ranks' last
    heartbeats.
    """
    jobs = [claim(spool, job_id) for job_id in topologies]
    script = str(Path(__file__).with_name("rank_of_jobs.py"))
    run_ranks(
        2, script, str(spool.root), *(f"{job_id}={one}" for job_id, one in topologies.items())
    )
    beats = [Attempt(spool, job.spec.id, 1).beats() for job in jobs]
    return {job.spec.id: (finish(spool, job), last) for job, last in zip(jobs, beats, strict=True)}


def steps_of(spool: Spool, job_id: str, *, measured: bool = True) -> list[dict[str, float]]:
    """Metrics of each optimizer step of the job. Without `measured`, the metrics of time and memory
    are left out, because a repetition of the job does not reproduce them."""
    steps = [event.data["metrics"] for event in spool.events.read(job_id) if event.type == "step"]
    varies = () if measured else ("seconds_", "memory_", "tokens_per_second")
    return [
        {name: value for name, value in step.items() if not name.startswith(varies)}
        for step in steps
    ]


def first_and_last_epoch(spool: Spool, job_id: str, epochs: int) -> tuple[float, float]:
    """The mean loss of the steps of the job's first epoch, and of its last epoch."""
    losses = [step["loss"] for step in steps_of(spool, job_id)]
    per_epoch = len(losses) // epochs
    return float(np.mean(losses[:per_epoch])), float(np.mean(losses[-per_epoch:]))


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    return load_file(checkpoint / "adapter_model.safetensors")


def files(checkpoint: Path) -> dict[str, bytes]:
    """Name -> content of all files except the manifest."""
    names = (
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    )
    return {name: (checkpoint / name).read_bytes() for name in names if name != "manifest.json"}


def same_bytes(a: Path, b: Path) -> bool:
    names = ("adapter_model.safetensors", "optimizer/adam.safetensors")
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
