"""The template variables of a training apply to all its records, in the data file and in the
held-out file."""

import json
from pathlib import Path

from tandem.data.chain_plan import ChainPlan, SFTTraining

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_the_template_variables_of_a_training_hold_for_both_files(tmp_path: Path) -> None:
    files = [tmp_path / "data.jsonl", tmp_path / "held.jsonl"]
    for file in files:
        file.write_text(json.dumps({"messages": CHAT}) + "\n")
    data, held_out = map(str, files)
    variables = {"enable_thinking": False}
    plan = ChainPlan(
        SFTTraining(run="r", data=data, held_out=held_out, chat_template_kwargs=variables)
    )
    found = list(plan.parsed())
    assert [place for place, _ in found] == ["data.jsonl line 1", "held.jsonl line 1"]
    assert [record.chat_template_kwargs for _, record in found] == [variables, variables]
