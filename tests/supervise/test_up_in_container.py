"""`tandem up --role` as the first process of a pod's container. The user has no name, no groups and
no capabilities. The root file system is read-only except /tmp, /run and the volume. `tests/docker`
runs `tandem up` under an init process.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from supervise.tandem_up import AB, HERE, PATH
from tandem.system import processes
from waiting import until

# The interpreter's files may lie below a directory that only root can read. The mount namespace has
# these files at another place.
ROOT = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
i=0
for path in "$@"; do i=$((i + 1)); mkdir /mnt/$i; mount --rbind "$path" /mnt/$i; done
mkdir /mnt/volume; mount --bind "$VOLUME" /mnt/volume
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /run
for path in "$@"; do
    top=/$(echo "$path" | cut -d/ -f2)
    mountpoint -q "$top" || mount -t tmpfs -o mode=755 tmpfs "$top"
done
i=0
for path in "$@"; do i=$((i + 1)); mkdir -p "$path"; mount --rbind /mnt/$i "$path"; done
mount --bind /mnt/volume /srv
mount -o remount,ro,bind /
cd /
eval "exec $COMMAND"
"""
AS_USER = (
    "setpriv --reuid 12345 --regid 0 --clear-groups --no-new-privs --bounding-set=-all"
    " --inh-caps=-all"
)


def can_unshare() -> bool:
    command = ["unshare", "-fpm", "--mount-proc", "true"]
    return (
        os.getuid() == 0
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="needs root and namespaces")
def test_first_process_without_name_on_a_read_only_root(tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2775)
    python = shlex.join([sys.executable, "-m", "start_up"])
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = kept | {
        "VOLUME": str(volume),
        "COMMAND": f"{AS_USER} {python}",
        "PYTHONPATH": PATH,
        "HOME": "/tmp",
        "TANDEM_ROOT": "/srv",
        "TANDEM_LOG_DIR": "/run/logs",
        "XDG_RUNTIME_DIR": "/run",
        "FAKE_A": "orphans",
        "PYTHONDONTWRITEBYTECODE": "1",
        "ROLE": "trainer",
        "PROGRAMS": json.dumps(AB),
    }
    needed = [sys.base_prefix, sys.prefix, str(HERE.parent.parent)]
    out = tmp_path / "out"
    with out.open("wb") as file:
        command = ["unshare", "-fpm", "--mount-proc", "sh", "-c", ROOT, "sh", *needed]
        container = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    of_container = partial(processes.descendants, container.pid)
    try:
        until("b runs", lambda: "b | b runs" in out.read_text() or container.poll() is not None)
        until(
            "orphans",
            lambda: out.read_text().count("orphaned") == 3 or container.poll() is not None,
        )
        until(
            "orphans are reaped",
            lambda: not any(p.zombie or p.command == "sleep" for p in of_container()),
        )
        inside = of_container()
        status = Path(f"/proc/{inside[-1].pid}/status").read_text()
        assert "Uid:\t12345\t12345\t12345\t12345" in status
        assert "CapEff:\t0000000000000000" in status
        made = [path for path in volume.rglob("*") if path.is_file()]
        assert made
        for path in volume.rglob("*"):
            assert path.stat().st_mode & 0o060 == 0o060, path
        first = next(process for process in inside if process.parent == container.pid)
        os.kill(first.pid, signal.SIGTERM)
        # unshare exits with the status of the first process.
        assert container.wait(120) == 0
        assert "up | stopped" in out.read_text()
    finally:
        container.kill()
        container.wait()
        print(out.read_text())  # pytest shows this output if the test failed
        processes.kill_all(lambda: processes.marked("VOLUME", str(volume)), timeout=10)
