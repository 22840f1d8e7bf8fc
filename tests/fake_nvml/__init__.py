"""A fake NVIDIA driver for this process and its children. The fake driver sets the answers that
this directory's `pynvml.py` gives."""

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 2**20


def gpu(uuid: str, used: int = 0, **answers: object) -> dict:
    """A GPU with `used` bytes in use, and 1 GiB that the driver reserves. `answers`: the results of
    NVML functions, by name."""
    # Some drivers count the reserved memory in `used`.
    memory = {
        "total": 100 * 2**30,
        "free": 99 * 2**30 - used,
        "reserved": 2**30,
        "used": 2**30 + used,
    }
    return {"nvmlDeviceGetUUID": uuid, "nvmlDeviceGetMemoryInfo": memory} | answers


class FakeNvml:
    """The fake driver. `gpus`: GPUs as `gpu` makes them. `raises`: NVML error codes, by
    function."""

    def __init__(self, directory: Path, *gpus: dict) -> None:
        self.path = directory / "nvml.json"
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.variables = {"FAKE_NVML": str(self.path), "PYTHONPATH": os.pathsep.join(path)}
        """Environment variables with which a child process asks this driver."""
        self.set(*gpus)

    def set(self, *gpus: dict, **raises: int) -> None:
        """Sets which GPUs exist from now on, and which NVML functions fail."""
        staged = self.path.with_suffix(".new")
        staged.write_text(json.dumps({"gpus": gpus, "raises": raises}))
        staged.replace(self.path)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Installs the driver for this process, and for children that it starts from now on."""
        from fake_nvml import pynvml

        monkeypatch.setitem(sys.modules, "pynvml", pynvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)
