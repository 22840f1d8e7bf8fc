"""Each optimizer step of a run reaches TensorBoard, W&B and MLflow once, even if programs are
killed in between."""

import json
import math
import os
import subprocess
import sys
import threading

import pytest

from api_server import KEY, commit, succeed
from integrations.track.readers import READERS, accumulator, curves, place, tables
from tandem.client import Tandem
from tandem.client.track import TrackerFailed, track
from tandem.errors import Conflict, InvalidInput
from waiting import until

KINDS = list(READERS)


def run_track(history, *kinds: str) -> list[int]:
    """Runs `track`. Returns the number of rows that each tracker got."""
    to = [place(kind, history.directory) for kind in kinds]
    return list(track(history.client, history.run, to, follow=False).values())


def run_python(
    arguments: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=300
    )


def loss(history, kind: str):
    return curves(kind, history.directory, history.run, "loss")


@pytest.mark.slow
@pytest.mark.sample(1, of="runs that are tracked")
def test_the_loaders_of_all_trackers_find_the_same_run(history):
    history.train(1, 0.9, 0.8)
    history.train(3, 0.7)
    assert run_track(history, *KINDS) == [7] * 3
    for kind in KINDS:

        def read(metric: str, kind: str = kind):
            return curves(kind, history.directory, history.run, metric)[0]

        assert read("loss") == read("train/loss") == [(1, 0.9), (2, 0.8), (3, 0.7)]
        assert [step for step, _ in read("train/reward")] == [1, 2, 3]
        assert read("checkpoint/step") == [(2, 1), (3, 2)]
        assert read("checkpoint/peak_memory_bytes") == [(2, 3000), (3, 3000)]
        assert read("checkpoint/reward_mean") == [(2, 0.5), (3, 0.5)]
        assert [step for step, _ in read("served/mean_abs_logprob_error")] == [2, 3]
        assert read("memory_optimizer_peak_bytes") == []  # the event has null for this value
    table = accumulator(history.directory, history.run).Tensors("hyperparameters")
    assert b"| optimizer.learning_rate | 0.0001 |" in table[0].tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.sample(1, of="runs that are tracked")
def test_each_tracker_has_a_table_of_what_was_sampled_for_a_checkpoint(history, monkeypatch):
    monkeypatch.chdir(history.directory)  # MLflow keeps artifacts in this directory
    file = history.directory / "game.samples.jsonl"
    lines = [
        {
            "run": history.run if step < 2 else "other",
            "step": step,
            "task": f"0:{step}",
            "reward": 0.25,
            "tokens": 3,
            "messages": [{"role": "user", "content": f"at {step}|\nx"}],
        }
        for step in (0, 1, 2)
    ]
    lines.append({**lines[0], "evaluated": True, "task": "eval:0"})
    to = [place(kind, history.directory) for kind in KINDS]

    def follow() -> None:
        track(history.client, history.run, to, lambda: file, follow=False)

    history.train(1, 0.9)  # at this step `file` does not exist yet
    follow()
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history.train(2, 0.8)
    for _ in range(2):
        follow()
    assert tables(history.directory, history.run) == {
        "tensorboard": [(2, "| 1 | 0:1 | 0.25 | user: at 1\\|<br>x |")],
        "wandb": [(2, [[1, "0:1", 0.25, "user: at 1|\nx"]])],
        "mlflow": [(2, "| 1 | 0:1 | 0.25 | user: at 1\\|<br>x |")],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_goes_on_where_it_stopped(history, kind):
    history.train(1, 0.9, 0.8)
    run_track(history, kind)
    history.begin()
    history.steps(3, 0.7)
    assert run_track(history, kind) == [1]
    history.steps(4, 0.6)
    history.succeed(held_out_loss=0.75)
    assert run_track(history, kind) == [3]
    assert run_track(history, kind) == [0]
    history.serve()
    assert run_track(history, kind) == [1]
    assert loss(history, kind) == [[(1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6)]]
    assert curves(kind, history.directory, history.run, "eval/loss") == [[(4, 0.75)]]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_the_last_attempt_counts(history, kind):
    """Trackers that can't remove rows keep the rows of a lost attempt. The next attempt computes
    the same numbers."""
    history.begin()
    history.steps(1, 0.9, 0.8)
    run_track(history, kind)
    history.event("requeued", error={"type": "rank_crashed", "message": "died"}, counts=True)
    history.steps(1, 0.95)
    run_track(history, kind)
    history.steps(2, 0.85, 0.7)
    history.succeed()
    run_track(history, kind)
    first = [(1, 0.95), (2, 0.85)] if kind == "tensorboard" else [(1, 0.9), (2, 0.8)]
    assert loss(history, kind) == [[*first, (3, 0.7)]]


def test_a_rank_that_died_between_a_checkpoint_and_its_event_stops_nothing(history):
    history.begin()
    history.steps(1, 1e39)
    commit(history.server.spool, history.job)
    succeed(history.server.spool, history.job)
    assert run_track(history, "tensorboard") == [2]
    assert loss(history, "tensorboard") == [[(1, math.inf)]]  # TensorBoard has float32
    assert curves("tensorboard", history.directory, history.run, "checkpoint/step") == [[(1, 1)]]


@pytest.mark.parametrize(
    ("kind", "end"), [*((kind, "rollback") for kind in KINDS), ("tensorboard", "failure")]
)
def test_steps_that_are_no_longer_part_of_the_run_are_replaced(history, kind, end):
    """TensorBoard shows the new steps in the same curve. W&B and MLflow show the new steps in a new
    curve."""
    history.train(1, 0.9, 0.8)
    if end == "rollback":
        history.train(3, 0.7, 0.6)
    else:
        history.begin()
        history.steps(3, 0.7, 0.6)
        history.fail()
    run_track(history, kind)
    if end == "rollback":
        history.client.rollback(history.run, 1)
    assert run_track(history, kind) == [0]
    history.begin()
    history.steps(3, 0.5)
    run_track(history, kind)
    history.steps(4, 0.4)
    run_track(history, kind)
    old, new = [(1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6)], [(3, 0.5), (4, 0.4)]
    assert loss(history, kind) == ([[*old[:2], *new]] if kind == "tensorboard" else [old, new])


def test_a_run_of_the_same_name_begins_anew(history):
    kinds = ("tensorboard", "mlflow")
    history.train(1, 0.9, 0.8)
    run_track(history, *kinds)
    history.client.delete_run(history.run)
    history.client.create_run(history.run, lora={"rank": 2})
    history.train(1, 0.5)
    run_track(history, *kinds)
    assert loss(history, "tensorboard") == [[(1, 0.5)]]
    assert loss(history, "mlflow")[-1] == [(1, 0.5)]


_KILLED = """
import os, sys
from tandem.client import Tandem
import tandem.client.track as t
kind, moment, step = sys.argv[3], sys.argv[4], int(sys.argv[7])
target = t.TARGETS[kind]
if moment == "after":
    write = target.write
    def killed(self, row):
        write(self, row)
        if row.position.step == step: os.kill(os.getpid(), 9)
    target.write = killed
else:
    import mlflow.store.tracking.sqlalchemy_store as store
    set_tags = store.SqlAlchemyStore._set_tags
    def killed(self, run, tags):
        for tag in tags:
            if tag.key == "tandem.position" and tag.value.endswith(f" {step}]"):
                os.kill(os.getpid(), 9)
        set_tags(self, run, tags)
    store.SqlAlchemyStore._set_tags = killed
t.track(Tandem(sys.argv[5], sys.argv[6]), sys.argv[1], [sys.argv[2]], follow=False)
"""


@pytest.mark.slow
@pytest.mark.sample(1, of="runs that are tracked")
@pytest.mark.parametrize(
    ("kind", "moment", "steps"),
    # 60 steps are more than W&B's buffer holds.
    [("tensorboard", "after", 4), ("wandb", "after", 60), ("mlflow", "before the tag", 4)],
)
def test_a_kill_loses_and_doubles_no_step(history, kind, moment, steps):
    """The tracking process gets SIGKILL right after it has written a row. With MLflow the signal
    arrives before the process sets the tag that confirms the row."""
    losses = [step / 64 for step in range(steps)]
    history.train(1, *losses)
    arguments = [
        history.run,
        place(kind, history.directory),
        kind,
        moment,
        history.server.url,
        KEY,
        str(steps - 2),
    ]
    # W&B in this process must not keep the run open in place of the killed process.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    command = ["-c", _KILLED, *arguments]
    assert run_python(command, environment).returncode == -9
    run_track(history, kind)
    points = [point for curve in loss(history, kind) for point in curve]
    assert points == list(enumerate(losses, 1))


def test_a_row_that_was_cut_off_at_any_byte_is_written_again(history):
    history.train(1, 0.9, 0.8)
    run_track(history, "tensorboard")
    (path,) = history.directory.glob("tb/*/*tfevents*")
    whole = path.read_bytes()
    for cut in range(0, len(whole), 211):
        path.write_bytes(whole[:cut])
        run_track(history, "tensorboard")
        assert path.read_bytes() == whole


def test_it_follows_jobs_to_come(history):
    def points(metric: str) -> list[int]:
        return [
            step for step, _ in curves("tensorboard", history.directory, history.run, metric)[0]
        ]

    def written(metric: str, *steps: int) -> None:
        until(f"{metric} has {steps}", lambda: points(metric) == list(steps))

    with Tandem(history.server.url, KEY) as tandem:
        arguments = (tandem, history.run, [place("tensorboard", history.directory)])
        threading.Thread(target=track, args=arguments, kwargs={"follow": True}, daemon=True).start()
        history.begin()
        history.steps(1, 0.5)
        written("loss", 1)  # the row is written while the job still runs
        history.steps(2, 0.5)
        written("loss", 1, 2)
        history.succeed()
        written("checkpoint/step", 2)
        history.serve()
        written("served/step", 2)
        history.train(3, 0.4)
        written("served/step", 2, 3)
        assert points("loss") == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_two_trackers_of_a_run_in_one_place_are_refused(history, kind):
    to = place(kind, history.directory)
    with pytest.raises(Conflict, match="another `tandem track`"):
        track(history.client, history.run, [to, to], follow=False)
    run_track(history, kind)  # the call that held the lock has ended, so the lock is free


def test_a_wrong_place_and_a_missing_package_are_named(history, monkeypatch):
    for to in ("tensorboard", "tensorboard:", "csv:file"):
        with pytest.raises(InvalidInput, match="use one of tensorboard:DIR"):
            track(history.client, history.run, [to], follow=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InvalidInput, match=r"pip install 'tandem-rl\[mlflow\]'"):
        run_track(history, "mlflow")


def test_a_server_that_does_not_answer_is_named(history, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackerFailed, match=r"127\.0\.0\.1") as failed:
        track(history.client, history.run, ["mlflow:http://127.0.0.1:9"], follow=False)
    assert failed.value.field == "--to mlflow:http://127.0.0.1:9"


@pytest.mark.slow
@pytest.mark.sample(1, of="runs that are tracked")
def test_the_command(history):
    history.train(1, 0.9)
    environment = os.environ | {"TANDEM_URL": history.server.url, "TANDEM_API_KEY": KEY}
    command = ["-m", "tandem", "track", history.run, "--no-follow", "--json"]
    to = place("tensorboard", history.directory)
    done = run_python([*command, "--to", to], environment)
    assert (done.returncode, json.loads(done.stdout)) == (0, {to: 3})
    refused = run_python([*command, "--to", "x"], environment)
    assert (refused.returncode, json.loads(refused.stderr)["error"]["field"]) == (1, "--to")
