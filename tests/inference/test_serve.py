"""What happens right before the program becomes vLLM."""

import os
import sys
from pathlib import Path

import pytest

from inference.stage import Stage
from tandem.inference.server import serve


def test_a_vllm_that_starts_withdraws_what_the_one_before_served(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.publisher().once()
    assert stage.served() == (0, None)
    settings = {"ROOT": stage.spool.root, "BASE_MODEL": stage.model, "DEVICE": "cpu", "INFERENCE_PORT": 1}
    for name, value in settings.items():
        monkeypatch.setenv(f"TANDEM_{name}", str(value))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "execve", lambda *_: sys.exit("became vLLM"))
    with pytest.raises(SystemExit, match="became vLLM"):
        serve.main()
    assert stage.spool.served.get("run") is None
