"""The routed experts of a turn's tokens reach these tokens' slots. Experts that no sampler can have
chosen are refused."""

import base64
import io

import numpy as np
import pytest

from tandem.client import turn_from_openai
from tandem.data.inputs import AdvantageSettings, Group, PackingSettings, Trajectory, Turn
from tandem.data.packed_format import PackedBatch
from tandem.data.prepare import prepare_rl
from tandem.data.routing import Mixture
from tandem.errors import InvalidInput

MIXTURE = Mixture(layers=3, num_experts=300, per_token=2)


def encoded(array) -> str:
    """The array in the form of vLLM's responses: base64 of a NumPy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def experts(tokens: int, first: int = 0) -> np.ndarray:
    """Experts for `tokens` tokens. No number of an expert occurs twice, and the smallest number is
    `first`."""
    shape = (tokens, MIXTURE.layers, MIXTURE.per_token)
    return (first + np.arange(np.prod(shape)).reshape(shape)).astype(np.uint16)


def turn(prompt: list[int], sampled: list[int], routed: object = None) -> Turn:
    given = encoded(routed) if isinstance(routed, np.ndarray) else routed
    return Turn(
        prompt_token_ids=prompt,
        token_ids=sampled,
        logprobs=[-0.5] * len(sampled),
        routed_experts=given,
    )


def prepare(out, *trajectories: list[Turn], mixture: Mixture | None = MIXTURE):
    members = [
        Trajectory(turns=turns, reward=float(number)) for number, turns in enumerate(trajectories)
    ]
    packing = PackingSettings(sequence_length=16)
    prepare_rl(
        [Group(trajectories=members)],
        vocab_size=10,
        advantage=AdvantageSettings(),
        packing=packing,
        out=out,
        mixture=mixture,
    )
    with PackedBatch.open(out) as batch:
        return batch.row(0)


def test_each_slot_has_the_experts_of_its_token(tmp_path):
    """If several sequences share a token's slot, the slot has the experts that the first of these
    sequences gives for the token. In the prompt of a later turn, tokens that an earlier turn has
    sampled keep the experts of the earlier turn."""
    first, second, other = experts(4), experts(7, 100), experts(4, 50)
    row = prepare(
        tmp_path / "data",
        [turn([1, 2, 3], [4, 5], first), turn([1, 2, 3, 4, 5, 6], [7, 8], second)],
        [turn([1, 2, 3], [9, 9], other)],
    )
    assert row.tokens.tolist()[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert row.slot_experts.shape == (16, 3, 2)
    expected = np.full((16, 3, 2), -1)
    expected[:4], expected[4:7], expected[8] = first, second[4:], other[3]
    assert np.array_equal(row.slot_experts, expected)


@pytest.mark.parametrize("dense", [0, 1])
def test_turns_without_experts_leave_their_slots_to_the_router(tmp_path, dense):
    """In `dense` cases the first layer has no experts, as in GLM-4.5, and vLLM returns zeros for
    this layer."""
    given = experts(3)
    given[:, :dense] = 0
    mixture = MIXTURE._replace(dense=dense)
    row = prepare(
        tmp_path / "data", [turn([1], [2, 3, 4], given)], [turn([5], [6])], mixture=mixture
    )
    assert np.array_equal(row.slot_experts[:3], given)
    assert (row.slot_experts[3:] == -1).all()
    assert prepare(tmp_path / "without", [turn([1], [2])], [turn([5], [6])]).slot_experts.shape == (
        16,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("routed", "problem"),
    [
        (experts(4), r"uint16 \[4, 3, 2\], expected integers \[3, 3, 2\]"),
        (experts(3)[:, :2], "expected integers"),
        (experts(3).astype(np.float32), "float32"),
        (experts(3) + 290, "outside"),
        (experts(3).astype(np.int32) - 1, "outside"),
        (np.zeros((3, 3, 2), np.uint8), "token 0 has an expert twice"),
        ("AAAA", "not base64 of an array"),
        ("§", "not base64 of an array"),
        (base64.b64encode(b"PK\x03\x04" + bytes(40)).decode(), "not base64 of an array"),
        (encoded(experts(3))[:-8], "not base64 of an array"),
        (np.array([object()]), "not base64 of an array"),
        (experts(3), "not a mixture of experts"),
    ],
)
def test_what_no_router_chose_is_refused(tmp_path, routed, problem):
    mixture = None if problem == "not a mixture of experts" else MIXTURE
    with pytest.raises(InvalidInput, match=problem) as refused:
        prepare(
            tmp_path / "data", [turn([1], [2])], [turn([1, 2], [3, 4], routed)], mixture=mixture
        )
    assert refused.value.field == "groups.0.trajectories.1.turns.0.routed_experts"
    assert not (tmp_path / "data").exists()


def test_a_response_of_vllm_brings_them():
    routed = encoded(experts(2))
    choice = {
        "token_ids": [6, 7],
        "logprobs": {"content": [{"logprob": -0.1}] * 2},
        "routed_experts": routed,
    }
    assert turn_from_openai({"choices": [choice], "prompt_token_ids": [5]}).routed_experts == routed
