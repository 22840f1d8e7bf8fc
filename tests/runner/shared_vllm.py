"""A fake vLLM as a program: makes room like the real one, uses a fake GPU's memory, is slow or refuses on demand.

FAKE_SLEEP_SECONDS, FAKE_WAKE_SECONDS: how long those take; FAKE_REFUSED_WAKES: so many fail first; FAKE_KEEPS=1: it
says that it sleeps and keeps its memory.
"""

import os
import time
from pathlib import Path

from fake_vllm import FakeVllm
from runner import fake_gpu
from tandem.config import load_settings
from tandem.inference.server.wait_for_gpu import wait_for_gpu
from tandem.system import logs


def main() -> None:
    logs.configure()
    settings = load_settings()
    gpu = Path(os.environ["FAKE_GPU"])
    wait_for_gpu(settings, free_seconds=20)
    fake_gpu.use(gpu, "vllm", fake_gpu.AWAKE)
    fake = FakeVllm()
    refuse = [int(os.environ.get("FAKE_REFUSED_WAKES", "0"))]

    def sleep() -> None:
        fake_gpu.tell(gpu, "vllm falls asleep")
        time.sleep(float(os.environ.get("FAKE_SLEEP_SECONDS", "0")))
        fake_gpu.use(gpu, "vllm", fake_gpu.AWAKE if os.environ.get("FAKE_KEEPS") else fake_gpu.ASLEEP)
        fake_gpu.tell(gpu, "vllm sleeps")

    def wake() -> None:
        fake_gpu.tell(gpu, "vllm wakes")
        time.sleep(float(os.environ.get("FAKE_WAKE_SECONDS", "0")))
        if refuse[0]:
            refuse[0] -= 1
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
