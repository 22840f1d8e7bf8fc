"""Measures the time of a page of `GET /v1/runs` on a spool with many runs.

    python -m bench.many_runs [--runs 20000] [--limit 200] [--pages 20]

The program starts a controller on a spool with copies of one new run. According to the spool's
records, vLLM serves all copies. The first page is the first request after the controller's start.
The other pages are requested one after another. `load` is the machine's load average during the
measurement. A high load changes CPU times less than other times.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import httpx

from bench.many_jobs import KEY, deployment
from bench.report import report
from tandem.spool import Spool
from tandem.spool.schema import Served


def fill(spool: Spool, count: int) -> None:
    """Copies the first run until there are `count` runs, without syncing the volume. The spool's
    records say that vLLM serves each run."""
    first = spool.paths.run_dir("run-0")
    files = [path for path in first.rglob("*") if path.is_file()]
    for number in range(count - 1):
        name = f"many-{number:05}"
        for path in files:
            copy = spool.paths.run_dir(name) / path.relative_to(first)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json":
                copy.write_text(path.read_text().replace('"run-0"', f'"{name}"'))
            else:
                shutil.copyfile(path, copy)
        (spool.paths.run_dir(name) / "discarded").mkdir()
        serve(spool, name)
    serve(spool, "run-0")


def serve(spool: Spool, name: str) -> None:
    """Writes a record of a served step like the publisher's record."""
    served = Served(
        step=0,
        model=f"{name}@0",
        checkpoint=spool.checkpoints.manifest(name, 0).weights_sha256,
        manifest=spool.checkpoints.manifest_identity(name, 0),
        verified=time.time(),
        mean_abs_logprob_error=0.0,
        allowed_logprob_error=0.0,
        tokens_checked=1,
    )
    (spool.paths.run_dir(name) / "served.json").write_text(served.model_dump_json())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20000)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--name", default="many-runs", help="of the file under bench/results")
    options = parser.parse_args()
    count, options.runs = options.runs, 1
    with deployment(options) as (spool, controller, _):
        fill(spool, count)
        cpu, seconds, after = controller.cpu(), list[float](), ""
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=controller.url, headers=headers, timeout=120) as http:
            for _ in range(options.pages):
                begin = time.monotonic()
                params = {"limit": options.limit} | ({"after": after} if after else {})
                page = http.get("/v1/runs", params=params).raise_for_status().json()
                seconds.append(time.monotonic() - begin)
                assert len(page) == options.limit
                assert all(run["served_in_chain"] for run in page)
                after = page[-1]["spec"]["name"]
        row = {
            "runs": count,
            "page": options.limit,
            "load": os.getloadavg()[0],
            "first page ms": 1e3 * seconds[0],
            "other pages, mean ms": 1e3 * sum(seconds[1:]) / len(seconds[1:]),
            "other pages, longest ms": 1e3 * max(seconds[1:]),
            "CPU ms a page": 1e3 * (controller.cpu() - cpu) / options.pages,
            "controller MiB": controller.memory(),
        }
    report(options.name, "A page of runs among many", [row])


if __name__ == "__main__":
    main()
