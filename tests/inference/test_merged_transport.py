"""From where a merged vLLM is told to take the weights of a run that trains all of them."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.config import Settings
from tandem.errors import CheckpointDamaged
from tandem.inference.publisher import merged_transport
from tandem.inference.publisher.merged_transport import MergedTransport
from tandem.inference.publisher.spot_check import SpotCheck
from tandem.inference.tensor_file import TensorFile
from tandem.spool import Spool
from tandem.spool.runs import verify_files, write_manifest
from tandem.spool.schema import Manifest, RunSpec
from tandem.vllm_client.client import InferenceRefused, VllmClient
from tiny import write_random_model

OFFER = {"transport": "nccl", "address": "127.0.0.1", "port": 1}


class FakeVllm:
    """Takes weights by every way but `broken`, and has those of `model`."""

    def __init__(self, model: Path, log: list[str], broken: str = "") -> None:
        self._model, self._log, self._broken = model, log, broken

    def swap_merged(self, _name: str, _path: str, *, sources: Sequence[Mapping[str, Any]], **_: Any) -> dict[str, Any]:
        [source] = sources
        self._log.append(source["way"])
        if source["way"] == self._broken:
            raise InferenceRefused("the ranks are gone")
        return {"transport": source["way"], "failed": [], "swap_seconds": 0.1}

    def merged_rows(self, rows: Mapping[str, int]) -> list[dict[str, Any]]:
        file = TensorFile(self._model / "model.safetensors")
        found = {name: file[name][row] for name, row in rows.items()}
        return [{"name": n, "begin": 0, "end": len(row), "sha256": sha256(row.tobytes()).hexdigest()}
                for n, row in found.items()]  # fmt: skip


class Scene:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = write_random_model(directory / "model")
        self.log: list[str] = []
        bare = Manifest(run="r", step=1, created=1.0, job="j", files={})
        self.manifest = write_manifest(self.model, bare)
        self.offers = [SimpleNamespace(type="offered", data=OFFER)]

        def verify(directory: Path, manifest: Manifest) -> None:
            self.log.append("verify")
            verify_files(directory, manifest)

        monkeypatch.setattr(merged_transport, "verify_files", verify)

    def load(self, broken: str = "") -> dict[str, float]:
        spool = SimpleNamespace(
            checkpoints=SimpleNamespace(path=lambda _run, _step: self.model),
            events=SimpleNamespace(read=lambda _job: self.offers),
            jobs=SimpleNamespace(get=lambda _job: ("running", None)),
        )
        client = cast(VllmClient, FakeVllm(self.model, self.log, broken))
        check = SpotCheck(str(self.model), "float32")
        settings = Settings(weights="merged", transport="nccl")
        transport = MergedTransport(client, cast(Any, None), settings, check, cast(Spool, spool))
        run = RunSpec(name="r", base_model="m", trainable="full", lora=None, weights="merged", created=0.0)
        return transport.load("r@1", self.model, run, self.manifest)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_ranks_that_wait_are_asked_before_files_are_read(scene: Scene) -> None:
    assert scene.load() == {"swap": 0.1}
    assert scene.log == ["nccl"], "to hash a large checkpoint takes longer than ranks wait"


def test_files_are_verified_before_vllm_reads_them(scene: Scene) -> None:
    scene.load(broken="nccl")
    assert scene.log == ["nccl", "verify", "volume"]
    scene.offers = []
    scene.log.clear()
    scene.load()
    assert scene.log == ["verify", "volume"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 64], ids=["empty", "garbage"])
def test_files_that_are_none_are_damage(scene: Scene, content: bytes) -> None:
    path = scene.model / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=str(scene.model)):
        scene.load()
    assert scene.log == []


def test_a_truncated_file_is_damage(scene: Scene) -> None:
    path = scene.model / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)
    with pytest.raises(CheckpointDamaged, match=str(scene.model)):
        scene.load()
    assert scene.log == []
