"""python -m inference.failing_adapter: prints the answers of vLLM's executor to three orders that
load adapters. The executor has two workers. The adapter `bad` can't be loaded.

The executor and the workers are vLLM's own classes with the plugin's change. The executor and the
workers run in this process, without a model.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.worker.gpu_worker import Worker

from tandem.inference.server import patches
from tandem.inference.server.worker import held_adapter


class Queue(deque[Any]):
    enqueue = deque.append

    def dequeue(self, timeout: float | None) -> Any:
        return self.popleft()


def process(rank: int) -> WorkerProc:
    def load(adapter: SimpleNamespace) -> int:
        if adapter.name == "bad":
            raise ValueError(f"no such file on {rank}")
        return adapter.lora_int_id

    made, made.worker = object.__new__(WorkerProc), object.__new__(Worker)
    made.rank, made.use_async_scheduling, made.worker_response_mq = rank, False, Queue()
    made.worker.model_runner = SimpleNamespace(add_lora=load)
    return made


def main() -> None:
    held_adapter.check = lambda *_: 0  # the check can't run, because there is no model
    patches.tell_failed_adapters()
    workers, executor = [process(0), process(1)], object.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(
        enqueue=lambda call: [w._execute_worker_rpc(call) for w in workers]
    )
    executor.response_mqs = [worker.worker_response_mq for worker in workers]
    for number, name in enumerate(("good", "bad", "good"), 1):
        try:
            print(executor.add_lora(SimpleNamespace(name=name, lora_int_id=number)))
        except Exception as error:
            print(error)
    print(sum(map(len, executor.response_mqs)), "answers are left")


if __name__ == "__main__":
    main()
