"""Loss and every LoRA gradient of trees in a packed row equal those of transformers and PEFT, which
compute sequence by sequence. The cases are each family with its special features, at every
`SaveLevel`.

transformers in float64 gives the expected values. The allowed error depends on the error of
transformers in float32. If an expert gets a single token, the expert's gradient contains this
token's rounding error, in Tandem and in transformers.
"""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.func import functional_call

from model.family_cases import CASES, SEQUENCES, WEIGHTS, packed_row
from policies import assert_close, gradients, make_policy, merged, write_random_adapter
from tandem.families.adapter import WEIGHTS_FILE
from tandem.model.layer.sublayers import SaveLevel
from tandem.spool.schema import DELTA_NET_TARGETS, LATENT_TARGETS, LORA_TARGETS, LoraShape
from tiny import write_random_model
from wide import computed_in

LORA = LoraShape(rank=3, alpha=1.5)
ATTENTION = LORA.model_copy(update={"targets": ("q_proj", "k_proj", "v_proj", "o_proj")})
SHAPES = {
    "qwen3": [
        LoraShape(rank=1, alpha=3.0, targets=("q_proj", "v_proj", "up_proj")),
        LoraShape(rank=13, alpha=32.0, targets=("k_proj", "gate_proj", "down_proj", "o_proj")),
    ],
    "qwen3_moe": [
        LoraShape(rank=8, alpha=3.0, targets=("gate_proj", "up_proj", "down_proj")),
        LoraShape(rank=3, alpha=6.0, targets=("q_proj", "up_proj")),
        LoraShape(rank=1, alpha=2.0, targets=("down_proj", "o_proj")),
    ],
    "qwen3_5_moe": [  # PEFT can adapt these layers. PEFT can't adapt the experts.
        LoraShape(rank=3, alpha=1.5, targets=(*LORA_TARGETS[:4], *DELTA_NET_TARGETS)),
    ],
}


def lora_of(case: str) -> LoraShape:
    if CASES[case]["family"].startswith("qwen3_5"):
        return LORA.model_copy(update={"targets": LORA_TARGETS + DELTA_NET_TARGETS})
    if case.startswith("gemma4"):
        experts = "num_experts" in CASES[case]
        targets = ("q_proj", "v_proj", "o_proj", *(() if experts else LORA_TARGETS[4:]))
        own = CASES[case].get("attention_k_eq_v", True) is False
        return LORA.model_copy(update={"targets": LORA_TARGETS if own else targets})
    if (family := CASES[case]["family"]) in ("glm4_moe_lite", "deepseek_v3"):
        queries = LATENT_TARGETS[:2] if family == "glm4_moe_lite" else ("q_proj",)
        return LORA.model_copy(update={"targets": queries + LATENT_TARGETS[2:] + LORA_TARGETS[3:]})
    return ATTENTION if CASES[case]["family"] == "gpt_oss" else LORA


def reference(
    model, directory, lora, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients by PEFT's keys, computed in `dtype`. If the adapter has experts,
    it is merged into the model's weights, because PEFT can't adapt experts."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model,
        dtype=dtype,
        # transformers' grouped product does not support float64.
        experts_implementation="eager",
    )
    base.requires_grad_(False)
    adapter = {
        key: value.to(dtype).requires_grad_()
        for key, value in load_file(directory / WEIGHTS_FILE).items()
    }
    if any(".experts." in key for key in adapter):
        weights = merged(base, adapter, lora)
        run, trained = (
            lambda tokens: functional_call(base, weights, (tokens[None],)).logits[0],
            adapter,
        )
    else:
        theirs = peft.PeftModel.from_pretrained(base, directory, is_trainable=True)
        run = lambda tokens: theirs(tokens[None]).logits[0]  # noqa: E731
        trained = {
            name.replace(".default", ""): p
            for name, p in theirs.named_parameters()
            if "lora_" in name
        }
        theirs.to(dtype)
    loss = torch.zeros((), dtype=dtype)
    for sequence, weights_of_items in zip(SEQUENCES, WEIGHTS, strict=True):
        with computed_in(dtype):
            logits = run(sequence)[:-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, sequence[1:, None])[:, 0]
        loss = loss + (logprobs * weights_of_items).sum()
    loss.backward()
    return loss.detach(), {key: tensor.grad for key, tensor in trained.items()}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("case", "lora"),
    [(case, lora) for case in CASES for lora in [lora_of(case), *SHAPES.get(case, [])]],
)
def test_loss_and_gradients(alone, tmp_path, case, lora):
    model = write_random_model(
        tmp_path / "model", seed=4, num_hidden_layers=3, **{"spread": 1.0, **CASES[case]}
    )
    directory = write_random_adapter(tmp_path / "adapter", model, lora)
    exact_loss, exact = reference(model, directory, lora, torch.float64)
    _, theirs = reference(model, directory, lora, torch.float32)
    policy = make_policy(model, lora, directory)
    for keep in SaveLevel:
        for layer in policy.gpt.decoder.layers:
            layer.save_level = keep
        loss = (policy(packed_row()).logprobs * torch.cat(WEIGHTS)).sum()
        loss.backward()
        actual: dict[str, torch.Tensor] = {}
        for name, gradient in gradients(policy).items():
            actual |= policy.adapter.gather(name, gradient)
        assert (loss - exact_loss).abs() <= 1e-5 * exact_loss.abs(), keep
        assert_close(actual, exact, 1e-5, theirs)
    # The base weights are frozen.
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize(
    "case",
    [
        "gemma3",
        "glm4_moe",
        "gpt_oss",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma4",
        "gemma4, experts",
        "olmo3",
    ],
)
def test_in_bf16_what_must_be_fp32_is(alone, tmp_path, case):
    """A policy in bf16 has log-probs that differ from those in fp32 only by bf16's rounding. A
    router's bias and the parameters `A_log` and `dt_bias` stay in fp32 with the same bits."""
    model = write_random_model(
        tmp_path, seed=4, num_hidden_layers=3, **{**CASES[case], "spread": 0.5}
    )
    lora = lora_of(case)
    whole, half = make_policy(model, lora), make_policy(model, lora, dtype=torch.bfloat16)
    with torch.no_grad():
        difference = whole(packed_row()).logprobs - half(packed_row()).logprobs
    assert difference.abs().mean() < 0.05
    for name, parameter in half.base().items():
        wide = name.endswith(("correction_bias", "A_log", "dt_bias"))
        assert parameter.dtype is (torch.float32 if wide else torch.bfloat16), name
        assert not wide or torch.equal(parameter, whole.base()[name])
    (half(packed_row()).logprobs * torch.cat(WEIGHTS)).sum().backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(half).values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_adapter_that_stays_fixed_for_several_passes_has_the_same_gradients(
    tmp_path, family, alone
):
    model = write_random_model(tmp_path / "model", family=family)
    write_random_adapter(tmp_path / "adapter", model)
    policy, row = make_policy(model, adapter=tmp_path / "adapter"), packed_row()

    def passes() -> dict[str, torch.Tensor]:
        for _ in range(2):
            policy(row).logprobs.sum().backward()
        return gradients(policy)

    expected = passes()
    with policy.adapter_fixed():
        found = passes()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    with torch.no_grad():
        for parameter in policy.lora_parameters().values():
            parameter.add_(0.1)
    changed = passes()
    assert not any(torch.equal(changed[name], gradient) for name, gradient in expected.items())
