"""Tandem's plugin of vLLM. vLLM's engine processes end with the server that started them. On the
CPU, an adapter changes only the tokens of its own requests. vLLM uses FlashInfer only where
FlashInfer can compile its kernels."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.inference.server import patches, plugin
from tandem.system import processes
from tandem.vllm_client.names import MERGED_VARIABLE
from waiting import until

of_adapters = pytest.mark.sample(1, of="adapters in vLLM")

# A server that starts its engine as vLLM does on CUDA: the engine is a spawned child that calls the
# plugin.
SERVER = """
import multiprocessing, sys, time, types
from tandem.inference.server.plugin import register

no = lambda *_: False
loads = type("Loads", (), {"add_lora": None})
sys.modules |= {  # the real imports take 8 s
    "vllm.platforms": types.SimpleNamespace(
        current_platform=types.SimpleNamespace(
            is_cpu=no, is_cuda=no, is_device_capability_family=no
        )
    ),
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


@pytest.mark.slow
def test_the_engine_dies_with_its_server(tmp_path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    try:
        server.send_signal(signal.SIGKILL)
        server.wait(60)
        until(
            "the engine dies",
            lambda: (found := processes.read_process(engine)) is None or found.zombie,
        )
    finally:
        server.stdout.close()
        if processes.read_process(engine) is not None:
            os.kill(engine, signal.SIGKILL)


def test_the_api_server_collects_garbage_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin lowers the frequency of garbage collections in the API server only. vLLM's engine
    keeps Python's default frequency."""
    monkeypatch.setattr(patches, "bound_http_requests", lambda: None)
    for name in ("_prepare_for_a_fork", "_gather_outputs"):
        monkeypatch.setattr(plugin, name, lambda: None)
    before, found = gc.get_threshold(), []
    monkeypatch.setattr(patches, "switch_expert_lora_off", lambda: found.append(gc.get_threshold()))
    monkeypatch.setattr(plugin, "die_with_parent", lambda parent: None)
    for name in (
        "hide_flashinfer_without_nvcc",
        "multiply_adapters_on_the_cpu",
        "tell_failed_adapters",
    ):
        monkeypatch.setattr(patches, name, lambda: None)
    monkeypatch.delenv(MERGED_VARIABLE, raising=False)
    try:
        parents = iter([SimpleNamespace(pid=1), None])
        monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: next(parents))
        plugin.register()
        assert found == [before]
        plugin.register()
        assert gc.get_threshold() == plugin.COLLECTIONS
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_engine_calls_the_plugin(
    platform: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls no plugins in a forked engine. A spawned engine calls them itself, and its
    function must be vLLM's own, because a local function can't be pickled."""
    calls: list[object] = []
    own = staticmethod(lambda *args, **kwargs: calls.append((args, kwargs)))
    engine: Any = type("EngineCoreProc", (), {"run_engine_core": own})
    utils = SimpleNamespace(get_mp_context=lambda: multiprocessing.get_context(method))
    current = SimpleNamespace(is_cpu=lambda: platform == "cpu")
    for name, module in (
        ("vllm.engine.arg_utils", SimpleNamespace()),
        ("vllm.platforms", SimpleNamespace(current_platform=current)),
        ("vllm.v1.engine", SimpleNamespace(utils=utils)),
        ("vllm.v1.engine.core", SimpleNamespace(EngineCoreProc=engine)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    monkeypatch.setattr(plugin, "_begin_engine", lambda: calls.append("begin"))
    hidden: list[bool] = []
    monkeypatch.setattr(patches, "hide_flashinfer_without_nvcc", lambda: hidden.append(True))
    plugin._prepare_for_a_fork()
    forks = platform == "cpu" or method == "fork"
    assert hidden == [True] * forks, "the engine inherits the modules of the API server"
    assert utils.get_mp_context().get_start_method() == ("fork" if forks else "spawn")
    engine.run_engine_core(1, dp_rank=2)
    assert calls == [*(["begin"] if forks else []), ((1,), {"dp_rank": 2})]


@of_adapters
def test_adapters_on_the_cpu_change_their_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            # This call makes pytest restore the function at the end of the test.
            monkeypatch.setattr(module, name, getattr(lora_ops, name))
    patches.multiply_adapters_on_the_cpu()
    adapters, base = [7, 9], 0  # Adapter 7 is in slot 0, adapter 9 in slot 1.
    a, b, x = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 8, 4), torch.randn(6, 8)
    for prefill in (True, False):
        wrapper = punica_cpu.PunicaWrapperCPU(16, 16, "cpu")
        tokens = (base, base, 7, 7, 9, base)
        wrapper.update_metadata(
            LoRAMapping(tokens, (base, 7, 9, base), is_prefill=prefill), adapters, 2, 100
        )
        y = torch.zeros(6, 8)
        wrapper.add_lora_linear(y, x, (a,), (b,), 2.0, (8,))
        for adapter, row, added in zip(tokens, x, y, strict=True):
            slot = adapters.index(adapter) if adapter != base else None
            expected = torch.zeros(8) if slot is None else 2.0 * b[slot, 0] @ a[slot, 0] @ row
            torch.testing.assert_close(added, expected)


@of_adapters
def test_adapters_on_the_cpu_give_what_vllm_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens use one adapter or three. In some calls the output is wider than the weights, and
    the weights fill a slice of the output. In other calls the output is narrower than the weights.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    names = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
    theirs = {name: getattr(lora_ops, name) for name in names}
    for module in (lora_ops, punica_cpu):
        for name in names:
            monkeypatch.setattr(module, name, theirs[name])
    patches.multiply_adapters_on_the_cpu()
    for name in names:  # vLLM passes some arguments by name.
        assert [*signature(getattr(punica_cpu, name)).parameters] == [
            *signature(theirs[name]).parameters
        ]
    a, b, x = torch.randn(3, 1, 4, 8), torch.randn(3, 1, 6, 4), torch.randn(5, 8)
    for slots in ([2] * 5, [0, 2, 0, 1, 2]):
        at, y = torch.tensor(slots), torch.randn(5, 16)
        low = torch.randn(5, 4)
        calls: list[tuple[str, tuple[object, ...], torch.Tensor]] = [
            ("bgmv_shrink", (x, a, 0.5), torch.randn(5, 4)),
            ("bgmv_expand_slice", (low, b, 3, 6, True), y),
            ("bgmv_expand_slice", (low, b, 3, 6, False), y),
            ("bgmv_expand", (low, b, True), y),
            ("bgmv_expand", (low, b, False), y[:, :5]),
        ]
        for name, (given, weights, *rest), output in calls:
            mine, wanted = output.clone(), output.clone()
            getattr(punica_cpu, name)(given, weights, mine, at, *rest)
            theirs[name](given, weights, wanted, at, *rest)
            torch.testing.assert_close(mine, wanted)
            assert not torch.equal(mine, output)


@of_adapters
@pytest.mark.slow
def test_an_adapter_that_no_worker_can_load_shifts_no_answers() -> None:
    script = [sys.executable, "-m", "inference.failing_adapter"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        script, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-4:] == [
        "True",
        "ValueError: no such file on 0",
        "True",
        "0 answers are left",
    ]


@pytest.mark.parametrize(
    ("cuda", "compiles", "hidden"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_flashinfer_is_hidden_where_it_can_not_compile(
    cuda: bool, compiles: bool, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 calls `has_flashinfer` before it uses most of FlashInfer's kernels. For all-reduce
    and attention vLLM imports FlashInfer without a call of `has_flashinfer`."""
    platform = SimpleNamespace(is_cuda=lambda: cuda)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(
        sys.modules, "vllm.utils.flashinfer", SimpleNamespace(has_flashinfer=lambda: compiles)
    )
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__spec__="found"))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    patches.hide_flashinfer_without_nvcc()
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == ("0" if hidden else "1")
    if not hidden:
        assert find_spec("flashinfer") == "found"
        return
    assert find_spec("flashinfer") is None
    for name in ("flashinfer", "flashinfer.comm"):
        with pytest.raises(ImportError):
            import_module(name)
