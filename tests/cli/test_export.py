"""`tandem export` writes the same merged weights as PEFT, beside the base model's other files."""

import json
import shutil
import sys

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from policies import merged, write_random_adapter
from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.merged_model import write_merged_model
from tandem.model.transfer.merge import merge
from tandem.spool.schema import LoraShape, RunSpec
from tiny import write_random_model

LORA = LoraShape(rank=4, alpha=10.0)
LATENT = LoraShape(rank=4, alpha=10.0, targets=("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
SOME = LoraShape(rank=3, alpha=7.0, targets=("q_proj", "down_proj"))


def load(directory, dtype="auto"):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.requires_grad_(False)


def export(tmp_path, base, lora=LORA):
    """Merges a random adapter into a base model. Returns the adapter, and the weights of the merged
    model."""
    adapter = write_random_adapter(tmp_path / "adapter", base, lora)
    write_merged_model(tmp_path / "out", base, adapter, lora)
    return adapter, load(tmp_path / "out").state_dict()


@pytest.mark.parametrize(
    ("family", "lora", "tied"),
    [
        ("qwen3", LORA, True),
        ("qwen3", SOME, False),
        ("gemma3_text", LORA, True),
        ("olmo3", LORA, False),
        ("glm4_moe_lite", LATENT, False),
    ],
)
def test_the_model_is_pefts_merge_and_unload(tmp_path, family, lora, tied):
    base = write_random_model(tmp_path / "base", family=family, tie_word_embeddings=tied)
    adapter, found = export(tmp_path, base, lora)
    expected = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload().state_dict()
    plain = load(base).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm(), name
        adapted = any(target in name for target in lora.targets)
        assert torch.equal(found[name], plain[name]) != adapted, name


def test_experts(tmp_path):
    base = write_random_model(tmp_path / "base", family="qwen3_moe")
    adapter, found = export(tmp_path, base)
    for name, value in merged(load(base), load_file(adapter / WEIGHTS_FILE), LORA).items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rounding_is_that_of_the_weights_that_vllm_serves(tmp_path, dtype):
    model = load(write_random_model(tmp_path / "fp32", tie_word_embeddings=True)).to(dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    adapter, found = export(tmp_path, tmp_path / "base")
    base, weights = model.state_dict(), load_file(adapter / WEIGHTS_FILE)
    scale = torch.tensor([LORA.alpha / LORA.rank], dtype=torch.float64)
    for key in (key for key in weights if "lora_A" in key):
        name = key.removeprefix("base_model.model.").replace("lora_A.", "")
        expected = torch.empty_like(base[name])[None]
        merge(
            expected,
            base[name][None],
            weights[key][None],
            weights[key.replace("lora_A", "lora_B")][None],
            scale,
        )
        assert found[name].dtype == dtype
        assert torch.equal(found[name], expected[0]), name


def test_what_does_not_fit_is_refused(tmp_path):
    model = write_random_model(tmp_path / "base")
    adapter = write_random_adapter(tmp_path / "adapter", model, LORA)
    other = write_random_model(tmp_path / "other", intermediate_size=64)
    with pytest.raises(CheckpointDamaged, match="not an adapter of rank 4"):
        write_merged_model(tmp_path / "out", other, adapter, LORA)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for value in (None, tensors[name].to(torch.float8_e4m3fn), tensors[name][:-1]):
        changed = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(
            changed if value is None else changed | {name: value}, model / "model.safetensors"
        )
        with pytest.raises(InvalidInput, match=name):
            write_merged_model(tmp_path / "out", model, adapter, LORA)
    save_file(tensors | {name: tensors[name].half()}, model / "model.safetensors")
    factors = load_file(adapter / WEIGHTS_FILE)
    save_file({key: value * 1e4 for key, value in factors.items()}, adapter / WEIGHTS_FILE)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointDamaged, match="not finite in F16"):
        write_merged_model(tmp_path / "out", model, adapter, LORA)


def test_the_command(tandem, server, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tandem("run", "create", "exported", "--rank", "2")[0] == 0
    spool, base = server.spool, root / "models/tiny"
    write_random_adapter(root / "staged", base, spool.runs.get("exported").lora)
    spool.checkpoints.commit(root / "staged", "exported", 1, "a-job")
    arguments = ("export", "exported", "1", "out", "--base-model", str(base))
    status, out, err = tandem(*arguments, "--json")
    assert status == 0, err
    assert json.loads(out)["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "out").iterdir()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    adapter = spool.checkpoints.path("exported", 1)
    expected = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload().state_dict()
    found = load(tmp_path / "out").state_dict()
    assert all(
        (found[name] - value).norm() <= 1e-2 * value.norm() for name, value in expected.items()
    )
    status, _, err = tandem(*arguments)
    assert (status, "not an empty directory" in err) == (1, True)
    shutil.rmtree(tmp_path / "out")
    status, _, err = tandem("export", "exported", "7", "out", "--base-model", str(base))
    assert (status, "no checkpoint 7" in err, list(tmp_path.iterdir())) == (1, True, [])


def test_a_run_of_all_weights_has_the_model_already(tandem, server, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spool, base = server.spool, root / "models/tiny"
    spec = RunSpec(
        name="all", base_model=str(base), trainable="full", lora=None, weights="merged", created=0.0
    )
    spool.runs.create(spec, lambda _: None)
    status, _, err = tandem("export", "all", "0", "out")
    assert status == 1
    assert "is the base model" in err
    shutil.copytree(base, root / "staged")
    (root / "staged/optimizer").mkdir()
    (root / "staged/optimizer/adam.json").write_text("{}")
    spool.checkpoints.commit(root / "staged", "all", 1, "a-job")
    assert tandem("export", "all", "1", "out")[0] == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in base.iterdir()
    }
    assert all(
        (tmp_path / "out" / path.name).read_bytes() == path.read_bytes() for path in base.iterdir()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_client_alone_is_told_what_it_needs(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "tandem.inference.merged_model")
    status, _, err = command("export", "run", "1", str(tmp_path / "out"))
    assert (status, "tandem export needs numpy: pip install 'tandem-rl[data]'" in err) == (
        1,
        True,
    ), err
