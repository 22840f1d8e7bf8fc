"""The client by itself: its address and key, retries, errors, and downloads."""

import asyncio
import contextlib
import inspect
import json
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter

from api_server import KEY, rl_request, run_one, tree
from spool.volume_tools import refused
from tandem import client as package
from tandem import errors
from tandem.client import AsyncTandem, Tandem, sampling_options
from tandem.client.http import connection, error_of, events_of, parsed
from tandem.controller.schemas import ErrorBody
from tandem.errors import CheckpointDamaged, InvalidInput, NotFound, TandemError, Unreachable
from tandem.spool.schema import Event


def test_both_clients_have_the_same_methods():
    def methods(kind: type) -> dict[str, list[str]]:
        public = [
            (n, m) for n, m in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")
        ]
        return {
            name: [str(p) for p in inspect.signature(m).parameters.values()] for name, m in public
        }

    assert methods(Tandem) == methods(AsyncTandem)
    assert set(package.__all__) <= set(dir(package))


def test_address_and_key_come_from_the_environment(monkeypatch, tmp_path):
    for name in ("TANDEM_URL", "TANDEM_API_KEY", "TANDEM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert connection(None, None)["base_url"] == "http://127.0.0.1:8080"
    assert "Authorization" not in connection(None, None)["headers"]
    (tmp_path / "key").write_text("from-file, second\n")
    monkeypatch.setenv("TANDEM_API_KEY_FILE", str(tmp_path / "key"))
    assert connection(None, None)["headers"]["Authorization"] == "Bearer from-file"
    monkeypatch.setenv("TANDEM_API_KEY_FILE", str(tmp_path / "missing"))
    with pytest.raises(InvalidInput, match=r"TANDEM_API_KEY_FILE: can't read .*missing"):
        connection(None, None)
    monkeypatch.setenv("TANDEM_API_KEY", "from-env")
    monkeypatch.setenv("TANDEM_URL", "http://elsewhere:1/")
    assert connection(None, None)["headers"]["Authorization"] == "Bearer from-env"
    assert connection(None, None)["base_url"] == "http://elsewhere:1"
    assert connection("http://here", "mine")["headers"]["Authorization"] == "Bearer mine"


def test_sampling_options_request_token_ids_and_logprobs():
    assert sampling_options(seed=5) == {
        "logprobs": True,
        "extra_body": {"return_token_ids": True, "seed": 5},
    }
    assert sampling_options(top_k=-1, top_p=1.0)["extra_body"]["top_k"] == -1

    for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}.items():
        # the trainer computes log-probs without these sampling options
        with refused(InvalidInput, name):
            sampling_options(**{name: value})


def test_errors_have_the_class_that_the_controller_raised():
    for kind in (
        InvalidInput,
        errors.NothingToLearn,
        errors.Conflict,
        errors.Unauthorized,
        errors.SpoolUnusable,
    ):
        body = {"error": {"type": kind.code, "message": "m", "field": "a.0.b"}}
        error = error_of(httpx.Response(kind.http_status, json=body))
        assert (type(error), error.code, error.message, error.field) == (
            kind,
            kind.code,
            "m",
            "a.0.b",
        )
    newer = error_of(httpx.Response(418, json={"error": {"type": "something_new", "message": "m"}}))
    assert (type(newer), newer.code) == (TandemError, "something_new")
    proxys = httpx.Response(
        418, text="<html>teapot</html>", request=httpx.Request("GET", "http://x/y")
    )
    assert "teapot" in error_of(proxys).message


@pytest.mark.parametrize("page", [False, True], ids=["the controller's", "a proxy's page"])
def test_a_stream_that_is_refused_for_long_raises_why(page, tmp_path):
    body = (
        b"<html>no backend</html>"
        if page
        else b'{"error": {"type": "spool_unusable", "message": "read-only"}}'
    )
    requests = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(503, content=body)

    with Tandem("http://somewhere", patience=1) as client:
        client._client._transport = httpx.MockTransport(answer)
        for ask in (
            lambda: list(client.events("j")),
            lambda: client.download("r", 1, tmp_path / "new"),
        ):
            with pytest.raises(
                Unreachable if page else errors.SpoolUnusable,
                match="no backend" if page else "^read-",
            ):
                ask()
        assert len(requests) >= 4
    assert list(tmp_path.iterdir()) == []


def test_a_lost_controller_is_unreachable_once_patience_is_exhausted():
    with Tandem("http://127.0.0.1:9", KEY, patience=0.5) as lost:
        for ask in (lambda: list(lost.events("job")), lambda: lost.get_run("run")):
            with pytest.raises(Unreachable, match="TANDEM_URL"):
                ask()


def test_what_fails_late_is_tried_again():
    """The client repeats a failing request for 0.5 s after the first failure. The first request for
    the list of jobs times out after 0.6 s. The first request for a stream of events times out after
    0.6 s, too."""
    event = Event(seq=0, time=0.0, job="j", type="succeeded")
    requests = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        if len(requests) in (1, 3):
            time.sleep(0.6)
            raise httpx.ReadTimeout("nothing came")
        content = (
            f"data:{event.model_dump_json()}\n" if request.url.path.endswith("events") else "[]"
        )
        return httpx.Response(200, text=content)

    with Tandem("http://somewhere", patience=0.5) as client:
        client._client._transport = httpx.MockTransport(answer)
        assert client.list_jobs() == []
        assert list(client.events("j")) == [event]
    assert requests == ["/v1/jobs"] * 2 + ["/v1/jobs/j/events"] * 2


class LosesAnswers(httpx.HTTPTransport):
    """Loses the first `lost` responses after the server has sent them."""

    lost = requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.requests += 1
        if self.requests <= self.lost:
            response.close()
            raise httpx.ReadError("the connection was closed")
        return response


@pytest.fixture
def lossy(server):
    """A client and its transport. The transport loses responses."""
    with Tandem(server.url, KEY, patience=20) as client:
        client._client._transport = LosesAnswers()
        yield client, client._client._transport


def test_a_submit_whose_answer_is_lost_is_one_job(server, run, lossy):
    client, transport = lossy
    transport.lost = 2
    job = client.train_rl(run, rl_request()["groups"], packing={"sequence_length": 64})
    assert transport.requests == 3
    assert [known.spec.id for _, known in server.spool.jobs.list(run=run)] == [job.id]


@pytest.mark.parametrize("change", [lambda client, run: client.rollback(run, 0), Tandem.delete_run])
def test_a_rollback_and_a_deletion_are_not_sent_twice(run, lossy, change):
    client, transport = lossy
    transport.lost = 1
    with pytest.raises(Unreachable):
        change(client, run)
    assert transport.requests == 1


@pytest.fixture
def trained(client, server, run):
    client.train(run, rl_request())
    run_one(server.spool)
    return run


def test_download(client, server, http, trained, tmp_path):
    manifest = client.download(trained, 1, tmp_path / "new" / "adapter")
    assert manifest.step == 1
    source = tree(server.spool.checkpoints.path(trained, 1))
    assert len(source) == 5
    assert tree(tmp_path / "new" / "adapter") == source
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["adapter"]

    with http.stream("GET", f"/v1/runs/{trained}/checkpoints/1/download") as answer:
        assert answer.headers["content-type"] == "application/x-tar"
        (tmp_path / "raw.tar").write_bytes(answer.read())
        assert (tmp_path / "raw.tar").stat().st_size == int(answer.headers["content-length"])
    with tarfile.open(tmp_path / "raw.tar") as archive:
        assert archive.getnames()[-1] == f"{trained}@1/manifest.json"


@pytest.mark.slow
def test_a_download_that_breaks_late_is_tried_again_as_long_as_it_gets_further(
    monkeypatch, tmp_path
):
    sent = []

    @contextlib.asynccontextmanager
    async def stream(*_: object, **__: object) -> AsyncIterator[AsyncIterator[bytes]]:
        sent.append(0)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(min(len(sent), 3)):
                await asyncio.sleep(0.4)
                yield b"part"
            raise Unreachable("it broke")

        yield chunks()

    async def scene() -> None:
        async with AsyncTandem("http://somewhere", patience=0.7) as client:
            monkeypatch.setattr(client, "_stream", stream)
            with pytest.raises(Unreachable):
                await client.download("run", 1, tmp_path / "new")

    asyncio.run(scene())
    assert 3 <= len(sent) <= 5


def test_a_download_does_not_overwrite(client, trained, tmp_path):
    (tmp_path / "mine").write_text("precious")
    for dest in (tmp_path, tmp_path / "mine"):
        with refused(InvalidInput, "dest"):
            client.download(trained, 1, dest)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_download_does_not_replace_where_it_runs_a_mount_or_a_link(
    client, trained, tmp_path, monkeypatch
):
    """The working directory, the mount and the link are empty, but a rename can't replace them. The
    client fetches nothing."""
    monkeypatch.setattr(client._api, "_stream", None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "mount").mkdir()
    (tmp_path / "link").symlink_to("mount")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "mount")
    for dest in (".", tmp_path / "here", "../here", tmp_path / "mount", tmp_path / "link"):
        with refused(InvalidInput, "dest", match="name a new directory in it"):
            client.download(trained, 1, dest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "mount"]
    assert not any((tmp_path / "here").iterdir())


def test_a_damaged_checkpoint_is_not_downloaded(client, server, trained, tmp_path):
    path = server.spool.checkpoints.path(trained, 1) / "optimizer" / "adam.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointDamaged, match=r"adam\.safetensors"):
        client.download(trained, 1, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_manifest_shows_in_the_list(client, server, trained):
    (server.spool.checkpoints.path(trained, 1) / "manifest.json").write_text("{")
    first, second = client.checkpoints(trained)
    assert first.damage is None
    assert "manifest.json" in second.damage


def test_a_newer_controller_may_say_more_and_another_server_is_named() -> None:
    event = {"seq": 0, "time": 1.0, "job": "j", "type": "claimed", "attempt": 1, "data": {}}
    lines = [event | {"new": 1}, event | {"seq": 1, "type": "new"}, event | {"seq": 2}]
    content = b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)
    assert [(found.seq, found.type) for found in events_of(content)] == [
        (0, "claimed"),
        (2, "claimed"),
    ]
    with pytest.raises(TandemError, match="TANDEM_URL"):
        events_of(b'data: {"seq": "x", "type": "failed"}\n')
    body = {"error": {"type": "not_found", "message": "m", "field": None, "new": 1}, "new": 2}
    assert isinstance(error_of(httpx.Response(404, json=body)), NotFound)
    with pytest.raises(TandemError, match=r"TANDEM_URL.*<html>"):
        parsed(TypeAdapter(ErrorBody), b"<html>")


def test_no_number_of_waits_uses_up_the_connections() -> None:
    assert connection(None, None)["limits"].max_connections is None


@pytest.mark.parametrize("key", ["k\N{LATIN SMALL LETTER E WITH ACUTE}y", "k\x01y"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="TANDEM_API_KEY"):
        connection("http://127.0.0.1", key)
