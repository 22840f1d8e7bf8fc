"""Full recompute with a frozen base still trains the adapter (it silently would not, see `Policy._hidden`)."""

from __future__ import annotations

import pytest
import torch

from policies import assert_close, gradients, linear_row, make_policy, write_random_adapter
from tiny import write_random_model


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recompute_gives_the_same_gradients(alone, tmp_path, family):
    model = write_random_model(tmp_path / "model", family=family, num_hidden_layers=3)
    adapter = write_random_adapter(tmp_path / "adapter", model)
    found = {}
    for recompute in ("none", "full"):
        policy = make_policy(model, adapter=adapter, recompute=recompute)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        outputs = policy(linear_row(torch.arange(50).numpy()))
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
        assert torch.equal(torch.get_rng_state(), before)
        found[recompute] = gradients(policy)  # which fails where there are none
    assert_close(found["full"], found["none"], 5e-5)


def test_only_the_adapter_is_trainable(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path))
    trainable = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    assert trainable == {id(parameter) for parameter in policy.lora_parameters().values()}
    assert {parameter.dtype for parameter in policy.lora_parameters().values()} == {torch.float32}
