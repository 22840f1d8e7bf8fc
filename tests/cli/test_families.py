"""The commands support every family of models. With a tiny model of each family, the tests make a
plan, check data, check the deployment and export the model. The exported model loads in
transformers. The logits of the exported model agree with PEFT's."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_model
import torch
import transformers

from policies import write_random_adapter
from tandem.families.adapter import default_targets
from tandem.families.registry import FAMILIES, read_arch
from tandem.inference.merged_model import write_merged_model
from tandem.spool import Spool
from tandem.spool.schema import LoraShape
from tiny import GEMMA4_MOE, VISIONS, write_random_model

FP32 = "fp32 weights beside others"
STACKED = "all experts in one tensor"
TOWER = "a vision tower beside its text model"
NOT_MERGED = {
    "deepseek_v3": FP32,
    "gemma4": "values made of keys",
    "gemma4 mixture": "experts beside MLPs",
    "gemma4_text": "values made of keys",
    "glm4_moe": FP32,
    "glm4_moe_lite": FP32,
    "gpt_oss": STACKED,
    "kimi_k2": FP32,
    "mistral3": TOWER,
    "qwen3_5": FP32,
    "qwen3_5_moe": FP32,
    "qwen3_5_moe_text": FP32,
    "qwen3_5_text": FP32,
    "qwen3_vl": TOWER,
    "qwen3_vl_moe": STACKED,
}
"""Family -> the reason why merged weights, and so runs of all weights, are refused."""
BESIDE: dict[str, dict[str, Any]] = {
    "gemma4 mixture": GEMMA4_MOE,
    "gemma4_text with values": {"attention_k_eq_v": False},
    # transformers has no model type `kimi_k2`.
    "kimi_k2": {"family": "deepseek_v3"},
}
NAMES = (*FAMILIES, *(name for name in BESIDE if name not in FAMILIES))


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name: str = request.param
    directory = tmp_path / "spool/models/tiny"
    Spool.create(tmp_path / "spool")
    tiny_model.write_tokenizer(directory)
    beside = BESIDE.get(name, {})
    more = {"family": name.split()[0], "spread": 1.0, "vocab_size": 320, **beside}
    if name.startswith("qwen3_5"):
        more["num_hidden_layers"] = 3
    write_random_model(directory, **more)
    renamed(directory, name)
    return directory


def renamed(directory: Path, name: str) -> None:
    if name == "kimi_k2":
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": name}))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 43)[None]).logits


def loaded(directory: Path, name: str) -> torch.nn.Module:
    kind = "ImageTextToText" if name.split()[0] in VISIONS else "CausalLM"
    if name == "kimi_k2":
        path = directory / "config.json"
        path.write_text(path.read_text().replace(name, "deepseek_v3"))
    model, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    renamed(directory, name)
    assert not any(report.values()), report
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "model"), [(name, name) for name in NAMES], indirect=["model"])
def test_commands_know_the_family(name, model, command, monkeypatch, tmp_path):
    why = NOT_MERGED.get(name)
    arguments = ("plan", str(model), "--gpus", "2", "--sequence-length", "256", "--json")
    status, out, err = command(*arguments)
    assert status == 0, err
    assert json.loads(out)["topologies"][0]["fits"]
    status, _, err = command(*arguments, "--full")
    assert status == (0 if why is None else 1)
    assert why is None or f"which has {why}" in err

    arch = read_arch(str(model))
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "spool"))
    monkeypatch.setenv("TANDEM_BASE_MODEL", "models/tiny")
    # vLLM's kernels for the CPU do not support the sizes of tiny models.
    monkeypatch.setenv("TANDEM_DEVICE", "cuda")
    for weights in ("adapter", "merged"):
        monkeypatch.setenv("TANDEM_WEIGHTS", weights)
        checks = {check["name"]: check for check in json.loads(command("doctor", "--json")[1])}
        assert f": {arch.model_type}, " in checks["base model"]["found"]
        wrong = {n: c["found"] for n, c in checks.items() if c["status"] == "fail"}
        for of_this_machine in ("device", "controller", "vLLM"):
            wrong.pop(of_this_machine, None)
        refused = "base model: merged weights"
        assert set(wrong) == ({refused} if why and weights == "merged" else set()), wrong
        assert why is None or why in wrong.get(refused, why)

    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "yes"}]
    (file := tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    status, out, err = command("data", "check", str(file), "--tokenizer", str(model), "--json")
    assert (status, json.loads(out)["records"]) == (0, 1), err

    lora = LoraShape(rank=3, alpha=3.0, targets=default_targets(arch))
    adapter = write_random_adapter(tmp_path / "adapter", model, lora)
    write_merged_model(tmp_path / "merged", model, adapter, lora)
    base, found = loaded(model, name), logits(loaded(tmp_path / "merged", name))
    assert (found - logits(base)).norm() > 0.1 * found.norm()
    if name.split()[0] == "gemma4":  # PEFT refuses Gemma 4; see test_vision_wrappers.py
        return
    expected = logits(peft.PeftModel.from_pretrained(base, adapter))
    assert (found - expected).norm() <= 1e-4 * expected.norm()
