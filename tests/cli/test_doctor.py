"""`tandem doctor` on a healthy deployment and on broken ones."""

import json
import py_compile
import sys
from importlib.machinery import PathFinder

import pytest

from api_server import tree
from tandem.cli import checks_machine


@pytest.fixture
def doctor(tandem):
    """Runs the command; returns its exit status, and its checks by name."""

    def run() -> tuple[int, dict[str, dict[str, str]]]:
        status, out, _ = tandem("doctor", "--json")
        return status, {check["name"]: check for check in json.loads(out)}

    return run


def test_a_healthy_deployment(doctor, tandem, root, monkeypatch):
    monkeypatch.setenv("TANDEM_ROOT", str(root))
    monkeypatch.setenv("TANDEM_BASE_MODEL", "models/tiny")
    monkeypatch.setenv("TANDEM_INFERENCE_URL", "http://127.0.0.1:9")
    before = tree(root)
    status, checks = doctor()
    assert status == 0, checks
    healthy = ["python", "settings", "TANDEM_API_KEY", "volume", "volume: locks", "device", "base model", "controller"]
    assert {name: checks[name]["status"] for name in healthy} == dict.fromkeys(healthy, "ok")
    assert checks["vLLM"]["status"] == "warn"
    assert tree(root) == before
    status, out, _ = tandem("doctor")
    assert (status, "qwen3" in out) == (0, True)


def test_everything_wrong_at_once(doctor, monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_BASE_MODEL", str(tmp_path / "nothing"))
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "file"))
    monkeypatch.setenv("TANDEM_API_KEY", "wrong")
    monkeypatch.setenv("TANDEM_DEVICE", "cuda")
    status, checks = doctor()
    assert status == 1
    for name in ("volume", "base model", "controller", "device"):
        assert checks[name]["status"] == "fail", name
        assert checks[name]["remedy"], name


def test_an_open_controller_without_a_key(doctor, monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "")
    monkeypatch.setenv("TANDEM_CONTROLLER_HOST", "0.0.0.0")
    assert doctor()[1]["TANDEM_API_KEY"]["status"] == "fail"


def test_settings_that_cannot_be_read(doctor, monkeypatch):
    monkeypatch.setenv("TANDEM_LAUNCH", "rocket")
    status, checks = doctor()
    assert (status, checks["settings"]["status"]) == (1, "fail")
    assert "TANDEM_LAUNCH" in checks["settings"]["found"]


def test_packages_that_every_process_compiles_again(doctor, monkeypatch, tmp_path):
    torch = tmp_path / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.touch()
    monkeypatch.setattr(checks_machine, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert "bytecode" not in doctor()[1], "the first process writes it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert doctor()[1]["bytecode"]["status"] == "warn"
    py_compile.compile(str(torch))
    check = doctor()[1]["bytecode"]
    assert (check["status"], check["found"]) == ("ok", "torch compiled")
