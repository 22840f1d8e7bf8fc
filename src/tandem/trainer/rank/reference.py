"""The reference of a job's loss: the base model, or another checkpoint of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from tandem.errors import InvalidInput, NotFound
from tandem.model.policy import Policy
from tandem.model.weights.base_weights import load_weights
from tandem.spool import Spool
from tandem.trainer.rank import model_checkpoint


@contextmanager
def reference_policy(
    spool: Spool, run: str, base_model: Path, policy: Policy, field: str, reference: int | Literal["base"]
) -> Iterator[None]:
    """Within the block the policy is the reference. What it has trained waits in host memory, and is back afterwards,
    bit for bit.

    Raises InvalidInput (field: `field`) if there is no such checkpoint, and CheckpointDamaged if it is not whole.
    """
    if reference == "base" and policy.lora is not None:
        with policy.adapter_disabled():
            yield
        return
    directory = base_model if reference == "base" else _checkpoint(spool, run, base_model, policy, field, reference)
    trained = policy.base() if policy.lora is None else policy.lora_parameters()
    own = {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained.items()}
    try:
        if policy.lora is None:
            load_weights(directory, policy.arch, policy.base, policy.topology.sizes, policy.topology.place)
        else:
            policy.load_adapter(directory)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(own[name])


def _checkpoint(spool: Spool, run: str, base_model: Path, policy: Policy, field: str, step: int) -> Path:
    """The directory with the weights of a step, whose files are whole."""
    try:
        if policy.lora is None:
            return model_checkpoint.check(spool, run, step) or base_model
        spool.checkpoints.verify(run, step)
        return spool.checkpoints.path(run, step)
    except NotFound as error:
        raise InvalidInput(f"{error.message}; take one of those, or 'base'", field=field) from error
