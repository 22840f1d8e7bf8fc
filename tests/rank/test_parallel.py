"""Two ranks compute the same as one rank. The two ranks are data-, tensor- or context-parallel with
uneven rows, or a pipeline."""

from pathlib import Path

import numpy as np
import pytest

from rank import jobs
from tandem.data.packed_format import PackedBatch
from tandem.metrics.metric import PHASES
from tandem.spool import Spool
from tandem.spool.schema import Beat, RankMemory, RLLoss, SFTLoss

# Two ranks train all pairs before the first test.
pytestmark = [pytest.mark.sample(1, of="processes of jobs"), pytest.mark.slow]

# With a small eps, Adam's first updates depend only on the signs of gradients, and rounding can
# flip signs. So eps is large in these tests.
EPS = 1e-2
LOSSES: dict[str, RLLoss | SFTLoss] = {
    "sft": SFTLoss(),
    "ppo": RLLoss(
        policy="ppo", normalisation="group", old_logprobs="trainer", tis_cap=3.0, entropy_coef=0.02
    ),
    "shaped": RLLoss(kl_coef=0.1, kl_in="advantage", advantage_scale="mean_abs"),
    # A job with this loss goes through all phases.
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
PAIRS = [
    *((kind, "dp") for kind in LOSSES),
    ("experts", "dp"),
    ("sft", "tp"),
    ("ppo", "tp"),
    ("gspo", "cp"),
    ("sft", "pp"),
    ("gspo", "pp"),
    ("shaped", "pp"),
]

Results = dict[tuple[str, str], tuple[list[dict[str, float]], Path, dict[int, Beat]]]


def submit(spool: Spool, run: str, kind: str, model: Path, **optimizer: int) -> str:
    jobs.make_run(spool, model, run, seed=3)
    # An epoch has an odd number of rows, and a step has two rows. So the last step of each epoch
    # has one row for two ranks.
    loss = LOSSES.get(kind, SFTLoss(normalisation="trajectory"))
    if isinstance(loss, SFTLoss):
        examples = jobs.random_examples(5, 20)
        more = {"held_out": jobs.random_examples(6, 12), **optimizer}
        job = jobs.submit_sft(
            spool, run, run, examples=examples, loss=loss, epochs=2, eps=EPS, **more
        )  # type: ignore[arg-type]
    else:
        groups = jobs.random_groups(5, 9)
        job = jobs.submit_rl(
            spool, run, run, groups=groups, loss=loss, epochs=2, eps=EPS, **optimizer
        )
    with PackedBatch.open(spool.paths.data_dir(job)) as batch:
        assert (batch.row_batch >= 0).sum() % 2 == 1
        assert len(set(np.diff(batch.item_offsets))) > 1
    return job


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Spool:
    return Spool.create(tmp_path_factory.mktemp("spool") / "spool")


@pytest.fixture(scope="module")
def results(spool: Spool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """(kind, topology) -> (metrics per step, checkpoint, each rank's last beat)."""
    models = dict.fromkeys(LOSSES, model)
    models["experts"] = jobs.make_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    made: Results = {}
    for kind in models:
        job = submit(spool, f"one-{kind}", kind, models[kind], grad_accumulation_sequences=2)
        path = jobs.run_here(spool, job)
        made[kind, "one"] = jobs.steps_of(spool, job, measured=False), path, {}
    for kind, topology in PAIRS:
        # By default a step of two data-parallel ranks has two rows.
        rows = {} if topology == "dp" else {"grad_accumulation_sequences": 2}
        submit(spool, f"{topology}-{kind}", kind, models[kind], **rows)
    ran = jobs.run_two_ranks(spool, {f"{topology}-{kind}": topology for kind, topology in PAIRS})
    for kind, topology in PAIRS:
        job = f"{topology}-{kind}"
        made[kind, topology] = jobs.steps_of(spool, job), *ran[job]
    return made


@pytest.mark.parametrize(("kind", "topology"), PAIRS)
def test_two_ranks_equal_one(kind: str, topology: str, results: Results, spool: Spool) -> None:
    (one, alone, _), (two, together, _) = results[kind, "one"], results[kind, topology]
    sizes = jobs.TOPOLOGIES[topology].manifest()
    assert spool.checkpoints.verify(f"{topology}-{kind}", 1).topology == sizes
    assert len(one) == len(two) > 2
    if kind in ("sft", "experts"):
        held_out = [
            spool.checkpoints.manifest(f"{where}-{kind}", 1).metrics for where in ("one", topology)
        ]
        assert held_out[0]["held_out_tokens"] == held_out[1]["held_out_tokens"] > 0
        assert held_out[1]["held_out_loss"] == pytest.approx(held_out[0]["held_out_loss"], rel=1e-4)
    for name in one[0]:
        seen, wanted = ([metrics[name] for metrics in steps] for steps in (two, one))
        np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    before, expected, got = (
        jobs.tensors(path) for path in (alone.parent / "00000000", alone, together)
    )
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert np.abs(tensor - before[name]).max() > 1e-4
        np.testing.assert_allclose(got[name], tensor, atol=1e-6, rtol=1e-5, err_msg=name)


def test_both_ranks_report_the_memory_of_every_phase(results: Results, spool: Spool) -> None:
    """Rank 0 gathers the event `loaded` from all ranks. The event contains the numbers of each
    rank's own heartbeat."""
    steps, _, beats = results["gspo", "dp"]
    assert beats.keys() == {0, 1}
    often = {"forward_backward", "optimizer"}
    for beat in beats.values():
        assert (list(beat.phases), set(beat.highest)) == (
            [name for name in PHASES[:-1] if name != "evaluate"],
            often,
        )
        for phase, held in (*beat.phases.items(), *beat.highest.items()):
            # On the CPU, allocated memory is the process's resident set. The resident set of a
            # process that has imported torch is larger than 100 MiB.
            assert (
                100 * 2**20
                < held["allocated"]
                == held["reserved"]
                <= held["peak"]
                < held["device_used"]
            ), phase
    assert beats[0].phases != beats[1].phases
    (loaded,) = (event.data for event in spool.events.read("dp-gspo") if event.type == "loaded")
    before = PHASES[: PHASES.index("probe") + 1]
    for rank, memory in loaded["memory"].items():
        expected = RankMemory(
            uuid="cpu", phases={phase: beats[int(rank)].phases[phase] for phase in before}
        )
        assert RankMemory.model_validate(memory) == expected
    for phase in often:
        most = max(beat.phases[phase]["peak"] for beat in beats.values())
        assert steps[-1][f"memory_{phase}_peak_bytes"] == most
