"""Two ranks under torchrun compute what one computes: data-parallel with uneven rows, and tensor-parallel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.data.packed_format import PackedBatch
from tandem.metrics.metric import PHASES
from tandem.spool import Spool
from tandem.spool.schema import Beat, RankMemory, RLLoss, SFTLoss
from trainer_ranks import jobs

# Large enough that Adam's first updates are not the mere signs of gradients, which rounding turns around.
EPS = 1e-2
LOSSES: dict[str, RLLoss | SFTLoss] = {
    "sft": SFTLoss(normalisation="trajectory"),
    "cispo": RLLoss(),
    "ppo": RLLoss(policy="ppo", normalisation="group", old_logprobs="trainer", tis_cap=3.0, entropy_coef=0.02),
    "gspo": RLLoss(
        policy="gspo",
        normalisation="trajectory",
        old_logprobs="trainer",
        clip_low=0.5,
        clip_high=0.5,
        kl_coef=0.2,
        kl_estimator="k1",
    ),
}
# Kinds of the dense model, and the mixture of experts, which is not cut over tensor-parallel ranks.
PAIRS = [*((kind, topology) for topology in ("dp", "tp") for kind in LOSSES), ("experts", "dp")]


def submit(spool: Spool, run: str, kind: str, model: Path, **optimizer: int) -> str:
    jobs.make_run(spool, model, run, seed=3)
    loss = LOSSES["sft" if kind == "experts" else kind]
    # Two epochs of an odd number of rows, two rows per step: the last step of each has one row for two ranks.
    if isinstance(loss, SFTLoss):
        examples = jobs.random_examples(5, 20)
        job = jobs.submit_sft(spool, run, run, examples=examples, loss=loss, epochs=2, eps=EPS, **optimizer)
    else:
        job = jobs.submit_rl(
            spool, run, run, groups=jobs.random_groups(5, 9), loss=loss, epochs=2, eps=EPS, **optimizer
        )
    with PackedBatch.open(spool.paths.data_dir(job)) as batch:
        assert len(batch) % 2 == 1
        assert len(set(np.diff(batch.item_offsets))) > 1
    return job


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Spool:
    return Spool.create(tmp_path_factory.mktemp("spool") / "spool")


@pytest.fixture(scope="module")
def beats() -> dict[str, dict[int, Beat]]:
    """Job of two ranks -> each rank's last beat; filled by `results`."""
    return {}


@pytest.fixture(scope="module")
def results(
    spool: Spool, beats: dict[str, dict[int, Beat]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[list[dict[str, float]], Path]]:
    """(kind, topology) -> (metrics per step, checkpoint)."""
    dense = jobs.make_model(tmp_path_factory.mktemp("model"))
    experts = jobs.make_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    models = dict.fromkeys(LOSSES, dense) | {"experts": experts}
    made = {}
    for kind, model in models.items():
        made[kind, "one"] = jobs.run_here(
            spool, submit(spool, f"one-{kind}", kind, model, grad_accumulation_sequences=2)
        )
    for kind, topology in PAIRS:
        # The default for two data-parallel ranks is two rows per step (R19).
        rows = {"grad_accumulation_sequences": 2} if topology == "tp" else {}
        submit(spool, f"{topology}-{kind}", kind, models[kind], **rows)
    tensor_parallel = {f"{topology}-{kind}": 2 if topology == "tp" else 1 for kind, topology in PAIRS}
    ran = jobs.run_torchrun(spool, tensor_parallel, ranks=2)
    for kind, topology in PAIRS:
        name = f"{topology}-{kind}"
        made[kind, topology], beats[name] = ran[name]
        tp = tensor_parallel[name]
        assert spool.checkpoints.verify(name, 1).topology == {"world_size": 2, "tp": tp, "dp": 2 // tp, "pp": 1}
    return {key: (jobs.steps_of(spool, f"{key[1]}-{key[0]}"), path) for key, path in made.items()}


@pytest.mark.parametrize(("kind", "topology"), PAIRS)
def test_two_ranks_equal_one(kind: str, topology: str, results: dict) -> None:
    (one, alone), (two, together) = results[kind, "one"], results[kind, topology]
    assert len(one) == len(two) > 2
    for name in set(one[0]) - {n for n in one[0] if n.startswith(("seconds_", "memory_", "tokens_per_second"))}:
        seen, wanted = ([metrics[name] for metrics in steps] for steps in (two, one))
        np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    before, expected, got = (jobs.tensors(path) for path in (alone.parent / "00000000", alone, together))
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert np.abs(tensor - before[name]).max() > 1e-4
        np.testing.assert_allclose(got[name], tensor, atol=1e-6, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("topology", ["dp", "tp"])
def test_every_phase_of_both_ranks_is_told_with_its_memory(topology: str, results: dict, spool: Spool, beats) -> None:
    """`gspo` goes through all phases. What rank 0 gathered for `loaded` is what each rank says of itself."""
    job = f"{topology}-gspo"
    said = beats[job]
    assert said.keys() == {0, 1}
    often = {"forward_backward", "optimizer"}
    for beat in said.values():
        assert (list(beat.phases), set(beat.highest)) == (list(PHASES[:-1]), often)
        for phase, held in (*beat.phases.items(), *beat.highest.items()):
            assert held.keys() == {"allocated", "reserved", "device_used", "host_pinned", "peak"}, phase
            # The resident set of a process with torch in it.
            assert 100 * 2**20 < held["allocated"] == held["reserved"] <= held["peak"] < held["device_used"], phase
            assert held["host_pinned"] == 0
        for phase in often:
            assert all(beat.highest[phase][kind] >= held for kind, held in beat.phases[phase].items())
    assert said[0].phases != said[1].phases
    (loaded,) = (event.data for event in spool.events.read(job) if event.type == "loaded")
    gathered = {int(rank): RankMemory.model_validate(told) for rank, told in loaded["memory"].items()}
    assert gathered.keys() == said.keys()
    before = PHASES[: PHASES.index("probe") + 1]
    for rank, told in gathered.items():
        assert told == RankMemory(uuid="cpu", phases={phase: said[rank].phases[phase] for phase in before})
    last = jobs.steps_of(spool, job)[-1]
    for phase in often:
        for kind in ("allocated", "device_used", "peak"):
            assert last[f"memory_{phase}_{kind}_bytes"] == max(beat.phases[phase][kind] for beat in said.values())
