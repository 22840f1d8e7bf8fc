"""Sessions on runs of a tiny model. A rank in this process computes the sessions' requests."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from rank import jobs
from tandem.data.datums import Datum, pass_request
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.spool import Spool, schema
from tandem.spool.attempt import Attempt
from tandem.spool.schema import SaveRequest, StepRequest
from tandem.spool.session_jobs import queue_waiting
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import entry

STEP = StepRequest(learning_rate=1e-2, beta2=0.99, eps=1e-8, max_grad_norm=1.0)


def open_session(spool: Spool, model: Path, number: int = 1, session: str = "") -> str:
    """Creates the run number `number` of a session. If `session` is empty, creates a new session
    for the run. Returns the run's name."""
    session = session or spool.sessions.create().id
    name, arch = spool.sessions.run_name(session, number), read_arch(str(model))
    spec = schema.RunSpec(
        name=name,
        base_model=str(model),
        lora=jobs.LORA,
        seed=7,
        created=time.time(),
        session=session,
    )

    def write(path: Path) -> None:
        write_identity_adapter(path, arch, jobs.LORA, base_model=str(model), seed=7)

    return spool.runs.create(spec, write).name


def random_data(seed: int, n: int = 6, *, sampled: bool = False) -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(n):
        length = int(rng.integers(3, 30))
        tokens = rng.integers(0, jobs.VOCAB, length + 1).astype(np.int32)
        logprobs = (-rng.exponential(3.0, length)).astype(np.float32) if sampled else None
        factors = rng.normal(size=length).astype(np.float32)
        data.append(Datum(tokens[:-1], tokens[1:], factors, logprobs))
    return data


class Client:
    """Appends requests to a run's log."""

    def __init__(self, spool: Spool, run: str) -> None:
        self.spool, self.run = spool, run

    def call(self, request: Any) -> int:
        seq = self.spool.requests.last(self.run) + 1
        self.spool.requests.append(self.run, seq, request)
        return seq

    def compute(
        self,
        data: list[Datum],
        loss: str = "cross_entropy",
        *,
        backward: bool = True,
        **config: float,
    ) -> int:
        seq = self.spool.requests.last(self.run) + 1
        request, write = pass_request(
            "forward_backward" if backward else "forward",
            data,
            loss,
            config,
            vocab_size=jobs.VOCAB,
        )
        self.spool.requests.append(self.run, seq, request, write)
        return seq

    def step(self, **changes: Any) -> int:
        return self.call(STEP.model_copy(update=changes))

    def save(self, name: str, group: Any = "weights") -> int:
        return self.call(SaveRequest(name=name, group=group))

    def result(self, seq: int) -> schema.RequestResult:
        result = self.spool.requests.result(self.run, seq)
        assert result is not None, f"request {seq} has no result"
        return result

    def metrics(self, seq: int) -> dict[str, float]:
        result = self.result(seq)
        assert result.error is None, result.error
        return result.metrics

    def error(self, seq: int) -> schema.RequestError:
        error = self.result(seq).error
        assert error is not None
        return error

    def logprobs(self, seq: int) -> list[np.ndarray]:
        return [np.frombuffer(one, "<f4") for one in self.spool.requests.logprobs(self.run, seq)]

    def checkpoint(self, name: str) -> Path:
        """The directory of the checkpoint that the client has saved under `name`."""
        step = self.spool.names.find(self.run, "weights", name).step
        return self.spool.checkpoints.path(self.run, step)


def program(client: Client) -> list[int]:
    """Appends the passes, steps and saves of a typical client to the run's log. No step applies the
    gradients of the last pass. Returns the requests' numbers."""
    calls = [client.compute(random_data(1)), client.compute(random_data(2)), client.step()]
    calls += [client.save("a"), client.compute(random_data(3), backward=False)]
    calls += [client.compute(random_data(4, sampled=True), "ppo"), client.step(weight_decay=0.1)]
    calls += [client.compute(random_data(5)), client.save("b"), client.step(max_grad_norm=None)]
    calls += [client.save("c"), client.save("c", "sampler"), client.compute(random_data(6))]
    return calls


def outcome(client: Client, calls: list[int]) -> dict[str, object]:
    """All results that a client can see, and the bytes of the checkpoints that it saved."""
    found: dict[str, object] = {
        f"result {seq}": client.result(seq).model_dump(exclude={"finished", "step"})
        for seq in calls
    }
    for seq in calls:
        if client.spool.requests.get(client.run, seq).request.kind.startswith("forward"):
            found[f"log-probs {seq}"] = client.spool.requests.logprobs(client.run, seq)
    for name in ("a", "b", "c"):
        found |= {f"{name}/{file}": of for file, of in jobs.files(client.checkpoint(name)).items()}
    return found


def differing(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def settings(idle: float = 0.0) -> RankSettings:
    """The ranks' settings. With the default of `idle`, the rank leaves when it has computed all
    waiting requests."""
    return jobs.settings().model_copy(update={"session_idle_seconds": idle})


def claim(spool: Spool) -> schema.Job:
    queue_waiting(spool)
    job = spool.queue.claim("test")
    assert job is not None
    assert job.spec.kind == "session"
    return job


def work(spool: Spool, idle: float = 0.0, main: jobs.Main = entry.main) -> schema.Job:
    """Runs a session's job in this process. The job computes the waiting requests, saves the
    session's state and succeeds."""
    job = claim(spool)
    attempt = Attempt(spool, job.spec.id, job.attempt)
    assert main(attempt, settings(idle)) == 0, jobs.error_of(spool, job)
    assert attempt.left.exists()
    spool.queue.finish(
        job,
        schema.JobResult(
            state="succeeded", step=spool.checkpoints.newest(job.spec.run), finished=time.time()
        ),
    )
    return job
