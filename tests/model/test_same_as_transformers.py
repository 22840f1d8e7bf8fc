"""For models of any shape, the base model has the logits of transformers in fp32. A base model with
wrong files is refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from policies import all_logits, linear_row, logits, make_policy
from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.registry import read_arch
from tiny import write_random_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": True, "num_hidden_layers": 3},
        {"num_key_value_heads": 4, "head_dim": 8},
        {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "hidden_size": 40,
            "vocab_size": 131,
        },
        {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"family": "llama", "rope_parameters": LLAMA3_ROPE},
        {"family": "mistral", "tie_word_embeddings": True},
        {
            "family": "qwen3_moe",
            "norm_topk_prob": False,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
        {
            "family": "qwen3_moe",
            "norm_topk_prob": False,
            "num_experts": 40,
            "num_experts_per_tok": 8,
        },
    ],
    ids=lambda config: ",".join(
        f"{k}={v if not isinstance(v, dict) else v['rope_type']}" for k, v in config.items()
    ),
)
def test_same_logits(alone, tmp_path, config):
    model = write_random_model(tmp_path, seed=len(config), **config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = make_policy(model)
    tokens = torch.randint(
        0, policy.arch.vocab_size, (130,), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected, actual = reference(tokens[None]).logits[0], all_logits(policy, tokens)
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() <= 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def policy(alone, model):
    return make_policy(model)


def test_items_log_probs_and_entropies(model, policy):
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens, trained = torch.randint(0, 260, (40,)), [3, 4, 5, 17, 17, 39]
    with torch.no_grad():
        logp = torch.log_softmax(reference(tokens[None]).logits[0].double() / 0.7, -1)
        outputs = policy(linear_row(tokens, trained, padding=9), temperature=0.7)
    sources = torch.tensor(trained) - 1
    assert outputs.logprobs.dtype == outputs.entropy.dtype == torch.float32
    torch.testing.assert_close(
        outputs.logprobs.double(), logp[sources, tokens[trained]], atol=2e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        outputs.entropy.double(), -(logp.exp() * logp).sum(-1)[sources], atol=2e-5, rtol=1e-5
    )


def test_a_row_without_items_takes_part_in_backward(policy):
    outputs = policy(linear_row([1, 2, 3], trained=[]))
    assert outputs.logprobs.shape == outputs.entropy.shape == (0,)
    (outputs.logprobs.sum() + outputs.entropy.sum()).backward()


def test_padding_changes_nothing_and_is_never_nan(policy):
    padded = logits(policy, linear_row([5, 6, 7, 8], padding=60))
    assert torch.isfinite(padded).all()
    torch.testing.assert_close(padded[:4], all_logits(policy, [5, 6, 7, 8]))


def test_files_with_an_index(policy, model, tmp_path):
    """The same model gives the same logits if its tensors are in two files with an index. Large
    models are published in this form."""
    tensors, tokens = load_file(model / "model.safetensors"), torch.arange(30)
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    assert torch.equal(all_logits(make_policy(tmp_path), tokens), all_logits(policy, tokens))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(NAME), f"no tensor {NAME}$"),
        (
            lambda t: t.update({NAME + "_blocks": t.pop(NAME)}),
            f"only {NAME}_blocks: it is quantised",
        ),
        (lambda t: t.update({NAME: torch.zeros(16, 32)}), "up_proj.weight has the shape"),
        (
            lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)}),
            "float8_e4m3fn: quantised weights",
        ),
    ],
    ids=["missing", "quantised", "misshapen", "scaled"],
)
def test_a_base_model_with_other_tensors_is_refused(alone, tmp_path, change, says):
    file = write_random_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(InvalidInput, match=says):
        make_policy(tmp_path)


def test_a_truncated_or_absent_base_model_is_refused(alone, tmp_path):
    file = write_random_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InvalidInput, match="can't be read"):
        make_policy(tmp_path)
    file.unlink()
    with pytest.raises(InvalidInput, match="has neither"):
        make_policy(tmp_path)


def test_quantised_weights_that_only_a_file_of_their_own_names_are_refused(tmp_path):
    model = write_random_model(tmp_path)
    (model / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnknownArchitecture, match="hf_quant_config"):
        read_arch(str(model))
