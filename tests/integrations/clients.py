"""Environments with other people's packages, in the versions that are tested. Each environment is
made once. Clients' programs run in the environments."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from local_stack import LocalStack
from tandem.spool.locks import file_lock

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
UV = shutil.which("uv") or str(ROOT / ".tools/bin/uv")


def python_of(name: str) -> Path:
    """The interpreter of `.venvs/<name>-<hash of its requirements>`."""
    requirements = HERE / "requirements" / f"{name}.txt"
    directory = (
        ROOT / ".venvs" / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    )
    python = directory / "bin/python"
    directory.parent.mkdir(exist_ok=True)
    with file_lock(directory.with_suffix(".lock")):
        if not (directory / "complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            subprocess.run(
                [UV, "venv", "-q", "--python", str(ROOT / ".venv/bin/python"), directory],
                check=True,
            )
            install = [UV, "pip", "install", "-q", "--python", str(python), "-r", str(requirements)]
            for attempt in range(3):  # the package index sometimes refuses
                if subprocess.run(install, check=attempt == 2).returncode == 0:
                    break
            # ART's PipelineTrainer imports torch and transformers. Both packages come from Tandem's
            # own environment, which is searched after the packages that are installed here.
            site = next((ROOT / ".venv/lib").glob("python*/site-packages"))
            next((directory / "lib").glob("python*/site-packages")).joinpath(
                "zz_tandem.pth"
            ).write_text(str(site))
            (directory / "complete").touch()
    return python


def run(stack: LocalStack, python: Path | str, program: Path, *arguments: str) -> str:
    """The output of a client's program. The program runs with Tandem's source, the addresses and
    the key, in the stack's directory."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TANDEM_", "VIRTUAL_ENV"))
    }
    environment |= {
        "PATH": f"{Path(UV).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples'}",
        "TANDEM_URL": stack.controller_url,
        "TANDEM_INFERENCE_URL": stack.inference_url,
        "TANDEM_API_KEY": stack.api_key,
        "OPENAI_API_KEY": stack.api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "UV_PYTHON": str(ROOT / ".venv/bin/python"),
    }
    done = subprocess.run(
        [str(python), str(program), *arguments],
        env=environment,
        cwd=stack.root,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{program.name}: {done.stdout[-3000:]}\n{done.stderr[-50000:]}"
    return done.stdout
