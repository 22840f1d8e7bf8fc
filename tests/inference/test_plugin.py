"""The plugin: vLLM's engine processes end with the server that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tandem.system import processes
from waiting import until

# A server that starts its engine as vLLM does on CUDA: a spawned child that calls the plugin.
SERVER = """
import multiprocessing, sys, time, types
from tandem.inference.server.plugin import register

platform = types.SimpleNamespace(is_cpu=lambda: False, is_device_capability_family=lambda _: False)
loads = type("Loads", (), {"add_lora": None})
sys.modules |= {  # the real imports take 8 s
    "vllm.platforms": types.SimpleNamespace(current_platform=platform),
    "vllm.v1.executor.abstract": types.SimpleNamespace(Executor=loads),
    "vllm.v1.worker.gpu_worker": types.SimpleNamespace(Worker=loads),
}

def engine(pipe):
    register()
    pipe.send("ready")
    time.sleep(60)

if __name__ == "__main__":
    register()
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs,))
    child.start()
    mine.recv()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_the_engine_dies_with_its_server(tmp_path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    try:
        server.send_signal(signal.SIGKILL)
        server.wait(10)
        until("the engine dies", lambda: (found := processes.read(engine)) is None or found.zombie, 10)
    finally:
        server.stdout.close()
        if processes.read(engine) is not None:
            os.kill(engine, signal.SIGKILL)


def test_an_adapter_that_no_worker_can_load_shifts_no_answers() -> None:
    script = [sys.executable, "-m", "inference.failing_adapter"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    done = subprocess.run(script, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-4:] == ["True", "ValueError: no such file on 0", "True", "0 answers are left"]
