"""`tandem preflight`: what compose and the chart run once, before anything starts, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from tandem.cli.doctor import Check, disk_checks, guarded, model_checks, render, volume_checks
from tandem.cli.output import Json, show
from tandem.config import Settings, load_settings, split_keys
from tandem.errors import TandemError
from tandem.spool import Spool

_SHORTEST_SECRET = 16


def preflight(
    role: Annotated[
        str, typer.Option(help="Whose start it is: controller, trainer, inference; inference has the admin token.")
    ] = "all",
    devices_granted: Annotated[
        bool, typer.Option("--devices-granted", help="A scheduler grants GPUs by their number; there are no names.")
    ] = False,
    json: Json = False,
) -> None:
    """Check the deployment's GPUs, secrets, volume and model before it starts. Exit status 1 on fail."""
    checks = list(_checks(role, devices_granted))
    show([check._asdict() for check in checks], json, lambda _: render(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _checks(role: str, devices_granted: bool) -> Iterator[Check]:
    try:
        settings = load_settings()
    except TandemError as error:
        yield Check("fail", "settings", str(error), "correct the variable; docs/settings.md lists all of them")
        return
    yield Check("ok", "settings", "every TANDEM_* variable can be used")
    if not devices_granted:
        yield from guarded(gpu_checks, settings)

    def secrets(settings: Settings) -> Iterator[Check]:
        return _secrets(settings, admin=role in ("all", "inference") or settings.gpu_mode == "shared")

    for part in (secrets, volume_checks, _spool, disk_checks, model_checks):
        yield from guarded(part, settings)


def gpu_checks(settings: Settings) -> Iterator[Check]:
    """Whether trainer and inference get devices of their own, or share theirs, one for each of their processes. Names
    are compared as they are written; that they exist is seen by the containers that use them. (Settings refuse an equal
    name, or in shared mode an unequal one.)"""
    if settings.device == "cpu":
        yield Check("ok", "GPUs", "none: TANDEM_DEVICE=cpu")
        return
    trainer, inference = settings.trainer_devices, settings.inference_devices
    both = [*trainer, *inference]
    if not trainer or not inference:
        yield Check("fail", "GPUs", f"trainer has {trainer}, inference {inference}",
                    "set TANDEM_TRAINER_DEVICES and TANDEM_INFERENCE_DEVICES")  # fmt: skip
        return
    if len({name.isdigit() for name in both}) > 1:
        yield Check("fail", "GPUs", f"some are named by index, some by UUID ({', '.join(both)}): whether two of them "
                    "are one can't be told", "name all by index, or all by UUID (`nvidia-smi -L`)")  # fmt: skip
        return
    # CUDA takes the unambiguous beginning of a UUID too.
    same = [(a, b) for a in trainer for b in inference if not a.isdigit() and (a.startswith(b) or b.startswith(a))]
    if same and settings.gpu_mode == "dedicated":
        yield Check("fail", "GPUs", f"trainer's {same[0][0]} and inference's {same[0][1]} may be one device",
                    "write the UUIDs out")  # fmt: skip
        return
    for role, names in (("TRAINER", trainer), ("INFERENCE", inference)):
        if len(set(names)) < len(names):
            yield Check("fail", "GPUs", f"TANDEM_{role}_DEVICES={','.join(names)} names one twice", "name each once")
    for variable, processes, names, of in (
        ("TANDEM_TRAINER_RANKS", settings.trainer_ranks, trainer, "TANDEM_TRAINER_DEVICES"),
        ("TANDEM_INFERENCE_TENSOR_PARALLEL", settings.inference_tensor_parallel, inference, "TANDEM_INFERENCE_DEVICES"),
    ):
        if processes != len(names):
            yield Check("fail", "GPUs", f"{variable}={processes}, but {of}={','.join(names)} are {len(names)}",
                        "each process has one device: make the numbers equal")  # fmt: skip
    if settings.gpu_mode == "shared":
        yield Check("ok", "GPUs", f"{', '.join(trainer)}, shared by trainer and inference")
    else:
        yield Check("ok", "GPUs", f"trainer {', '.join(trainer)}; inference {', '.join(inference)}")


def _secrets(settings: Settings, *, admin: bool) -> Iterator[Check]:
    keys, token = split_keys(settings.secret("api_key")), settings.secret("admin_token") or ""
    wanted = [("TANDEM_API_KEY", keys), ("TANDEM_ADMIN_TOKEN", [token] if token else [])]
    for variable, values in wanted if admin else wanted[:1]:
        if not values:
            yield Check("fail", variable, "empty or not set", "run secrets/create, or set it or its _FILE")
        elif min(map(len, values)) < _SHORTEST_SECRET:
            yield Check("warn", variable, f"shorter than {_SHORTEST_SECRET} characters", "run secrets/create")
        else:
            yield Check("ok", variable, "set")
    if token and token in keys:
        yield Check("fail", "TANDEM_ADMIN_TOKEN", "is one of the API keys: whoever may sample could change what is "
                    "served", "make it another one")  # fmt: skip


def _spool(settings: Settings) -> Iterator[Check]:
    root = Spool.create(settings.root).root
    yield Check("ok", "spool", f"{root} is there")
