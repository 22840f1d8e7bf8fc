"""`prepare_sft` packs examples into rows, with the help of a tokenizer and a chat template. The
tests check the rows, and the examples that `prepare_sft` refuses."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.chat_tokenizer import chat_tokenizer
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.packed_format import PackedBatch, PackedRow
from tandem.data.prepare import prepare_dpo, prepare_sft
from tandem.data.render import render
from tandem.errors import InvalidInput, NothingToLearn
from tandem.spool.schema import PackedData

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 1000


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(CHATML).save_pretrained(path)
    return str(path)


def chat(*contents: str, **more: object) -> SFTExample:
    """An SFT example whose messages have these contents. The first message is the user's, and user
    and assistant alternate."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return SFTExample.model_validate({"messages": messages, **more})


def run(
    out: Path,
    examples: list[SFTExample],
    tokenizer_path: str,
    vocab_size: int = VOCAB,
    **settings: Any,
) -> tuple[PackedData, PackedRow]:
    packing = PackingSettings.model_validate({"sequence_length": 256, **settings})
    data = prepare_sft(
        examples, tokenizer_path=tokenizer_path, vocab_size=vocab_size, packing=packing, out=out
    )
    with PackedBatch.open(out, data.sha256) as batch:
        assert np.isnan(batch.trajectory_reward).all()
        assert np.isnan(batch.row(0).item_logprob).all()
        return data, batch.row(0)


def test_every_assistant_message_and_its_end_of_turn(tmp_path: Path, tokenizer_path: str) -> None:
    data, row = run(
        tmp_path / "a",
        [chat("hi", "yes", "really?", "no", "ok"), chat("hi", "maybe")],
        tokenizer_path,
    )
    tokenizer, found = load_tokenizer(tokenizer_path), []
    for sequence in np.unique(row.item_sequence):
        at = row.item_sequence == sequence
        last = row.item_target[at][-1]
        slots = np.flatnonzero((np.arange(256) <= last) & (row.subtree_end > last))
        texts = [tokenizer.decode(row.tokens[some]) for some in (slots, row.item_target[at])]
        found.append((int(row.item_trajectory[at][0]), *texts))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    longer = (
        f"{text}yes<|im_end|>\n<|im_start|>user\nreally?<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>"
    )
    assert sorted(found) == [
        (0, longer, "yes<|im_end|>no<|im_end|>"),
        (1, f"{text}maybe<|im_end|>", "maybe<|im_end|>"),
    ]
    assert (data.num_trajectories, data.num_groups, data.num_items, data.num_rows) == (
        2,
        2,
        len(row.item_target),
        1,
    )
    assert data.reward_mean is None
    # The two examples share the slots of their prompt and of a common beginning of their answers.
    shared = len(tokenizer(text).input_ids)
    assert data.num_unshared_tokens - data.num_tokens in (shared, shared + 1)


def test_weights_and_raw_tokens(tmp_path: Path) -> None:
    """Examples with token ids need no tokenizer."""
    examples = [
        SFTExample(token_ids=[1, 2, 3, 4], trainable=[False, True, False, False], weight=0.5),
        SFTExample(token_ids=[1, 2, 5], trainable=[False, False, True]),
    ]
    data, row = run(tmp_path / "a", examples, "/nonexistent", sequence_length=8)
    assert (data.num_items, data.num_tokens, data.num_unshared_tokens) == (2, 3, 5)
    assert row.tokens[:3].tolist() == [1, 2, 5]
    items = zip(row.item_trajectory, row.item_target, row.item_source, row.item_weight, strict=True)
    assert list(items) == [(0, 1, 0, 0.5), (1, 2, 1, 1.0)]


LONG = SFTExample(token_ids=list(range(300)), trainable=[False] * 299 + [True])


@pytest.mark.parametrize(
    ("examples", "vocab_size", "field", "message"),
    [
        ([], VOCAB, "examples", "no example"),
        (
            [SFTExample(token_ids=[1, 1000], trainable=[False, True])],
            VOCAB,
            "examples.0.token_ids",
            "id 1000 at index",
        ),
        ([chat("hi", "yes")], 258, "examples.0.messages", "vocabulary"),
        (
            [chat("hi", "yes", weight=1e39)],
            VOCAB,
            "examples.0.weight",
            "1e.39 does not fit float32",
        ),
        (
            [SFTExample(token_ids=[1, 2], weights=[0, 1e30], weight=1e9)],
            VOCAB,
            "examples.0.weight",
            "float32",
        ),
        (
            [SFTExample(token_ids=[1, 2], weights=[0, 1], targets=[0, 1000])],
            VOCAB,
            "examples.0.targets",
            "id 1000",
        ),
        (
            [SFTExample(token_ids=[1, 2], weights=[0, -1])],
            VOCAB,
            "examples.0.weights",
            'normalisation="sum"',
        ),
        ([chat("hi", "yes", "ok", "")], VOCAB, "examples.0.messages.3", "blank.*train: false"),
        ([chat("hi", " \n")], VOCAB, "examples.0.messages.1", "blank"),
        ([chat("hi", "yes"), LONG], VOCAB, "examples.1", "300 tokens don't fit a row of 256"),
    ],
)
def test_refused_naming_the_field(
    tmp_path: Path,
    tokenizer_path: str,
    examples: list[SFTExample],
    vocab_size: int,
    field: str,
    message: str,
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        run(tmp_path / "a", examples, tokenizer_path, vocab_size)
    assert refused.value.field == field
    assert not (tmp_path / "a").exists()


def test_nothing_to_train_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NothingToLearn, match="2 trajectories don't fit 256 tokens"):
        run(tmp_path / "a", [LONG, LONG], "", too_long="drop")
    packing, short = (
        PackingSettings(sequence_length=8, too_long="drop"),
        SFTExample(token_ids=[1, 2], weights=[0, 1]),
    )
    with pytest.raises(NothingToLearn, match="1 trajectories don't fit"):
        prepare_sft(
            [LONG],
            held_out=[short],
            tokenizer_path="",
            vocab_size=VOCAB,
            packing=packing,
            out=tmp_path / "a",
        )
    with pytest.raises(InvalidInput, match="can't load a tokenizer") as refused:
        run(tmp_path / "a", [chat("hi", "yes")], str(tmp_path / "nowhere"))
    assert refused.value.field == "base_model"


def test_held_out_examples_are_in_rows_of_their_own_and_in_no_count(tmp_path: Path) -> None:
    first, second, other = (
        SFTExample(token_ids=[n, n, n + 1], trainable=[False, True, True]) for n in (1, 3, 5)
    )
    found = []
    for number, held_out in enumerate([(), (other,)]):
        out, packing = tmp_path / str(number), PackingSettings(sequence_length=16)
        found.append(
            prepare_sft(
                [first, second],
                held_out=held_out,
                tokenizer_path="",
                vocab_size=9,
                packing=packing,
                batch_size=1,
                out=out,
            )
        )
    changed = {"num_held_out": 1, "sha256": found[1].sha256}
    assert found[1] == found[0].model_copy(update=changed)
    with PackedBatch.open(out) as batch:
        assert batch.row_batch.tolist() == [0, 1, -1]
        assert batch.row(2).tokens[:3].tolist() == [5, 5, 6]


def test_a_pair_is_in_one_row_or_in_none(tmp_path: Path, tokenizer_path: str) -> None:
    """A pair's answers are never truncated, because a shorter answer would be another answer."""
    short, long = (
        PreferencePair(prompt="ab", chosen="yes", rejected=rejected)
        for rejected in ("no", "x" * 100)
    )

    def pack(
        *pairs: PreferencePair, length: int = 256, too_long: str = "refuse", vocab: int = VOCAB
    ) -> PackedData:
        packing = PackingSettings.model_validate({"sequence_length": length, "too_long": too_long})
        out = tmp_path / str(next(numbers))
        return prepare_dpo(
            pairs, tokenizer_path=tokenizer_path, vocab_size=vocab, packing=packing, out=out
        )

    numbers = count()
    slots = pack(long).num_tokens
    assert pack(short, long, length=slots).num_groups == 2
    for too_long in ("refuse", "truncate"):
        with pytest.raises(InvalidInput, match=f"takes {slots} tokens") as refused:
            pack(short, long, length=slots - 1, too_long=too_long)
        assert refused.value.field == "pairs.1"
    data = pack(short, long, length=slots - 1, too_long="drop")
    assert (data.num_groups, data.num_trajectories, data.dropped_trajectories) == (1, 2, 2)
    with pytest.raises(InvalidInput, match="vocabulary"):
        pack(short, vocab=100)


def test_items_of_a_pair_say_whether_their_answer_was_rejected(
    tokenizer_path: str, tmp_path: Path
) -> None:
    answers = [("a", "b"), ("b", "a")]
    pairs = [PreferencePair(prompt="q", chosen=yes, rejected=no) for yes, no in answers]
    packing = PackingSettings(sequence_length=64)
    prepare_dpo(
        pairs, tokenizer_path=tokenizer_path, vocab_size=VOCAB, packing=packing, out=tmp_path / "a"
    )
    with PackedBatch.open(tmp_path / "a") as batch:
        row = batch.row(0)
        assert batch.trajectory_group.tolist() == [0, 0, 1, 1]
    assert len(batch) == 1
    assert set(row.item_weight) == {1}
    # The trajectories of a pair are its chosen and its rejected answer, in this order.
    assert np.array_equal(row.item_rejected, row.item_trajectory % 2 == 1)


def test_an_answer_that_is_not_trained_may_be_blank() -> None:
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    silent = {"role": "assistant", "content": "", "train": False}
    example = SFTExample.model_validate({"messages": [ask, silent, ask, answer]})
    assert render(chat_tokenizer(CHATML), [example], ["x"])


def test_pairs_without_a_difference_are_refused() -> None:
    trimming = chat_tokenizer(CHATML.replace("m.content", "m.content | trim"))
    ask = {"role": "user", "content": "hi"}

    def pair(chosen: str, rejected: str) -> PreferencePair:
        answers = {"chosen": chosen, "rejected": rejected}
        return PreferencePair.model_validate(
            {"prompt": [ask]}
            | {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        )

    for one, field, message in (
        (pair("yes", "yes\n"), "x", "the same tokens"),
        (pair("yes", " "), "x.rejected", "blank"),
    ):
        with pytest.raises(InvalidInput, match=message) as refused:
            render(trimming, [one], ["x"])
        assert refused.value.field == field
    assert render(trimming, [pair("yes", "no")], ["x"])
