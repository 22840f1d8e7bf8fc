"""A session's requests compute the same bits as jobs of the same data, even if the session is
interrupted."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from rank import jobs, sessions
from rank.sessions import Client, differing, open_session, outcome, program, random_data
from tandem.data.datums import Datum
from tandem.data.examples import SFTExample
from tandem.data.inputs import Group, Trajectory, Turn
from tandem.model import parallel, recompute
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import LoadRequest, PassRequest, RLLoss, SFTLoss, VoidRequest
from tandem.trainer.rank import entry, session_loop
from tandem.trainer.rank.session_loop import MOST_STARTS
from tandem.training.rows import RowLosses, Totals

RNG = np.random.default_rng(5)


@pytest.fixture
def client(spool: Spool, model: Path) -> Client:
    return Client(spool, open_session(spool, model))


def examples(data: list[Datum]) -> list[SFTExample]:
    """The data of a session's pass as examples of a job."""
    return [
        SFTExample(
            token_ids=[*one.tokens.tolist(), int(one.targets[-1])],
            weights=[0.0, *map(float, one.factors)],
        )
        for one in data
    ]


def test_a_pass_and_a_step_equal_a_job_bit_for_bit(spool: Spool, client: Client):
    data = random_data(1)
    passed, stepped, _ = client.compute(data), client.step(), client.save("a")
    sessions.work(spool)
    request = spool.requests.get(client.run, passed).request
    assert isinstance(request, PassRequest)
    job = jobs.submit_sft(
        spool,
        examples=examples(data),
        loss=SFTLoss(normalisation="sum"),
        row=request.sequence_length,
        batch_size=len(data),
    )
    made = jobs.run_here(spool, job)
    assert jobs.same_bytes(client.checkpoint("a"), made)
    [of_job] = jobs.steps_of(spool, job)
    assert client.metrics(passed)["loss:sum"] == of_job["loss"]
    assert client.metrics(stepped)["grad_norm"] == of_job["grad_norm"]


@pytest.mark.parametrize(
    ("name", "config", "loss"),
    [
        ("ppo", {}, RLLoss(policy="ppo", clip_high=0.2, normalisation="sum")),
        ("cispo", {}, RLLoss(policy="cispo", clip_high=3.0, normalisation="sum")),
        ("dro", {"beta": 0.1}, RLLoss(policy="dro", dro_beta=0.1, normalisation="sum")),
        ("gspo", {}, RLLoss(policy="gspo_token", normalisation="sum")),
    ],
)
def test_a_step_of_an_rl_loss_equals_a_job(spool: Spool, client: Client, name, config, loss):
    group = Group(
        trajectories=[
            Trajectory(
                turns=[
                    Turn(
                        prompt_token_ids=[5],
                        token_ids=RNG.integers(0, jobs.VOCAB, n).tolist(),
                        logprobs=(-RNG.exponential(3.0, n)).tolist(),
                        advantages=RNG.normal(size=n).tolist(),
                    )
                ],
                reward=0.0,
                advantage=0.0,
            )
            for n in (4, 9, 6)
        ]
    )
    data = [
        Datum(
            np.array([*turn.prompt_token_ids, *turn.token_ids[:-1]], np.int32),
            np.array(turn.token_ids, np.int32),
            np.array(turn.advantages, np.float32),
            np.array(turn.logprobs, np.float32),
            np.ones(len(turn.token_ids), np.float32),
        )
        for turn in (trajectory.turns[0] for trajectory in group.trajectories)
    ]
    client.compute(data, name, **config)
    client.step()
    client.save("a")
    sessions.work(spool)
    made = jobs.run_here(
        spool, jobs.submit_rl(spool, groups=[group], loss=loss, row=128, batch_size=1)
    )
    assert jobs.same_bytes(client.checkpoint("a"), made)


def test_gradients_add_up_over_passes_and_logprobs_are_those_of_a_forward_pass(
    spool: Spool, client: Client
):
    """The session makes a step after two passes, or after one pass with the data of both passes.
    Both ways give the same weights, except for the order of sums."""
    one, two = random_data(2), random_data(3)
    first, second, together = client.compute(one), client.compute(two), None
    forward = client.compute([*one, *two], backward=False)
    client.step()
    client.save("parts")
    other = Client(
        spool,
        open_session(spool, Path(spool.runs.get(client.run).base_model), 2, session_of(client)),
    )
    together = other.compute([*one, *two])
    other.step()
    other.save("whole")
    work_off(spool, client, other)
    parts, whole = jobs.tensors(client.checkpoint("parts")), other.checkpoint("whole")
    start = jobs.tensors(spool.checkpoints.path(client.run, 0))
    moved = 0.0
    for name, values in jobs.tensors(whole).items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-4, atol=1e-6)
        moved = max(moved, float(np.abs(values - start[name]).max()))
    assert moved > 5e-3
    of_parts = [*client.logprobs(first), *client.logprobs(second)]
    for a, b, c in zip(of_parts, client.logprobs(forward), other.logprobs(together), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5)
    assert [len(values) for values in of_parts] == [len(datum.tokens) for datum in [*one, *two]]
    losses = [client.metrics(seq)["loss:sum"] for seq in (first, second)]
    assert client.metrics(forward)["loss:sum"] == pytest.approx(sum(losses), rel=1e-4)
    want = -sum(
        float((datum.factors * values).sum())
        for datum, values in zip(one, client.logprobs(first), strict=True)
    )
    assert losses[0] == pytest.approx(want, rel=1e-4)


def work_off(spool: Spool, *clients: Client) -> None:
    """Runs the sessions' jobs one after the other until all requests of the clients are
    answered."""
    while any(spool.requests.pending(client.run) for client in clients):
        sessions.work(spool)


def session_of(client: Client) -> str:
    session = client.spool.runs.get(client.run).session
    assert session is not None
    return session


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["fork", "resident"])
def test_a_session_that_idles_out_between_any_two_calls_gives_the_same_bytes(
    spool: Spool,
    client: Client,
    model: Path,
    launch: str,
    monkeypatch: pytest.MonkeyPatch,
):
    main = entry.resident() if launch == "resident" else entry.main
    whole = program(client)
    sessions.work(spool)
    again = Client(spool, open_session(spool, model))
    # Each job of the session computes one request and saves the session's state. The next job
    # continues the session with the next request.
    log, waiting = spool.requests, list[tuple[Any, ...]]()
    append, last = log.append, log.last
    with monkeypatch.context() as patched:
        patched.setattr(log, "append", lambda *request: waiting.append(request))
        patched.setattr(log, "last", lambda run: last(run) + len(waiting))
        calls = program(again)
    for request in waiting:
        append(*request)
        sessions.work(spool, main=main)
    assert calls == whole
    assert differing(outcome(client, whole), outcome(again, calls)) == []
    # The client requests a step after the session's job has ended. The step needs the gradient of
    # the last pass, so the session's next job computes this gradient again.
    for one in (client, again):
        one.step()
        one.save("d")
        sessions.work(spool, main=main)
    parallel.destroy()
    assert jobs.same_bytes(client.checkpoint("d"), again.checkpoint("d"))


def gspo(lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The loss `gspo` of one datum as Tinker's documentation defines it. A position whose `q`, the
    sampler's log-prob, is NaN does not count in the sequence's ratio."""
    s = (lp.detach() - q)[~q.isnan()].mean().exp()
    ratio = s * (lp - lp.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.3, 2.0) * a)


def test_steps_are_those_of_transformers_peft_and_adamw(spool: Spool, client: Client, model: Path):
    """One step with each loss makes the same weights as autograd on unpacked data. The difference
    is below the oracle's bound, 1e-3 of the weights' movement."""
    losses: list[tuple[str, dict[str, float], Any]] = [
        ("cross_entropy", {}, lambda lp, q, a: -a * lp),
        ("importance_sampling", {}, lambda lp, q, a: -(lp - q).exp() * a),
        ("dro", {"beta": 0.2}, lambda lp, q, a: -a * lp + 0.1 * (lp - q).square()),
        ("cispo", {}, lambda lp, q, a: -(lp - q).exp().clamp(0.0, 4.0).detach() * a * lp),
        (
            "ppo",
            {},
            lambda lp, q, a: -torch.minimum((lp - q).exp() * a, (lp - q).exp().clamp(0.8, 1.2) * a),
        ),
        ("gspo", {"clip_low_threshold": 0.3, "clip_high_threshold": 2.0}, gspo),
    ]
    adam = {"learning_rate": 2e-3, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.1}
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        spool.checkpoints.path(client.run, 0),
        is_trainable=True,
    )
    trained = {
        name.replace(".default", ""): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=2e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1
    )
    for number, (name, config, formula) in enumerate(losses):
        data = random_data(20 + number, sampled=True)
        if name == "gspo":
            data = [
                replace(one, sequence_ratio_mask=(one.tokens % 3).astype(np.float32))
                for one in data
                if (one.tokens % 3).any()
            ]
        client.compute(data[:3], name, **config)
        client.compute(data[3:], name, **config)
        client.step(**adam)
        optimizer.zero_grad()
        for datum in data:
            logits = theirs(torch.from_numpy(datum.tokens).long()[None]).logits[0]
            targets = torch.from_numpy(datum.targets).long()
            lp = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
            assert datum.logprobs is not None
            sampler, factors = torch.from_numpy(datum.logprobs), torch.from_numpy(datum.factors)
            if datum.sequence_ratio_mask is not None:
                sampler = sampler.where(torch.from_numpy(datum.sequence_ratio_mask) != 0, torch.nan)
            formula(lp, sampler, factors).sum().backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    client.save("a")
    sessions.work(spool)
    ours = jobs.tensors(client.checkpoint("a"))
    assert ours.keys() == trained.keys()
    apart = [torch.from_numpy(ours[name]) - trained[name].detach() for name in trained]
    moved = [trained[name].detach() - before[name] for name in trained]
    lengths = [float(torch.cat([one.flatten() for one in many]).norm()) for many in (apart, moved)]
    assert lengths[1] > 0.01
    assert lengths[0] < 1e-3 * lengths[1]


def test_a_save_of_what_is_saved_makes_no_checkpoint(spool: Spool, client: Client):
    client.save("start")
    client.compute(random_data(1))
    client.step()
    client.save("a")
    client.save("a", "sampler")
    sessions.work(spool)
    assert spool.checkpoints.steps(client.run) == [0, 1]
    named = {(one.group, one.name): one.step for one in spool.names.list(client.run)}
    assert named == {("weights", "start"): 0, ("weights", "a"): 1, ("sampler", "a"): 1}
    assert spool.checkpoints.pinned(client.run) == [0, 1]
    manifest = spool.checkpoints.manifest(client.run, 1)
    assert manifest.seq == 3
    assert manifest.probe is not None
    assert manifest.probe.logprobs != manifest.probe.previous
    assert manifest.probe.previous == manifest.probe.base  # The previous step is step 0.


def test_weights_are_loaded_with_and_without_adams_state(spool: Spool, client: Client, model: Path):
    client.compute(random_data(1))
    client.step()
    client.save("a")
    client.compute(random_data(2))
    client.step()
    client.save("b")
    sessions.work(spool)
    goes_on = {}
    for optimizer in (True, False):
        other = Client(spool, open_session(spool, model))
        step = spool.names.find(client.run, "weights", "a").step
        loaded = other.call(LoadRequest(run=client.run, step=step, optimizer=optimizer))
        other.save("loaded")
        sessions.work(spool)  # The ranks leave. The next ranks continue from this checkpoint.
        other.compute(random_data(2))
        other.step()
        other.save("b")
        sessions.work(spool)
        assert other.result(loaded).error is None
        same = jobs.tensors(client.checkpoint("a")), jobs.tensors(other.checkpoint("loaded"))
        assert all(np.array_equal(same[0][name], same[1][name]) for name in same[0])
        goes_on[optimizer] = jobs.same_bytes(client.checkpoint("b"), other.checkpoint("b"))
    assert goes_on == {True: True, False: False}


def test_what_goes_wrong_is_told_and_changes_nothing(spool: Spool, client: Client, model: Path):
    good = Client(spool, open_session(spool, model))
    for one in (client, good):
        one.compute(random_data(1))
    [bad] = random_data(2, 1)
    bad = Datum(bad.tokens, bad.targets, np.full_like(bad.factors, 3e38))
    infinite = client.compute([bad, bad])
    nothing = client.call(LoadRequest(run="nothing", step=0, optimizer=True))
    missing = client.call(LoadRequest(run="r", step=7, optimizer=True))
    void = client.call(VoidRequest(reason="request 5 did not come"))
    for one in (client, good):
        one.step()
        one.save("a")
    work_off(spool, client, good)
    assert "the loss is" in client.error(infinite).message
    assert "no run 'nothing'" in client.error(nothing).message
    assert "no checkpoint 7" in client.error(missing).message
    assert client.error(void).message == "request 5 did not come"
    assert jobs.same_bytes(client.checkpoint("a"), good.checkpoint("a"))


def test_a_request_that_ends_its_ranks_again_and_again_is_given_up(spool: Spool, client: Client):
    first = client.compute(random_data(1))
    for _ in range(MOST_STARTS):
        spool.requests.begin(client.run, first)
    second = client.compute(random_data(2))
    client.step()
    sessions.work(spool)
    assert "ended 5 times" in client.error(first).message
    assert client.error(first).category == "server"
    assert client.metrics(second)["items:sum"] > 0


def test_sessions_take_turns(spool: Spool, client: Client, model: Path):
    """Idle ranks leave soon if another job waits, even if their idle time is set to 1000 s."""
    other = Client(spool, open_session(spool, model))
    client.compute(random_data(1))
    other.compute(random_data(1))
    begin = time.monotonic()
    sessions.work(spool, idle=1000.0)
    assert time.monotonic() - begin < 60
    sessions.work(spool)
    assert client.logprobs(1)[0].tobytes() == other.logprobs(1)[0].tobytes()


def test_a_rank_whose_memory_runs_out_begins_again_with_the_passes_before(
    spool: Spool, client: Client, model: Path, monkeypatch: pytest.MonkeyPatch
):
    add, lowered, count = RowLosses.add_gradients, [], 0

    def runs_out(self: RowLosses, *arguments: Any) -> Totals:
        nonlocal count
        count += 1
        totals = add(self, *arguments)
        # The second pass runs out of memory at its first and at its second computation.
        if count in (2, 4):
            raise torch.OutOfMemoryError
        return totals

    def train(one: Client) -> Client:
        for seed in (1, 2, 3):
            one.compute(random_data(seed))
        one.step()
        one.save("a")
        work_off(spool, one)
        return one

    other = train(Client(spool, open_session(spool, model)))
    monkeypatch.setattr(RowLosses, "add_gradients", runs_out)
    monkeypatch.setattr(recompute, "lower", lambda _: lowered.append(1) or True)
    train(client)
    assert len(lowered) == 2
    assert count > 6
    assert jobs.same_bytes(client.checkpoint("a"), other.checkpoint("a"))


def test_a_session_saves_from_time_to_time_and_makes_room(
    spool: Spool, client: Client, monkeypatch: pytest.MonkeyPatch
):
    """With an autosave time of 0 s, each optimizer step makes a checkpoint. After the checkpoint
    the step's requests need no arrays any more. If a job ends by its time limit, the next job
    continues the session."""
    monkeypatch.setattr(session_loop, "AUTOSAVE_SECONDS", 0.0)
    for seed in (1, 2):
        client.compute(random_data(seed))
        client.step()
    waiting = client.compute(random_data(3))
    sessions.work(spool)
    assert spool.checkpoints.steps(client.run) == [0, 1, 2]
    assert [spool.checkpoints.manifest(client.run, step).seq for step in (1, 2)] == [2, 4]
    assert spool.checkpoints.pinned(client.run) == []
    kept = [(spool.requests.data_dir(client.run, seq) / "arrays.npy").exists() for seq in (1, 3, 5)]
    assert kept == [False, False, True]
    monkeypatch.setattr(session_loop, "MOST_SECONDS", 0.0)
    client.step()
    job = sessions.work(spool, idle=1000.0)
    assert spool.requests.pending(client.run)  # The rank left before it computed the step.
    monkeypatch.undo()
    assert sessions.work(spool).spec.id != job.spec.id
    assert spool.requests.pending(client.run) == []
    assert client.metrics(waiting + 1)["optimizer_step"] == 3


def test_a_session_that_has_ended_is_left_with_what_was_done(spool: Spool, client: Client):
    client.compute(random_data(1))
    client.step()
    job = sessions.claim(spool)
    spool.sessions.end(session_of(client), "its client said so")
    attempt = Attempt(spool, job.spec.id, job.attempt)
    assert entry.main(attempt, sessions.settings(1000.0)) == 0
    assert attempt.left.exists()
    assert spool.requests.pending(client.run) == [1, 2]
