"""A client that submits, repeats and cancels jobs over HTTP all the time, and records the
answers."""

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from soak.stack import API_KEY

RUNS = ("a", "b", "c")
PENDING = 3
"""The number of a run's jobs that wait at the same time."""
# The statuses with which the API answers when it can't serve now.
LATER = (500, 502, 503, 504)


class Ledger:
    """Appends to the file that `soak.check.Ledger` reads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.damaged: set[str] = set()  # ids of jobs
        path.touch()

    def write(self, kind: str, **fields: Any) -> None:
        if kind == "damaged":
            self.damaged.add(fields["id"])
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


class Client:
    def __init__(self, root: Path, url: str, ledger: Ledger, seed: int) -> None:
        self._root, self._ledger, self._rng = root, ledger, random.Random(seed)
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {API_KEY}"},
            timeout=10,
            trust_env=False,
        )
        # Id of each accepted job -> its run and its request.
        self._bodies: dict[str, tuple[str, dict[str, Any]]] = {}
        self._made: set[str] = set()
        self._count = 0
        self.problems: list[str] = []
        self.sending = threading.Event()  # set while a request is under way
        self._paused = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._work, daemon=True).start()

    def pause(self) -> None:
        """Send nothing more until `go_on`; returns when the last request has ended."""
        self._paused.set()
        self._idle.wait()

    def go_on(self) -> None:
        self._paused.clear()

    def _work(self) -> None:
        while True:
            if self._paused.is_set():
                self._idle.set()
                time.sleep(0.05)
                continue
            self._idle.clear()
            try:
                self._act()
            except Exception as error:  # a bug of the soak itself must not pass for silence
                self.problems.append(f"the client failed: {error!r}")
            time.sleep(self._rng.uniform(0.02, 0.2))

    def _act(self) -> None:
        run = self._rng.choice(RUNS)
        if run not in self._made:
            self._create(run)
        elif self._bodies and self._rng.random() < 0.15:
            self._repeat(self._rng.choice(list(self._bodies)))
        elif self._bodies and self._rng.random() < 0.03:
            # Cancel one of the newest jobs, which may wait or run. The soak accepts any answer to
            # the cancellation.
            self.request("POST", f"/v1/jobs/{self._rng.choice(list(self._bodies)[-6:])}/cancel")
        elif self._rng.random() < 0.03:
            self.request(
                self._rng.choice(["PUT", "DELETE"]),
                f"/v1/runs/{run}/checkpoints/{self._rng.randrange(4)}/pin",
            )
        elif len([*self._root.glob(f"jobs/live/{run}/*/[!.]*")]) < PENDING:
            self._submit(run)

    def _create(self, run: str) -> None:
        answer = self.request("POST", "/v1/runs", {"name": run, "lora": {"rank": 2, "alpha": 4}})
        if answer is not None and answer.is_success:
            self._made.add(run)
            self._ledger.write("run", run=run)

    def _submit(self, run: str) -> None:
        self._count += 1
        job = f"job-{self._count:05d}"
        body = self._request_body(job)
        self._ledger.write("asked", id=job, run=run)
        for _ in range(self._rng.randint(1, 6)):
            answer = self.request("POST", f"/v1/runs/{run}/train", body)
            if answer is not None and answer.is_success:
                self._ledger.write("accepted", id=job)
                self._bodies[job] = run, body
                return
            if answer is not None and answer.status_code not in LATER:
                self._ledger.write("refused", id=job)
                self.problems.append(f"job {job} was refused: {answer.status_code} {answer.text}")
                return
            if self._paused.is_set():
                return
            time.sleep(self._rng.uniform(0.05, 0.5))

    def _repeat(self, job: str) -> None:
        """Sends a job's request again. The API must recognise that the request is for a job that
        exists already."""
        run, body = self._bodies[job]
        self._ledger.write("repeated", id=job)
        answer = self.request("POST", f"/v1/runs/{run}/train", body)
        if (
            answer is not None
            and answer.status_code not in (*LATER, 200)
            and job not in self._ledger.damaged
        ):
            self.problems.append(
                f"job {job}, submitted again, was answered {answer.status_code} {answer.text[:300]}"
            )

    def _request_body(self, job: str) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {
            "id": job,
            "packing": {"sequence_length": 64},
            "max_attempts": rng.choice([2, 3, 5, 8]),
            "stall_seconds": 60,
            "optimizer": {"learning_rate": 1e-3, "epochs": rng.randint(1, 3)},
        }
        if rng.random() < 0.5:
            examples = [
                [rng.randrange(1, 250) for _ in range(40)] for _ in range(rng.randint(1, 3))
            ]
            trainable = [False] * 10 + [True] * 30
            return body | {
                "kind": "sft",
                "examples": [{"token_ids": ids, "trainable": trainable} for ids in examples],
            }
        return body | {"kind": "rl", "groups": [self._group() for _ in range(rng.randint(1, 3))]}

    def _group(self) -> dict[str, Any]:
        prompt = [self._rng.randrange(1, 250) for _ in range(8)]
        completions = [[self._rng.randrange(1, 250) for _ in range(12)] for _ in range(2)]
        turns = [
            {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": [-5.5] * len(ids)}
            for ids in completions
        ]
        return {
            "trajectories": [{"turns": [turn], "reward": 1.0 - i} for i, turn in enumerate(turns)]
        }

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response | None:
        """The API's answer, or None if no answer came."""
        self.sending.set()
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError:
            return None
        finally:
            self.sending.clear()
        if answer.status_code == 500:
            self.problems.append(f"{method} {path} was answered 500: {answer.text[:300]}")
        return answer
