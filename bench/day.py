"""A day's worth of jobs: does anything grow? Thousands of tiny jobs through every program of a
deployment.

    nice python -m bench.day [--jobs 2000] [--ways resident fork] [--every 20] [--out DIR]

Real controller (over HTTP), runner, ranks with Megatron (one, on the CPU), publisher and exporter;
vLLM is the tests' fake, which is not measured. Jobs and checkpoints are removed as soon as the
settings allow. After every `--every` jobs the queue is empty, nothing runs, and memory,
descriptors, threads, processes and files are counted. Exits with 1 if something grew. Samples are
also in `<out>/<way>.jsonl`, the programs' output in `<out>/<way>/*.log`.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.day_samples import OWN, Sample, grown, of_files, of_process, of_runner, rows
from bench.report import report
from tandem.client import Tandem
from tandem.spool import Spool
from tandem.system import ports, processes

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE / "examples"), str(HERE / "tests")]
import tiny_model  # noqa: E402

import fake_vllm  # noqa: E402

KEEP_SECONDS, SWEEP_SECONDS, KEEP_CHECKPOINTS, SCRAPE_SECONDS = 60.0, 20.0, 5, 3.0
LATE_SECONDS = 2 * SWEEP_SECONDS + 10.0  # until the sweeper has removed what it may
# How long the publisher keeps copies of adapters, and vLLM older steps.
COPIES_SECONDS = 10 * 60.0 + 60.0
# The controller's sweeper works every ten minutes otherwise.
_CONTROLLER = f"""
import sys
from tandem.controller import __main__, app
app.SWEEP_SECONDS = {SWEEP_SECONDS}
sys.exit(__main__.main())
"""
_VLLM = """
import collections, sys, threading
sys.path.insert(0, sys.argv[1])
import fake_vllm
fake = fake_vllm.FakeVllm()
fake.calls = collections.deque(maxlen=1)
fake.start(int(sys.argv[2]))
threading.Event().wait()
"""
REQUEST = {
    "kind": "sft",
    "packing": {"sequence_length": 16},
    "optimizer": {"learning_rate": 1e-5},
    "examples": [{"token_ids": [10, 11, 20, 21], "trainable": [False, False, True, True]}],
}


class Day:
    """A deployment in a directory of its own, and the jobs that it has done."""

    def __init__(self, directory: Path, way: str) -> None:
        self.directory, self.spool = directory, Spool.create(directory / "spool")
        tiny_model.write_tiny_qwen3(
            self.spool.root / "models/tiny",
            hidden_size=16,
            layers=1,
            heads=2,
            kv_heads=1,
            head_dim=8,
            ffn_size=16,
        )
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        with contextlib.ExitStack() as held:
            controller, vllm, self.metrics = (
                held.enter_context(ports.reserve()).port for _ in range(3)
            )
        self.url = f"http://127.0.0.1:{controller}"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")
        } | {
            "TANDEM_ROOT": str(self.spool.root),
            "TANDEM_BASE_MODEL": "models/tiny",
            "TANDEM_DEVICE": "cpu",
            "TANDEM_LAUNCH": way,
            "TANDEM_API_KEY": fake_vllm.API_KEY,
            "TANDEM_ADMIN_TOKEN": fake_vllm.ADMIN_TOKEN,
            "TANDEM_CONTROLLER_PORT": str(controller),
            "TANDEM_METRICS_PORT": str(self.metrics),
            "TANDEM_INFERENCE_URL": f"http://127.0.0.1:{vllm}",
            # The fake's log-probs are nobody's.
            "TANDEM_VERIFY_TOLERANCE": "1000",
            "TANDEM_KEEP_CHECKPOINTS": str(KEEP_CHECKPOINTS),
            "TANDEM_KEEP_DAYS": str(KEEP_SECONDS / 86400),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        self.commands = {
            "vllm": ["-c", _VLLM, str(HERE / "tests"), str(vllm)],
            "controller": ["-c", _CONTROLLER],
            "exporter": ["-m", "tandem.metrics.exporter"],
            "publisher": ["-m", "tandem.inference.publisher"],
            "runner": ["-m", "tandem.trainer.runner"],
        }
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: list[float] = []  # when each job did, Unix seconds

    @contextlib.contextmanager
    def running(self) -> Iterator[Tandem]:
        """All programs; the client of the controller."""
        stop = threading.Event()
        try:
            for name, command in self.commands.items():
                with (self.directory / f"{name}.log").open("wb") as log:
                    self.programs[name] = subprocess.Popen(
                        [sys.executable, *command],
                        env=self.environment,
                        stdout=log,
                        stderr=log,
                        preexec_fn=processes.die_with_parent,  # noqa: PLW1509
                    )
            self._wait_ready()
            threading.Thread(target=self._scrape, args=(stop,), daemon=True).start()
            with Tandem(self.url, fake_vllm.API_KEY) as client:
                yield client
        finally:
            stop.set()
            for process in reversed(self.programs.values()):
                process.terminate()
            for process in reversed(self.programs.values()):
                process.wait(60)

    def _wait_ready(self) -> None:
        while True:
            self.check()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)

    def check(self) -> None:
        for name, process in self.programs.items():
            log = self.directory / f"{name}.log"
            assert process.poll() is None, (
                f"{name} ended with {process.returncode}\n{log.read_text()[-2000:]}"
            )

    def _scrape(self, stop: threading.Event) -> None:
        """What Prometheus and a person with a browser ask for."""
        headers = {"Authorization": f"Bearer {fake_vllm.API_KEY}"}
        pages = [f"http://127.0.0.1:{self.metrics}/metrics"]
        pages += [
            f"{self.url}/{path}"
            for path in ("metrics", "v1/jobs", "v1/runs", "v1/runs/day/checkpoints")
        ]
        while not stop.wait(SCRAPE_SECONDS):
            for page in pages:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(page, headers=headers, timeout=30, trust_env=False)

    def work(self, client: Tandem, count: int) -> None:
        """Do `count` jobs one after another, and wait until the last one's checkpoint is served."""
        jobs = [client.train("day", REQUEST) for _ in range(count)]
        for job in jobs:
            client.wait_job(job.id, timeout=300)
            self.ended.append(time.time())
        client.wait_served("day", jobs[-1].spec.base_step + 1)

    def recent(self, seconds: float) -> int:
        """How many jobs ended within the last `seconds`."""
        return sum(at > time.time() - seconds for at in self.ended)

    def sample(self) -> Sample:
        self.check()
        pids = {name: process.pid for name, process in self.programs.items() if name != "vllm"}
        pids |= of_runner(pids["runner"])
        found: Sample = {}
        for program, pid in pids.items():
            found |= {(program, what): value for what, value in of_process(pid).items()}
        counts, size = of_files(self.spool.root)
        found["spool", "bytes"] = size
        jobs = self.recent(KEEP_SECONDS + LATE_SECONDS)
        limits = {f"jobs/{name}": jobs for name in ("succeeded", "ids", "events", "logs")}
        # Four files each: adapter, its configuration, the optimizer's state, the manifest.
        limits["runs/checkpoints"] = 4 * (KEEP_CHECKPOINTS + 2 + self.recent(LATE_SECONDS))
        for name, limit in limits.items():
            found[name, "kept"] = kept = counts.pop(name, 0)
            found[name, "beyond what is kept"] = max(0, kept - limit)
        found["spool, other", "files"] = sum(counts.values())
        copies, _ = of_files(self.temporary)
        found["TMPDIR", "kept"] = kept = sum(copies.values())
        found["TMPDIR", "beyond what is kept"] = max(
            0, kept - 2 * (self.recent(COPIES_SECONDS + LATE_SECONDS) + 20)
        )
        found["/dev/shm", "names"] = len(list(Path("/dev/shm").iterdir()))  # everybody's
        return found


def measure(way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one way to start ranks."""
    directory = options.out / way
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    day = Day(directory, way)
    samples: list[tuple[int, Sample]] = []
    with day.running() as client, (options.out / f"{way}.jsonl").open("w") as lines:
        client.create_run("day", lora={"rank": 1, "targets": ["q_proj"]})
        begin = time.monotonic()
        while len(day.ended) < options.jobs:
            day.work(client, min(options.every, options.jobs - len(day.ended)))
            time.sleep(1.0)  # ranks leave, and threads
            samples.append((len(day.ended), day.sample()))
            told = {f"{of}: {what}": value for (of, what), value in samples[-1][1].items()}
            seconds = time.monotonic() - begin
            lines.write(json.dumps({"jobs": len(day.ended), "seconds": seconds, **told}) + "\n")
            lines.flush()
            memory = ", ".join(
                f"{of} {value:.1f}" for (of, what), value in samples[-1][1].items() if what == OWN
            )
            print(
                f"{way}: {len(day.ended)} jobs, {seconds / len(day.ended):.2f} s each; {OWN}:"
                f" {memory}",
                flush=True,
            )
    found = rows(way, samples)
    found.append(
        {
            "way": way,
            "of": "all",
            "what": "seconds per job",
            "first quarter": seconds / len(day.ended),
            "last quarter": seconds / len(day.ended),
            "per 1,000 jobs": 0.0,
            "flat": "",
        }
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Every way in turn. `arguments`: those of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument(
        "--ways", nargs="+", choices=["torchrun", "fork", "resident"], default=["resident", "fork"]
    )
    parser.add_argument("--every", type=int, default=20, help="jobs between two samples")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    options.out = options.out or Path(tempfile.mkdtemp(prefix="tandem-day-"))
    found = []
    for way in options.ways:
        found += measure(way, options)
        report("day", f"{options.jobs} tiny jobs in each way; what stays between jobs", found)
    for line in grown(found):
        print(f"grew: {line}", flush=True)
    return 1 if grown(found) else 0


if __name__ == "__main__":
    sys.exit(main())
