"""Serves made-up metrics, with which the dashboards can be shown without a GPU or a job.

    python -m images.grafana.demo DIRECTORY [--gpus 8]

The command serves the metrics pages of a deployment until Ctrl-C, each page on a free port. The
command writes the shipped configuration of Prometheus to DIRECTORY, with these ports as targets.
Start Prometheus by `cd DIRECTORY && prometheus`.
"""

import argparse
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from images.grafana.demo.pages import JOBS, DemoPage
from images.grafana.demo.world import World

from tandem.metrics.exporter import MetricsServer

PROMETHEUS = Path(__file__).parents[2] / "prometheus"


def write_configuration(directory: Path, ports: dict[str, int], interval: str | None) -> None:
    """Copies the rules and `prometheus.yml`, with `ports` (Prometheus job -> port on this machine)
    as the targets.

    `interval`: the time between two scrapes, and between two evaluations of the rules. None keeps
    the shipped intervals.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(PROMETHEUS / "rules", directory / "rules", dirs_exist_ok=True)
    config: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    if interval is not None:
        config["global"] = dict.fromkeys(
            ("scrape_interval", "scrape_timeout", "evaluation_interval"), interval
        )
    for job in config["scrape_configs"]:
        if "http_sd_configs" in job:
            url = f"http://127.0.0.1:{ports['tandem-inference']}/targets"
            job["http_sd_configs"][0] |= {"url": url, "refresh_interval": "1s"}
        else:
            job["static_configs"][0]["targets"] = [f"127.0.0.1:{ports[job['job_name']]}"]
        if interval is not None:
            job.pop("scrape_interval", None)
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves made-up metrics until Ctrl-C.")
    parser.add_argument("directory", type=Path, help="where the configuration of Prometheus goes")
    parser.add_argument(
        "--interval", help="between two scrapes, instead of the shipped intervals; for example 1s"
    )
    parser.add_argument("--gpus", type=int, default=1, help="that train; as many more serve")
    arguments = parser.parse_args()
    world = World(arguments.gpus)
    replicas = dict[str, int]()  # name of each vLLM server -> its port
    servers = {job: MetricsServer("127.0.0.1", 0, DemoPage(world, job), replicas) for job in JOBS}
    second = MetricsServer("127.0.0.1", 0, DemoPage(world, "tandem-vllm", 1), {})
    replicas |= {"0": servers["tandem-vllm"].server_port, "1": second.server_port}
    second.serve_in_background()
    for job, server in servers.items():
        server.serve_in_background()
        print(f"{job}: http://127.0.0.1:{server.server_port}/metrics")
    ports = {job: server.server_port for job, server in servers.items()}
    write_configuration(arguments.directory, ports, arguments.interval)
    print(f"cd {arguments.directory} && prometheus", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
