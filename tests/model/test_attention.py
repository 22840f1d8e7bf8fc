"""The attention kernels SDPA and FlexAttention apply the same mask to trees. The file also tests
long probes, and rows in which only the first slots are computed."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from policies import LORA, logits, make_policy, write_random_adapter
from tandem.families.adapter import all_targets
from tandem.families.registry import read_arch
from tandem.model import attention, flex_attention
from tandem.model.rows import RowTensors
from tandem.trainer.rank import probe
from tiny import write_random_model


def random_tree(length: int, used: int, generator: torch.Generator) -> torch.Tensor:
    """`subtree_end` of a row of `length` slots: random trees in depth-first order on the first
    `used` slots, then padding."""
    end = torch.arange(length) + 1

    def grow(start: int, stop: int, depth: int) -> None:
        while start < stop:
            size = int(torch.randint(1, stop - start + 1, (), generator=generator))
            segment = (
                int(torch.randint(1, size + 1, (), generator=generator)) if depth < 4 else size
            )
            end[start : start + segment] = start + size
            grow(start + segment, start + size, depth + 1)
            start += size

    grow(0, used, 0)
    return end


@pytest.mark.parametrize("window", [None, 7])
def test_the_dense_mask_is_the_definition(window):
    end = random_tree(60, 50, torch.Generator().manual_seed(0))
    # The keys of each query, including the query's own slot.
    sequence = [[k for k in range(q + 1) if q < int(end[k])] for q in range(60)]
    by_definition = torch.tensor(
        [[k in sequence[q][-(window or 60) :] for k in range(60)] for q in range(60)]
    )
    assert torch.equal(attention.dense_mask(end, window), by_definition)


def test_a_window_drops_blocks_that_are_out_of_it():
    end = torch.full((1024,), 1024)
    counts = [
        int((b.kv_num_blocks + b.full_kv_num_blocks).sum())
        for b in (flex_attention.block_mask(end, end.device, window) for window in (None, 256, 1))
    ]
    assert counts == [36, 8 + 7 + 6, 8]


@pytest.mark.parametrize("length", [128, 384, 1000, 1024])
def test_the_block_mask_is_the_dense_one(length):
    for seed in range(5):
        end = random_tree(length, length - 7 * seed, torch.Generator().manual_seed(seed))
        dense = attention.dense_mask(end)
        ours = flex_attention.block_mask(end, end.device)
        theirs = create_block_mask(
            lambda b, h, q, k, dense=dense: dense[q, k],
            None,
            None,
            length,
            length,
            device="cpu",
            BLOCK_SIZE=128,
        )
        for field in [
            name for name, value in vars(theirs).items() if isinstance(value, torch.Tensor)
        ]:
            mine, other = getattr(ours, field), getattr(theirs, field)
            # Only the first `num_blocks` indices have a meaning.
            if field.endswith("indices"):
                count = getattr(theirs, field.replace("indices", "num_blocks"))
                valid = torch.arange(mine.shape[-1]) < count[..., None]
                mine, other = mine * valid, other * valid
            assert torch.equal(mine, other), field


WINDOW = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}


@pytest.mark.parametrize(
    "config",
    [{}, WINDOW, {"family": "gpt_oss"}, {"family": "deepseek_v3", "spread": 1.0}],
    ids=["whole", "window", "sinks", "values of another width"],
)
def test_flex_and_sdpa_give_the_same_logits(alone, monkeypatch, tmp_path, config):
    """The test compares forward passes only, because FlexAttention has no backward pass on the CPU.
    `test_gpu_like_cpu.py` compares gradients on a GPU."""
    # `_attend` calls FlexAttention with the blocks of `flex`, but without compilation.
    monkeypatch.setattr(attention, "flex", flex_attention._attend)
    model = write_random_model(tmp_path / "model", **config)
    lora = LORA.model_copy(update={"targets": all_targets(read_arch(str(model)))[:4]})
    policy = make_policy(model, lora, write_random_adapter(tmp_path / "adapter", model, lora))
    generator = torch.Generator().manual_seed(3)
    tokens, positions = (
        torch.randint(0, bound, (200,), generator=generator) for bound in (260, 50)
    )
    row = RowTensors(tokens, positions, random_tree(200, 180, generator), tokens[:0], tokens[:0])
    by_kernel = {}
    with torch.no_grad():
        for policy.attention_kernel in ("sdpa", "flex"):
            by_kernel[policy.attention_kernel] = logits(policy, row)
    assert torch.isfinite(by_kernel["flex"]).all()
    assert (by_kernel["flex"] - by_kernel["sdpa"]).abs().max() <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "value_size"), [(192, 128), (256, 256), (96, 160), (512, 512)])
def test_flex_and_sdpa_give_the_same_gradients_where_values_have_another_width(size, value_size):
    dtype, generator = torch.bfloat16, torch.Generator().manual_seed(3)
    end = random_tree(300, 280, generator)
    q, k, v, weight = (
        torch.randn(300, 4, width, generator=generator).to("cuda", dtype)
        for width in (size, size, value_size, value_size)
    )
    rotation = attention.rotation(torch.zeros(300), torch.ones(32), dtype)
    found = []
    for kernel in ("sdpa", "flex"):
        row = attention.tree_params(end, kernel, tuple(part.cuda() for part in rotation))
        own = one, two, three = [head.detach().requires_grad_() for head in (q, k, v)]
        output = attention.attend(one, two, three, row, size**-0.5)
        found.append([output, *torch.autograd.grad((output * weight).sum(), own)])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() <= 1e-2 * other.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_and_sdpa_give_the_same_gradients_with_sinks(window, dtype):
    generator = torch.Generator().manual_seed(3)
    shape, end = (300, 8, 64), random_tree(300, 280, generator)
    heads = [
        torch.randn(size, generator=generator)
        for size in (shape, (300, 2, 64), (300, 2, 64), shape)
    ]
    sinks = torch.randn(8, generator=generator).to("cuda", dtype)
    *inputs, weight = (head.to("cuda", dtype) for head in heads)
    rotation = attention.rotation(torch.zeros(300), torch.ones(32), dtype)
    found = []
    for kernel in ("sdpa", "flex"):
        row = attention.tree_params(end, kernel, tuple(part.cuda() for part in rotation), window)
        own = q, k, v = [head.detach().requires_grad_() for head in inputs]
        output = attention.attend(q, k, v, row, 0.125, sinks)
        found.append([output, *torch.autograd.grad((output * weight).sum(), own)])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() <= (
            1e-2 if dtype is torch.bfloat16 else 1e-3
        ) * other.float().norm()


def test_a_long_probe_has_the_log_probs_of_some_of_its_tokens(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path))
    tokens = torch.randint(0, 200, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    long = probe.score_long(policy, tokens, 160, torch.device("cpu"))
    assert (long.tokens, len(long.positions), long.positions[0], long.positions[-1]) == (
        tokens,
        64,
        21,
        149,
    )
    (every,) = probe.logprobs(policy, [tokens], 160, torch.device("cpu"))
    expected = [every[position - 1] for position in long.positions]
    torch.testing.assert_close(long.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert probe.score_long(policy, [], 160, torch.device("cpu")) is None


def test_computing_only_the_used_slots_changes_nothing(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path))
    sequences = [[3, 1, 4, 1, 5], [9, 2, 6]]
    with torch.no_grad():
        whole, few = (
            policy(probe.probe_row(sequences, 40, torch.device("cpu"), slots)) for slots in (40, 8)
        )
    torch.testing.assert_close(few.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(few.entropy, whole.entropy, atol=1e-5, rtol=1e-5)
