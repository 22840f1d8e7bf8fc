"""A fake vLLM as a program. The program sleeps like the real vLLM and uses memory of a fake GPU. A
test can make the program slow, or make it refuse orders.

A test writes its orders as JSON to the fake GPU's file `orders`. `sleep_seconds` and
`wake_seconds`: the seconds that vLLM needs to fall asleep and to wake. `refuse_wakes`: this number
of orders to wake fails, and the next one succeeds. `keep`: vLLM answers that it sleeps, but keeps
its memory.
"""

import json
import os
import time
from pathlib import Path

from fake_vllm import FakeVllm
from runner import fake_gpu
from tandem.config import load_settings
from tandem.inference.server.serve import wait_for_gpu
from tandem.system import logs


def main() -> None:
    logs.configure()
    settings = load_settings()
    gpu = Path(os.environ["FAKE_GPU"])
    wait_for_gpu(settings, free_seconds=20)
    fake_gpu.use(gpu, "vllm", fake_gpu.AWAKE)
    fake = FakeVllm()
    refused = 0

    def order(name: str) -> float:
        path = gpu / "orders"
        return json.loads(path.read_text()).get(name, 0) if path.exists() else 0

    def sleep() -> None:
        fake_gpu.tell(gpu, "vllm falls asleep")
        time.sleep(order("sleep_seconds"))
        fake_gpu.use(gpu, "vllm", fake_gpu.AWAKE if order("keep") else fake_gpu.ASLEEP)
        fake_gpu.tell(gpu, "vllm sleeps")

    def wake() -> None:
        nonlocal refused
        fake_gpu.tell(gpu, "vllm wakes")
        time.sleep(order("wake_seconds"))
        if refused < order("refuse_wakes"):
            refused += 1
            raise MemoryError("refused for the test's sake")
        fake_gpu.use(gpu, "vllm", fake_gpu.AWAKE)
        fake_gpu.tell(gpu, "vllm is awake")

    fake.on_sleep, fake.on_wake = sleep, wake
    fake.start(settings.inference_port)
    fake_gpu.tell(gpu, "vllm is up")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
