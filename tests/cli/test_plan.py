import json
import sys

from tiny import SHAPE


def test_the_command_recommends_what_fits(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = SHAPE | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = (
        "plan",
        str(tmp_path),
        "--gpus",
        "2",
        "--sequence-length",
        "512",
        "--gpu-memory",
        "4",
    )
    status, out, _ = command(*arguments, "--json")
    data = json.loads(out)
    first = data["topologies"][0]
    assert (status, first["topology"], first["fits"]) == (0, "DP=2", True)
    assert data["recommended"] == first["settings"]
    parts = [size for name, size in first["gib"].items() if name != "total"]
    assert abs(sum(parts) - first["gib"]["total"]) < 0.05
    full = json.loads(command(*arguments, "--full", "--json")[1])
    assert full["topologies"][0]["gib"]["adapter"] == 0
    assert "three measured jobs are within 4 %" in full["source"]
    for shape in (("--target", "q_proj"), ("--rank", "8")):
        status, _, err = command(*arguments, "--full", *shape)
        assert (status, "leave --rank and --target out" in err) == (1, True)
    status, _, err = command(*arguments, "--target", "nonsense")
    assert (status, "--target" in err, "q_proj" in err) == (1, True, True)
    status, out, _ = command(*arguments)
    assert status == 0
    assert "TANDEM_TENSOR_PARALLEL=1" in out
    assert "DP=2" in out


def test_the_number_of_inference_servers_follows_from_a_given_speed(command, tmp_path):
    """Without `--server-speed` the plan has no number of servers, because a server's speed is not
    known beforehand."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen3"}))
    arguments = ["plan", str(tmp_path), "--gpus", "1", "--sequence-length", "512", "--json"]
    data = json.loads(command(*arguments)[1])
    assert "inference" not in data
    trained = data["topologies"][0]["tokens_per_second"]
    for speed, share, servers in (
        (2 * trained, 1, 1),
        (trained / 3.5, 1, 4),
        (trained / 3.5, 0.5, 2),
    ):
        options = ["--server-speed", str(speed), "--generated", str(share)]
        found = json.loads(command(*arguments, *options)[1])["inference"]
        assert found["servers"] == servers, (speed, share)
        assert "nobody has measured" in found["why"]
    status, out, _ = command(*arguments[:-1], "--server-speed", str(trained))
    assert (status, "(given)" in out) == (0, True)


def test_what_does_not_fit_is_refused(command, tmp_path):
    config = SHAPE | {"model_type": "qwen3", "vocab_size": 300_000, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, err = command(
        "plan", str(tmp_path), "--gpus", "1", "--sequence-length", "512", "--gpu-memory", "2"
    )
    assert status == 1
    assert "no topology of 1 GPUs fits 2.0 GiB" in err
    assert command("plan", str(tmp_path), "--gpus", "1")[0] == 0
    longer = str(config["max_position_embeddings"] + 1)
    status, _, err = command("plan", str(tmp_path), "--gpus", "1", "--sequence-length", longer)
    assert (
        status,
        f"--sequence-length: {longer} is more than the model's" in err.replace("\n", " "),
    ) == (1, True)


def test_a_model_of_the_hub_needs_the_extra_data(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    status, _, err = command("plan", "Qwen/Qwen3-8B", "--gpus", "1")
    assert (
        status,
        "a model of the hub needs huggingface_hub: pip install 'tandem-rl[data]'" in err,
    ) == (1, True), err
