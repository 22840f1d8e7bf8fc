"""Checks that vLLM computes for a checkpoint what the trainer computed. No checkpoint is served without it.

Hashes prove that the volume has the right bytes. Only log-probs prove that vLLM read them, scaled the right layers by
the right factor, and dropped the older adapter.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.config import Settings
from tandem.inference.server.command import serving_dtype
from tandem.spool.schema import LongProbe, Probe
from tandem.vllm_client.client import VllmClient
from tandem.vllm_client.names import BASE_MODEL_NAME

IDENTITY_PROMPTS: tuple[tuple[int, ...], ...] = (tuple(range(1, 33)), tuple(range(48, 16, -1)))
"""Prompts on which step 0 is compared with the base model. Every vocabulary has these tokens."""

MARGIN = 4.0
"""Standard errors by which a movement must be below one half to count against a checkpoint. The trainer's log-probs
are rounded too: after a step no larger than bfloat16's rounding, any weights give a movement of about one half."""

LONG_TOLERANCE = 2.0


@dataclass(frozen=True)
class Verification:
    """`error`: mean |served - expected| over `tokens` log-probs, in nats. `reason`: why it is refused, else empty."""

    error: float
    tokens: int
    reason: str = ""


def verify_tolerance(settings: Settings) -> float:
    """The largest mean log-prob error, in nats, at which a checkpoint is served: the setting, or a bound on rounding.

    Measured errors: up to 2e-6 in float32 (CPU), 0.03 in bfloat16 (H200, a small model with peaked distributions).
    """
    return settings.verify_tolerance or (0.02 if serving_dtype(settings) == "float32" else 0.05)


def movement(
    served: Sequence[float], checkpoint: Sequence[float], reference: Sequence[float]
) -> tuple[float, float] | None:
    """Where the served log-probs are on the line from a reference (0) to the checkpoint's own log-probs (1).

    Returns the least-squares coefficient a of `served - reference = a (checkpoint - reference)` over the probe's tokens
    and its standard error under independent residuals. a > 1/2 exactly when `served` is nearer (in L2) to the
    checkpoint. None where checkpoint and reference are equal, so that there is no line.
    """
    direction = [c - r for c, r in zip(checkpoint, reference, strict=True)]
    length = sum(d * d for d in direction)
    if length == 0.0:
        return None
    shift = [s - r for s, r in zip(served, reference, strict=True)]
    a = sum(s * d for s, d in zip(shift, direction, strict=True)) / length
    residual = sum((s - a * d) ** 2 for s, d in zip(shift, direction, strict=True))
    return a, math.sqrt(residual / max(len(shift) - 1, 1) / length)


def verify(
    client: VllmClient, model: str, probe: Probe | None, *, tolerance: float, identity: str = BASE_MODEL_NAME
) -> Verification:
    """Compare what vLLM serves as `model` with the trainer's `probe`, or with the model
    `identity` if there is none (step 0).

    The mean absolute error must be at most `tolerance` nats. A small step would pass that with the old weights, so the
    served log-probs must also be nearer to the checkpoint's than to those of the checkpoint before it and of the base
    model, where rounding lets them be told apart. Raises what VllmClient raises.
    """
    longest = client.longest_prompt()
    prompts = [tokens[:longest] for tokens in (IDENTITY_PROMPTS if probe is None else probe.tokens)]
    served = _flat(client.prompt_logprobs(model, tokens) for tokens in prompts)
    if probe is None:
        expected = _flat(client.prompt_logprobs(identity, tokens) for tokens in prompts)
    else:
        expected = _of_prompts(prompts, probe.logprobs)
    if len(served) != len(expected) or not served:
        reason = f"the probe is malformed: {len(expected)} log-probs for {len(served)} predictions"
        return Verification(math.inf, len(served), reason)
    error = _mean_error(served, expected)
    owner = "the base model" if probe is None else "the trainer"
    if reason := _too_different(error, len(served), owner, tolerance):
        return Verification(error, len(served), reason)
    if probe is None:
        return Verification(error, len(served))
    if reason := _nearer_to_a_reference(served, expected, probe, prompts):
        return Verification(error, len(served), reason)
    return _verify_long(client, model, probe.long, longest, tolerance, Verification(error, len(served)))


def _verify_long(
    client: VllmClient, model: str, probe: LongProbe | None, longest: int, tolerance: float, short: Verification
) -> Verification:
    """The result for all tokens. `longest`: tokens that vLLM takes; positions beyond them are not compared. The mean
    error may be LONG_TOLERANCE times `tolerance`, because few tokens after a long prefix have more rounding."""
    positions = [position for position in probe.positions if position < longest] if probe else []
    if probe is None or not positions:
        return short
    # Up to the last position: a whole probe if vLLM takes it.
    values = client.prompt_logprobs(model, probe.tokens[: positions[-1] + 1])
    served, expected = [values[position - 1] for position in positions], probe.logprobs[: len(positions)]
    if len(expected) != len(positions):
        return Verification(math.inf, short.tokens, "the long probe is malformed: it lacks log-probs")
    error = _mean_error(served, expected)
    tokens = short.tokens + len(served)
    if reason := _too_different(error, len(served), "the trainer", LONG_TOLERANCE * tolerance):
        return Verification(error, tokens, f"{reason} (in a sequence of {positions[-1] + 1} tokens)")
    return Verification((short.error * short.tokens + error * len(served)) / tokens, tokens)


def _mean_error(served: Sequence[float], expected: Sequence[float]) -> float:
    """Mean |served - expected|; infinite if a value is not finite."""
    error = sum(abs(s - e) for s, e in zip(served, expected, strict=True)) / len(served)
    return error if math.isfinite(error) else math.inf


def _too_different(error: float, tokens: int, owner: str, allowed: float) -> str:
    """Why a mean error, in nats over `tokens` log-probs, is too large, or empty."""
    if not math.isfinite(error):
        return "vLLM's log-probs of the probe are not all finite"
    if error > allowed:
        return (
            f"vLLM's log-probs differ from {owner}'s by {error:.4g} nats on average over {tokens} tokens (allowed: "
            f"{allowed:g}): it does not serve these weights"
        )
    return ""


def _nearer_to_a_reference(
    served: Sequence[float], expected: Sequence[float], probe: Probe, prompts: Sequence[Sequence[int]]
) -> str:
    """Why vLLM rather serves the weights of a reference, or empty.

    The trainer computed the references too. vLLM's own log-probs of the base model would share vLLM's rounding with
    `served`: after a step as small as that, right weights come out nearer to them.
    """
    for name, rows in (("the checkpoint before it", probe.previous), ("the base model", probe.base)):
        reference = _of_prompts(prompts, rows)
        if len(reference) != len(served):
            return f"the probe is malformed: {len(reference)} log-probs of {name} for {len(served)} predictions"
        moved = movement(served, expected, reference)
        if moved is not None and moved[0] + MARGIN * moved[1] < 0.5:
            share = f"{moved[0]:.2f} of the way, give or take {moved[1]:.2f}"
            return f"vLLM's log-probs are nearer to those of {name} than to this checkpoint's ({share})"
    return ""


def _of_prompts(prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]) -> list[float]:
    """The log-probs of prompts that may be shorter than the probe's."""
    if len(rows) != len(prompts):
        return []
    return _flat(row[: len(tokens) - 1] for tokens, row in zip(prompts, rows, strict=True))


def _flat(rows: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(rows))
