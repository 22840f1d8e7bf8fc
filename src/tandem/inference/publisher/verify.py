"""Does vLLM really compute what the trainer computed? Asked of every checkpoint before it is served.

Hashes prove that the right bytes lie on the volume; they don't prove that vLLM read them, applied the right scale to
the right layers, or didn't keep an older adapter. Log-probs of fixed token sequences do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from tandem.spool.schema import Probe
from tandem.vllm_client.names import BASE_MODEL_NAME

IDENTITY_PROMPTS: tuple[tuple[int, ...], ...] = (tuple(range(1, 33)), tuple(range(48, 16, -1)))
"""What step 0 is compared with the base model on: any vocabulary has these tokens."""

MARGIN = 4.0
"""Standard errors by which a movement must fall short of half the way to count against a checkpoint. Where a step is no
larger than bfloat16's rounding, which is in the trainer's own log-probs too, any weights come out at about half."""


class Scorer(Protocol):
    def prompt_logprobs(self, model: str, tokens: Sequence[int]) -> list[float]: ...


@dataclass(frozen=True)
class Movement:
    """Where the served log-probs lie on the line from a reference (0) to the checkpoint's own (1).

    The least-squares coefficient a of `served - reference = a (new - reference)` over the probe's tokens, and its
    standard error under independent residuals. a > 1/2 exactly when `served` is nearer (in L2) to `new`.
    """

    coefficient: float
    standard_error: float

    @property
    def elsewhere(self) -> bool:
        """Whether what is served is the reference's rather than the checkpoint's."""
        return self.coefficient + MARGIN * self.standard_error < 0.5


@dataclass(frozen=True)
class Verification:
    """`error`: mean |served - expected| over `tokens` log-probs, nats. `reason`: why refused, empty if not."""

    error: float
    tokens: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


def movement(served: Sequence[float], new: Sequence[float], reference: Sequence[float]) -> Movement | None:
    """None where new and reference are the same: there is no line then."""
    direction = [n - r for n, r in zip(new, reference, strict=True)]
    length = sum(d * d for d in direction)
    if length == 0.0:
        return None
    shift = [s - r for s, r in zip(served, reference, strict=True)]
    a = sum(s * d for s, d in zip(shift, direction, strict=True)) / length
    residual = sum((s - a * d) ** 2 for s, d in zip(shift, direction, strict=True))
    return Movement(a, math.sqrt(residual / max(len(shift) - 1, 1) / length))


def verify(scorer: Scorer, model: str, probe: Probe | None, *, tolerance: float) -> Verification:
    """Compare what vLLM serves as `model` with the trainer's `probe`, or with the base model where there is none.

    With a probe: mean |served - logprobs| <= tolerance; and where the checkpoint differs measurably from the one before
    it, or from the base model, the served log-probs must lie nearer to the checkpoint's: a small step would otherwise
    pass with the old weights. Those two are the trainer's as well. vLLM's own of the base model would not do: they
    share its rounding with what it serves, so right weights come out nearer to them where a step is as small as that
    (0.28 of the way, give or take 0.05, seen with Qwen3-8B's shape). Passes on InferenceUnavailable and
    InferenceRefused of the scorer.
    """
    prompts = IDENTITY_PROMPTS if probe is None else probe.tokens
    served = _flat(scorer.prompt_logprobs(model, tokens) for tokens in prompts)
    if probe is None:
        expected = _flat(scorer.prompt_logprobs(BASE_MODEL_NAME, tokens) for tokens in prompts)
    else:
        expected = _flat(probe.logprobs)
    if len(served) != len(expected) or not served:
        return Verification(
            math.inf, len(served), f"the probe is malformed: {len(expected)} log-probs for {len(served)} predictions"
        )
    error = sum(abs(s - e) for s, e in zip(served, expected, strict=True)) / len(served)
    if not math.isfinite(error):
        return Verification(math.inf, len(served), "vLLM's log-probs of the probe are not all finite")
    whose = "the base model's" if probe is None else "the trainer's"
    if error > tolerance:
        return Verification(
            error,
            len(served),
            f"vLLM's log-probs differ from {whose} by {error:.4g} nats on average over {len(served)} tokens "
            f"(allowed: {tolerance:g}): it does not serve these weights",
        )
    if probe is None:
        return Verification(error, len(served))
    references = [("previous", "the checkpoint before it", probe.previous), ("base", "the base model", probe.base)]
    for field, name, rows in references:
        reference = _flat(rows)
        if len(reference) != len(served):
            return Verification(error, len(served), f"the probe is malformed: `{field}` has another length")
        moved = movement(served, expected, reference)
        if moved is not None and moved.elsewhere:
            reason = (
                f"vLLM's log-probs are nearer to those of {name} than to this checkpoint's "
                f"({moved.coefficient:.2f} of the way, give or take {moved.standard_error:.2f})"
            )
            return Verification(error, len(served), reason)
    return Verification(error, len(served))


def _flat(rows: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(rows))
