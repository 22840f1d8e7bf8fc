"""A session's models. Each model of Tinker's API is a run. The run's requests are on the volume in
the client's order."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from tandem.controller.deployment import Deployment
from tandem.controller.routes_runs import make_run, run_spec
from tandem.controller.schemas import CreateRun
from tandem.controller.tinker.names import Name, SavedPath
from tandem.controller.tinker.schemas import LoraConfig, OptimizerConfig
from tandem.errors import Conflict, InvalidInput, NotFound
from tandem.families.adapter import default_targets
from tandem.families.arch import EXPERT_TARGETS
from tandem.spool.schema import (
    ClientModel,
    LoadRequest,
    LoraShape,
    LoraTarget,
    RunSpec,
    VoidRequest,
)

ALPHA = 32.0
"""LoRA's alpha of every model, for every rank: `W' = W + 32 / rank * B A`."""
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


def base_name(deployment: Deployment, name: str, field: str = "base_model") -> str:
    """The base model's name in the form that the client sent. The client finds the tokenizer by
    this name. Raises InvalidInput if `name` is not the name of the base model.

    Args:
        name: the name under which the client asks for the base model, for example its name on the
            hub.
        field: the field of the error.
    """
    own = deployment.base_model
    # If `base_model` is a directory, the directory's name is often the model's name on the hub.
    if deployment.is_base_model(name) or PurePosixPath(own).name == name.rpartition("/")[2]:
        return name
    problem = f"{name[:200]!r} is not served; supported_models: {own!r}"
    raise InvalidInput(problem, field=field)


def lora_shape(deployment: Deployment, config: LoraConfig) -> LoraShape:
    """The LoRA shape of a model. `lm_head` has no adapter, even with `train_unembed`. Raises
    InvalidInput (field `lora_config`) if no layer is left to train."""
    arch = deployment.arch
    targets: Sequence[Any] = default_targets(arch)
    if arch.moe is not None and deployment.settings.expert_lora:
        targets = [*targets, *sorted(EXPERT_TARGETS)]
    chosen: list[LoraTarget] = [
        target for target in targets if (config.train_mlp if target in _MLP else config.train_attn)
    ]
    if not chosen:
        problem = "no layer is left to train: train_attn is for attention, train_mlp for MLPs"
        raise InvalidInput(f"{problem}, and lm_head has no adapter here", field="lora_config")
    return LoraShape(rank=config.rank, alpha=ALPHA, targets=tuple(chosen))


def check_optimizer(config: OptimizerConfig | None, field: str) -> None:
    if config is not None and config.type != "adamw":
        problem = f"{config.type!r} is not served; leave it out: AdamW is the only optimizer"
        raise InvalidInput(problem, field=field)


def make_model(
    deployment: Deployment, model: Name, base_model: str, lora: LoraShape, seed: int | None
) -> None:
    """Makes the model's run, unless it exists. Raises InvalidInput if a model with this name and
    another LoRA shape exists.

    Args:
        base_model: the base model's name in the form that the client sent.
        seed: the run's seed; None: a random seed.
    """
    spool = deployment.spool
    spool.sessions.check_open(model.session)
    with suppress(NotFound):
        if spool.runs.get(model.run).lora != lora:
            raise InvalidInput(f"{model} has another adapter", field="model_seq_id")
        return
    spool.sessions.put_model(model.session, model.number, ClientModel(base_model=base_model))
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    spec = run_spec(deployment, CreateRun(name=model.run, lora=lora, seed=seed))
    with suppress(Conflict):  # the run exists: a repeated request has another random seed
        make_run(deployment, spec.model_copy(update={"session": model.session}))


def model_run(deployment: Deployment, model: Name) -> RunSpec:
    """The model's run. Raises NotFound (field `model_id`) if the run does not exist."""
    with suppress(NotFound):
        return deployment.spool.runs.get(model.run)
    raise NotFound(f"there is no model {str(model)!r}", field="model_id")


def saved_step(deployment: Deployment, path: SavedPath, field: str) -> int:
    """The step of the checkpoint that the path `path` names. Raises NotFound if the step does not
    exist.

    Args:
        field: the error's field.
    """
    with suppress(NotFound):
        return deployment.spool.names.find(path.model.run, path.group, path.name).step
    raise NotFound(f"there is no checkpoint {str(path)!r}", field=field)


def trained_parts(spec: RunSpec) -> dict[str, Any]:
    """The trained parts of the model, in Tinker's terms."""
    targets = set(spec.lora.targets) if spec.lora else set()
    return {
        "lora_rank": spec.lora.rank if spec.lora else None,
        "train_unembed": False,
        "train_mlp": bool(targets & _MLP),
        "train_attn": bool(targets - _MLP),
    }


class Numbers:
    """The numbers of requests. A client counts a model's requests from 1. If a model is created
    from a checkpoint, the load of the checkpoint is a request to which the client gives no number.
    On the volume, the load has number 1, so the client's request n has number n + 1."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._loaded: dict[str, int] = {}  # run -> 1 if the run's first request is a load, else 0

    def logged(self, run: str, seq: int) -> int:
        """The number that the client's request `seq` has on the volume."""
        if run not in self._loaded:
            try:
                first = self._deployment.spool.requests.get(run, 1).request
            except NotFound:
                return seq  # nothing is cached, because the load may not have been logged yet
            self._loaded[run] = int(isinstance(first, LoadRequest))
        return seq + self._loaded[run]

    def void(self, run: str, seq: int, reason: str) -> None:
        """Logs a `VoidRequest` in place of the client's refused request.

        Args:
            seq: the client's number of the request.
            reason: why the request was refused; cut to 1,000 characters.
        """
        self.fill(run, self.logged(run, seq), reason)

    def fill(self, run: str, logged: int, reason: str) -> None:
        """Logs a `VoidRequest` with the number `logged`, so that later requests do not wait for
        this number.

        Args:
            logged: the request's number on the volume.
            reason: why the request was not carried out; cut to 1,000 characters.
        """
        with suppress(Conflict):  # the number is taken by another request, or the session has ended
            self._deployment.spool.requests.append(run, logged, VoidRequest(reason=reason[:1000]))
