"""Turns a forward or backward pass of Tinker's API into a request that the session's request log
can store. The module also has the reasons why some of Tinker's losses are not supported."""

from collections.abc import Callable
from pathlib import Path

from tandem.controller.deployment import Deployment
from tandem.controller.tinker.passes import Pass
from tandem.data.datums import named_loss, pass_request
from tandem.errors import InvalidInput
from tandem.spool.schema import PassRequest, SFTLoss

UNSERVED = {
    "stable_reinforce": "its formula is not published; choose importance_sampling, ppo, cispo, gspo"
    " or dro",
    "custom": "losses are not uploaded here; the package computes them by itself",
}


def pack_pass(deployment: Deployment, asked: Pass) -> tuple[PassRequest, Callable[[Path], str]]:
    """Returns the request to be logged, and the function that writes the request's arrays. Raises
    InvalidInput that names the wrong field."""
    if asked.loss in UNSERVED:
        raise InvalidInput(f"{asked.loss} is not served: {UNSERVED[asked.loss]}", field="loss_fn")
    config = dict[str, float]()
    for name, value in asked.config.items():
        if isinstance(value, str):
            raise InvalidInput("is not a number", field=f"loss_fn_config.{name[:64]}")
        config[name] = value
    supervised = isinstance(named_loss(asked.loss, config), SFTLoss)
    names = ("weights",) if supervised else ("advantages", "logprobs")
    if asked.loss == "gspo":
        names = (*names, "sequence_ratio_mask")
    return pass_request(
        "forward" if asked.forward_only else "forward_backward",
        asked.data(names, needed=not supervised),
        asked.loss,
        config,
        vocab_size=deployment.arch.vocab_size,
        longest=deployment.arch.max_positions,
    )
