import functools
import gc
import importlib.metadata
import json
import os
import random
import shutil
import ssl
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path

import pytest

import every_process.sitecustomize
from fake_nvml import FakeNvml
from tandem.system.environment import omp_waiting

# The tests set GOMP_SPINCOUNT before they load torch. Without GOMP_SPINCOUNT, waiting threads would
# take CPU time from the other programs.
os.environ.update(omp_waiting(os.environ))
# If several programs share two cores, a tiny model's two threads mostly wait for each other. This
# wait took a fifth of the CPU time of tests with a real vLLM. `tests/stack/test_stack.py` and the
# containers have as many threads as a deployment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With PYTHONDONTWRITEBYTECODE, every process that a test starts would compile torch, Megatron and
# vLLM again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
EVERY_PROCESS = str(Path(every_process.sitecustomize.__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [EVERY_PROCESS, os.environ.get("PYTHONPATH")])
)
# The workers of pytest-xdist inherit EVERY_PROCESS_PACKAGES.
if "EVERY_PROCESS_PACKAGES" not in os.environ:
    packages = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115
    json.dump(importlib.metadata.packages_distributions(), packages)
    packages.flush()
    os.environ["EVERY_PROCESS_PACKAGES"] = packages.name
# httpx reads the machine's certificates for every client, so also for every `httpx.get` that polls
# a port. Each reading takes 20 to 40 ms of CPU time. While a vLLM server started, such readings
# took a tenth of its CPU time.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# A forked child does not destroy the garbage that it inherits. The garbage includes objects of the
# Helm library. Their destructor calls Go's runtime, which has lost its threads in a forked child,
# and does not return.
os.register_at_fork(after_in_child=gc.freeze)


# The workers of pytest-xdist inherit the seed.
SEED = os.environ.setdefault("SAMPLE_SEED", str(random.SystemRandom().randrange(2**32)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run every case and every file that is marked `sample` or `one_of`",
    )
    parser.addoption("--cases", type=int, metavar="N", help="run at most N cases of each test")


def pytest_collection_finish() -> None:
    """Excludes the objects of modules and tests from garbage collections. There are about a million
    such objects, and they live until the end of the process."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    drawn = "all" if config.option.all_cases else f"a sample, SAMPLE_SEED={SEED}"
    return f"marked cases and files: {drawn}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.all_cases:
        _keep_samples(config, items)
    if shutil.which("nvidia-smi") is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip("needs a GPU"))
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[_group(item.nodeid)].append(item)
    items[:] = chain.from_iterable(_in_order(list(groups.values())))


def _in_order(groups: list[list[pytest.Item]]) -> Iterator[list[pytest.Item]]:
    """The order in which workers take groups of tests: the group of the Docker engine first, and
    groups without slow tests last, larger groups before smaller groups. In between, groups of slow
    tests, which compute, alternate with groups of slow and fast tests, which mostly wait. So the
    CPU has work all the time, and seldom too much."""
    kinds: dict[str, list[list[pytest.Item]]] = defaultdict(list)
    for group in sorted(groups, key=len, reverse=True):
        slow = [item.get_closest_marker("slow") is not None for item in group]
        docker = any(item.get_closest_marker("docker") for item in group)
        kind = "slow" if all(slow) else "mixed" if any(slow) else "fast"
        kinds["docker" if docker else kind].append(group)
    yield from kinds["docker"]
    for pair in zip_longest(kinds["slow"], kinds["mixed"]):
        yield from filter(None, pair)
    yield from kinds["fast"]


def _group(nodeid: str) -> str:
    """The group of a test. Tests of one group run in one worker, in their order. A group has the
    tests of one file, or all tests that share the Docker engine, the chart's renders or a stack."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/docker/") or file == "tests/helm/test_live.py":
        return "docker"
    return "tests/helm" if file.startswith("tests/helm/") else SHARED.get(file, file)


SHARED = {
    "tests/stack/test_openai_fine_tuning.py": "tests/stack/test_fine_tuning.py",
    "tests/stack/test_tinker_stack.py": "tests/stack/test_rl_stack.py",
    "tests/integrations/test_tinker_cookbook.py": "tests/integrations/test_clients.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


type Sets = dict[tuple[int, str], dict[object, list[pytest.Item]]]
"""The sets from which the seed draws members: (number of members to keep, name of the set) ->
member -> the member's tests."""


def _keep_samples(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that the seed draws. A first draw chooses among files, a second draw among
    the parameters of fixtures, and a third draw among the remaining tests. There is no draw among
    files if pytest's arguments name files or directories. With `--cases N`, a last draw keeps N
    cases of each test."""
    left_out: set[pytest.Item] = set()
    whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    draws = [_files] if whole_suite else []
    draws += [_parameters, _tests]
    if config.option.cases:
        draws.append(functools.partial(_cases, config.option.cases))
    for sets in draws:
        found = sets([item for item in items if item not in left_out])
        assert len({name for _, name in found}) == len(found), "a name has marks of several counts"
        for (count, name), members in found.items():
            kept = random.Random(f"{SEED} {name}").sample(list(members), min(count, len(members)))
            for member in members.keys() - kept:
                left_out.update(members[member])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _files(items: list[pytest.Item]) -> Sets:
    """Sets of files: a file whose `pytestmark` contains `sample(n, of=name)` belongs to the set
    `name`. Files that share a stack are one member. The draw leaves out only slow tests."""
    sets: Sets = defaultdict(lambda: defaultdict(list))
    for item in items:
        module = item.getparent(pytest.Module)
        for mark in module.own_markers if module else []:
            if mark.name == "sample" and item.get_closest_marker("slow"):
                file = item.nodeid.partition("::")[0]
                sets[mark.args[0], mark.kwargs["of"]][SHARED.get(file, file)].append(item)
    return sets


def _parameters(items: list[pytest.Item]) -> Sets:
    """Sets of a fixture's parameters, for tests with the mark `one_of(fixture)`."""
    sets: Sets = defaultdict(lambda: defaultdict(list))
    for item in items:
        mark = item.get_closest_marker("one_of")
        indices = item.callspec.indices if hasattr(item, "callspec") else {}
        if mark and (fixture := mark.args[0]) in indices:
            sets[1, f"{item.path.name} {fixture}"][indices[fixture]].append(item)
    return sets


def _tests(items: list[pytest.Item]) -> Sets:
    """Sets of tests: the cases of a test with the mark `sample(n)`, or the cases of all tests with
    the mark `sample(n, of=name)`."""
    sets: Sets = defaultdict(lambda: defaultdict(list))
    for item in items:
        for mark in item.own_markers:
            if mark.name == "sample":
                name = mark.kwargs.get("of") or item.nodeid.partition("[")[0]
                sets[mark.args[0], name][item].append(item)
    return sets


def _cases(count: int, items: list[pytest.Item]) -> Sets:
    """Sets of the cases of each test. `count`: number of cases to keep."""
    sets: Sets = defaultdict(lambda: defaultdict(list))
    for item in items:
        sets[count, item.nodeid.partition("[")[0]][item].append(item)
    return sets


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Restores the environment variables after each test file, so that the processes of the next
    file start without the changes of this file. An import of TRL silences vLLM's log and sets
    LD_LIBRARY_PATH; an import of vLLM sets more variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A fake NVIDIA driver without GPUs, in place of the machine's driver. A test gives the driver
    GPUs with the method `set`."""
    fake = FakeNvml(tmp_path)
    fake.install(monkeypatch)
    return fake


@pytest.fixture(scope="module")
def alone() -> Iterator[object]:
    """This process as the only rank, on the CPU."""
    from tandem.model import device, parallel

    device.activate("cpu")
    yield parallel.init_parallel()
    parallel.destroy()
