"""Two steps of RL on the real model of `make demo`, and the demo's files and messages."""

import re
from pathlib import Path

import demo_sums
import pytest
from rich.console import Console

from local_stack import LocalStack

# The model is kept between runs of the tests. `make clean` removes the model.
MODEL = Path(__file__).parents[2] / "out" / "models" / "smollm2"


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.sample(1, of="long runs of all programs")
def test_two_steps_of_the_demo_on_the_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := demo_sums.fetch(MODEL):
        pytest.skip(f"the real model can't be fetched: {problem}")
    # The computation grows with the number of groups. A step samples a further group if all rewards
    # of a group are equal.
    monkeypatch.setattr(demo_sums, "SHOWN", 2)
    text = demo_sums.configuration(2)
    # A group of six fits in 128 slots, and all slots of a row are computed.
    fewer = {"groups_per_step": 1, "group_size": 6, "groups": 2, "sequence_length": 128}
    for name, value in fewer.items():
        text, found = re.subn(rf"(?m)^{name} = \d+", f"{name} = {value}", text)
        assert found == 1
    lines: list[str] = []
    variables = {
        "TANDEM_BASE_MODEL": str(MODEL),
        "TANDEM_WEIGHTS": "merged",
        "TANDEM_VLLM_ARGS": "",  # a deployment's KV cache; the tests' KV cache has fixed blocks
    }
    with LocalStack(tmp_path, **variables, TANDEM_MAX_MODEL_LEN="512") as stack:
        for name, value in stack.environment.items():
            if name.startswith("TANDEM_"):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("TANDEM_URL", stack.controller_url)
        monkeypatch.setenv("TANDEM_INFERENCE_URL", stack.inference_url)
        report = demo_sums.train(tmp_path, text, lines.append)
        served = [
            event.data
            for step in (1, 2)
            for event in stack.client.job_events(f"demo-rl-{step - 1}")
            if event.type == "served"
        ]
    assert [line["step"] for line in report["steps"]] == [1, 2]
    assert [line["evaluated"] for line in report["evaluations"]] == [0, 2]
    assert len(lines) == 4
    # The policy moves, and the trainer's log-probs agree with the log-probs with which vLLM
    # sampled.
    assert all(line["trained"]["grad_norm"] > 0 for line in report["steps"])
    assert all(abs(line["trained"]["kl_sampler"]) < 1e-4 for line in report["steps"])
    assert [data["model"] for data in served] == ["demo@1", "demo@2"]
    assert all(data["mean_abs_logprob_error"] < 1e-3 for data in served)
    assert len(report["before"]) == len(report["after"]) == demo_sums.SHOWN
    demo_sums.plot(report, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 10_000
    console = Console(width=100, record=True)
    demo_sums.show(report, console)
    assert "after 2 steps" in console.export_text()


def test_what_the_task_rewards() -> None:
    assert [demo_sums.sums.judge(said, 12) for said in ("12", " 12.", "5 + 7 = 12", "13", "")] == [
        (True, True),
        (True, False),
        (True, False),
        (False, True),
        (False, False),
    ]


def test_what_is_evaluated_is_not_trained() -> None:
    trained, held = demo_sums.sums.Sums(10, 99, skip=200), demo_sums.sums.Sums(10, 99, count=200)
    assert len(held.tasks()) == 200
    assert len(trained.tasks()) == 90 * 90 - 200
    assert not set(trained.tasks()) & set(held.tasks())


def test_the_readme_shows_the_task_and_its_configuration_whole() -> None:
    root = demo_sums.EXAMPLES.parent
    readme = (root / "README.md").read_text()
    for file, begins in (("sums.py", "import random"), ("sums.toml", "[run]")):
        text = (root / "examples" / file).read_text()
        assert text[text.index(begins) :] in readme
