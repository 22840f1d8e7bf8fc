"""Which path NCCL takes between two processes that are kept apart as two containers are, and how
fast it is.

    python3 bench/nccl_between_containers.py [--out result.json]        (as root, on a machine with
                                                                        two GPUs)

Each rank gets namespaces of its own (mount with a /dev/shm of its own, IPC, PID, UTS with its own
host name, network) made by unshare(1), as a container runtime makes them, and broadcasts 2.1 GB.
What differs between the cases is what they share. A case that can't work within its time says so.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEGABYTES, ROUNDS, SECONDS = 2100, 10, 75
BASE = ["mount", "pid", "uts"]
SAME_HOST = {"NCCL_HOSTID": "tandem"}
# name -> (both GPUs visible, namespaces of its own, environment of both)
CASES: dict[str, tuple[bool, list[str], dict[str, str]]] = {
    "one host, no containers": (True, [], {}),
    "containers, own GPU only": (False, [*BASE, "ipc", "net", "shm"], {}),
    "containers, own GPU only, NCCL_HOSTID": (False, [*BASE, "ipc", "net", "shm"], SAME_HOST),
    "containers, all GPUs": (True, [*BASE, "ipc", "net", "shm"], {}),
    "containers, all GPUs, NCCL_HOSTID": (True, [*BASE, "ipc", "net", "shm"], SAME_HOST),
    "containers, all GPUs, NCCL_HOSTID, shared IPC": (True, [*BASE, "net"], SAME_HOST),
    "containers, all GPUs, NCCL_HOSTID, shared IPC, no cuMem": (
        True,
        [*BASE, "net"],
        SAME_HOST | {"NCCL_CUMEM_ENABLE": "0"},
    ),
    "containers, all GPUs, NCCL_HOSTID, shared IPC, shared host name": (
        True,
        ["mount", "pid", "net"],
        SAME_HOST,
    ),
    "containers, all GPUs, shared IPC": (True, [*BASE, "net"], {}),
    "containers, own GPU only, NCCL_HOSTID, shared IPC": (False, [*BASE, "net"], SAME_HOST),
    "containers, own GPU only, NCCL_HOSTID, shared IPC, no P2P": (
        False,
        [*BASE, "net"],
        SAME_HOST | {"NCCL_P2P_DISABLE": "1"},
    ),
    "containers, all GPUs, NCCL_HOSTID, shared network": (True, [*BASE, "ipc", "shm"], SAME_HOST),
    "containers, all GPUs, NCCL_HOSTID, shared IPC and network": (True, BASE, SAME_HOST),
    "containers, own GPU only, NCCL_HOSTID, shared IPC and network": (False, BASE, SAME_HOST),
}


def rank() -> None:
    """One of the two processes; rank 0 prints gigabytes per second."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    data = torch.ones(MEGABYTES * 250_000, device="cuda")  # float32
    for _ in range(2):
        dist.broadcast(data, 0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        dist.broadcast(data, 0)
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"GBPS {data.nbytes * ROUNDS / (time.perf_counter() - begin) / 1e9:.1f}", flush=True)
    dist.destroy_process_group()


def start(
    index: int, visible: bool, own: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Rank `index` in its namespaces."""
    net = "net" in own
    setup = ["set -e"]
    if "mount" in own:
        setup.append("mount --make-rprivate /")
    if "shm" in own:
        setup.append("mount -t tmpfs -o size=8g tmpfs /dev/shm")
    if "uts" in own:
        setup.append(f"hostname container-{index}")
    if not visible:
        setup.append(f"mount --bind /dev/null /dev/nvidia{1 - index}")
    setup.append(f"exec {shlex.quote(sys.executable)} {shlex.quote(__file__)} --rank")
    flags = [f"--{name}" for name in ("mount", "pid", "uts", "ipc") if name in own]
    # Without a mount of its own /proc, a PID namespace would see the wrong /proc/self.
    flags += ["--fork", "--mount-proc"] if "pid" in own else []
    command = (
        ["unshare", *flags, "bash", "-c", "\n".join(setup)] if own else ["bash", "-c", setup[-1]]
    )
    if net:
        command = ["nsenter", f"--net=/var/run/netns/rank{index}", *command]
    variables = os.environ | {
        "RANK": str(index),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.99.0.1" if net else "127.0.0.1",
        "MASTER_PORT": "29533",
        "CUDA_VISIBLE_DEVICES": str(index) if visible else "0",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "veth" if net else "lo",
        **environment,
    }
    with log.open("wb") as out:
        return subprocess.Popen(command, env=variables, stdout=out, stderr=out)


def network() -> None:
    """Two network namespaces joined by a virtual cable, as a container bridge joins them. Needs
    pyroute2."""
    from pyroute2 import IPRoute, NetNS, netns

    for index in (0, 1):
        netns.create(f"rank{index}")
    with IPRoute() as here:
        here.link("add", ifname="veth0", kind="veth", peer={"ifname": "veth1"})
        for index in (0, 1):
            here.link(
                "set", index=here.link_lookup(ifname=f"veth{index}")[0], net_ns_fd=f"rank{index}"
            )
    for index in (0, 1):
        with NetNS(f"rank{index}") as there:
            cable, loopback = (
                there.link_lookup(ifname=f"veth{index}")[0],
                there.link_lookup(ifname="lo")[0],
            )
            there.addr("add", index=cable, address=f"10.99.0.{index + 1}", prefixlen=24)
            there.link("set", index=cable, state="up")
            there.link("set", index=loopback, state="up")


def measure(
    name: str, visible: bool, own: list[str], environment: dict[str, str], directory: Path
) -> dict[str, object]:
    """Run one case; the row of the table."""
    logs = [directory / f"{re.sub(r'[^a-zA-Z0-9]+', '_', name)}.{index}.log" for index in (0, 1)]
    ranks = [start(index, visible, own, environment, log) for index, log in enumerate(logs)]
    end = time.monotonic() + SECONDS
    while any(r.poll() is None for r in ranks) and time.monotonic() < end:
        time.sleep(0.2)
    late = any(r.poll() is None for r in ranks)
    for r in ranks:
        r.kill()
        r.wait()
    text = "".join(log.read_text(errors="replace") for log in logs)
    found = re.search(r"GBPS ([\d.]+)", text)
    paths = sorted(set(re.findall(r"via (P2P/\S+|SHM/\S+|NET/\S+)", text)))
    complaints = re.findall(r"(?:Cuda failure|Error|WARN).*", text) or ["no answer"]
    error = None if found else "no answer in time" if late else complaints[0][:200]
    rate = float(found[1]) if found else None
    return {"case": name, "gigabytes_per_second": rate, "paths": paths, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.rank:
        rank()
        return
    directory = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    try:
        network()
        have_net = True
    except Exception as error:  # whatever a kernel without them says
        print(f"no network namespaces here: {error}")
        have_net = False
    rows = []
    for name, (visible, own, environment) in CASES.items():
        if "net" in own and not have_net:
            own = [o for o in own if o != "net"]
            name += " (network shared: none could be made)"
        rows.append(measure(name, visible, own, environment, directory))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
