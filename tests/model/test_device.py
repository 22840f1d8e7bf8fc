"""CUDA starts while a rank does its first work. The rank's first work does not wait for CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiny import write_random_model

# The test runs without a GPU. CUDA fails to start without a GPU, so code that needs CUDA fails
# visibly.
BUILD = """
import sys, torch, traceback
from tandem.errors import InvalidInput
from tandem.model import device, parallel
from tandem.families.registry import read_arch
from tandem.model.build import build_policy
from tandem.spool.schema import LoraShape
from tandem.training.phases import MemoryWatch, Phases

class Asked(Exception): ...

def asked():
    raise Asked

assert device.activate("cuda") == torch.device("cuda:0")
device.wait_until_started, join = asked, torch.distributed.init_process_group
# NCCL would ask for a GPU.
torch.distributed.init_process_group = lambda _, **options: join("gloo", **options)
watch = MemoryWatch()
with Phases(lambda phase: watch.beat(), watch).phase("rendezvous"):
    parallel.init_parallel()
for model in sys.argv[1:]:
    try:
        build_policy(read_arch(model), LoraShape(rank=2, alpha=4), base=dict)
    except Asked as error:
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        print(callers[-3:], torch.cuda.is_initialized(), device.started(), watch.beat())
    except InvalidInput as error:
        print(error)
"""


@pytest.mark.slow
def test_only_to_be_placed_the_model_needs_the_device(tmp_path: Path) -> None:
    models = [
        str(write_random_model(tmp_path / family, family=family))
        for family in ("qwen3", "qwen3_moe")
    ]
    assert built_for_a_gpu(models) == ["['place', 'device', 'asked'] False False {}"] * 2


def built_for_a_gpu(models: list[str]) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", BUILD, *models], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_named() -> None:
    ask = "from tandem.model import device; device.activate('cuda', 63); device.device()"
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "RuntimeError: GPU 63 of those that this process can see can't be used: " in ran.stderr
