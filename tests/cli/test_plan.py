import json

from tiny import SHAPE


def test_the_command_recommends_what_fits(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = SHAPE | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("plan", str(tmp_path), "--gpus", "2", "--sequence-length", "512", "--gpu-memory", "4")
    status, out, _ = command(*arguments, "--json")
    data = json.loads(out)
    first = data["topologies"][0]
    assert (status, first["topology"], first["fits"]) == (0, "DP=2", True)
    assert data["recommended"] == first["settings"]
    parts = [size for name, size in first["gib"].items() if name != "total"]
    assert abs(sum(parts) - first["gib"]["total"]) < 0.05
    status, out, _ = command(*arguments)
    assert status == 0
    assert "TANDEM_TENSOR_PARALLEL=1" in out
    assert "DP=2" in out


def test_too_little_memory_is_refused(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen3"}))
    status, _, err = command("plan", str(tmp_path), "--gpus", "1", "--sequence-length", "512", "--gpu-memory", "1")
    assert status == 0, err
