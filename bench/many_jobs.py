"""Makes spools with many jobs, and runs a controller on such a spool."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tandem.client import Tandem
from tandem.spool import Spool
from tandem.spool.schema import Event, Job, JobResult, JobState
from tandem.system import ports

KEY = "bench"
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def request(number: int) -> dict[str, Any]:
    """A small RL job: two groups of four trajectories."""

    def trajectory(i: int) -> dict[str, Any]:
        ids = [(number + i + j) % 300 for j in range(16)]
        turn = {"prompt_token_ids": ids[:6], "token_ids": ids[6:], "logprobs": [-0.5] * 10}
        return {"turns": [turn], "reward": float(i)}

    groups = [{"trajectories": [trajectory(i) for i in range(4)]} for _ in range(2)]
    return {"kind": "rl", "groups": groups, "packing": {"sequence_length": 64}}


class Controller:
    """A process of `python -m tandem.controller` on a spool."""

    def __init__(self, root: Path) -> None:
        with ports.reserve() as held:
            self.url = f"http://127.0.0.1:{held.port}"
            environment = {
                name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")
            } | {
                "TANDEM_ROOT": str(root),
                "TANDEM_BASE_MODEL": "models/tiny",
                "TANDEM_API_KEY": KEY,
                "TANDEM_CONTROLLER_PORT": str(held.port),
            }
        command = [sys.executable, "-m", "tandem.controller"]
        with root.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.headers = {"Authorization": f"Bearer {KEY}"}
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)

    def memory(self) -> float:
        """Resident MiB."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu(self) -> float:
        """CPU seconds that the controller has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def open(self, connections: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, limits=limits, timeout=120, trust_env=False
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextlib.contextmanager
def deployment(options: argparse.Namespace) -> Iterator[tuple[Spool, Controller, Tandem]]:
    """A spool with runs, and a controller on this spool."""
    directory = Path(tempfile.mkdtemp(prefix="tandem-queue-", dir=options.directory))
    root = directory / "spool"
    Spool.create(root)
    (root / "models/tiny").mkdir(parents=True)
    (root / "models/tiny/config.json").write_text(json.dumps(CONFIG))
    controller = Controller(root)
    try:
        with Tandem(controller.url, KEY) as tandem:
            for run in range(options.runs):
                tandem.create_run(f"run-{run}", lora={"rank": 1})
            yield Spool(root), controller, tandem
    finally:
        controller.close()
        shutil.rmtree(directory)


def fill(spool: Spool, job: Job, state: JobState, count: int, runs: int) -> None:
    """Writes `count` copies of `job` in the state `state`, without syncing the volume. The
    submission times of ended copies are 30 seconds apart."""
    result = (
        JobResult(state="succeeded", step=1, finished=time.time()) if state == "succeeded" else None
    )
    for number in range(count):
        job_id, run = f"{state}-{number}", f"run-{number % runs}"
        created = time.time() - (30.0 * (count - number) if result else 0.0)
        changed = {
            "id": job_id,
            "run": run,
            "base_step": 1 + number // runs,
            "created": created,
        }
        spec = job.spec.model_copy(update=changed)
        copy = job.model_copy(update={"spec": spec, "state": state, "result": result})
        key, paths = copy.key, spool.paths
        directory = paths.live_dir(key) if result is None else paths.ended_dir(key, state)
        directory.mkdir(parents=True)
        (directory / "job.json").write_text(copy.model_dump_json(indent=1) + "\n")
        if result is None:
            (directory / "data").mkdir()
        else:
            event = Event(seq=0, time=created, job=job_id, type="succeeded", data={"step": 1})
            (directory / "events.jsonl").write_text(event.model_dump_json() + "\n")
