from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tandem.system.environment import omp_waiting

# Before torch is loaded: what computes in this process has neighbours, too.
os.environ.update(omp_waiting(os.environ))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of the tests that are marked `sample`")
    parser.addoption("--sample-seed", type=int, default=None, help="choose the cases of `sample` by this seed")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.sample_seed is None:
        config.option.sample_seed = random.SystemRandom().randrange(2**32)


def pytest_report_header(config: pytest.Config) -> str:
    chosen = "all cases" if config.option.all_cases else f"a sample: --sample-seed={config.option.sample_seed}"
    return f"large matrices: {chosen}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with the mark `sample(n)`, keep n of its cases, chosen by the seed."""
    if config.option.all_cases:
        return
    matrices: dict[tuple[int, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sample"):
            matrices[mark.args[0], item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for (count, name), cases in matrices.items():
        chosen = random.Random(f"{config.option.sample_seed} {name}").sample(cases, min(count, len(cases)))
        left_out |= set(cases) - set(chosen)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One vLLM for the whole session (it takes half a minute to start); tests name their runs apart."""
    import tiny_model

    from vllm_server import VllmServer

    directory = tmp_path_factory.mktemp("vllm")
    server = VllmServer(directory, tiny_model.write_tiny_qwen3(directory / "model", hidden_size=64, layers=2))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[object]:
    """This process as the only rank, on the CPU."""
    from tandem.model import device, parallel

    device.activate("cpu")
    yield parallel.init_parallel()
    parallel.destroy()
