"""The command line against a real controller; somebody does the runner's part."""

from __future__ import annotations

import json
import os
import py_compile
import re
import subprocess
import sys
import threading
import time
from importlib.machinery import PathFinder
from itertools import count

import pytest

from api_server import KEY, Server, claim, fail, groups, make_root, rl_request, run_one, sft_request, tree, until
from tandem.cli import main
from tandem.cli.train import apply_setting, read_request
from tandem.errors import InvalidInput
from tandem.spool.schema import Served

_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(make_root(tmp_path_factory.mktemp("volume") / "spool")) as server:
        yield server


@pytest.fixture
def tandem(server, monkeypatch, capsys):
    """Runs the command; gives its exit status, stdout and stderr."""
    monkeypatch.setenv("TANDEM_URL", server.url)
    monkeypatch.setenv("TANDEM_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    yield command
    for _, job in server.spool.jobs.list(states=("queued", "running")):
        server.spool.queue.cancel(job.spec.id)


@pytest.fixture
def run(tandem) -> str:
    name = f"run-{next(_numbers)}"
    assert tandem("run", "create", name, "--rank", "2")[0] == 0
    return name


def in_background(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_runs(tandem, run):
    status, out, _ = tandem("run", "create", f"{run}-b", "--rank", "4", "--target", "q_proj", "--json")
    created = json.loads(out)
    assert status == 0
    assert created["spec"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    names = [r["spec"]["name"] for r in json.loads(tandem("run", "list", "--json")[1])]
    assert {run, f"{run}-b"} <= set(names)
    assert run in tandem("run", "list")[1]
    status, out, _ = tandem("run", "show", run)
    assert status == 0
    assert "rank 2, alpha 4" in out


def test_refusals_name_the_field_on_stderr(tandem, run):
    status, out, err = tandem("run", "create", "x", "--rank", "0")
    assert (status, out) == (1, "")
    assert "lora.rank" in err
    status, out, err = tandem("run", "show", "nobody", "--json")
    assert (status, out) == (1, "")
    assert json.loads(err)["error"]["field"] == "run"
    assert tandem("run", "nonsense")[0] == 2
    assert tandem("jobs", "list", "--state", "sleeping")[0] == 1


def test_the_controller_is_not_there(tandem, monkeypatch):
    monkeypatch.setenv("TANDEM_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("tandem.cli.runs.PATIENCE", 0.2)
    status, _, err = tandem("run", "list")
    assert status == 5
    assert "TANDEM_URL" in err


def test_train_from_json_lines_until_served(tandem, run, server, tmp_path):
    (tmp_path / "groups.jsonl").write_text("\n".join(json.dumps(g) for g in groups(2)) + "\n")

    def others() -> None:
        until("it is queued", lambda: server.spool.jobs.list(run=run))
        run_one(server.spool)
        served = {"step": 1, "model": f"{run}@1", "checkpoint": "0", "verified": time.time()}
        server.spool.served.put(run, Served(**served, mean_abs_logprob_error=0, tokens_checked=1))

    thread = in_background(others)
    status, out, err = tandem(
        "train", run, str(tmp_path / "groups.jsonl"), "--set", "packing.sequence_length=64",
        "--set", "loss.policy=ppo", "--id", f"{run}-job", "--json",
    )  # fmt: skip
    thread.join()
    assert status == 0, err
    job = json.loads(out)
    assert (job["id"], job["state"], job["spec"]["loss"]["policy"]) == (f"{run}-job", "succeeded", "ppo")
    assert job["spec"]["data"]["num_groups"] == 2

    for command in (["jobs", "show", job["id"]], ["jobs", "list", "--run", run]):
        status, out, _ = tandem(*command)
        assert status == 0
        assert job["id"] in out
        assert "succeeded" in out
    assert json.loads(tandem("jobs", "list", "--run", run, "--state", "queued", "--json")[1]) == []
    assert tandem("logs", job["id"])[1] == f"rank 0 trains {job['id']}\n"
    lines = [json.loads(line) for line in tandem("logs", "-f", job["id"], "--json")[1].splitlines()]
    assert [line["event"]["type"] for line in lines if "event" in line][-1] == "succeeded"
    assert any("rank 0 trains" in line.get("log", "") for line in lines)
    assert "Memory of job" in tandem("memory", job["id"])[1]
    told = {"0": {"uuid": "cpu", "phases": {"build": {"allocated": 3 * 2**20}}, "highest": {}}}
    server.spool.events.append(job["id"], "released", attempt=1, memory=told)
    (attempt,) = json.loads(tandem("memory", job["id"], "--json")[1])
    assert (attempt["attempt"], attempt["device"], attempt["released"]) == (1, "cpu", True)
    assert attempt["ranks"]["0"]["phases"] == {"build": {"allocated": 3 * 2**20}}
    assert re.search(r"build +│ +0 +│ +3\.0 MiB", tandem("memory", job["id"])[1])
    assert tandem("memory", "nobody")[0] == 1
    status, out, err = tandem("logs", "-f", job["id"])
    assert "rank 0 trains" in out
    assert "step 2/2 loss=0.5" in err


def test_a_failing_job_is_exit_status_3(tandem, run, server, tmp_path):
    (tmp_path / "request.json").write_text(json.dumps(sft_request()))
    thread = in_background(
        lambda: (
            until("it is queued", lambda: server.spool.jobs.list(run=run)),
            fail(server.spool, claim(server.spool)),
        )
    )
    status, _, err = tandem("train", run, str(tmp_path / "request.json"))
    thread.join()
    assert status == 3
    assert "rank_crashed" in err
    assert "boom" in err
    job = server.spool.jobs.list(run=run)[0][1].spec.id
    assert tandem("logs", "-f", job)[0] == 3


def test_queue_and_cancel(tandem, run, tmp_path):
    (tmp_path / "request.json").write_text(json.dumps(rl_request()))
    status, out, _ = tandem("train", run, str(tmp_path / "request.json"), "--wait", "no", "--json")
    assert status == 0
    job = json.loads(out)
    assert job["state"] == "queued"
    assert json.loads(tandem("jobs", "cancel", job["id"], "--json")[1])["state"] == "cancelled"
    status, _, err = tandem("train", run, str(tmp_path / "request.json"), "--wait", "no", "--base-step", "7")
    assert (status, "base_step" in err) == (1, True)
    status, _, err = tandem("train", run, str(tmp_path / "missing.json"))
    assert (status, "FILE" in err) == (1, True)


def test_checkpoints(tandem, run, server, tmp_path):
    (tmp_path / "request.json").write_text(json.dumps(rl_request()))
    tandem("train", run, str(tmp_path / "request.json"), "--wait", "no")
    run_one(server.spool)
    steps = json.loads(tandem("checkpoints", "list", run, "--json")[1])
    assert [info["step"] for info in steps] == [0, 1]
    assert "the base model" in tandem("checkpoints", "list", run)[1]
    status, _, _ = tandem("checkpoints", "download", run, "1", str(tmp_path / "adapter"))
    assert (status, (tmp_path / "adapter" / "adapter_config.json").is_file()) == (0, True)
    assert tandem("checkpoints", "download", run, "1", str(tmp_path / "adapter"))[0] == 1
    assert json.loads(tandem("checkpoints", "fork", run, "1", f"{run}-f", "--json")[1])["newest_step"] == 0
    assert json.loads(tandem("checkpoints", "rollback", run, "0", "--json")[1])["discarded"] == [1]


def test_what_a_file_may_hold():
    example, group = sft_request()["examples"][0], groups()[0]
    assert read_request(json.dumps([group])) == {"kind": "rl", "groups": [group]}
    assert read_request(json.dumps(example)) == {"kind": "sft", "examples": [example]}
    assert read_request(f"{json.dumps(example)}\n\n{json.dumps(example)}") == {"kind": "sft", "examples": [example] * 2}
    assert read_request(json.dumps({"groups": [group], "loss": {}})) == {"kind": "rl", "groups": [group], "loss": {}}
    for text, field in [
        ("", "FILE"),
        ("[]", "FILE"),
        (f"{json.dumps(example)}\n{{", "FILE line 2"),
        (f"{json.dumps(example)}\n3", "FILE line 2"),
        (json.dumps([example, group]), "FILE"),
    ]:
        with pytest.raises(InvalidInput) as refused:
            read_request(text)
        assert refused.value.field == field
    request = read_request(json.dumps([group]))
    apply_setting(request, "optimizer.learning_rate=1e-3")
    apply_setting(request, "labels.note=a=b")
    assert request["optimizer"] == {"learning_rate": 1e-3}
    assert request["labels"] == {"note": "a=b"}
    for wrong in ("kind", "=1", "kind.x=1"):
        with pytest.raises(InvalidInput):
            apply_setting(request, wrong)


# ---------------------------------------------------------------- doctor


def doctor(tandem, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    status, out, _ = tandem("doctor", "--json", *arguments)
    return status, {check["name"]: check for check in json.loads(out)}


def test_doctor_on_a_healthy_deployment(tandem, server, monkeypatch):
    monkeypatch.setenv("TANDEM_ROOT", str(server.settings.root))
    monkeypatch.setenv("TANDEM_BASE_MODEL", "models/tiny")
    monkeypatch.setenv("TANDEM_INFERENCE_URL", "http://127.0.0.1:9")
    before = tree(server.settings.root)
    status, checks = doctor(tandem)
    assert status == 0, checks
    for name in (
        "python",
        "settings",
        "TANDEM_API_KEY",
        "volume",
        "volume: locks",
        "device",
        "base model",
        "controller",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["vLLM"]["status"] == "warn"
    assert tree(server.settings.root) == before
    status, out, _ = tandem("doctor")
    assert (status, "qwen3" in out) == (0, True)


def test_doctor_finds_what_is_wrong(tandem, server, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_BASE_MODEL", str(tmp_path / "nothing"))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "file"))
    monkeypatch.setenv("TANDEM_API_KEY", "wrong")
    monkeypatch.setenv("TANDEM_DEVICE", "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    status, checks = doctor(tandem)
    assert status == 1
    for name in ("volume", "base model", "controller", "device"):
        assert checks[name]["status"] == "fail", name
        assert checks[name]["remedy"], name
    monkeypatch.setenv("TANDEM_API_KEY", "")
    monkeypatch.setenv("TANDEM_CONTROLLER_HOST", "0.0.0.0")
    assert doctor(tandem)[1]["TANDEM_API_KEY"]["status"] == "fail"
    monkeypatch.setenv("TANDEM_LAUNCH", "rocket")
    status, checks = doctor(tandem)
    assert (status, checks["settings"]["status"]) == (1, "fail")
    assert "TANDEM_LAUNCH" in checks["settings"]["found"]


def test_doctor_says_when_every_process_compiles_its_imports_again(tandem, server, monkeypatch, tmp_path):
    torch = tmp_path / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        "tandem.cli.checks.installation.find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)])
    )
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert "bytecode" not in doctor(tandem)[1], "the first process writes it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert doctor(tandem)[1]["bytecode"]["status"] == "warn"
    py_compile.compile(str(torch))
    check = doctor(tandem)[1]["bytecode"]
    assert (check["status"], check["found"]) == ("ok", "torch compiled")


def test_the_module_is_the_command_and_every_command_helps():
    done = subprocess.run([sys.executable, "-m", "tandem", "--help"], capture_output=True, text=True, check=True)
    for command in (
        "up",
        "run",
        "train",
        "jobs",
        "logs",
        "checkpoints",
        "doctor",
        "controller",
        "runner",
        "serve",
        "publisher",
    ):
        assert command in done.stdout
    environment = os.environ | {"TANDEM_LAUNCH": "rocket"}
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "up"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert "TANDEM_LAUNCH" in done.stderr
