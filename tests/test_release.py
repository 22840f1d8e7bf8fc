"""Installs the wheel and the sdist in clean environments, with only the declared dependencies.
`tandem --help`, `data check` and the client work with the wheel. `tandem version` works with the
sdist.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from api_server import KEY, Server, make_root
from tandem import __version__

pytestmark = pytest.mark.slow
INSTALLED = pytest.mark.sample(0, of="installed packages")  # environments take minutes to make
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/data/sums.jsonl"
TRIES = 5

CLIENT = """
import sys
from tandem.client import Tandem

with Tandem(*sys.argv[1:]) as tandem:
    tandem.create_run("clean", lora={"rank": 4})
    job = tandem.train(
        "clean",
        {
            "kind": "sft",
            "examples": [{"token_ids": [10, 11, 20], "trainable": [False, False, True]}],
            "packing": {"sequence_length": 64},
        },
    )
    print(*(run.spec.name for run in tandem.list_runs()), tandem.get_job(job.spec.id).state)
"""


def uv(*arguments: object) -> str:
    """Runs uv, up to TRIES times, because the package index may refuse for a moment."""
    command = [shutil.which("uv") or str(ROOT / ".tools/bin/uv"), *map(str, arguments)]
    for tried in range(1, TRIES + 1):
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
        if done.returncode == 0:
            return done.stdout
        if tried < TRIES:
            time.sleep(5)
    raise AssertionError(done.stderr)


def run_in(environment: Path, *command: object) -> str:
    """Runs a program of the environment outside of the checkout, without the variables of Tandem
    and Python that this process has."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TANDEM_", "PYTHON", "VIRTUAL_ENV"))
    }
    program, *arguments = map(str, command)
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=variables,
        cwd=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the sdist and of the wheel. The wheel is made from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    uv("build", "-q", "--out-dir", out)
    return out


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    """An environment with the wheel and its extra `data`. The dependencies have the locked
    versions."""
    directory = tmp_path_factory.mktemp("clean")
    locked = directory / "locked.txt"
    uv(
        *("export", "-q", "--frozen", "--no-hashes", "--no-default-groups", "--no-emit-project"),
        *("--extra", "data", "-o", locked),
    )
    [wheel] = built.glob("*.whl")
    uv("venv", "-q", "--python", sys.executable, directory / "venv")
    python = directory / "venv/bin/python"
    uv("pip", "install", "-q", "--python", python, "--constraint", locked, f"{wheel}[data]")
    return directory / "venv"


def test_the_wheel_has_the_package_and_nothing_else(built):
    [wheel] = built.glob("*.whl")
    assert wheel.name == f"tandem_rl-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "tandem",
        f"tandem_rl-{__version__}.dist-info",
    }
    source = {path.relative_to(ROOT / "src").as_posix() for path in ROOT.glob("src/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == source
    assert "tandem/py.typed" in names


@INSTALLED
def test_the_command_works(environment):
    assert "tandem up" in run_in(environment, "tandem", "--help")
    assert run_in(environment, "tandem", "version").split()[-1] == __version__
    heavy = "import importlib.util as u; print(*filter(u.find_spec, ('torch', 'vllm', 'fastapi')))"
    assert run_in(environment, "python", "-c", heavy) == "\n"


@INSTALLED
def test_data_is_checked_without_a_stack(environment, tmp_path):
    model = make_root(tmp_path / "spool") / "models/tiny"
    check = ("tandem", "data", "check", EXAMPLES, "--tokenizer", model)
    facts = json.loads(run_in(environment, *check, "--json"))
    assert (facts["records"], facts["broken"]) == (100, [])
    assert "What is 3 + 3?" in run_in(environment, *check)


@INSTALLED
def test_the_client_trains(environment, tmp_path):
    with Server(make_root(tmp_path / "spool")) as server:
        printed = run_in(environment, "python", "-c", CLIENT, server.url, KEY)
        assert printed.split() == ["clean", "queued"]


@INSTALLED
def test_the_sdist_installs(built, tmp_path):
    [sdist] = built.glob("*.tar.gz")
    uv("venv", "-q", "--python", sys.executable, tmp_path / "venv")
    uv("pip", "install", "-q", "--python", tmp_path / "venv/bin/python", sdist)
    assert run_in(tmp_path / "venv", "tandem", "version").split()[-1] == __version__
