"""Damages the files of a spool, one at a time, and lets every program read the spool.

    python -m tests.fuzz.files [--minutes 30] [--seed S] [--only PATTERN]

A spool with every kind of file is made by real jobs. Each round copies the spool and damages one
file of the copy. Collectors, controller, `tandem doctor`, publisher, sweeper and a runner with real
ranks read the damaged copy. No program may raise, hang or answer 500. A job that succeeds must make
the same weights as on the undamaged spool. A run that was not damaged must be served and trained.
`--seed` and `--round` repeat one round. Root can read every file, whatever the file's
permissions are. The following command runs the fuzzer without this privilege of root:

    setpriv --bounding-set=-dac_override,-dac_read_search python -m tests.fuzz.files
"""

import argparse
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from fuzz import readers
from fuzz.damage import damage
from fuzz.stage import WITNESS, Stage, make_stage
from spool.spool_tools import memory_directory

USED = "used.json"
# Programs can't detect a wrong value in the records of jobs, runs and steps. Only packed data and
# weights have hashes.
_RECORDS = re.compile(r"jobs/live/.*/job\.json|jobs/active/|run\.json|manifest\.json")
_Seen = tuple[list[str], dict[str, str]]
"""The problems, and the adapters that exist afterwards: SHA-256 by `<run>@<step>`."""


class Fuzzer:
    def __init__(self, directory: Path, seed: int, only: str = "") -> None:
        self.seed = seed
        self.stage: Stage = make_stage(directory)
        root = self.stage.original
        names = sorted(
            path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()
        )
        names = [
            name
            for name in (*names, USED)
            if WITNESS not in name and not name.startswith("jobs/locks/")
        ]
        self.kinds: dict[str, list[str]] = {}
        for name in names:
            if re.search(only, name):
                self.kinds.setdefault(_kind(name), []).append(name)
        self.seen: Counter[str] = Counter()
        self.good: dict[str, str] = {}
        problems, self.good = self._read(self.stage.copy("copy"), USED, b"{}", True, None)
        assert not problems, f"an undamaged spool has problems: {problems}"

    def round(self, number: int) -> tuple[str, list[str]]:
        """Runs one round. Returns a pair: the damaged file with its damage, and the problems."""
        chosen = random.Random(f"{self.seed} {number}")
        kind = chosen.choice(sorted(self.kinds))
        name = chosen.choice(self.kinds[kind])
        root = self.stage.copy("copy")
        path = self.stage.directory / USED if name == USED else root / name
        if name == USED:
            shutil.rmtree(path, ignore_errors=True)  # left by an earlier round
            path.unlink(missing_ok=True)
            path.write_text('{"main": 1.0, "lost": 2.0}')
        api = readers.Api(self.stage, root) if chosen.random() < 0.5 else None
        how = damage(path, root, chosen, node=number % 3 == 0)
        self.seen[kind] += 1
        used = path.read_bytes() if name == USED and path.is_file() and how != "sparse" else b"{}"
        trains = chosen.random() < 0.2 or bool(
            re.search(r"jobs/(live|active)/|checkpoints|run\.json", name)
        )
        problems, made = self._read(root, name, used, trains, api)
        if trains and not _RECORDS.search(name):
            others = [model for model, sha256 in made.items() if self.good.get(model) != sha256]
            problems += [f"succeeded with other weights: {model}" for model in others]
        if (
            trains
            and name != "spool.json"
            and made.get(f"{WITNESS}@2") != self.good[f"{WITNESS}@2"]
        ):
            problems.append("the witness was not trained")
        # Programs report an unreadable file as an error of the volume, and wait.
        if how == "unreadable":
            problems = [
                problem
                for problem in problems
                if not re.search("ermission denied|witness", problem)
            ]
        return f"{name}: {how}", problems

    def _read(
        self, root: Path, name: str, used: bytes, train: bool, api: readers.Api | None
    ) -> _Seen:
        """Lets the programs read the copy. `api`: a controller that was started before the
        damage."""
        stage, problems, made = self.stage, list[str](), dict[str, str]()
        unusable = readers.UNUSABLE if name == "spool.json" else ()
        witness = not unusable

        def ask(requests: Callable[..., Awaitable[None]]) -> None:
            nonlocal api
            api = api or readers.Api(stage, root)
            problems.extend(api(partial(requests, witness=witness)))

        with readers.quiet() as printed:
            problems += readers.collect(stage, root, unusable)
            problems += readers.doctor(stage, root)
            problems += readers.guarded("controller", lambda: ask(readers.read), unusable)
            problems += readers.publish(stage, root, used, self.good or readers.made(root), witness)
            if train and witness:
                problems += readers.run_jobs(stage, root)
                problems += readers.guarded("checkpoints", lambda: made.update(readers.made(root)))
                problems += readers.guarded("controller", lambda: ask(readers.read))
            problems += readers.clean(stage, root, unusable)
            problems += readers.guarded("controller", lambda: ask(readers.write), unusable)
            self.printed = printed()
        return problems, made


def _kind(name: str) -> str:
    """The file's path without names of runs, names of jobs, steps and times. All files of packed
    data have one path."""
    if "/data/" in name:
        return "jobs/data"
    name = re.sub(r"runs/[^/]+", "runs/R", name)
    name = re.sub(r"(jobs/(?:live|ended|active)/).*?[^/]*,[^/]*", r"\1J", name)
    name = re.sub(r"\d{8}(-\w+)?", "N", name)
    return re.sub(
        r"(main|lost|asked|ended|failed|cancelled|forked)(-\w+)?",
        "J",
        re.sub(r"\d{16},.*,", "", name),
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs rounds until the time is over. `arguments`: the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=10**9, help="no more than these")
    parser.add_argument("--round", type=int, default=None, help="only this round")
    parser.add_argument("--only", default="", help="a regular expression for the files' names")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    failed: Counter[str] = Counter()
    with memory_directory() as directory:
        fuzzer = Fuzzer(Path(directory), seed, options.only)
        end, number = time.monotonic() + 60 * options.minutes, options.round or 0
        begun = number
        last = begun + (options.rounds if options.round is None else 1)
        while time.monotonic() < end and number < last:
            what, problems = fuzzer.round(number)
            for problem in problems:
                failed[re.sub(r"[\w./-]*tandem-test-\w+", "", problem)[:90]] += 1
                print(f"round {number}: {what}\n    {problem}", flush=True)
            if options.round is not None:
                print(what, fuzzer.printed)
            number += 1
            if number % 50 == 0:
                print(f"{number} rounds", flush=True)
        print(
            f"{number - begun} rounds with seed {seed}; {sum(failed.values())} problems; files:"
            f" {dict(fuzzer.seen)}"
        )
    for problem, count in failed.most_common():
        print(f"{count:5} {problem}")
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # torch's threads may wait for one another


if __name__ == "__main__":
    main()
