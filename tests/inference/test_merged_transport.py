"""The publisher's choice of the source of weights: ranks or files. The runs train all weights, and
vLLM serves merged weights."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import pytest

from tandem.config import Settings
from tandem.errors import CheckpointDamaged
from tandem.inference.publisher import transports
from tandem.inference.publisher.transports import MergedTransport
from tandem.inference.tensor_files import TensorFile
from tandem.spool import Spool
from tandem.spool.paths import Paths
from tandem.spool.runs import verify_files, write_manifest
from tandem.spool.schema import ONLY, LoraShape, Manifest, RunSpec
from tandem.system import liveness
from tandem.vllm_client.client import InferenceRefused, InferenceUnavailable, VllmClient
from tandem.vllm_client.names import MergedPhase
from tiny import write_random_model
from waiting import until

RUN = RunSpec(name="r", base_model="m", trainable="full", lora=None, weights="merged", created=0.0)
OFFER = {
    "transport": "nccl",
    "address": "127.0.0.1",
    "meeting": "jobs/none/j/attempts/1/meeting",
    "servers": [ONLY],
}


class FakeVllm:
    """A fake vLLM that accepts weights by every way except `broken`. The fake vLLM's weights are
    the weights of `model`."""

    def __init__(
        self, model: Path, log: list[str], broken: str, state: dict[str, str] | None
    ) -> None:
        self._model, self._log, self._broken, self._state = model, log, broken, state

    def merged(self) -> dict[str, str] | None:
        return self._state

    def swap_merged(
        self, *_: Any, source: Mapping[str, Any], again: Mapping[str, Any]
    ) -> dict[str, Any]:
        assert again["way"] == "volume"
        self._log.append(source["way"])
        if source["way"] == self._broken:
            raise InferenceRefused("the ranks are gone")
        return {"transport": source["way"], "swap_seconds": 0.1}

    def merged_rows(self, rows: Mapping[str, int]) -> list[dict[str, Any]]:
        file = TensorFile(self._model / "model.safetensors")
        found = {name: file[name][row] for name, row in rows.items()}
        return [
            {"name": n, "begin": 0, "end": len(row), "sha256": sha256(row.tobytes()).hexdigest()}
            for n, row in found.items()
        ]


class Scene:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = write_random_model(directory / "model")
        self.log: list[str] = []
        self.attempt = 1  # The number of the job's running attempt.
        bare = Manifest(run="r", step=1, created=1.0, job="j", files={})
        self.manifest = write_manifest(self.model, bare)
        self.offers = [SimpleNamespace(type="offered", attempt=1, data=OFFER)]

        def verify(directory: Path, manifest: Manifest) -> None:
            self.log.append("verify")
            verify_files(directory, manifest)

        monkeypatch.setattr(transports, "verify_files", verify)

    def transport(
        self,
        broken: str = "",
        state: dict[str, str] | None = None,
        requests: Literal["keep", "wait"] = "keep",
    ) -> MergedTransport:
        spool = SimpleNamespace(
            root=self.model.parent,
            paths=Paths(self.model.parent),
            checkpoints=SimpleNamespace(path=lambda _run, _step: self.model),
            events=SimpleNamespace(read=lambda _job: self.offers),
            jobs=SimpleNamespace(
                get=lambda _job: ("running", SimpleNamespace(attempt=self.attempt))
            ),
        )
        client = cast(VllmClient, FakeVllm(self.model, self.log, broken, state))
        settings = Settings(
            weights="merged",
            transport="nccl",
            device="cpu",
            base_model=str(self.model),
            swap_requests=requests,
        )
        return MergedTransport(client, cast(Any, None), settings, cast(Spool, spool))

    def load(self, broken: str = "") -> dict[str, float]:
        return self.transport(broken).load("r@1", self.model, RUN, self.manifest)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_ranks_that_wait_are_asked_before_files_are_read(scene: Scene) -> None:
    assert scene.load() == {"swap": 0.1}
    assert scene.log == ["nccl"], "to hash a large checkpoint takes longer than ranks wait"


def test_a_meeting_outside_of_the_jobs_own_directory_is_passed_over(scene: Scene) -> None:
    """An attacker who has taken over the trainer can't make vLLM open other files of the volume."""
    for meeting in ("runs/r/served.json", "/etc/passwd", "jobs/none/other/attempts/1/meeting"):
        scene.offers = [
            SimpleNamespace(type="offered", attempt=1, data=OFFER | {"meeting": meeting})
        ]
        scene.load()
    assert "nccl" not in scene.log


def test_a_server_that_the_ranks_do_not_await_reads_files(scene: Scene) -> None:
    """The server was not ready when the ranks offered the weights."""
    data = OFFER | {"servers": ["1"]}
    scene.offers = [SimpleNamespace(type="offered", attempt=1, data=data)]
    scene.load()
    assert scene.log == ["verify", "volume"]


def test_an_offer_of_an_attempt_that_was_ended_is_passed_over(scene: Scene) -> None:
    scene.attempt = 2
    scene.load()
    assert scene.log == ["verify", "volume"]


def test_files_that_ranks_still_write_are_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offer of ranks that write files has no field `meeting`."""
    monkeypatch.setattr(liveness, "beat", lambda _: None)
    written = SimpleNamespace(type="sent", attempt=1, data={"transport": "volume"})
    scene.offers = [SimpleNamespace(type="offered", attempt=1, data={"transport": "volume"})]
    monkeypatch.setattr(transports.time, "sleep", lambda _: scene.offers.append(written))
    assert scene.transport()._offered(RUN, scene.manifest) == []
    assert scene.offers[1:] == [written]


def test_files_are_verified_before_vllm_reads_them(scene: Scene) -> None:
    scene.load(broken="nccl")
    assert scene.log == ["nccl", "verify", "volume"]
    scene.offers = []
    scene.log.clear()
    scene.load()
    assert scene.log == ["verify", "volume"]


def test_a_swap_and_hashes_that_take_long_are_no_hang(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """TANDEM_SWAP_SECONDS may exceed the time that the liveness probe allows for a turn of the
    publisher."""
    slow = slower(monkeypatch, tmp_path)
    monkeypatch.setattr(transports, "verify_files", slow(transports.verify_files))
    monkeypatch.setattr(FakeVllm, "swap_merged", slow(FakeVllm.swap_merged))
    scene.load(broken="nccl")
    assert scene.log == ["nccl", "verify", "volume"]


def test_hashing_the_whole_weights_of_a_lora_run_is_no_hang(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene.offers = []
    transport = scene.transport()
    find = slower(monkeypatch, tmp_path)(lambda _: scene.model)
    transport._spool = cast(
        Spool, SimpleNamespace(events=transport._spool.events, merged=SimpleNamespace(find=find))
    )
    run = RUN.model_copy(update={"lora": LoraShape(rank=4, alpha=8.0), "trainable": "lora"})
    assert transport._offered(run, scene.manifest) == [
        {"way": "volume", "directory": str(scene.model)}
    ]


def slower(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a function wait until the publisher renews the file `publisher.alive`
    in `directory`."""
    monkeypatch.setenv(liveness.VARIABLE, str(directory))
    monkeypatch.setattr(transports, "BEAT_SECONDS", 0.01)
    sign = directory / "publisher.alive"

    def slow(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sign.unlink(missing_ok=True)
            until("it beats", sign.exists, 20)
            return work(*args, **kwargs)

        return call

    return slow


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"", lambda whole: b"\xff" * 64, lambda whole: whole[: len(whole) // 3]],
)
def test_files_that_are_none_are_damage(scene: Scene, damage: Callable[[bytes], bytes]) -> None:
    path = scene.model / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointDamaged, match=str(scene.model)):
        scene.load()
    assert scene.log == []


@pytest.mark.parametrize(("requests", "pauses"), [("wait", True), ("keep", False)])
def test_after_a_wait_in_vain_requests_are_let_in_for_as_long(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, requests: Literal["keep", "wait"], pauses: bool
) -> None:
    clock = [1000.0]

    def busy(self: FakeVllm, *_: Any, **__: Any) -> dict[str, Any]:
        scene.log.append("swap")
        clock[0] += 120
        raise InferenceUnavailable("5 requests still run")

    monkeypatch.setattr(transports.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(transports, "_alive", lambda action: action())
    monkeypatch.setattr(FakeVllm, "swap_merged", busy)
    scene.offers = []
    transport = scene.transport(requests=requests)
    ordered = []
    for later in (0, 0.5, 119, 1):
        clock[0] += later
        scene.log.clear()
        with pytest.raises(InferenceUnavailable, match="5 requests still run"):
            transport.load("r@1", scene.model, RUN, scene.manifest)
        ordered.append("swap" in scene.log)
    assert ordered == ([True, False, False, True] if pauses else [True] * 4)
    transport.server_lost()  # The next server has no running requests.
    scene.log.clear()
    with pytest.raises(InferenceUnavailable):
        transport.load("r@1", scene.model, RUN, scene.manifest)
    assert "swap" in scene.log


@pytest.mark.parametrize("phase", get_args(MergedPhase))
def test_only_announced_weights_count(scene: Scene, phase: MergedPhase) -> None:
    """Weights that vLLM serves without an announcement were not verified, or are a mix of two
    versions. The publisher must write and check these weights again."""
    transport = scene.transport(
        state={"phase": phase, "name": "r@1", "path": "/1", "transport": "merge"}
    )
    transport.refresh()
    assert transport.listed == ({"r@1": "/1"} if phase == "served" else {})


def test_weights_that_took_the_place_of_others_make_their_records_stale(scene: Scene) -> None:
    """In vLLM, the first step of a fork replaces a step of the fork's source run. So the publisher
    must remove the record of the source run."""
    state = {"phase": "served", "name": "a@5", "path": "/5", "transport": "merge"}
    transport = scene.transport(state=state)
    assert not transport.refresh()
    transport.listed = {"r@1": "/1"}  # as `load` does
    state |= {"name": "r@1", "path": "/1"}
    assert transport.refresh()
    assert not transport.refresh()
