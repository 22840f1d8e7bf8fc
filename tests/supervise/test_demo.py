"""`make demo` leaves no running stack, and sends no request to another stack."""

import signal
import subprocess
import sys
from pathlib import Path

import demo
import pytest

from free_ports import free_ports
from tandem.system import ports
from waiting import alive, until

EXAMPLES = Path(demo.__file__).parent
PROGRAM = """if True:
    import sys, time
    from pathlib import Path
    import demo
    from tandem.system.processes import die_with_parent
    demo.sys.executable = sys.argv[2]  # in the place of `tandem up`
    with demo.stack(Path(sys.argv[1]), {}) as process:
        print(process.pid, flush=True)
        time.sleep(600)
"""


def test_the_stack_ends_with_a_killed_demo(tmp_path):
    up = tmp_path / "up"
    up.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    up.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(up)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES) as started:
        pid = int(started.stdout.readline())
        assert alive(pid)
        started.send_signal(signal.SIGKILL)
    until("the stack to end", lambda: not alive(pid))


def test_a_taken_port_is_named_or_replaced(capsys):
    with ports.reserve(*free_ports(1)) as held:
        with pytest.raises(
            SystemExit, match=f"--controller-port: another Tandem process uses port {held.port} "
        ):
            demo.free_port(held.port, 8080, "--controller-port")
        other = demo.free_port(None, held.port, "--controller-port")
        assert other != held.port
        assert f"port {held.port} is taken, so this demo uses {other}" in capsys.readouterr().out
    assert demo.free_port(None, held.port, "--controller-port") == held.port
