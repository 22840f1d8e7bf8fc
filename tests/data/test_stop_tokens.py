"""Each trained turn ends with a token at which vLLM stops. The tests use TRL's chat templates, each
with the stop tokens of the models that have the template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.chat_tokenizer import TEMPLATES, chat_tokenizer, turn
from data.test_golden_renderings import CALL, TOOL
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.prepare import prepare_dpo, prepare_sft
from tandem.data.render import preview, render
from tandem.data.stopping import Stops, stop_ids
from tandem.errors import InvalidInput

ASK = turn("user", "hi")
CALLING = turn("assistant", "", tool_calls=[CALL])
KINDS: dict[str, dict[str, Any]] = {
    "answer": {"messages": [ASK, turn("assistant", "yo")]},
    "earlier": {"messages": [ASK, turn("assistant", "yo"), ASK, turn("assistant", "ya")]},
    "call": {"messages": [ASK, CALLING], "tools": [TOOL]},
    "thought": {"messages": [ASK, turn("assistant", "yo", reasoning_content="Hm")]},
}
# Each family lists the names of its templates, and its stop tokens. The stop tokens are
# eos_token_id of the checkpoints' generation_config.json, with the tokenizer's EOS first. Each
# family also lists four tokens. The four tokens end an answer, an earlier answer of a conversation,
# a tool call, and an answer with a thought. REFUSED in place of a token means that Tandem refuses
# the example, because the template refuses or leaves out the message.
REFUSED = None
FAMILIES: dict[str, tuple[str, list[str], list[str | None]]] = {}


def family(names: str, stops: str, *ends: str | None) -> None:
    for name in names.split():
        FAMILIES[name] = names, stops.split(), list(ends)


family(
    "cohere cohere_training",
    "<|END_OF_TURN_TOKEN|>",
    *["<|END_OF_TURN_TOKEN|>"] * 2,
    REFUSED,
    "<|END_OF_TURN_TOKEN|>",
)
family(
    "cohere2 cohere2_training",
    "<|END_OF_TURN_TOKEN|>",
    *["<|END_OF_TURN_TOKEN|>"] * 2,
    REFUSED,
    "<|END_OF_TURN_TOKEN|>",
)
family("deepseek_r1_distill deepseekv3", "<｜end▁of▁sentence｜>", *[REFUSED] * 4)
family(
    "deepseek_r1_distill_training",
    "<｜end▁of▁sentence｜>",
    *["<｜end▁of▁sentence｜>"] * 2,
    REFUSED,
    "<｜end▁of▁sentence｜>",
)
family("deepseekv3_training", "<｜end▁of▁sentence｜>", *["<｜end▁of▁sentence｜>"] * 4)
family(
    "diffusion_gemma gemma4 gemma4_v3 gemma4_v4 gemma4_v5",
    "<eos> <turn|> <|tool_response>",
    "<turn|>",
    "<turn|>",
    "<|tool_response>",
    "<turn|>",
)
family("gemma4_v2", "<eos> <turn|> <|tool_response>", *["<turn|>"] * 4)
# The part between TRL's tags `{% generation %}` leaves out the token that ends a tool call.
family(
    "diffusion_gemma_training",
    "<eos> <turn|> <|tool_response>",
    "<turn|>",
    "<turn|>",
    "<tool_call|>",
    "<turn|>",
)
family(
    "gemma gemma_training gemma3 gemma3_training",
    "<eos> <end_of_turn>",
    *["<end_of_turn>"] * 2,
    REFUSED,
    "<end_of_turn>",
)
family(
    "glm4moe glm4moe_training",
    "<|endoftext|> <|user|> <|observation|>",
    "<|user|>",
    "<|user|>",
    "<|observation|>",
    "<|user|>",
)
family(
    "gptoss",
    "<|return|> <|endoftext|> <|call|>",
    "<|return|>",
    "<|return|>",
    "<|call|>",
    "<|return|>",
)
# TRL's tags train an earlier answer in the form that the template gives to earlier answers. A model
# samples a final answer, which has another form.
family(
    "gptoss_training",
    "<|return|> <|endoftext|> <|call|>",
    "<|return|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
family(
    "idefics3 idefics3_training smolvlm smolvlm_training llava_next llava_next_training",
    "<end_of_utterance>",
    *[REFUSED] * 4,
)
family(
    "lfm2 lfm2_training qwen2_5_vl qwen2_5_vl_training",
    "<|im_end|> <|endoftext|>",
    *["<|im_end|>"] * 2,
    REFUSED,
    "<|im_end|>",
)
CHATML = (
    "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2 lfm2_v2_training nemotron_3_5_lightning_training"
    " nemotron_3_nano_training nemotron_3_super_training nemotron_3_ultra_training qwen2_5"
    " qwen2_5_training qwen3 qwen3_training qwen3_5_nothink_training qwen3_5_think"
    " qwen3_5_think_training qwen3_6 qwen3_6_training qwen3_8 qwen3_8_training"
    " qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_vl qwen3_vl_training"
)
family(CHATML, "<|im_end|> <|endoftext|>", *["<|im_end|>"] * 4)
family("qwen3_5_nothink", "<|im_end|> <|endoftext|>", *["<|im_end|>"] * 3, REFUSED)
# The prompt of these Nemotron templates ends with <think>. Tandem refuses an answer without a
# thought, because the answer does not begin with <think>.
family(
    "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra",
    "<|im_end|> </s>",
    *[REFUSED] * 3,
    "<|im_end|>",
)
family(
    "llama3 llama3_training",
    "<|end_of_text|> <|eot_id|>",
    *["<|eot_id|>"] * 2,
    REFUSED,
    "<|eot_id|>",
)
family("llama3_1 llama3_2", "<|end_of_text|> <|eom_id|> <|eot_id|>", *["<|eot_id|>"] * 4)
family("muse_glimmer muse_glimmer_training", "<|eot|>", *["<|eot|>"] * 4)
family("phi3 phi3_5", "<|endoftext|> <|assistant|> <|end|>", *["<|end|>"] * 2, REFUSED, "<|end|>")
# TRL's tags also enclose the text that the template adds after a conversation.
family(
    "phi3_training phi3_5_training",
    "<|endoftext|> <|assistant|> <|end|>",
    "<|endoftext|>",
    "<|end|>",
    REFUSED,
    "<|endoftext|>",
)


# The pairs (template, kind of turn) whose `{% generation %}` block does not end with a stop token.
ENDLESS = {("diffusion_gemma_training", "call"), ("gptoss_training", "earlier")}


def saved(template: str, stops: list[str], directory: Path) -> Any:
    """Writes a model's tokenizer and stop tokens to `directory` and loads the tokenizer. The first
    stop token is the tokenizer's EOS."""
    tokenizer = chat_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": stops, "eos_token": stops[0]})
    tokenizer.save_pretrained(directory)
    ids = tokenizer.convert_tokens_to_ids(stops)
    content = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    (directory / "generation_config.json").write_text(json.dumps(content))
    return load_tokenizer(str(directory))


def test_every_template_of_trl_is_here() -> None:
    assert FAMILIES.keys() == {path.stem for path in TEMPLATES.glob("*.jinja")}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_kind_of_turn_ends_where_vllm_stops(name: str, tmp_path: Path) -> None:
    _, stops, expected = FAMILIES[name]
    tokenizer = saved((TEMPLATES / f"{name}.jinja").read_text(), stops, tmp_path)
    assert vllm_stops(tmp_path) == stop_ids(tokenizer)
    for (kind, record), end in zip(KINDS.items(), expected, strict=True):
        example = SFTExample.model_validate(record)
        if end is None:
            with pytest.raises(InvalidInput, match="the chat template"):
                render(tokenizer, [example], ["x"])
            continue
        (sequences,) = render(tokenizer, [example], ["x"])
        first = turns(sequences)[0]
        shown, endless = tokenizer.decode(first).rstrip(), (name, kind) in ENDLESS
        assert shown.endswith(end), (kind, shown)
        ends = Stops(tokenizer).endings(sequences)
        assert (ends[0] is not None) == endless, (kind, shown)
        # Sampling ends at the first stop token, so a turn has no second stop token. Only the
        # generation tags of a template may enclose further tokens.
        if "endgeneration" not in tokenizer.chat_template:
            assert [i for i, token in enumerate(first) if token in stop_ids(tokenizer)] == [
                len(first) - 1
            ], (kind, shown)


def turns(sequences: list[Any]) -> list[list[int]]:
    return [
        one.tokens[run].tolist()
        for one in sequences
        for run in np.split(one.trained, np.flatnonzero(np.diff(one.trained) > 1) + 1)
    ]


def vllm_stops(directory: Path) -> set[int]:
    """The stop tokens that vLLM's own code sets for a request without stop tokens."""
    from transformers import AutoTokenizer, GenerationConfig
    from vllm import SamplingParams

    parameters = SamplingParams()
    parameters.update_from_generation_config(
        GenerationConfig.from_pretrained(directory).to_diff_dict(),
        AutoTokenizer.from_pretrained(directory).eos_token_id,
    )
    return parameters.all_stop_token_ids


def test_a_turn_after_a_stop_token_continues_the_sequence(tmp_path: Path) -> None:
    """The example's tokens equal those of a sampled trajectory. GLM-4.5 samples `<|user|>` at the
    end of a turn, and the next prompt contains `<|user|>` at the same place."""
    _, stops, _ = FAMILIES["glm4moe"]
    tokenizer = saved((TEMPLATES / "glm4moe.jinja").read_text(), stops, tmp_path)
    messages = [*KINDS["call"]["messages"], turn("tool", "18"), turn("assistant", "yo"), ASK]
    example = SFTExample(messages=[*messages, turn("assistant", "ya")], tools=[TOOL])
    ((one,),) = render(tokenizer, [example], ["x"])
    shown = [tokenizer.decode(found) for found in turns([one])]
    assert [text.rpartition("<|")[2] for text in shown] == ["observation|>", "user|>", "user|>"]


NO_STOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "remedy"),
    [
        (NO_STOP, "use a chat template that ends each turn with one"),
        # A base model's EOS is not the token that ends a turn of ChatML.
        ((TEMPLATES / "qwen3.jinja").read_text(), "to eos_token_id in the model's generation_conf"),
    ],
)
def test_training_that_never_ends_is_refused(template: str, remedy: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tokenizer = saved(template, ["<|end_of_text|>"], directory)
    answer, worse = turn("assistant", "yo"), turn("assistant", "no")
    example = SFTExample(messages=[ASK, answer])
    pair = PreferencePair(prompt=[ASK], chosen=[answer], rejected=[worse])
    out = tmp_path / "out"
    for field, prepare, item in (
        ("examples", prepare_sft, example),
        ("pairs", prepare_dpo, pair),
    ):
        with pytest.raises(InvalidInput, match="no trained turn ends with a token at") as refused:
            prepare(  # type: ignore[operator]
                [item],
                tokenizer_path=str(directory),
                vocab_size=10**6,
                packing=PackingSettings(),
                out=out,
            )
        assert (refused.value.field, remedy in refused.value.message) == (field, True)
    shown = preview(tokenizer, [example, SFTExample(text="It is.")], [pair])
    assert [(one.trained_turns, one.endless_turns) for one in shown] == [(1, 1), (0, 0), (2, 2)]
    assert not out.exists()
    # These examples are accepted: a plain text uses no template and ends with EOS, and token ids
    # are used unchanged.
    out.mkdir()
    rest = [SFTExample(text="It is."), SFTExample(token_ids=[1, 2], trainable=[False, True])]
    prepare_sft(
        rest,
        tokenizer_path=str(directory),
        vocab_size=10**6,
        packing=PackingSettings(),
        out=out,
    )
