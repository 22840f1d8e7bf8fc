"""Variables that a chat template reads besides the conversation. Each variable of a record is
passed to the template, or named in a refusal if the template does not read it. The date is
fixed."""

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.chat_tokenizer import TEMPLATES, chat_tokenizer, turn
from data.test_golden_renderings import CALL, TOOL
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.packed_format import PackedBatch
from tandem.data.packing import LinearSequence, slots_of
from tandem.data.prepare import prepare_dpo
from tandem.data.render import preview, render
from tandem.errors import InvalidInput

ASK, ANSWER, WORSE = turn("user", "hi"), turn("assistant", "yo"), turn("assistant", "no")
CALLING = turn("assistant", "", tool_calls=[CALL])
RESULT = turn("tool", "sunny", tool_call_id="abcdefghi", name="get_weather")


def tokenizer_of(name: str) -> Any:
    return chat_tokenizer((TEMPLATES / f"{name}.jinja").read_text())


def both(tokenizer: Any, one: LinearSequence) -> tuple[str, str]:
    """The context before the first trained token, and the trained text. In the trained text, `|`
    marks each place where context lies between trained tokens."""
    runs = np.split(one.trained, np.flatnonzero(np.diff(one.trained) > 1) + 1)
    return (
        tokenizer.decode(one.tokens[: runs[0][0]]),
        "|".join(tokenizer.decode(one.tokens[run]) for run in runs),
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_8", "glm4moe", "qwen3_5_think"])
def test_sft_and_sampling_see_the_same_prompt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for more in ({"enable_thinking": False}, {"enable_thinking": True}):
        item = SFTExample(messages=[ASK, ANSWER], chat_template_kwargs=more)
        pair = PreferencePair(
            prompt=[ASK], chosen=[ANSWER], rejected=[WORSE], chat_template_kwargs=more
        )
        ((one,), (chosen, rejected)) = render(tokenizer, [item, pair], ["x", "y"])
        # `prompt` is the prompt that vLLM renders for a sampler's request with the same variables.
        prompt = tokenizer.apply_chat_template(
            [ASK], add_generation_prompt=True, tokenize=False, **more
        )
        assert {both(tokenizer, found)[0] for found in (one, chosen, rejected)} == {prompt}


def test_variables_that_the_template_does_not_read_are_named() -> None:
    tokenizer = tokenizer_of("qwen3")
    for wrong in ("enable_thinkin", "messages", "strftime_now", "add_generation_prompt"):
        item = SFTExample(messages=[ASK, ANSWER], chat_template_kwargs={wrong: True})
        with pytest.raises(
            InvalidInput, match=r"no such variable; it reads .*enable_thinking"
        ) as e:
            render(tokenizer, [item], ["examples.0"])
        assert e.value.field == f"examples.0.chat_template_kwargs.{wrong}"
    for texts in ({"text": "t"}, {"prompt": "q", "completion": "a"}):
        with pytest.raises(ValueError, match="chat_template_kwargs go with messages only"):
            SFTExample.model_validate(texts | {"chat_template_kwargs": {"x": 1}})


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "gptoss_training", "muse_glimmer"])
def test_the_date_is_fixed(name: str) -> None:
    tokenizer = tokenizer_of(name)
    item = SFTExample(messages=[ASK, ANSWER])
    days = [date(2026, 1, 2), date(2026, 1, 2), date(2026, 3, 4)]
    first, again, other = (
        both(tokenizer, render(tokenizer, [item], ["x"], day)[0][0])[0] for day in days
    )
    assert first == again
    assert first != other
    assert "2026" in first
    today = str(datetime.now(UTC).date())
    (shown,) = preview(tokenizer, [item], [])
    assert shown.date in (today, str(datetime.now(UTC).date()))
    (none,) = preview(tokenizer_of("qwen3"), [item], [])
    assert none.date is None


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training"])
def test_a_branch_with_calls_is_a_completion(name: str) -> None:
    """In a branch of a pair, all tokens of the assistant are trained, and tools' answers are
    context. Qwen3's template leaves the empty thought out of earlier turns, so a branch becomes
    several sequences."""
    tokenizer = tokenizer_of(name)
    branches = {"chosen": [CALLING, RESULT, ANSWER], "rejected": [CALLING, RESULT, WORSE]}
    shared = {"prompt": [ASK], "tools": [TOOL]}
    for more in (branches, branches | {"rejected": [WORSE]}):
        pair = PreferencePair.model_validate(shared | more)
        (found,) = render(tokenizer, [pair], ["x"])
        for rejected, said in ((False, "yo"), (True, "no")):
            half = [both(tokenizer, one) for one in found if one.rejected == rejected]
            whole = "|".join(trained for _, trained in half)
            assert all(context.rstrip().endswith("<|im_start|>assistant") for context, _ in half)
            parts = [part.strip() for part in whole.split("<|im_end|>")]
            assert [p.endswith(said) for p in parts[:-1]] == [False] * (len(parts) - 2) + [True]
            assert whole.count("get_weather") == (
                len(more["rejected" if rejected else "chosen"]) > 1
            )
            assert "sunny" not in whole
        assert any("sunny" in tokenizer.decode(one.tokens) for one in found)
        shown = preview(tokenizer, [], [pair])[0]
        assert shown.error is None
        assert shown.slots == slots_of(found)


def test_a_branch_is_packed_in_one_row(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    tokenizer.save_pretrained(tmp_path / "model")
    pair = PreferencePair.model_validate(
        {
            "prompt": [ASK],
            "chosen": [CALLING, RESULT, ANSWER],
            "rejected": [CALLING, RESULT, WORSE],
            "tools": [TOOL],
        }
    )
    (found,) = render(tokenizer, [pair], ["x"])
    (tmp_path / "out").mkdir()
    packed = prepare_dpo(
        [pair] * 2,
        tokenizer_path=str(tmp_path / "model"),
        vocab_size=10**6,
        packing=PackingSettings(sequence_length=slots_of(found)),
        out=tmp_path / "out",
    )
    assert (packed.num_trajectories, packed.num_rows) == (4, 2)
    counts = [sum(len(one.trained) for one in found if one.rejected == r) for r in (False, True)]
    with PackedBatch.open(tmp_path / "out") as batch:
        rejected = np.concatenate([batch.row(i).item_rejected for i in range(2)])
    assert [int((rejected == r).sum()) for r in (False, True)] == [2 * count for count in counts]


@pytest.mark.parametrize("end", [[CALLING, RESULT], [RESULT, ANSWER], [ANSWER, ASK, ANSWER]])
def test_other_branches_are_refused(end: list[Any]) -> None:
    with pytest.raises(ValueError, match="must be the assistant's messages, with tools' answers"):
        PreferencePair.model_validate({"prompt": [ASK], "chosen": end, "rejected": [WORSE]})


@pytest.mark.parametrize(
    ("name", "more", "thoughts"),
    [
        ("qwen3", {}, 1),
        ("qwen3", {"enable_thinking": False}, 0),
        ("qwen3_5_think", {}, 1),
        ("qwen3_8", {"enable_thinking": False}, 0),
        ("qwen2_5", {}, 0),
    ],
)
def test_empty_thoughts_are_counted(name: str, more: dict[str, Any], thoughts: int) -> None:
    said = turn("assistant", "yo", reasoning_content="Hm")
    items = [SFTExample(messages=[ASK, one], chat_template_kwargs=more) for one in (ANSWER, said)]
    found = preview(tokenizer_of(name), items, [])
    # With `enable_thinking` false the prompt has an empty thought, so an answer with a thought is
    # refused.
    assert (found[1].error is None) == (not more)
    assert [one.empty_thoughts for one in found] == [thoughts, 0]
