"""python -m fake_program <name>: a program for `tandem up` that misbehaves as FAKE_<NAME> says."""

import os
import signal
import subprocess
import sys
import time

from tandem.system import logs


def main(name: str) -> None:
    order = os.environ.get(f"FAKE_{name.upper()}", "run")

    def stop(*_: object) -> None:
        os.write(1, f"{name} stops at {time.time()}\n".encode())  # the signal may interrupt a print
        sys.exit(0)

    # The handler is set before the program reports that it runs, because a test may stop the
    # program right after the report.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if order == "stubborn" else stop)
    print(
        f"{name} runs; admin token of {len(os.environ['TANDEM_ADMIN_TOKEN'])} characters",
        flush=True,
    )
    if order == "child":
        # Like vLLM's engine, the child is in the same process group and doesn't notice its parent's
        # death.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    if order == "orphans":
        for _ in range(3):
            # The shell ends at once. The shell's child `sleep` ends 0.2 s later, as the child of
            # another process.
            subprocess.run(["sh", "-c", "sleep 0.2 &"], check=True)
            print("orphaned", flush=True)
    if order == "daemon":
        # The child has a session of its own and ignores SIGTERM, so supervisord does not end it.
        script = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        )
        subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    if order == "json":
        logs.configure()
        logs.Log("fake").warning("from a", n=1)
    if order == "start-fails":
        sys.exit(3)
    if order == "crash-loop":
        time.sleep(1.3)
        sys.exit(4)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
