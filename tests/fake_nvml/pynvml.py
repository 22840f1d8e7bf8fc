"""Takes the place of pynvml: its constants and errors, and functions that answer from the file
$FAKE_NVML (see FakeNvml)."""

import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

HERE = str(Path(__file__).parent)
_file = PathFinder.find_spec("pynvml", [path for path in sys.path if path != HERE]).origin
_spec = spec_from_file_location("real_pynvml", _file)
real = sys.modules["real_pynvml"] = module_from_spec(_spec)
_spec.loader.exec_module(real)
inits = 0
VERSIONS = {"nvmlSystemGetDriverVersion": "580.95.05", "nvmlSystemGetCudaDriverVersion_v2": 13010}


def __getattr__(name: str):
    found = getattr(real, name)
    if not name.startswith("nvml") or not callable(found):
        return found
    return lambda *arguments, **options: _answer(name, arguments, options)


def _answer(name: str, arguments: tuple, options: dict) -> object:
    global inits
    state = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    if name in state["raises"]:
        raise real.NVMLError(state["raises"][name])
    inits += name == "nvmlInit"
    gpus = state["gpus"]
    if name in ("nvmlInit", "nvmlShutdown"):
        return None
    if name == "nvmlDeviceGetCount":
        return len(gpus)
    if name == "nvmlDeviceGetHandleByIndex":
        return gpus[arguments[0]]
    if name == "nvmlDeviceGetHandleByUUID":
        every = [device for gpu in gpus for device in (gpu, *gpu.get("migs", []))]
        return _only([device for device in every if device["nvmlDeviceGetUUID"] == arguments[0]])
    if name in VERSIONS:
        return VERSIONS[name]
    gpu = arguments[0]
    if "lost" in gpu and name != "nvmlDeviceGetUUID":
        raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)
    if name == "nvmlDeviceGetP2PStatus":
        linked = arguments[1]["nvmlDeviceGetUUID"] in gpu.get("nvlinks", [])
        return real.NVML_P2P_STATUS_OK if linked else real.NVML_P2P_STATUS_NOT_SUPPORTED
    if name == "nvmlDeviceGetMigDeviceHandleByIndex":
        return _only(gpu["migs"][arguments[1] : arguments[1] + 1])
    if name == "nvmlDeviceGetMemoryInfo":
        assert options == {"version": real.nvmlMemory_v2}
        if "memory_of" in gpu:
            return _memory_of(Path(gpu["memory_of"]))
    if name not in gpu:
        raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
    answer = gpu[name]
    return SimpleNamespace(**answer) if isinstance(answer, dict) else answer


def _only(matches: list[dict]) -> dict:
    if matches:
        return matches[0]
    raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)


def _memory_of(directory: Path) -> SimpleNamespace:
    """The memory of a GPU that `directory` stands for. Each process that uses the GPU has a file in
    `directory` with the MiB of memory that the process uses."""
    from runner import fake_gpu

    used = (3 + sum(fake_gpu.living(directory).values())) * 2**20
    return SimpleNamespace(total=80 * 2**30, free=80 * 2**30 - used, reserved=0, used=used)
