"""What `tandem doctor` and `tandem preflight` check of a deployment: secrets, GPU names, the base
model, what is damaged, services."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from tandem.cli.common import Check
from tandem.client.http import connection
from tandem.config import Settings
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.families.registry import read_arch
from tandem.inference.server.command import check_merged_arguments, ordered_copy, serving_device
from tandem.planning.checks import check_sizes
from tandem.planning.plan import automatic, describe
from tandem.spool import Spool
from tandem.system.gpus import Devices
from tandem.topology.sizes import Sizes

_SHORTEST_SECRET = 16
_PLACES = {"device": "on the GPU", "host": "in pinned host memory"}


def keys_checks(settings: Settings) -> Iterator[Check]:
    """Whether this machine has the secrets, and keeps them private. Missing ones may be fine on
    one's own machine."""
    for name, file in (
        ("api_key", settings.api_key_file),
        ("admin_token", settings.admin_token_file),
    ):
        variable = f"TANDEM_{name.upper()}"
        secret = settings.secret(name)  # type: ignore[arg-type]
        if file is not None and _open_to_all(file):
            remedy = (
                f"chmod 600 {file}; or 700 for its directory where a container of another uid reads"
                " the file"
            )
            yield Check("warn", variable, f"every user can read {file}", remedy)
        elif secret:
            yield Check("ok", variable, "set")
        elif name == "admin_token":
            yield Check(
                "warn",
                variable,
                "not set",
                "`tandem up` makes one; separate containers need the same one",
            )
        elif settings.controller_host in ("127.0.0.1", "localhost", "::1"):
            yield Check(
                "warn",
                variable,
                "not set: only this machine can use the controller",
                f"set {variable}",
            )
        else:
            found = f"not set, and the controller binds to {settings.controller_host}"
            yield Check(
                "fail", variable, found, f"set {variable}, or TANDEM_CONTROLLER_HOST=127.0.0.1"
            )


def _open_to_all(file: Path) -> bool:
    """Whether every user can read the file: the directories above it are open, too. A container's
    own mount counts as closed: what it shows lies elsewhere."""
    file = file.resolve()
    if file.is_relative_to("/run/secrets"):
        return False
    return bool(file.stat().st_mode & stat.S_IROTH) and all(
        parent.stat().st_mode & stat.S_IXOTH for parent in file.parents
    )


def required_secrets(settings: Settings, *, admin: bool) -> Iterator[Check]:
    """Whether the secrets of a deployment's containers are set, long and different; the token only
    with `admin`."""
    keys, token = settings.api_keys, settings.secret("admin_token") or ""
    required = {"TANDEM_API_KEY": keys} | (
        {"TANDEM_ADMIN_TOKEN": [token] if token else []} if admin else {}
    )
    for variable, values in required.items():
        if not values:
            yield Check(
                "fail", variable, "empty or not set", "run secrets/create, or set it or its _FILE"
            )
        elif min(map(len, values)) < _SHORTEST_SECRET:
            yield Check(
                "warn",
                variable,
                f"shorter than {_SHORTEST_SECRET} characters",
                "run secrets/create",
            )
        else:
            yield Check("ok", variable, "set")
    if token and token in keys:
        found = "is one of the API keys: everybody who may sample could change the served adapters"
        yield Check("fail", "TANDEM_ADMIN_TOKEN", found, "use a token of its own")


def gpu_checks(settings: Settings) -> Iterator[Check]:
    """Whether the settings name a GPU for each process of trainer and inference; both use the same
    in shared mode.

    Names are compared as written, without a GPU; the containers that use them check that they
    exist. The settings themselves refuse equal names, and unequal ones in shared mode.
    """
    trainer, inference = ", ".join(settings.trainer_devices), ", ".join(settings.inference_devices)
    if settings.device == "cpu":
        yield Check("ok", "GPUs", "none: TANDEM_DEVICE=cpu")
    elif problem := _gpu_problem(settings):
        yield Check("fail", "GPUs", *problem)
    elif settings.gpu_mode == "shared":
        yield Check("ok", "GPUs", f"{trainer}, shared by trainer and inference")
    else:
        yield Check("ok", "GPUs", f"trainer {trainer}; inference {inference}")


def _gpu_problem(settings: Settings) -> tuple[str, str] | None:
    """The first thing that is wrong with the names of GPUs, and what to do."""
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
    # CUDA accepts the beginning of a UUID, so of two different names one may begin with the other.
    same = [
        (a, b)
        for a in trainer
        for b in inference
        if not a.isdigit() and (a.startswith(b) or b.startswith(a))
    ]
    if same and settings.gpu_mode == "dedicated":
        found = f"trainer's {same[0][0]} and inference's {same[0][1]} may be one device"
        return found, "write the UUIDs in full"
    for role, variable, processes, devices in (
        ("TRAINER", "TRAINER_RANKS", settings.trainer_ranks, trainer),
        ("INFERENCE", "INFERENCE_TENSOR_PARALLEL", settings.inference_tensor_parallel, inference),
    ):
        setting = f"TANDEM_{role}_DEVICES={','.join(devices)}"
        if len(set(devices)) < len(devices):
            return f"{setting} names one twice", "name each once"
        if processes != len(devices):
            found = f"TANDEM_{variable}={processes}, but {setting} names {len(devices)}"
            return found, "each process has one GPU: make the numbers equal"
    return None


def model_checks(settings: Settings) -> Iterator[Check]:
    """Configuration, weights and tokenizer; of a hub name only the configuration."""
    if settings.base_model is None:
        yield Check(
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
        yield Check("fail", "base model", error.message, "choose another TANDEM_BASE_MODEL")
        return
    shape = f"{arch.num_layers} layers of {arch.hidden_size}, vocabulary {arch.vocab_size}"
    yield Check(
        "ok", "base model", f"{model}: {arch.model_type}, {shape}, {arch.max_positions} positions"
    )
    try:
        check_sizes(arch, Sizes.of(settings))
        if settings.topology == "auto":
            yield Check("ok", "topology", _automatic(settings))
    except InvalidInput as error:
        yield Check(
            "fail", "topology", error.message, "set it, or choose another TANDEM_BASE_MODEL"
        )
    directory = Path(model)
    if not directory.is_dir():
        return
    if not any(directory.glob("*.safetensors")):
        yield Check(
            "fail",
            "base model: weights",
            f"{directory} has no *.safetensors",
            "download the whole model",
        )
    if unreadable := sorted(
        path.name for path in directory.glob("*") if not os.access(path, os.R_OK)
    ):
        found = f"uid {os.getuid()} can't read {', '.join(unreadable[:3])}"
        yield Check(
            "fail",
            "base model: weights",
            found,
            f"make the files readable: chmod -R a+rX {directory}",
        )
    if not (directory / "tokenizer.json").is_file():
        remedy = "SFT on messages and vLLM's chat API need one"
        yield Check("warn", "base model: tokenizer", f"{directory} has no tokenizer.json", remedy)


def weights_checks(settings: Settings) -> Iterator[Check]:
    """How vLLM gets the weights of a run, and why; what can't be served that way."""
    if settings.weights == "adapter":
        found = (
            "adapter (TANDEM_WEIGHTS): vLLM loads adapters of each run's newest"
            f" {settings.keep_served} steps"
        )
        yield Check("ok", "weights", found)
    else:
        yield Check(
            "ok",
            "weights",
            "merged (TANDEM_WEIGHTS): vLLM's own weights are those of one run's newest step",
        )
        yield Check(
            "ok",
            "weights: transport",
            _TRANSPORTS[settings.way] + f" (TANDEM_TRANSPORT={settings.transport})",
        )
        yield Check("ok", "weights: second copy", _second_copy(settings))
    try:
        check_merged_arguments(settings)
    except InvalidInput as error:
        yield Check(
            "fail",
            "weights: vLLM's arguments",
            error.message,
            "change TANDEM_VLLM_ARGS or TANDEM_WEIGHTS",
        )
    try:
        runs = Spool(settings.root).runs.list()
    except SpoolUnusable:
        return  # another check says so
    if others := [run.name for run in runs if run.weights != settings.weights]:
        found = f"runs that are served another way, and so not here: {', '.join(others)}"
        yield Check(
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
        yield Check("fail", "weights: runs", found, remedy)


_TRANSPORTS = {
    "merge": "merge: only adapters travel, which is the least where only adapters change",
    "nccl": (
        "nccl: whole weights, from the trainer's ranks; vLLM must reach the trainer on every port"
    ),
    "volume": "volume: whole weights, as files on the volume",
}


def _second_copy(settings: Settings) -> str:
    """Where vLLM keeps the second copy of the weights, and why there."""
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
    """What TANDEM_TOPOLOGY=auto chooses, where this machine has the trainer's GPUs. Raises
    InvalidInput."""
    try:
        memory = Devices(settings, "trainer").smallest()
    except TandemError:
        memory = 0
    if not memory:
        return "TANDEM_TOPOLOGY=auto: the trainer chooses it from the memory of its GPUs"
    made = automatic(settings, memory)
    return f"{describe(made.recommended.sizes)} (TANDEM_TOPOLOGY=auto): {made.why}"


def damage_checks(settings: Settings) -> Iterator[Check]:
    """What is damaged on the volume and left out: jobs, names among their files, runs."""
    if not (settings.root / "spool.json").exists():
        return
    remedies = {
        "job": "the file was set aside; submit the job again, then remove the file",
        "name": "it belongs to no job: remove it",
        "run": "restore the run's directory from a copy, or remove it",
    }
    damage = Spool(settings.root).damage()
    for kind, found in damage.items():
        more = [f"and {len(found) - 10} more"] if len(found) > 10 else []
        yield from (
            Check("warn", f"damaged {kind}", problem, remedies[kind])
            for problem in found[:10] + more
        )
    if not any(damage.values()):
        yield Check("ok", "spool", "nothing is damaged")


def controller_checks(_: Settings) -> Iterator[Check]:
    def describe(ready: httpx.Response, runs: httpx.Response) -> str:
        return f"version {ready.json().get('version')}, {len(runs.json())} runs"

    url = connection(None, None)["base_url"]
    remedy = "start it (`tandem up`), or set TANDEM_URL to its address"
    yield _service_check("controller", url, ("/readyz", "/v1/runs"), remedy, describe)


def inference_checks(settings: Settings) -> Iterator[Check]:
    def describe(_: httpx.Response, models: httpx.Response) -> str:
        names = [model.get("id", "?") for model in models.json().get("data", [])]
        return f"serves {', '.join(names) or 'nothing'}"

    remedy = "start it (`tandem up`; it takes a minute), or set TANDEM_INFERENCE_URL"
    yield _service_check(
        "vLLM", settings.resolved_inference_url, ("/health", "/v1/models"), remedy, describe
    )


def _service_check(
    name: str, url: str, paths: Sequence[str], remedy: str, describe: Callable[..., str]
) -> Check:
    """Whether a service answers all paths, the last of them with our key; `describe` gets the
    answers."""
    answers = []
    for path in paths:
        try:
            answer = httpx.get(
                f"{url}{path}", headers=connection(None, None)["headers"], timeout=5.0
            )
        except httpx.HTTPError as error:
            return Check("warn", name, f"{url} does not answer ({type(error).__name__})", remedy)
        if answer.status_code == 401:
            return Check(
                "fail", name, f"{url} refuses our key", "set TANDEM_API_KEY to one of its keys"
            )
        if answer.status_code != 200:
            return Check(
                "fail",
                name,
                f"{url}{path} answers {answer.status_code}: {answer.text[:300]}",
                "see its log",
            )
        answers.append(answer)
    return Check("ok", name, f"{url}: {describe(*answers)}")
