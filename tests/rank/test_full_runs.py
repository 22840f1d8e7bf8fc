"""Jobs that train all weights, on one rank and on two. The jobs learn, repeat exactly, and make
models that transformers loads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rank import jobs
from rank.jobs import files
from tandem.model import parallel
from tandem.spool import Spool
from tandem.spool.schema import RLLoss, SFTLoss
from tandem.trainer.rank import entry, model_checkpoint
from tandem.trainer.rank.model_checkpoint import STEPS_FILE

pytestmark = pytest.mark.sample(1, of="processes of jobs")

WEIGHTS = "model-00001-of-00001.safetensors"
EPS = 1e-2  # Adam's eps is large, so that rounding flips no sign of the first updates.
KINDS: dict[str, dict[str, object]] = {
    "dense": {"family": "qwen3"},
    "tied": {"family": "qwen2", "tie_word_embeddings": True},
    "experts": {"family": "qwen3_moe"},
}
TOPOLOGIES = {
    "dense": ("dp", "tp", "sp", "cp", "pp"),
    "tied": ("pp",),
    "experts": ("sp", "ep", "pp"),
}
"""The topologies of two ranks whose results are compared with one rank's, by kind of model.
`tests/oracle` shows that such a comparison finds mistakes."""


@pytest.fixture(autouse=True)
def by_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_WEIGHTS", "merged")
    monkeypatch.setenv("TANDEM_TRANSPORT", "volume")


@pytest.fixture
def spool(tmp_path: Path, model: Path) -> Spool:
    spool = Spool.create(tmp_path / "spool")
    jobs.make_run(spool, model, full=True)
    return spool


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / WEIGHTS)


def test_sft_learns_and_makes_a_model_that_transformers_loads(spool: Spool, model: Path) -> None:
    made = jobs.run_here(spool, jobs.submit_sft(spool, epochs=15, learning_rate=3e-3))
    first, last = jobs.first_and_last_epoch(spool, "sft", 15)
    assert last < 0.5 * first
    manifest = spool.checkpoints.verify("r", 1)
    assert set(manifest.weights_files) == {WEIGHTS}
    assert {"config.json", "model.safetensors.index.json", STEPS_FILE} < manifest.files.keys()
    before, after = load_file(model / "model.safetensors"), weights(made)
    assert before.keys() == after.keys()
    # Every tensor is trained.
    assert all(not torch.equal(before[name], after[name]) for name in before)
    theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert manifest.probe is not None
    for tokens, expected in zip(manifest.probe.tokens, manifest.probe.logprobs, strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            found = torch.log_softmax(theirs(ids[None]).logits[0, :-1], -1).gather(
                -1, ids[1:, None]
            )[:, 0]
        assert (found - torch.tensor(expected)).abs().max() <= 1e-4
    assert manifest.probe.base == manifest.probe.previous


def test_in_bf16_jobs_continue_from_master_values(
    spool: Spool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three jobs of one step each make the same weights as one job of three steps, even if a step
    is below bf16's resolution."""
    monkeypatch.setenv("TANDEM_DTYPE", "bfloat16")
    jobs.make_run(spool, model, "together", full=True)
    examples = jobs.random_examples(1, 2)
    settings = {"examples": examples, "learning_rate": 1e-6, "grad_accumulation_sequences": 2}
    for number in range(3):
        job = jobs.submit_sft(spool, job_id=f"apart-{number}", **settings)  # type: ignore[arg-type]
        apart = jobs.run_here(spool, job)
    whole = jobs.run_here(
        spool, jobs.submit_sft(spool, "together", "together", epochs=3, **settings)
    )  # type: ignore[arg-type]
    start, end = (load_file(path / "optimizer/remainder" / WEIGHTS) for path in (apart, whole))
    assert any(tensor.any() for tensor in start.values())
    assert all(torch.equal(start[name], end[name]) for name in start)
    assert files(apart) == files(whole)


def test_ranks_that_stay_make_what_new_ranks_make(spool: Spool, model: Path) -> None:
    jobs.make_run(spool, model, "new", full=True)
    stays, made = entry.resident(), []
    for number in range(3):
        job = jobs.submit_sft(spool, job_id=f"stays-{number}")
        made.append(files(jobs.run_here(spool, job, stays)))
    parallel.destroy()
    for number, kept in enumerate(made):
        assert kept == files(jobs.run_here(spool, jobs.submit_sft(spool, "new", f"new-{number}")))


def test_a_fork_of_a_forks_first_step_goes_on_from_its_files(spool: Spool) -> None:
    jobs.run_here(spool, jobs.submit_sft(spool))
    for source, step, name in (("r", 1, "b"), ("b", 0, "c")):
        spool.checkpoints.fork(source, step, spool.runs.get("r").model_copy(update={"name": name}))
    own = spool.checkpoints.path("c", 0)
    assert model_checkpoint.find(spool, "c", 0, Path("base")) == model_checkpoint.Found(
        own, trained=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", 1])
def test_a_reference_is_another_models_weights(spool: Spool, reference: str | int) -> None:
    """A job that measures the divergence from the base model or from step 1 makes the same step as
    a job that measures no divergence."""
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="first", epochs=3))
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="second", epochs=3))
    loss = RLLoss(kl_metric=True, kl_reference=reference)  # type: ignore[arg-type]
    jobs.run_here(
        spool, jobs.submit_rl(spool, job_id="third", loss=loss, grad_accumulation_sequences=20)
    )
    kl = jobs.steps_of(spool, "third")[0]["kl_reference"]
    assert kl > 1e-3
    with_reference = weights(spool.checkpoints.path("r", 3))
    spool.checkpoints.rollback("r", 2)
    plain = jobs.run_here(
        spool, jobs.submit_rl(spool, job_id="plain", grad_accumulation_sequences=20)
    )
    assert all(torch.equal(tensor, with_reference[name]) for name, tensor in weights(plain).items())


@pytest.mark.parametrize("damaged", [WEIGHTS, STEPS_FILE, f"optimizer/exp_avg_sq/{WEIGHTS}", None])
def test_a_damaged_file_or_a_missing_state_fails_the_job(spool: Spool, damaged: str | None) -> None:
    """If `damaged` is None, no file is damaged, and the manifest does not name the optimizer's
    state."""
    made = jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    if damaged:
        (made / damaged).write_bytes((made / damaged).read_bytes()[:-1])
    else:
        manifest = spool.checkpoints.manifest("r", 1)
        kept = {
            name: entry
            for name, entry in manifest.files.items()
            if not name.startswith("optimizer/")
        }
        (made / "manifest.json").write_text(
            manifest.model_copy(update={"files": kept}).model_dump_json()
        )
    error = jobs.fail_here(spool, jobs.submit_sft(spool, job_id="second"))
    assert (error.type, (damaged or STEPS_FILE) in error.message) == ("checkpoint_damaged", True)


def test_another_dtype_is_refused(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    monkeypatch.setenv("TANDEM_DTYPE", "bfloat16")
    error = jobs.fail_here(spool, jobs.submit_sft(spool, job_id="second"))
    assert (error.type, "another dtype" in error.message) == ("invalid_input", True)


@pytest.fixture(scope="module")
def several(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[list[dict[str, float]], Path]]:
    """(kind, topology) -> metrics of the second job's steps, and the second job's checkpoint. The
    ranks of the topology run the first job. One rank runs the second job from the first job's
    checkpoint."""
    spool = Spool.create(tmp_path_factory.mktemp("spool") / "spool")
    models = {
        kind: jobs.make_model(tmp_path_factory.mktemp(kind), **config)
        for kind, config in KINDS.items()
    }

    def submit(topology: str, kind: str, number: int) -> str:
        run = f"{topology}-{kind}"
        if number == 1:
            jobs.make_run(spool, models[kind], run, seed=3, full=True)
        # By default a step of two data-parallel ranks has two rows.
        rows = (
            {} if topology in ("dp", "ep") and number == 1 else {"grad_accumulation_sequences": 2}
        )
        return jobs.submit_sft(
            spool,
            run,
            f"{run}-{number}",
            examples=jobs.random_examples(5, 20),
            eps=EPS,
            learning_rate=1e-3,
            loss=SFTLoss(normalisation="trajectory"),
            **rows,
        )

    pairs = [(topology, kind) for kind, several in TOPOLOGIES.items() for topology in several]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_WEIGHTS", "merged")
        patch.setenv("TANDEM_TRANSPORT", "volume")
        for kind in KINDS:
            jobs.run_here(spool, submit("one", kind, 1))
        jobs.run_two_ranks(spool, {submit(topology, kind, 1): topology for topology, kind in pairs})
        made = {}
        for topology, kind in [("one", kind) for kind in KINDS] + pairs:
            path = jobs.run_here(spool, job := submit(topology, kind, 2))
            made[kind, topology] = jobs.steps_of(spool, job, measured=False), path
    return made


@pytest.mark.slow  # Two ranks train all pairs before the first test.
@pytest.mark.parametrize(
    ("kind", "topology"), [(kind, one) for kind, several in TOPOLOGIES.items() for one in several]
)
def test_two_ranks_make_what_one_makes(several, kind: str, topology: str) -> None:
    expected, reference = several[kind, "one"]
    metrics, path = several[kind, topology]
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["optimizer_step"] == theirs["optimizer_step"]
    for file in (WEIGHTS, f"optimizer/exp_avg/{WEIGHTS}", f"optimizer/exp_avg_sq/{WEIGHTS}"):
        ours, theirs = load_file(path / file), load_file(reference / file)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).norm() <= 2e-4 * tensor.norm(), (file, name)
