"""Several vLLM servers on one spool. A step is announced when every ready server serves it. A slow,
dead or new server never gets a request for a step that it doesn't have."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm
from fake_vllm import FakeVllm
from inference import replica_and_stop
from inference.stage import Stage
from tandem.errors import SpoolUnusable
from tandem.inference.publisher import __main__ as program
from tandem.inference.publisher import replica as replica_module
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.publisher.replica import Member
from tandem.spool import removal
from tandem.spool import replicas as replicas_module
from tandem.spool.schema import Replica
from tandem.vllm_client.client import VllmClient
from tandem.vllm_client.names import READY_MARGIN_SECONDS
from waiting import until


class Several:
    """A stage with several fake vLLMs. Each fake vLLM has a publisher. A publisher acts only when
    the test calls the publisher."""

    def __init__(self, stage: Stage, names: str, **settings: object) -> None:
        self.stage = stage
        self.vllms: dict[str, FakeVllm] = {}
        self.publishers: dict[str, Publisher] = {}
        self.settings = settings
        for name in names:
            self.vllms[name] = vllm = FakeVllm()
            vllm.start()
            self.publish(name)

    def publish(self, name: str) -> None:
        """Replaces the publisher of the replica `name` by a new one, as a restart does."""
        if name in self.publishers:
            self.member(name).stop()
        values = {"inference_url": self.vllms[name].url, "replica": name, **self.settings}
        client = VllmClient(self.stage.settings(**values), timeout=5.0)
        self.publishers[name] = self.stage.publisher(client=client, **values)

    def member(self, name: str) -> Member:
        member = self.publishers[name]._records
        assert isinstance(member, Member)
        return member

    def once(self, *names: str) -> None:
        for name in names:
            self.publishers[name].once()

    def ready(self) -> str:
        """The names of the replicas whose vLLMs answer requests. Each of these replicas is ready
        according to its record."""
        ready = {name for name, r in self.stage.spool.replicas.living().items() if r.ready}
        answering = {name for name, vllm in self.vllms.items() if vllm.ready}
        assert answering <= ready, "a vLLM answers that others don't wait for"
        return "".join(sorted(answering))

    def announced(self) -> int | None:
        record = self.stage.spool.served.get("run")
        return None if record is None else record.step

    def check(self) -> None:
        """Every vLLM that answers requests has the announced step."""
        if self.announced() is not None:
            for name in self.ready():
                assert self.stage.record().model in self.vllms[name].adapters

    def served_events(self, job: str) -> int:
        return [event.type for event in self.stage.spool.events.read(job)].count("served")

    def close(self) -> None:
        for name, vllm in self.vllms.items():
            self.member(name).stop()
            vllm.stop()


@pytest.fixture
def several(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Several]]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A replica's thread calls `beat` only every hour, so the thread does not disturb the tests' own
    # calls.
    monkeypatch.setattr(replica_module, "BEAT_SECONDS", 3600.0)
    monkeypatch.setattr(replica_module, "DRAIN_SECONDS", 0.0)
    made: list[Several] = []

    def make(names: str = "ab", **settings: object) -> Several:
        made.append(Several(stage, names, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def die(several: Several, name: str, seconds: float = replicas_module.DEAD_SECONDS + 1) -> None:
    """Ends the replica `name`. To the publishers, the replica's record then looks as if nobody had
    renewed it for `seconds`."""
    several.member(name).stop()
    replicas = several.stage.spool.replicas, *(several.member(n)._replicas for n in several.vllms)
    for each in replicas:
        each.living()  # Every publisher has seen the record at least once.
        beat, since = each._seen[name]
        each._seen[name] = beat, since - seconds
    several.vllms[name].ready_until = 0.0  # vLLM's permission to answer requests has ended.


def test_a_step_is_announced_when_every_ready_replica_has_verified_it(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several()
    assert (two.ready(), two.announced()) == ("", None)
    two.once("a")
    assert (two.ready(), two.announced()) == ("a", 0), "nobody waits for one that isn't ready"
    two.once("b")
    assert two.ready() == "ab"
    stage.step(0.3, job="job-1")
    two.once("a")
    assert (two.announced(), two.served_events("job-1")) == (0, 0)
    stage.step(0.5, job="job-2")
    two.once("b")
    assert two.announced() == 1, "b has 2 as well, and a has 1"
    assert two.served_events("job-1") == 1
    two.check()
    two.once("a", "b", "a")
    two.check()
    assert two.announced() == 2
    assert [two.served_events(job) for job in ("job-1", "job-2")] == [1, 1]
    assert stage.record().refused_step is None
    (event,) = [e for e in stage.spool.events.read("job-2") if e.type == "served"]
    assert event.data["model"] == "run@2"


def test_a_laggard_takes_itself_out_and_comes_back(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several(publish_seconds=0.05)
    two.once("a", "b", "a")
    stage.step(0.3, job="job")
    two.once("a")
    two.member("b").beat()
    assert (two.ready(), two.announced()) == ("ab", 0), "it has a while"
    time.sleep(0.06)
    two.member("b").beat()
    assert two.ready() == "a"
    assert "it has no run@1" in stage.spool.replicas.living()["b"].why
    two.member("a").beat()
    assert (two.announced(), two.served_events("job")) == (1, 1)
    two.check()
    two.once("b")
    assert two.ready() == "ab"
    two.check()


def test_a_laggard_is_asked_nothing_before_the_others_go_on(
    several: Callable[..., Several], stage: Stage
) -> None:
    """The slow replica's vLLM does not confirm that it has stopped answering requests. The other
    replicas wait until this vLLM's permission to answer ends."""
    two = several(publish_seconds=0.01)
    two.once("a", "b", "a")
    stage.step(0.3)
    two.once("a")
    two.member("b").beat()
    time.sleep(0.02)
    two.vllms["b"].statuses["/tandem/ready"] = [503]
    two.member("b").beat()
    two.member("a").beat()
    assert (two.ready(), two.announced()) == ("ab", 0)
    two.member("b").beat()
    two.member("a").beat()
    assert (two.ready(), two.announced()) == ("a", 1)
    two.check()


def test_nobody_waits_for_a_dead_replica(
    several: Callable[..., Several], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = several("abc")
    three.once("a", "b", "c", "a", "b")
    stage.step(0.3, job="job")
    three.once("a", "b")
    assert three.announced() == 0
    die(three, "c")
    three.member("a").beat()
    assert (three.announced(), three.served_events("job")) == (1, 1)
    three.check()
    # Replica c, which hung, continues. Replica c answers no request before it has the announced
    # step.
    member = three.member("c")
    monkeypatch.setattr(member, "_beaten", time.monotonic() - replicas_module.DEAD_SECONDS)
    member.beat()
    assert three.ready() == "ab"
    three.once("c")
    assert three.ready() == "abc"
    three.check()


@pytest.mark.parametrize("phase", list(replica_and_stop.PHASES))
def test_a_publisher_that_is_killed_in_any_phase(
    several: Callable[..., Several], stage: Stage, tmp_path: Path, phase: str
) -> None:
    """Publisher b dies in each phase of a publication. A server that lacks the announced step
    answers no requests. Replica a goes on, and replica b comes back."""
    two = several()
    two.once("a", "b", "a")
    two.member("b").stop()
    variables = {
        "TANDEM_ROOT": str(stage.spool.root),
        "TANDEM_INFERENCE_URL": two.vllms["b"].url,
        "TANDEM_REPLICA": "b",
        "TANDEM_API_KEY": fake_vllm.API_KEY,
        "TANDEM_ADMIN_TOKEN": fake_vllm.ADMIN_TOKEN,
        "TANDEM_DEVICE": "cpu",
        "TANDEM_MAX_LORAS": "25",
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": replica_and_stop.TESTS,
    }
    go = tmp_path / "go"
    with subprocess.Popen(
        [sys.executable, replica_and_stop.__file__, phase, str(go)], env=os.environ | variables
    ) as publisher:
        until("b is ready", go.with_suffix(".ready").exists, 60)
        assert two.ready() == "ab"
        stage.step(0.3, job="job")
        two.once("a")
        assert two.announced() == 0
        go.touch()
        assert publisher.wait(60) == -signal.SIGKILL
    two.check()
    assert two.announced() == (1 if phase == "after the announcement" else 0)
    two.member("a").beat()
    has = phase in ("between record and announcement", "after the announcement")
    assert two.announced() == (1 if has else 0), "b's vLLM answers still, so it counts"
    two.check()
    die(two, "b")
    two.member("a").beat()
    assert (two.ready(), two.announced(), two.served_events("job")) == ("a", 1, 1)
    two.check()
    two.publish("b")
    assert two.ready() == "a", "not before it has the step"
    two.once("b")
    assert (two.ready(), two.announced(), two.served_events("job")) == ("ab", 1, 1)
    two.check()


def test_a_clock_that_is_wrong_kills_nobody(
    several: Callable[..., Several], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica counts as dead only if its record stops changing, because hosts' clocks may be
    wrong."""
    two = several()
    two.once("a", "b", "a")
    stage.step(0.3)
    for seconds in (-1000.0, 1000.0):
        path = stage.spool.paths.replicas / "b.json"
        record = Replica.model_validate_json(path.read_bytes())
        wrong = record.model_copy(update={"beat": time.time() + seconds})
        path.write_text(wrong.model_dump_json())
        two.once("a")
        two.member("a").beat()
        assert two.announced() == 0, "b lives, and does not serve the step yet"
        two.check()


def test_one_that_is_about_to_be_stopped_leaves(
    several: Callable[..., Several], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is about to be stopped is not ready. The proxy sends this replica no new
    requests, and the other replicas announce steps without this replica."""
    two = several()
    two.once("a", "b", "a")
    leaving = stage.spool.root.parent / "leaving"
    monkeypatch.setattr(replica_module, "leaving_file", lambda _root: leaving)
    leaving.write_text(str(time.time() + 60))
    two.member("b").beat()
    time.sleep(0.02)
    two.member("b").beat()
    assert not two.vllms["b"].ready
    assert two.member("b")._record.why == "it is about to be stopped"
    two.once("b")
    assert not two.vllms["b"].ready
    # After a restart of the container, the time in the file `leaving` is in the past.
    leaving.write_text(str(time.time() - 1))
    two.once("b", "a")
    assert two.ready() == "ab"


def test_permission_ends_before_a_replica_counts_as_dead() -> None:
    assert replica_module.LEASE_SECONDS + replica_module.BEAT_SECONDS < 30
    assert replica_module.LEASE_SECONDS < replicas_module.DEAD_SECONDS - 5


def test_who_joins_between_verification_and_announcement_has_the_announced_step(
    several: Callable[..., Several], stage: Stage
) -> None:
    three = several("abc", keep_served=1)
    three.once("a", "b", "a")
    stage.step(0.3)
    # Replica a verifies step 1. Step 1 is not announced, because replica b lacks step 1.
    three.once("a")
    three.once("c")
    assert three.ready() == "ab", "c has run@1 and not run@0, which clients are told to ask for"
    assert "does not serve run@0" in stage.spool.replicas.living()["c"].why
    three.once("b")
    three.check()
    assert three.announced() == 1
    three.once("c")
    assert three.ready() == "abc"
    stage.step(0.4)
    three.once("a", "b")
    assert three.announced() == 1, "c counts from now on"
    three.once("c")
    assert three.announced() == 2
    three.check()


def test_an_announced_step_stays_loaded_while_a_replica_is_slow(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several(keep_served=1)
    two.once("a", "b", "a")
    for effect in (0.2, 0.3, 0.4):
        stage.step(effect)
        two.once("a")  # In these tests the publisher may unload an idle adapter at once.
        assert two.announced() == 0
        two.check()
    two.once("b", "a")
    two.check()
    assert two.announced() == 3
    assert two.vllms["a"].adapters.keys() == {"run@3"}


def test_one_replica_that_refuses_what_another_serves_leaves_at_once(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several()
    two.once("a", "b", "a")
    stage.step(0.5)
    two.vllms["b"].ignores_weights = True
    two.once("b", "a")
    two.member("b").beat()
    two.member("a").beat()
    assert (two.ready(), two.announced()) == ("a", 1)
    assert "it refused run@1, which others serve" in stage.spool.replicas.living()["b"].why
    two.check()


def test_a_step_that_all_refuse_is_refused_and_all_stay(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several()
    two.once("a", "b", "a")
    stage.step(0.5, weights=0.0)
    two.once("a")
    assert stage.served() == (0, None), "the other may serve it"
    two.once("b", "a")
    assert stage.served() == (0, 1)
    assert "nats" in str(stage.record().refused_reason)
    assert two.ready() == "ab"


def test_a_replica_whose_vllm_starts_again_loses_its_permission(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several()
    two.once("a", "b", "a")
    two.vllms["b"].stop()
    two.once("b")
    assert two.ready() == "a"
    two.vllms["b"].start()
    two.member("b").beat()
    assert (two.ready(), two.announced()) == ("a", 0), "it has no adapters yet"
    two.once("b")
    assert two.ready() == "ab"
    # vLLM restarts so fast that the publisher never sees vLLM down.
    two.vllms["b"].stop()
    two.vllms["b"].start()
    two.member("b").beat()
    assert two.ready() == "a"
    two.once("b")
    two.check()
    assert two.ready() == "ab"


def test_a_publisher_that_starts_again_verifies_before_its_vllm_answers(
    several: Callable[..., Several], stage: Stage
) -> None:
    two = several()
    two.once("a", "b", "a")
    two.publish("b")
    assert (two.ready(), two.announced()) == ("a", 0)
    two.once("b")
    assert two.ready() == "ab"
    for name in "ab":
        two.publish(name)
    assert (two.ready(), two.announced()) == ("", 0), "both have it still"
    two.once("a")
    assert (two.ready(), two.announced()) == ("a", 0)
    for vllm in two.vllms.values():
        vllm.stop()
    two.once("a", "b")
    assert two.announced() is None, "nobody serves anything"


def test_a_rollback_is_announced_as_a_step(several: Callable[..., Several], stage: Stage) -> None:
    two = several()
    stage.step(0.3)
    stage.step(0.4)
    two.once("a", "b", "a")
    assert two.announced() == 2
    stage.rollback(1)
    two.once("a")
    assert two.announced() == 1, "both have it"
    stage.step(0.9)
    two.once("a")
    assert two.announced() == 1, "b has another step 2"
    two.once("b", "a")
    assert two.announced() == 2
    assert {path for path, _ in (v.adapters["run@2"] for v in two.vllms.values())}.__len__() == 2
    two.check()


def test_retention_keeps_what_a_living_replica_serves(
    several: Callable[..., Several], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = several(keep_served=1)
    stage.step(0.2)
    two.once("a", "b", "a")
    for effect in (0.3, 0.4, 0.5):
        stage.step(effect)
        two.once("a")
    settings = stage.settings(keep_checkpoints=1)
    removal.prune(stage.spool, settings)
    assert stage.spool.checkpoints.steps("run") == [0, 1, 4], "b serves 1"
    die(two, "b")
    two.member("a").beat()
    two.once("a")  # Publisher a unloads step 1, which is no longer announced.
    removal.prune(stage.spool, settings)
    assert stage.spool.checkpoints.steps("run") == [0, 4]


def test_records_of_a_replica_that_is_gone_for_good_are_removed(
    several: Callable[..., Several], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = several()
    two.once("a", "b")
    die(two, "b")
    two.member("a").beat()
    assert stage.spool.replicas.all().keys() == {"a", "b"}
    die(two, "b", replicas_module.FORGET_SECONDS)
    two.member("a").beat()
    assert stage.spool.replicas.all().keys() == {"a"}
    assert [path.name for path in (stage.spool.root / "runs/run/served").iterdir()] == ["a.json"]


def test_a_publisher_beside_replicas_needs_a_name(
    several: Callable[..., Several], stage: Stage
) -> None:
    several("a")
    with pytest.raises(SpoolUnusable, match="inference servers with names: a; give this one"):
        program._publisher_lock(stage.spool, None)
    with stage.spool.replicas.publisher_lock("a"):
        pass


def test_the_only_server_writes_no_records_of_replicas(stage: Stage) -> None:
    stage.publisher().once()
    assert not stage.spool.paths.replicas.exists()
    assert not (stage.spool.root / "runs/run/served").exists()
    assert all(path != "/tandem/ready" for path, _ in stage.vllm.calls)


def asked(
    app: Any, path: str, method: str = "GET", admin: bool = False, body: object = None
) -> int:
    """The status of the app's answer to a request."""
    from tandem.inference.server.middleware.guard import ADMIN

    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": [], ADMIN: admin}
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


def test_vllm_answers_requests_while_it_has_permission() -> None:
    from starlette.responses import PlainTextResponse

    from tandem.inference.server.middleware.readiness import Readiness

    app = Readiness(PlainTextResponse("sampled"))
    chat, ready = "/v1/chat/completions", "/tandem/ready"
    assert [asked(app, path) for path in (chat, "/tokenize", ready)] == [503] * 3
    assert [asked(app, path) for path in ("/health", "/v1/models", "/metrics")] == [200] * 3
    assert asked(app, chat, admin=True) == 200, "the publisher verifies before"
    soon = {"until": time.monotonic() + READY_MARGIN_SECONDS + 1, "instance": app.instance}
    assert asked(app, ready, "POST", body=soon) == 401
    assert asked(app, ready, "POST", True, soon | {"instance": "other"}) == 409
    assert asked(app, chat) == 503
    assert asked(app, ready, "POST", True, soon) == 200
    assert [asked(app, path) for path in (chat, ready)] == [200, 200]
    app.until -= 1  # One second passes.
    assert [asked(app, path) for path in (chat, ready)] == [200, 503], "the proxy knows it first"
    app.until -= READY_MARGIN_SECONDS
    assert [asked(app, path) for path in (chat, ready)] == [503, 503]
