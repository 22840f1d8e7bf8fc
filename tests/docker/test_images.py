"""The images' metadata, sizes and layers."""

import hashlib
import json
import os
import re
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from compose_stack import ROOT, SERVICES, TAG, docker

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("images")]
BUDGETS: dict[str, int] = json.loads((ROOT / "images" / "budgets.json").read_text())
"""The largest size of each image, in 10^6 bytes as `docker images` counts them."""
CPU_IMAGES = ("controller", "trainer-cpu", "inference-cpu")


def name_of(image: str) -> str:
    role, _, device = image.partition("-")
    return f"tandem-{role}:{TAG}" + ("-cpu" if device else "")


@cache
def about(image: str) -> dict:
    """`docker image inspect`. Skips the test of a CUDA image that was not built here."""
    done = docker("image", "inspect", name_of(image), check=False)
    if done.returncode and image not in CPU_IMAGES:
        pytest.skip(f"{name_of(image)} was not built here")
    return json.loads(done.stdout)[0]


def inside(image: str, *command: str) -> str:
    return docker(
        "run", "--rm", "--network", "none", "--entrypoint", command[0], name_of(image), *command[1:]
    ).stdout


@dataclass(frozen=True)
class Entry:
    path: str
    mode: int
    layer: int


@cache
def entries(image: str) -> list[Entry]:
    """The files of all layers in the engine's storage, including those that a later layer
    removes."""
    graph = about(image)["GraphDriver"]
    data = graph["Data"]
    # LowerDir lists the top layer first. LowerDir is absent if there is only one layer.
    directories = [data["UpperDir"], *filter(None, (data.get("LowerDir") or "").split(":"))][::-1]
    if graph["Name"] != "overlay2" or not os.access(directories[0], os.R_OK):
        pytest.skip(
            "the engine's layers can't be read here: another machine, another user, or another"
            " driver"
        )
    assert len(directories) == len(about(image)["RootFS"]["Layers"])
    return [entry for layer, top in enumerate(directories) for entry in _walk(Path(top), layer)]


def _walk(top: Path, layer: int) -> Iterator[Entry]:
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = os.path.join(directory, name)  # noqa: PTH118 (hundreds of thousands of them)
            yield Entry(path.removeprefix(str(top)), os.lstat(path).st_mode, layer)


@pytest.mark.parametrize("image", [*CPU_IMAGES, "trainer", "inference"])
def test_an_image_stays_within_its_budget(image):
    size = about(image)["Size"] / 1e6
    assert size <= BUDGETS[image], (
        "see what grew (docker history), or raise it in images/budgets.json and say why"
    )
    assert size >= 0.85 * BUDGETS[image], "it has become smaller: lower its budget"


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_an_images_metadata(image):
    role = image.removesuffix("-cpu")
    config = about(image)["Config"]
    labels = {
        name.rpartition(".")[2]: value
        for name, value in config["Labels"].items()
        if name.startswith("org.opencontainers.image.")
    }
    assert labels["title"] == f"tandem-{role}"
    assert labels["version"] == TAG
    assert labels["licenses"] == "Apache-2.0"
    assert {"description", "revision", "created", "name"} <= set(labels)
    assert config["User"] == "2000:0"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/entrypoint"]
    assert not config["Cmd"]
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "-m", "tandem.supervise.health"]
    assert config["Healthcheck"]["Timeout"] < config["Healthcheck"]["Interval"]
    ports = {
        "controller": {"8080/tcp"},
        "trainer": {"9400/tcp"},
        "inference": {"8000/tcp", "9401/tcp"},
    }
    assert set(config["ExposedPorts"]) == ports[role]
    assert not config["Volumes"], "no anonymous volume"
    variables = dict(line.split("=", 1) for line in config["Env"])
    assert variables["TANDEM_ROLE"] == role
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert variables["TANDEM_ROOT"] == "/data"


@pytest.mark.parametrize("image", ["trainer", "inference"])
def test_a_cuda_image_asks_for_the_driver(image):
    variables = dict(line.split("=", 1) for line in about(image)["Config"]["Env"])
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert variables["TANDEM_DEVICE"] == "cuda"


@pytest.mark.parametrize("end", ["", "-cpu"], ids=["cuda", "cpu"])
def test_torch_is_stored_once(end):
    trainer, inference = (
        about(f"{role}{end}")["RootFS"]["Layers"] for role in ("trainer", "inference")
    )
    shared = len(
        list(takewhile(lambda pair: pair[0] == pair[1], zip(trainer, inference, strict=False)))
    )
    assert shared >= 5
    for role in ("trainer", "inference"):
        torch = {
            e.layer
            for e in entries(f"{role}{end}")
            if e.path.endswith("/site-packages/torch/__init__.py")
        }
        library = re.compile(r"/nvidia/.*/(libcublas|libnccl|libcudnn)[^/]*$")
        cuda = {e.layer for e in entries(f"{role}{end}") if library.search(e.path)}
        assert len(torch) == 1, "installed twice"
        assert max(torch | cuda) < shared, (
            "torch and CUDA's libraries belong to the layers that both images have"
        )


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_the_source_is_the_last_large_layer(image):
    """After a change of the source, only a few megabytes are built and pulled."""
    ours = {
        entry.layer
        for entry in entries(image)
        if entry.path.endswith("/site-packages/tandem/config.py")
    }
    others = {
        entry.layer
        for entry in entries(image)
        if "/site-packages/" in entry.path and "/site-packages/tandem" not in entry.path
    }
    assert len(ours) == 1
    assert max(others) < min(ours)


def test_the_controller_has_no_torch():
    packages = {
        entry.path.split("/site-packages/")[1].split("/")[0]
        for entry in entries("controller")
        if "/site-packages/" in entry.path
    }
    assert not {"torch", "vllm", "megatron", "nvidia", "triton"} & packages
    assert {"tandem", "fastapi", "transformers"} <= packages


# Names and directories that no layer may have.
UNWANTED_NAMES = {
    ".env",
    ".git",
    "api_key",
    "admin_token",
    "hf_token",
    "grafana_password",
    "uv.lock",
    ".netrc",
    "id_rsa",
    ".npmrc",
    ".pypirc",
    "pip.conf",
    "uv.toml",
}
OF_THE_BUILD = ("/src/", "/project/", "/wheel/", "/uv/", "/.cache/uv/")


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_no_layer_and_no_command_has_secrets_build_files_or_tests(image):
    wrong = []
    for entry in entries(image):
        name = entry.path.rpartition("/")[2]
        below = entry.path.startswith(OF_THE_BUILD[:-1]) or OF_THE_BUILD[-1] in entry.path
        ours = "/site-packages/tandem/" in entry.path or entry.path.startswith(
            "/opt/tandem/examples/"
        )
        if name in UNWANTED_NAMES or below or (ours and "test" in entry.path):
            wrong.append(entry.path)
    assert not wrong
    commands = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", name_of(image)).stdout
    assert not [
        word
        for word in ("API_KEY=", "ADMIN_TOKEN=", "HF_TOKEN=", "PASSWORD=", "hf_")
        if word in commands
    ]


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_only_scratch_space_is_writable_for_everybody(image):
    """Users outside the group may write only to sticky directories. The group may write only to
    sticky directories and to the volumes' directories. No file below /opt is setuid or setgid."""
    # Later layers replace files of earlier layers. A character device in a layer removes a file of
    # an earlier layer.
    final = {entry.path: entry.mode for entry in entries(image)}
    modes = {p: m for p, m in final.items() if not stat.S_ISLNK(m) and not stat.S_ISCHR(m)}
    assert {
        p
        for p, m in modes.items()
        if m & stat.S_IWOTH and not (stat.S_ISDIR(m) and m & stat.S_ISVTX)
    } == set()
    ours = {p: m for p, m in modes.items() if not p.startswith(("/var/", "/tmp", "/run/lock"))}
    assert {p for p, m in ours.items() if m & stat.S_IWGRP} <= {
        "/data",
        "/cache",
        "/private-cache",
        "/run/tandem",
    }
    assert not [
        p for p, m in ours.items() if p.startswith("/opt") and m & (stat.S_ISUID | stat.S_ISGID)
    ]


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_installed_packages_are_the_locked_ones(image):
    code = (
        "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x"
        " in d()), sep='\\n')"
    )
    installed = dict(
        line.lower().replace("_", "-").split("==")
        for line in inside(image, "python", "-c", code).split()
    )
    locked: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(package["name"], set()).add(package["version"])
    assert len(installed) > 30
    assert set(installed) <= set(locked), "something is installed that is not in uv.lock"
    differ = {name: version for name, version in installed.items() if version not in locked[name]}
    assert not differ


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_the_source_is_this_checkouts(image):
    """The images were built from this checkout."""
    code = (
        "import hashlib, pathlib, tandem; root = pathlib.Path(tandem.__file__).parent\nfor p in"
        " root.rglob('*.py'): print(p.relative_to(root),"
        " hashlib.sha256(p.read_bytes()).hexdigest())"
    )
    built = dict(line.split() for line in inside(image, "python", "-c", code).splitlines())
    source = ROOT / "src" / "tandem"
    here = {
        str(p.relative_to(source)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in source.rglob("*.py")
    }
    assert built == here


def test_every_entrypoint_is_short_and_runs_what_it_is_given():
    for role in SERVICES:
        text = (ROOT / "entrypoints" / role).read_text()
        assert len(text.splitlines()) <= 12
        assert (
            subprocess.run(["sh", "-n", ROOT / "entrypoints" / role], check=False).returncode == 0
        )
        assert os.access(ROOT / "entrypoints" / role, os.X_OK)
    done = docker(
        "run",
        "--rm",
        "--network",
        "none",
        "--user",
        "54321:0",
        "--read-only",
        name_of("controller"),
        "sh",
        "-c",
        "id -u; umask; exit 7",
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout.split() == ["54321", "0002"]
