"""Checks of vLLM's sampling options, so that vLLM draws from the distribution that the trainer
computes. The module imports only the standard library and `tandem.errors`, because vLLM's own
process imports it."""

from collections.abc import Mapping
from typing import Any

from tandem.errors import InvalidInput

# Options that change the sampled distribution, each with the values at which it does nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "watermarking": (False,),
}
# Options that change the answer or the prompt independently of the model's distribution, each with
# the values at which it does nothing.
_BENDING: dict[str, tuple[object, ...]] = {
    "best_of": (1,),  # other values return the most probable of several answers
    "ignore_eos": (False,),
    "truncate_prompt_tokens": (),
    "repetition_detection": (),
}


def distorting(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first option that makes vLLM's answers differ from samples of the model's distribution,
    and the reason. None if there is no such option."""
    for name, neutral in _NEUTRAL.items():
        if options.get(name) not in (None, *neutral):
            problem = (
                f"{name}={options[name]} samples from another distribution than the trainer"
                " computes"
            )
            return name, f"{problem}; leave it out"
    for name, neutral in _BENDING.items():
        if options.get(name) not in (None, *neutral):
            return name, f"{name}={options[name]} bends what the model answers; leave it out"
    return None


def loop_options(options: Mapping[str, Any], own: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The sampling options of a training loop, including the temperature. Raises InvalidInput if
    the temperature in `own` differs from the loop's temperature, which the loss uses too.

    Args:
        options: the loop's options; the default temperature is 1.
        own: a request's or an environment's own options.
        field: the field that the error names.
    """
    wanted = {"temperature": 1.0, **options}
    if own.get("temperature", wanted["temperature"]) != wanted["temperature"]:
        problem = (
            f"{own['temperature']} is not the loss's {wanted['temperature']}; set both in the"
            " config"
        )
        raise InvalidInput(problem, field=field)
    return wanted
