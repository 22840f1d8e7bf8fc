"""A spool with runs for the publisher's tests, and a fake vLLM for tests that need no real vLLM."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tiny_model
from safetensors.numpy import load_file, save_file

import fake_vllm
from fake_vllm import FakeVllm
from spool.spool_tools import submit
from tandem.config import Settings
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.inference.publisher.publisher import Publisher
from tandem.spool import Spool, fs
from tandem.spool.schema import LoraShape, Manifest, Probe, RunSpec, Served
from tandem.vllm_client.client import VllmClient

LORA = LoraShape(rank=4, alpha=10.0)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], list(range(40, 60))]


def write_identity(directory: Path, model: Path, lora: LoraShape = LORA) -> None:
    directory.mkdir(exist_ok=True)
    write_identity_adapter(directory, read_arch(str(model)), lora, base_model=str(model), seed=0)


def make_run(spool: Spool, name: str, model: Path, lora: LoraShape = LORA) -> RunSpec:
    spec = RunSpec(name=name, base_model=str(model), lora=lora, created=time.time())
    return spool.runs.create(spec, lambda directory: write_identity(directory, model, lora))


def commit(
    spool: Spool,
    run: str,
    adapter: Path | Callable[[Path], object],
    probe: Probe | None,
    job: str | None = None,
) -> Manifest:
    """Commits the next checkpoint of a run. `adapter`: a directory with the checkpoint's adapter,
    or a function that writes the adapter into a directory."""
    staged = spool.root / "jobs" / fs.new_ulid()
    staged.mkdir(parents=True)
    if callable(adapter):
        adapter(staged)
    else:
        shutil.copytree(adapter, staged, dirs_exist_ok=True)
    step = spool.checkpoints.newest(run) + 1
    return spool.checkpoints.commit(staged, run, step, job, probe=probe)


class Stage:
    """The run `run` on a spool, a fake vLLM, and publishers from the spool to the fake vLLM.

    An adapter of this stage moves the fake vLLM's log-probs by one number, the checkpoint's
    "effect".
    """

    def __init__(self, directory: Path, vllm: FakeVllm) -> None:
        self.vllm = vllm
        self.model = tiny_model.write_tiny_qwen3(
            directory / "model", hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=32
        )
        self.spool = Spool.create(directory / "spool")
        make_run(self.spool, "run", self.model)
        self.effects = [0.0]
        self.client = VllmClient(self.settings(), timeout=5.0)

    def settings(self, **values: object) -> Settings:
        fixed = {"root": self.spool.root, "inference_url": self.vllm.url, "max_loras": 25}
        secrets = {"api_key": fake_vllm.API_KEY, "admin_token": fake_vllm.ADMIN_TOKEN}
        return Settings(**{**fixed, **secrets, "device": "cpu", **values})  # type: ignore[arg-type]

    def publisher(
        self, *, client: VllmClient | None = None, grace: float = 0.0, **settings: object
    ) -> Publisher:
        return Publisher(self.settings(**settings), client or self.client, grace=grace)

    def write_adapter(self, effect: float, directory: Path) -> None:
        write_identity(directory, self.model)
        weights = load_file(directory / WEIGHTS_FILE)
        name = next(name for name in weights if "lora_B" in name)
        weights[name] = weights[name].copy()
        weights[name][0, 0] = effect
        save_file(weights, directory / WEIGHTS_FILE)

    def probe(self, effect: float) -> Probe:
        now, previous, base = (
            [fake_vllm.logprobs(tokens, moved) for tokens in PROMPTS]
            for moved in (effect, self.effects[-1], 0.0)
        )
        return Probe(tokens=PROMPTS, logprobs=now, previous=previous, base=base)

    def step(self, effect: float, *, weights: float | None = None, job: str | None = None) -> None:
        """Commit a checkpoint. `effect`: the effect of its probe. `weights`: the effect of its
        adapter, by default `effect`."""
        adapter = partial(self.write_adapter, effect if weights is None else weights)
        if job is not None:
            submit(self.spool, job, "run")
            # The publisher adds the event `served` to a job in any final state.
            self.spool.queue.cancel(job)
        commit(self.spool, "run", adapter, self.probe(effect), job)
        self.effects.append(effect)

    def rollback(self, step: int) -> None:
        self.spool.checkpoints.rollback("run", step)
        del self.effects[step + 1 :]

    def weights(self, step: int) -> Path:
        return self.spool.checkpoints.path("run", step) / WEIGHTS_FILE

    def served(self) -> tuple[int, int | None]:
        """The served step and the refused step of the run's record."""
        record = self.record()
        return record.step, record.refused_step

    def record(self) -> Served:
        record = self.spool.served.get("run")
        assert record is not None
        return record

    def listed(self) -> list[str]:
        return sorted(self.vllm.adapters)

    def called(self, path: str) -> int:
        return sum(called == path for called, _ in self.vllm.calls)
