"""A job whose turns bring their sampler's experts trains with these."""

import base64
import io
from pathlib import Path

import numpy as np

from rank import jobs
from tandem.data.inputs import Group
from tandem.spool import Spool
from tiny import MOE, SHAPE


def with_experts(groups: list[Group]) -> list[Group]:
    """Random experts for every turn."""
    rng, updated = np.random.default_rng(3), []
    for group in groups:
        content = group.model_dump()
        for trajectory in content["trajectories"]:
            for turn in trajectory["turns"]:
                tokens = len(turn["prompt_token_ids"]) + len(turn["token_ids"]) - 1
                ranks = rng.random((tokens, SHAPE["num_hidden_layers"], MOE["num_experts"])).argsort(-1)
                buffer = io.BytesIO()
                np.save(buffer, ranks[..., : MOE["num_experts_per_tok"]].astype(np.uint8))
                turn["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        updated.append(Group.model_validate(content))
    return updated


def test_a_job_uses_the_experts_of_its_turns(spool: Spool, tmp_path: Path) -> None:
    model, groups = jobs.make_model(tmp_path / "model", "qwen3_moe"), jobs.random_groups(0)
    loss = {}
    for run, given in (("free", groups), ("replayed", with_experts(groups)), ("again", with_experts(groups))):
        jobs.make_run(spool, model, run)
        jobs.run_here(spool, jobs.submit_rl(spool, run, run, groups=given))
        loss[run] = [step["entropy"] for step in jobs.steps_of(spool, run)]
    assert loss["replayed"] == loss["again"]
    assert all(abs(a - b) > 1e-3 for a, b in zip(loss["free"], loss["replayed"], strict=True))
