"""The preparations of `serve` right before its process becomes vLLM."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.stage import Stage
from tandem.errors import InvalidInput
from tandem.inference.server import serve


@pytest.fixture
def environments(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[dict[str, str]]]:
    """A list with the environment of each vLLM that `start` starts."""
    log = logging.getLogger()
    level = log.level
    monkeypatch.setattr(log, "handlers", [])  # `serve.main` adds its own log handlers.
    given: list[dict[str, str]] = []

    def become_vllm(_program: str, _argv: list[str], environment: dict[str, str]) -> None:
        given.append(environment)
        sys.exit("became vLLM")

    settings = {
        "ROOT": stage.spool.root,
        "BASE_MODEL": stage.model,
        "DEVICE": "cpu",
        "INFERENCE_PORT": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"TANDEM_{name}", str(value))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "execve", become_vllm)
    yield given
    log.setLevel(level)


def start(ends: object = "became vLLM") -> None:
    with pytest.raises(SystemExit) as caught:
        serve.main()
    assert caught.value.code == ends


def test_vllm_keeps_what_it_compiled_in_a_directory_of_this_user(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM unpickles files in the directory of compiled code, so no other user may write there. The
    directory is not in vLLM's TMPDIR, because each start of vLLM empties TMPDIR."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    start()
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    caches = [Path(environments[0][name]) for name in names]
    for cache in caches:
        assert cache.is_relative_to(tmp_path / "vllm")
        assert cache.stat().st_mode & 0o777 == 0o700
    (caches[0] / "compiled").touch()
    start()
    assert (Path(environments[1]["VLLM_CACHE_ROOT"]) / "compiled").exists()
    caches[0].chmod(0o770)
    start(1)  # After exit status 1 supervisord starts the program again.


def test_what_the_vllm_before_served_and_left_in_its_tmpdir_is_removed(
    stage: Stage, environments: list[dict[str, str]]
) -> None:
    start()
    stage.publisher().once()
    assert stage.served() == (0, None)
    directory = Path(environments[0]["TMPDIR"])
    (directory / "more").mkdir()
    (directory / "more/socket").touch()
    start()
    assert stage.spool.served.get("run") is None
    assert environments[1]["TMPDIR"] == str(directory)
    assert list(directory.iterdir()) == []


def test_a_vllm_that_other_machines_reach_needs_a_key(
    environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TANDEM_INFERENCE_HOST", "0.0.0.0")
    start(ends=2)
    assert "TANDEM_API_KEY" in capfd.readouterr().err
    assert environments == []
    monkeypatch.setenv("TANDEM_API_KEY", "key")
    start()
    assert environments[0]["VLLM_API_KEY"] == "key"


def test_a_token_file_that_cannot_be_read_is_a_wrong_setting(
    environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN_FILE", "/no-token")
    start(ends=2)
    assert "no-token" in capfd.readouterr().err
    assert environments == []


def test_a_tandem_whose_plugin_vllm_would_not_find_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package's modules are on the path, but its metadata is not."""
    serve.check_plugin()
    source = Path(serve.__file__).parents[3]
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(source)])
    with pytest.raises(InvalidInput, match="not installed"):
        serve.check_plugin()
