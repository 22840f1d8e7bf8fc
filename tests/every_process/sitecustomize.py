"""Every Python process that a test starts runs this module first, because tests/conftest.py puts
this directory into PYTHONPATH.

By default Python's garbage collector looks for cycles at every 700 new objects. While a process
imports torch and vLLM, there is no garbage. Nevertheless the search takes an eighth of the CPU time
of the process's start. In all tests together, the search took a tenth of the CPU time. Code of vLLM
starts six more searches during the server's start, and they find no garbage either. These six
searches take 2.4 s of the 13 s of CPU time that the server needs to start.

At each start vLLM imports gRPC to send traces, which takes 1 s of CPU time. The library
transformers looks for the files of all packages, which takes 0.8 s. No test sends traces, and the
installed packages do not change. Ranks import Weights & Biases through torch and Megatron, which
takes 0.5 s of the 4 s of their start. Deployments do not have Weights & Biases.

TEST_CLOCK_SECONDS: the error of the process's clock in seconds. A process with a clock error stands
for a host with its own clock.
"""

import gc
import os
import sys
import time

gc.set_threshold(50_000, 20, 100)
if "vllm.entrypoints.openai.api_server" in sys.orig_argv:  # vLLM's engine is a fork of this process
    gc.collect = lambda generation=2: 0
sys.modules["opentelemetry.exporter.otlp.proto"] = None  # type: ignore[assignment]

if any(word.startswith("tandem.trainer.launch.") for word in sys.orig_argv):
    sys.modules["wandb"] = None  # type: ignore[assignment]

if "EVERY_PROCESS_PACKAGES" in os.environ:
    import importlib.metadata

    def packages_distributions() -> dict[str, list[str]]:
        import json

        with open(os.environ["EVERY_PROCESS_PACKAGES"]) as file:  # noqa: PTH123
            found: dict[str, list[str]] = json.load(file)
        return found

    importlib.metadata.packages_distributions = packages_distributions

if wrong := float(os.environ.get("TEST_CLOCK_SECONDS", "0")):
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + wrong
    time.time_ns = lambda: _time_ns() + round(wrong * 1e9)
