"""Checks that vLLM computes for a checkpoint what the trainer computed. No checkpoint is served
without it: hashes prove only that the volume has the right bytes."""

import math
import statistics
from collections.abc import Sequence
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
"""Standard errors by which a movement must be below one half to count against a checkpoint. The
trainer's log-probs are rounded too: after a step no larger than bfloat16's rounding, any weights
give a movement of about one half."""

LONG_TOLERANCE = 2.0
COMPARED = 0.9
"""The share of the tokens, those with the smallest errors, whose mean error the tolerance limits.
Tokens that go to other experts differ by any amount. Wrong weights change all tokens'."""


@dataclass(frozen=True)
class Verification:
    """`error`: mean |served - expected| over all `tokens` log-probs, in nats."""

    error: float
    tokens: int


class WrongWeights(Exception):
    """vLLM does not serve a checkpoint's weights, or that can't be verified. The message says
    why."""


def verify_tolerance(settings: Settings) -> float:
    """The largest error at which a checkpoint is served, in nats: the setting, or a bound on
    rounding.

    Measured means of all tokens: up to 2e-6 in float32 (CPU), 0.04 in bfloat16 (H100, a small model
    with peaked distributions; a mixture of four experts 0.05, and 0.03 of COMPARED).
    """
    return settings.verify_tolerance or (0.02 if serving_dtype(settings) == "float32" else 0.05)


def movement(
    served: Sequence[float], checkpoint: Sequence[float], reference: Sequence[float]
) -> tuple[float, float] | None:
    """Where the served log-probs are on the line from a reference (0) to the checkpoint's own
    log-probs (1), and the standard error of that under independent residuals. None where checkpoint
    and reference are equal.

    It is the least-squares coefficient a of `served - reference = a (checkpoint - reference)`.
    Rounding sends a few tokens of a mixture to other experts, in vLLM or in the trainer, before the
    step or after it, and moves them by any amount. So that they don't decide a, both sides of each
    token are divided by |checkpoint - reference|, or by the third quartile of that where it is
    larger. Then the left side is cut to 1 around the middle of the way.
    """
    direction = [c - r for c, r in zip(checkpoint, reference, strict=True)]
    moved = [abs(d) for d in direction if d]
    if not moved:
        return None
    least, xs, ys = sorted(moved)[3 * len(moved) // 4], [], []
    for s, r, d in zip(served, reference, direction, strict=True):
        scale = max(abs(d), least)
        xs.append(x := d / scale)
        ys.append(x / 2 + min(max((s - r) / scale - x / 2, -1.0), 1.0))
    length = sum(x * x for x in xs)
    a = sum(x * y for x, y in zip(xs, ys, strict=True)) / length
    residual = sum((y - a * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return a, math.sqrt(residual / max(len(xs) - 1, 1) / length)


def verify(
    client: VllmClient,
    model: str,
    probe: Probe | None,
    *,
    tolerance: float,
    identity: str = BASE_MODEL_NAME,
) -> Verification:
    """Compare what vLLM serves as `model` with the trainer's `probe`, or with `identity` if there
    is none (step 0).

    The mean absolute error of the closest tokens (COMPARED of all) must be at most `tolerance`
    nats. A small step would pass that with the old weights, so the served log-probs must also be
    nearer to the checkpoint's than to those of the checkpoint before it and of the base model,
    where rounding lets them be told apart. Raises WrongWeights, and what VllmClient raises.
    """
    longest = client.longest_prompt()
    prompts = [tokens[:longest] for tokens in (IDENTITY_PROMPTS if probe is None else probe.tokens)]
    served = list(chain.from_iterable(client.prompt_logprobs(model, *prompts)))
    if probe is None:
        expected = list(chain.from_iterable(client.prompt_logprobs(identity, *prompts)))
        return Verification(_error(served, expected, "the base model", tolerance), len(served))
    expected = _of_prompts(prompts, probe.logprobs)
    short = Verification(_error(served, expected, "the trainer", tolerance), len(served))
    # The trainer computed the references too. vLLM's own log-probs of the base model would share
    # vLLM's rounding with `served`: after a step as small as that, right weights come out nearer to
    # them.
    for name, rows in (
        ("the checkpoint before it", probe.previous),
        ("the base model", probe.base),
    ):
        _refuse_reference(served, expected, _of_prompts(prompts, rows), name)
    return (
        short
        if probe.long is None
        else _with_long(short, client, model, probe.long, longest, tolerance)
    )


def _with_long(
    short: Verification,
    client: VllmClient,
    model: str,
    probe: LongProbe,
    longest: int,
    tolerance: float,
) -> Verification:
    """The result for all tokens. `longest`: tokens that vLLM takes; positions beyond them are not
    compared. The mean error may be LONG_TOLERANCE times `tolerance`, because few tokens after a
    long prefix have more rounding.
    """
    positions = [position for position in probe.positions if position < longest]
    if not positions:
        return short
    # Up to the last position: a whole probe if vLLM takes it.
    end = positions[-1] + 1
    [values] = client.prompt_logprobs(model, probe.tokens[:end])
    served, expected = (
        [values[position - 1] for position in positions],
        probe.logprobs[: len(positions)],
    )
    where = f" (in a sequence of {end} tokens)"
    error, tokens = (
        _error(served, expected, "the trainer", LONG_TOLERANCE * tolerance, where),
        len(served),
    )
    mean = (short.error * short.tokens + error * tokens) / (short.tokens + tokens)
    return Verification(mean, short.tokens + tokens)


def _error(
    served: Sequence[float], expected: Sequence[float], owner: str, allowed: float, where: str = ""
) -> float:
    """The mean |served - expected| of all tokens in nats. WrongWeights if that of COMPARED is above
    `allowed`."""
    if len(served) != len(expected) or not served:
        raise WrongWeights(
            f"the probe is malformed: {len(expected)} log-probs for {len(served)}"
            f" predictions{where}"
        )
    errors = sorted(abs(s - e) for s, e in zip(served, expected, strict=True))
    if not math.isfinite(sum(errors)):
        raise WrongWeights(f"vLLM's log-probs of the probe are not all finite{where}")
    compared = errors[: math.ceil(COMPARED * len(errors))]
    error = sum(compared) / len(compared)
    if error > allowed:
        raise WrongWeights(
            f"vLLM's log-probs differ from {owner}'s by {error:.4g} nats on average over the"
            f" closest {COMPARED:.0%} of {len(errors)} tokens (allowed: {allowed:g}; median"
            f" {statistics.median(errors):.4g}, largest {errors[-1]:.4g}): it does not serve these"
            f" weights{where}"
        )
    return sum(errors) / len(errors)


def _refuse_reference(
    served: Sequence[float], expected: Sequence[float], reference: Sequence[float], name: str
) -> None:
    """WrongWeights if vLLM rather serves the weights of a reference."""
    if len(reference) != len(served):
        problem = f"{len(reference)} log-probs of {name} for {len(served)} predictions"
        raise WrongWeights(f"the probe is malformed: {problem}")
    moved = movement(served, expected, reference)
    if moved is not None and moved[0] + MARGIN * moved[1] < 0.5:
        share = f"{moved[0]:.2f} of the way, give or take {moved[1]:.2f}"
        raise WrongWeights(
            f"vLLM's log-probs are nearer to those of {name} than to this checkpoint's ({share})"
        )


def _of_prompts(prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]) -> list[float]:
    """The log-probs of prompts that may be shorter than the probe's."""
    if len(rows) != len(prompts):
        return []
    return list(
        chain.from_iterable(
            row[: len(tokens) - 1] for tokens, row in zip(prompts, rows, strict=True)
        )
    )
