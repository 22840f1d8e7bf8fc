"""Kills and disturbs a stack at random moments, and checks between the rounds that no promise was
broken.

    python -m tests.soak [--kills 1000] [--seed N] [--pace 1.6] [--servers 2 | --real-vllm]
        [--executor hosts] [--work DIRECTORY]

Each round has one way to start ranks. After each round the trainer is stopped and started again.
Then every job ends, and `soak.check` reads the files. The seed chooses victims, moments, signals,
damage and jobs. The kernel chooses when a process runs. So a seed repeats the plan, but not the
exact run. The program exits with 1 after the first round with a violation, and keeps the round's
files. If the user is root, the volume is a tmpfs that can get full and read-only. For other users
these two faults are left out.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sized
from contextlib import suppress
from pathlib import Path

import httpx

from soak import check
from soak.client import Client, Ledger
from soak.disturb import (
    CONTAINER,
    HOSTS,
    HOSTS_IMPORTS,
    HOSTS_WEIGHTS,
    IMPORTS,
    SIGNALS,
    WEIGHTS,
    Conditions,
    Damage,
    Moments,
    Strikes,
)
from soak.stack import API_KEY, CONTAINERS, Stack, Victim, Volume
from soak.stranger import Stranger

ROUND = 40
LAUNCHES = {"fork": 70, "resident": 15, "torchrun": 15}
STOP_SECONDS, JOBS_SECONDS, SERVED_SECONDS = 90.0, 240.0, 180.0
LATE_SECONDS = 20.0
"""A soak that is more than these seconds behind its pace does not wait for moments that seldom
come."""
VOLUME_MIB = 320


class Soak:
    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self._options, self._rng = options, random.Random(options.seed)
        self.work = work
        self.volume = Volume(work / "volume", VOLUME_MIB)
        self.root = self.volume.root
        self._ledger = Ledger(work / "ledger")
        self.stack = Stack(
            work,
            self.volume,
            real_vllm=options.real_vllm,
            servers=options.servers,
            executor=options.executor,
        )
        several = options.executor == "hosts"
        self._weights = HOSTS_WEIGHTS if several else WEIGHTS
        self._importing = HOSTS_IMPORTS if several else IMPORTS
        self.stranger: Stranger | None = None
        if options.servers > 1:
            keys = {"Authorization": f"Bearer {API_KEY}"}
            self.stranger = Stranger(self.root, self.stack.vllm_urls, keys)
            self.stranger.start()
        self.client = Client(self.root, self.stack.url, self._ledger, self._rng.getrandbits(32))
        self._moments = Moments(self.root, self.client, self._rng)
        self._strikes = Strikes(self._rng, self._ledger)
        self._conditions = Conditions(self.stack, self.volume, self._rng, self._ledger)
        self._damage = Damage(self.root, self._rng, self._ledger)
        self.counts: dict[str, Counter[str]] = {
            name: Counter()
            for name in ("program", "moment", "signal", "condition", "damage", "launch")
        }
        # the number of signals that are allowed now to programs whose restart imports torch
        self._imports = 1.0
        self._again: list[str] = []  # programs that get another signal
        self._due = 0.0  # time of the next signal at the pace `options.pace`
        self.kills = 0

    def round(self, kills: int, launch: str) -> list[str]:
        """Sends signals to programs. Some of the signals count as kills. After `kills` such
        signals, lets all jobs end. Returns the violations."""
        self.counts["launch"][launch] += kills
        problems = []
        if self.stack.launch_kind != launch:
            problems = self.stack.stop("up", STOP_SECONDS) + self._trainer_is_gone()
            self.stack.launch(launch)
        self.client.go_on()
        self._due = time.monotonic()
        goal = self.kills + kills
        while self.kills < goal:
            self._meanwhile()
            if self._rng.random() < 0.15 and (kind := self._conditions.begin()):
                self.counts["condition"][kind] += 1
            if (
                not self._conditions.refuses_writes
                and self._rng.random() < 0.35
                and (kind := self._damage.inflict())
            ):
                self.counts["damage"][kind] += 1
            self._strike(launch)
        self._strikes.follow(all_now=True)
        self._conditions.end(all_now=True)
        return problems + self.drain()

    def _meanwhile(self) -> None:
        self._strikes.follow()
        self._conditions.end()

    def _strike(self, launch: str) -> None:
        costly = self._importing if launch == "fork" else self._importing | {"rank", "leader"}
        self._imports = min(3.0, self._imports + self._options.costly)
        if self._again:
            self._strike_again(self._again.pop())
            return
        program = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
        if program in costly and self._imports < 1:
            return
        # If the signals are ahead of the pace, there is time to wait for a rare moment. A new rank
        # appears only if its launcher has the time to start.
        self._due += self._options.pace
        early = self._due - time.monotonic()
        late = early < -LATE_SECONDS
        longest = (
            20.0
            if program in ("rank", "leader") and not late
            else min(20.0, max(0.4 if late else 1.0, early))
        )
        before = self._victims(program)
        moment = self._moments.wait(self._moments.choose(program), longest, self._meanwhile)
        how = (
            "kill"
            if program in (CONTAINER, HOSTS)
            else self._rng.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        )
        # The search for processes takes a while, and the moment may pass meanwhile.
        if not (
            self._struck(program, before, how) or self._struck(program, self._victims(program), how)
        ):
            return
        if program in costly:
            self._imports -= 1
            self._again = [program] * self._rng.choice([0, 0, 1, 2, 3])
        self._count(program, moment, how)

    def _strike_again(self, program: str) -> None:
        """Kills the program again soon after its start. A runner that is killed so early is still
        deciding the outcome of the previous runner's jobs, and has not imported torch."""
        end = time.monotonic() + self._rng.uniform(0.3, 2.0)
        while time.monotonic() < end:
            self._meanwhile()
            time.sleep(0.05)
        if self._struck(program, self._victims(program), "kill"):
            self._count(program, "start", "kill")

    def _count(self, program: str, moment: str, how: str) -> None:
        self.kills += how != "stop-continue"
        for name, value in (("program", program), ("moment", moment), ("signal", how)):
            self.counts[name][value] += 1

    def _victims(self, program: str) -> list[Victim]:
        containers = self.stack.containers
        wanted = {CONTAINER: containers["trainer"], HOSTS: containers.get("hosts", ())}.get(
            program, (program,)
        )
        return [victim for victim in self.stack.victims() if victim.program in wanted]

    def _struck(self, program: str, victims: list[Victim], how: str) -> bool:
        if program in (CONTAINER, HOSTS):
            return self._strikes.kill_container(victims)
        return bool(victims) and self._strikes.strike(self._rng.choice(victims), how)

    def drain(self) -> list[str]:
        """Lets all jobs end, and returns the violations."""
        # If `tandem up` and supervisord were just killed, their programs still run. The next
        # `tandem up` ends these programs.
        problems = self._wait(
            "tandem up has started", STOP_SECONDS, lambda: self._none_of("supervisord")
        )
        problems += self.stack.stop("up", STOP_SECONDS) + self._trainer_is_gone()
        self.client.pause()
        self.stack.launch("fork")
        problems += self._wait("all jobs end", JOBS_SECONDS, self._pending)
        self._roll_back()
        problems += self._wait("the newest steps are served", SERVED_SECONDS, self._not_served)
        ledger = check.Ledger.read(self.work / "ledger")
        problems += check.violations(self.root, ledger) + self.client.problems
        self.client.problems = []
        if self.stranger is not None:
            problems += self.stranger.problems
        return problems

    def _roll_back(self) -> None:
        """Roll a run back to an earlier step, while the controller may die."""
        run, step = self._rng.choice(["a", "b", "c"]), self._rng.randrange(3)
        newest = max(
            (int(path.name) for path in self.root.glob(f"runs/{run}/checkpoints/0*")), default=0
        )
        controllers = self._victims("controller")
        if controllers and self._rng.random() < 0.5:
            self._kill_soon(controllers[0])
        if newest > 2:
            self.client.request("POST", f"/v1/runs/{run}/rollback", {"step": newest - step})

    def _kill_soon(self, victim: Victim) -> None:
        """Kills the victim from another thread, within 30 ms."""
        threading.Timer(self._rng.uniform(0, 0.03), lambda: victim.send(signal.SIGKILL)).start()
        self._ledger.write("strike", program=victim.program, how="kill")

    def _wait(self, what: str, seconds: float, missing: Callable[[], Sized]) -> list[str]:
        end = time.monotonic() + seconds
        while (left := missing()) and time.monotonic() < end:
            time.sleep(0.1)
        return [f"not within {seconds:.0f} s: {what}; missing: {left}"] if left else []

    def _pending(self) -> list[str]:
        paths = self.root.glob("jobs/live/[!.]*/*/[!.]*")
        return [str(path.relative_to(self.root)) for path in paths if check.JUNK not in path.name]

    def _not_served(self) -> list[str]:
        """The newest steps that are not served yet. The publisher writes the record of the served
        step, and then the event of the step's job. A served step has both the record and the
        event."""
        missing = []
        for run in self.root.glob("runs/[!.]*/checkpoints"):
            newest, served, told = max(run.glob("0*"), default=run), None, False
            with suppress(OSError, ValueError):
                served = json.loads((run.parent / "served.json").read_text())["step"]
                job = json.loads((newest / "manifest.json").read_text())["job"]
                events = next(self.root.glob(f"jobs/ended/*/*,{job},*/events.jsonl"), None)
                told = events is None or '"type":"served"' in events.read_text().replace(" ", "")
            if not told or served != int(newest.name):
                missing.append(f"{run.parent.name}@{newest.name}, served is {served}, told: {told}")
        return missing

    def _none_of(self, program: str) -> list[str]:
        return [] if self._victims(program) else [program]

    def _trainer_is_gone(self) -> list[str]:
        """Waits until no process of the trainer is left. After a kill of `tandem up`, its
        supervisord may still be stopping programs."""
        return self._wait(
            "no process of the trainer", STOP_SECONDS, lambda: self._victims(CONTAINER)
        )

    def finish(self) -> list[str]:
        """Stops all programs, makes temporary files look old, lets a runner sweep them, and checks
        the spool once more."""
        problems = self.stack.close(STOP_SECONDS)
        problems += self._wait(
            "no process is left", STOP_SECONDS, lambda: check.leftovers(self.root)
        )
        for path in [
            entry for top in self.root.rglob(".tmp-*") for entry in (top, *top.rglob("*"))
        ]:
            os.utime(path, (time.time() - 7200,) * 2)
        self.stack.sweep(lambda: not [*self.root.rglob(".tmp-*")])
        problems += check.leftovers(self.root)
        return problems + check.violations(
            self.root, check.Ledger.read(self.work / "ledger"), swept=True
        )

    def summary(self) -> dict[str, object]:
        paths = [*self.root.glob("jobs/ended/*/*/job.json")]
        jobs = [json.loads(path.read_text()) for path in paths]
        counts = {name: dict(count.most_common()) for name, count in self.counts.items()}
        return {
            "jobs": Counter(job["state"] for job in jobs),
            "errors": Counter(
                job["result"]["error"]["type"] for job in jobs if job["result"]["error"]
            ),
            "attempts": dict(sorted(Counter(job["attempt"] for job in jobs).items())),
            "starts": self.stack.starts,
            **({} if self.stranger is None else {"answers": self.stranger.answers}),
            "CPU seconds": round(sum(os.times()[:4])),
            **counts,
        }

    def close(self) -> None:
        if self.stranger is not None:
            self.stranger.stop()
        self._strikes.follow(all_now=True)
        self._conditions.end(all_now=True)
        self.stack.close(1.0)
        for victim in self.stack.victims():
            victim.send(signal.SIGKILL)
        self.volume.close()


def run(soak: Soak, options: argparse.Namespace) -> list[str]:
    """Runs rounds, and ends after the first round with violations. Returns the violations."""
    rng = random.Random(options.seed)
    begin = time.monotonic()
    if not soak.volume.mounted:
        print(
            "soak: no tmpfs can be mounted here, so the volume never gets full or read-only",
            flush=True,
        )
    wait_ready(soak.stack.url)
    while soak.kills < options.kills and time.monotonic() - begin < options.seconds:
        launch = options.launch or rng.choices(list(LAUNCHES), list(LAUNCHES.values()))[0]
        problems = soak.round(min(options.round, options.kills - soak.kills), launch)
        print(
            f"soak: {soak.kills} kills, {time.monotonic() - begin:.0f} s, round of {launch}: "
            f"{len(problems)} violations",
            flush=True,
        )
        if problems:
            return problems
    return soak.finish()


def wait_ready(url: str) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise TimeoutError("the controller did not start within 180 s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument(
        "--pace", type=float, default=1.6, help="seconds per strike, without the rounds' ends"
    )
    parser.add_argument(
        "--costly",
        type=float,
        default=0.08,
        help="share of strikes that make somebody import torch",
    )
    parser.add_argument("--round", type=int, default=ROUND, help="kills between two checks")
    parser.add_argument(
        "--launch", choices=list(LAUNCHES), default=None, help="only this way to start ranks"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="no round begins after that")
    parser.add_argument(
        "--real-vllm", action="store_true", help="vLLM itself under `tandem up --role inference`"
    )
    parser.add_argument(
        "--executor",
        choices=list(CONTAINERS),
        default="local",
        help="hosts: an agent for each of two",
    )
    parser.add_argument("--servers", type=int, default=1, help="inference servers on the one spool")
    parser.add_argument(
        "--work", type=Path, default=None, help="a new directory for everything; kept"
    )
    options = parser.parse_args()
    if options.executor == "hosts":
        options.launch = "fork"  # agents start ranks only by `fork`
    work = options.work or Path(tempfile.mkdtemp(prefix="soak-"))
    work.mkdir(exist_ok=True)
    print(f"soak: --seed {options.seed} --kills {options.kills}, in {work}", flush=True)
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("soak: stopped by SIGTERM"))
    soak = Soak(work, options)
    problems = ["the soak itself failed"]
    try:
        problems = run(soak, options)
        summary = {
            "kills": soak.kills,
            "violations": len(problems),
            "seconds": round(time.monotonic() - begin),
        }
        print(json.dumps(summary | soak.summary(), indent=1), flush=True)
    finally:
        if problems:
            soak.stack.keep_evidence()
        soak.close()
        if not problems and options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    for problem in problems:
        print(f"soak: VIOLATION: {problem}")
    print(
        f"soak: {soak.kills} kills, {len(problems)} violations; --seed {options.seed}"
        + (f"; files: {work}" if problems else "")
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
