"""Ranks on several hosts, which share the spool alone: two network namespaces, and bare
torchrun."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank import jobs
from tandem.spool import Spool
from tandem.topology.sizes import Sizes
from tandem.trainer.launch import Launch, RankSettings

HUB_NAME = "tandem-tests/tiny"
ADDRESSES = ("10.231.77.1", "10.231.77.2")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces, joined by one cable; neither sees the other's
    loopback."""
    names = [f"tandem-{os.getpid()}-{end}" for end in "ab"]
    cables = [f"td{os.getpid() % 10**7}{end}" for end in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`, which makes network namespaces")
    made = subprocess.run(
        ["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        commands = [
            f"ip netns add {names[1]}",
            f"ip link add {cables[0]} type veth peer name {cables[1]}",
        ]
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            inside = f"ip -n {name} link set"
            commands += [
                f"ip link set {cable} netns {name}",
                f"{inside} {cable} name eth0",
                f"{inside} lo up",
                f"ip -n {name} addr add {address}/24 dev eth0",
                f"{inside} eth0 up",
            ]
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def hub_cache(directory: Path, model: Path) -> Path:
    """A cache of the hub's files in which `HUB_NAME` is `model`."""
    revision = directory / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (revision / "refs").mkdir(parents=True)
    (revision / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, revision / "snapshots" / ("0" * 40))
    return directory


def train(spool: Spool, job_id: str, hosts: list[str], caches: list[Path]) -> tuple[list[int], str]:
    """Run the job with one rank on each host; the agents' exit statuses and output."""
    job = jobs.claim(spool, job_id)
    work = spool.paths.work_dir(job_id, job.attempt)
    settings = RankSettings(sizes=Sizes(data=2), device="cpu")
    launch = Launch(root=spool.root, job=job_id, attempt=job.attempt, settings=settings)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-port=29400",
        f"--master-addr={ADDRESSES[0]}",
    ]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    agents = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                host,
                *torchrun,
                f"--node-rank={number}",
                "-m",
                "tandem.trainer.launch.bootstrap",
                launch.model_dump_json(),
            ],
            env=environment | {"HF_HOME": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, (host, cache) in enumerate(zip(hosts, caches, strict=True))
    ]
    try:
        told = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    logs = [path.read_text() for path in sorted(work.glob("rank.*.log"))] if work.exists() else []
    return [agent.returncode for agent in agents], "\n".join([*told, *logs])


@pytest.mark.slow
def test_two_hosts_train_what_one_host_trains(
    tmp_path: Path, model: Path, hosts: list[str]
) -> None:
    """Each host has the base model in a hub cache of its own."""
    caches = [hub_cache(tmp_path / host, model) for host in hosts]
    spool = Spool.create(tmp_path / "spool")
    for run in ("one", "two"):
        jobs.make_run(spool, model, run, base_model=str(model) if run == "one" else HUB_NAME)
        jobs.submit_sft(spool, run, run, epochs=2, grad_accumulation_sequences=2)
    alone = jobs.run_here(spool, "one")
    statuses, output = train(spool, "two", hosts, caches)
    assert statuses == [0, 0], output
    job = spool.jobs.get("two")[1]
    assert jobs.same_bytes(alone, jobs.finish(spool, job))
    assert len(jobs.steps_of(spool, "two")) == 2
    (started,) = (event.data for event in spool.events.read("two") if event.type == "started")
    assert started["topology"]["world_size"] == 2
